"""Work on several cores: what fails, or is killed, is counted and said, and leaves the rest done."""

import io
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from simulations.schedule import Piece, do_all


def write(path: Path) -> str:
    path.write_text(str(os.getpid()))
    return "written"


def kill_itself() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def log_as_flower_does() -> str:
    from logging import INFO

    from flwr.common.logger import log

    log(INFO, "a line a round")
    return "logged"


def test_processes_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    assert do_all([Piece("one", log_as_flower_does)], 1, console) == 0
    assert "logged" in console.file.getvalue()  # type: ignore[attr-defined]
    assert capfd.readouterr() == ("", "")


def test_what_fails_is_said_and_does_not_end_the_others(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    pieces = [
        Piece("[no] folder", partial(write, tmp_path / "none" / "a")),
        Piece("one", partial(write, tmp_path / "b")),
    ]
    assert do_all(pieces, 1, console, [Piece("first", partial(write, tmp_path / "c"))]) == 1
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("1/2 [no] folder: failed: FileNotFoundError") and lines[1] == "2/2 one: written"
    # Not in this process, whose work goes on whatever happens there.
    assert (tmp_path / "b").read_text() == (tmp_path / "c").read_text() != str(os.getpid())


def test_a_process_that_is_killed_ends_the_call_and_not_its_caller(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    assert do_all([Piece("one", kill_itself), Piece("two", partial(write, tmp_path / "b"))], 1, console) == 2
    assert "one: failed: a process was killed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_ends_the_caller_ends_its_processes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        do_all(
            [Piece("b", partial(write, tmp_path / "b"))],
            2,
            Console(),
            [Piece("", partial(write, tmp_path / "n" / "a"))],
        )
    # The pool's own thread waits for them as well, and who comes second may learn of their end a moment later.
    ends = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
