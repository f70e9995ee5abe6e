"""Pieces run one after another, each in a process of its own, and what they found kept to go on from."""

import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from server.results import write_json
from simulations.speed.sections import Piece, Run

T = TypeVar("T")

# The share of the memory that is free which a piece may take, so that the machine outlives one that wants too much.
_ROOM = 0.8


def run_all(
    pieces: Sequence[Piece], settings: Mapping[str, Any], threads: int, results: Path, scratch: Path, console: Console
) -> dict[str, str]:
    """Run the pieces that were not run under these settings yet, and return the reasons of those that failed.

    `scratch`, where pieces write models and replies, is emptied where the next pieces have nothing in common with the
    ones before, and at the end.
    """
    failed: dict[str, str] = {}
    shared = False
    try:
        with _process(threads) as preparer:
            for piece in pieces:
                name = f"{piece.section}, {piece.name}"
                if kept(piece, settings, results) is not None:
                    console.print(f"{name}: kept from an earlier run", markup=False)
                    continue
                if shared and piece.prepare is None:
                    shutil.rmtree(scratch, ignore_errors=True)
                shared = piece.prepare is not None
                started = time.perf_counter()
                try:
                    if piece.prepare is not None:
                        # It makes what is missing.
                        preparer.submit(piece.prepare).result()
                    runs = _in_new_process(piece.do, threads)
                except Exception as error:
                    said = failed[name] = _reason(error)
                else:
                    write_json(_file(piece, results), {"settings": settings, "runs": labelled(piece, runs)})
                    said = f"{len(runs)} runs"
                took = time.perf_counter() - started
                console.print(f"{name}: {said} ({took:.0f} s)", markup=False, soft_wrap=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return failed


def kept(piece: Piece, settings: Mapping[str, Any], results: Path) -> list[Run] | None:
    """Return what a piece found under these settings, None where it has not been run."""
    file = _file(piece, results)
    found = json.loads(file.read_text()) if file.exists() else {}
    return found["runs"] if found.get("settings") == settings else None


def labelled(piece: Piece, runs: Sequence[Run]) -> list[Run]:
    """Return runs with where they belong, and with figures as long as they mean something."""
    labels = {"section": piece.section, **(piece.labels or {})}
    return [{**labels, **{key: _short(value) for key, value in run.items()}} for run in runs]


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _file(piece: Piece, results: Path) -> Path:
    name = re.sub(r"[^\w.]+", "-", f"{piece.section} {piece.name}")
    return results / "pieces" / f"{name}.json"


def _in_new_process(do: Callable[[], T], threads: int) -> T:
    with _process(threads) as pool:
        return pool.submit(do).result()


@contextmanager
def _process(threads: int) -> Iterator[ProcessPoolExecutor]:
    """A process of its own, which an interruption of this one ends at once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_up, (threads,)) as pool:
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit):
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _set_up(threads: int) -> None:
    """Make a process fit to be measured: so many threads, quiet, and not able to take all memory."""
    # Command lines that it starts have as many.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from flwr.common.logger import FLOWER_LOGGER

    from rotfed.checkpoints.folder import quiet_transformers
    from rotfed.errors import ConvergenceWarning

    torch.set_num_threads(threads)
    FLOWER_LOGGER.setLevel(logging.ERROR)
    quiet_transformers()
    warnings.simplefilter("ignore", ConvergenceWarning)
    available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    if available is not None:
        room = int(_ROOM * 1024 * int(available[1]))
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))


def _reason(error: Exception) -> str:
    if isinstance(error, BrokenProcessPool):
        return "failed: the process was killed, by want of memory perhaps"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "failed: more memory was wanted than the machine has free"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"failed: {type(error).__name__}: {first}"
