"""Flower's real simulation engine, private to one process and gone when its `with` block ends.

`flwr run` alone would start a SuperLink that outlives it and serves whoever comes next. Here one SuperLink,
on free ports, with its own FLWR_HOME and working directory, serves the runs of one block.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
APP_FILES = ("pyproject.toml", "LICENSE", "rotfed", "server", "client")

_START_ATTEMPTS = 3
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 15.0
_CLI_TIMEOUT = 120.0
# Asking costs a fresh Python process that imports Flower, on the same cores as the run.
_ASK_EVERY = 20.0


class EngineError(RuntimeError):
    """The engine itself, rather than a run on it, failed."""


@dataclass(frozen=True)
class RunStatus:
    """How a run stands, in Flower's words: "running", "finished:completed", "finished:failed" ..."""

    run_id: str
    status: str
    details: str

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether it has ended well."""
        return self.status == "finished:completed"


class Engine:
    """A context manager around one SuperLink in simulation mode.

    Leaving the block stops the SuperLink and everything it started (Ray included) and deletes its files.

    Parameters
    ----------
    app
        The folder of the Flower app, as `flwr run` takes it; it is copied first, so that the code that runs
        is the code at the start, wherever the caller's working directory is.
    """

    def __init__(self, app: Path = PROJECT) -> None:
        self._app = app
        self._superlink: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        self.home = Path(tempfile.mkdtemp(prefix="rotfed-"))
        try:
            _copy_app(self._app, self.home / "app")
            (self.home / "neutral").mkdir()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def submit(
        self, run_config: Mapping[str, bool | int | float | str], *, nodes: int, cpus: int = 1, gpus: float = 0.0
    ) -> str:
        """Start a run with `nodes` clients, each on `cpus` cores and `gpus` of a GPU; return its id."""
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in run_config.items())
        federation = f"num-supernodes={nodes} client-resources-num-cpus={cpus} client-resources-num-gpus={float(gpus)}"
        answer = self._flwr("run", str(self.home / "app"), "--run-config", config, "--federation-config", federation)
        run_id = answer.get("run-id")
        if not answer.get("success") or not run_id:
            raise EngineError(f"flwr run: expected a run id, found {answer}")
        return str(run_id)

    def follow(self, run_id: str, done: Callable[[], bool], *, timeout: float) -> None:
        """Return once `done()`, called a few times a second, is true, or the run has ended without it.

        Raises EngineError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        next_question = time.monotonic() + _ASK_EVERY
        while not done():
            self._check(run_id, deadline)
            if time.monotonic() >= next_question:
                if self._statuses()[run_id].finished:
                    done()
                    return
                next_question = time.monotonic() + _ASK_EVERY
            time.sleep(0.25)

    def wait(self, run_ids: Sequence[str], *, timeout: float) -> list[RunStatus]:
        """Wait until the runs have ended, and tell how; EngineError after `timeout` seconds.

        This is the word that counts: `flwr run --stream` exits 0 for a crashed run as well.
        """
        deadline = time.monotonic() + timeout
        while True:
            statuses = self._statuses()
            found = [statuses[run_id] for run_id in run_ids]
            running = [status for status in found if not status.finished]
            if not running:
                return found
            self._check(running[0].run_id, deadline)
            time.sleep(0.5)

    def log(self, run_id: str, lines: int = 40) -> str:
        """The last lines of a run's log."""
        result = self._call("log", run_id, "--show")
        return "\n".join((result.stdout + result.stderr).splitlines()[-lines:])

    # ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        # Another process may take a port between the choice and the start.
        for _ in range(_START_ATTEMPTS):
            port, control_port = _free_ports(2)
            self._environment = _environment(self.home)
            self._write_connection(port)
            command = [
                "flower-superlink",
                "--insecure",
                "--simulation",
                "--disable-runtime-dependency-installation",
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--control-api-address", f"127.0.0.1:{control_port}"),
            ]
            with (self.home / "superlink.log").open("wb") as log:
                self._superlink = subprocess.Popen(
                    command,
                    cwd=self.home / "neutral",
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if self._healthy(port):
                return
            self._stop_processes()
        raise EngineError(
            f"flower-superlink: expected a start in {_START_ATTEMPTS} attempts, found none; {self._log_end()}"
        )

    def _healthy(self, port: int) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            if self._superlink is None or self._superlink.poll() is not None:
                return False
            with contextlib.suppress(OSError):
                # No proxy stands between a process and itself, whatever the environment says.
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(f"http://127.0.0.1:{port}/health", timeout=2) as response:
                    if response.status == 200:
                        return True
            time.sleep(0.2)
        return False

    def _write_connection(self, port: int) -> None:
        """Name our SuperLink by address: Flower then never starts one of its own."""
        home = self.home / "flwr"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "private"\n\n[superlink.private]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )

    def _statuses(self) -> dict[str, RunStatus]:
        answer = self._flwr("list")
        if not answer.get("success"):
            raise EngineError(f"flwr list: expected the runs, found {answer}")
        return {
            run["run-id"]: RunStatus(run["run-id"], run["status"], _details(run["status-details"]))
            for run in answer["runs"]
        }

    def _check(self, run_id: str, deadline: float) -> None:
        """Raise EngineError when the time is up or the SuperLink is gone."""
        if time.monotonic() > deadline:
            raise EngineError(f"run {run_id}: expected an end in time, found it still going; {self._log_end()}")
        if self._superlink is not None and self._superlink.poll() is not None:
            raise EngineError(
                f"flower-superlink: expected to run, found exit status {self._superlink.returncode}; {self._log_end()}"
            )

    def _log_end(self) -> str:
        return "its log ends:\n" + (self.home / "superlink.log").read_text(errors="replace")[-2000:]

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["flwr", *arguments],
            cwd=self.home / "neutral",
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CLI_TIMEOUT,
            start_new_session=True,
        )

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        result = self._call(*arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(result.stdout)
        except json.JSONDecodeError:
            text = (result.stdout + result.stderr).strip()
            raise EngineError(f"flwr {arguments[0]}: expected JSON, found {text!r}") from None
        return answer

    def _stop(self) -> None:
        with _uninterrupted():
            self._stop_processes()
            shutil.rmtree(self.home, ignore_errors=True)

    def _stop_processes(self) -> None:
        """End the SuperLink and whatever it started; some of Ray's processes outlive their parents."""
        if self._superlink is not None:
            self._superlink.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._superlink.wait(_STOP_TIMEOUT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._superlink.pid, signal.SIGKILL)
            self._superlink.wait()
            self._superlink = None
        deadline = time.monotonic() + _STOP_TIMEOUT
        while (left := engine_processes(self.home)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)


def _details(text: str) -> str:
    return "" if text == "N/A" else text


def _environment(home: Path) -> dict[str, str]:
    """The environment of every process of the engine."""
    binaries = str(Path(sys.executable).parent)
    environment = {
        "OMP_NUM_THREADS": "1",  # clients run side by side, one core each
        **{key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "RAY_"))},
        "PATH": os.pathsep.join([binaries, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ADDRESS": "local",  # never join a cluster that happens to run here
        "RAY_TMPDIR": str(home / "ray"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # What the caller has on its import path must not shadow the bundle.
    environment.pop("PYTHONPATH", None)
    return environment


def _copy_app(source: Path, target: Path) -> None:
    target.mkdir()
    for name in APP_FILES:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target / name)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def engine_processes(home: Path) -> list[int]:
    """Ids of the processes that belong to the engine with this home; none where there is no /proc.

    They inherit its FLWR_HOME and its working directory. Either can be lost (Ray's agents write their titles over
    their environment, its workers may change folder), so that one of the two has to do.
    """
    variable = f"FLWR_HOME={home / 'flwr'}".encode()
    neutral = str(home / "neutral")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look, and other users' are not ours to read.
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            if variable in environment or os.readlink(folder / "cwd") == neutral:
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM meanwhile: an impatient second one must not leave processes behind."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
