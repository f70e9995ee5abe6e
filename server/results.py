"""The results of a run: one JSON file that is valid at every moment, and the folder of its model."""

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import rotfed
from client.settings import ConfigError


def environment() -> dict[str, Any]:
    """Versions and hardware, as far as they decide figures and speed."""
    return {
        "versions": {
            "python": platform.python_version(),
            "rotfed": rotfed.__version__,
            **{package: version(package) for package in ("torch", "transformers", "flwr", "numpy")},
        },
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` so that a reader finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not a tempfile, whose mode would keep the results from everybody but their owner.
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_empty(folder: str) -> None:
    """Make the folder for a run's model; ConfigError where that cannot be, or something is in it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        inside = sorted(path.name for path in Path(folder).iterdir())
        # Whether it can be written to is to be known before the rounds.
        TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        raise ConfigError(f"run config save-model = {folder!r} can be no folder ({error}); name another") from error
    if inside:
        raise ConfigError(
            f"run config save-model = {folder!r}: expected no such folder, or an empty one, found {inside[0]} in it; "
            "remove it or name another"
        )


@contextmanager
def whole_or_nothing(folder: str) -> Iterator[str]:
    """A folder to write to, whose files are moved to `folder` once all have been written."""
    # Within it: where it is a disk of its own, nothing can be moved to it from beside it.
    with TemporaryDirectory(dir=folder) as temporary:
        yield temporary
        for path in Path(temporary).iterdir():
            path.rename(Path(folder) / path.name)


class Recorder:
    """Collects a run's rounds and, with a path, rewrites the results file after each of them."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self._path = path
        self._started = time.perf_counter()
        self._content: dict[str, Any] = {
            "status": "running",
            "error": "",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            **header,
            "rounds": [],
        }
        self._write()

    def add_round(self, entry: Mapping[str, Any]) -> None:
        """Append one round: its number, loss, accuracy and whatever else was measured."""
        self._content["rounds"].append({**entry, "seconds": self._seconds()})
        self._write()

    def update(self, **entries: Any) -> None:
        """Set entries beside the rounds."""
        self._content.update(entries)
        self._write()

    def finish(self, status: str, error: str = "") -> None:
        """State how the run ended: "completed" or "failed"."""
        self.update(status=status, error=error)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 3)

    def _write(self) -> None:
        self._content["seconds"] = self._seconds()
        if self._path is not None:
            write_json(self._path, self._content)
