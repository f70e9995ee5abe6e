"""Seconds, the stages that they are spent in, and peak memory."""

import gc
import pkgutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

INTERVAL = 0.005
"""Seconds between two looks at a process's memory."""

_RESET_PEAK = "5"


def seconds(run: Callable[[], object]) -> float:
    """Return the time that a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# ----------------------------------------------------------------------------------------------------------
# Stages


class StageClock:
    """Time by stage: what is spent in a stage that another one calls counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within: list[str] = []
        self._since = 0.0
        self._thread = threading.get_ident()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted for the stage; calls from other threads are not."""

        @wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments, **keywords)
            self._charge()
            self._within.append(stage)
            try:
                return function(*arguments, **keywords)
            finally:
                self._charge()
                self._within.pop()

        return run

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now


@contextmanager
def staged(stages: Mapping[str, Sequence[str]]) -> Iterator[Mapping[str, float]]:
    """Count the time of the functions of each stage, named as `module:attribute`; yields seconds by stage."""
    clock = StageClock()
    with ExitStack() as stack:
        for stage, names in stages.items():
            for name in names:
                module, _, path = name.partition(":")
                owner, _, attribute = path.rpartition(".")
                holder = pkgutil.resolve_name(f"{module}:{owner}" if owner else module)
                stack.enter_context(patch.object(holder, attribute, clock.timed(stage, getattr(holder, attribute))))
        yield clock.seconds


# ----------------------------------------------------------------------------------------------------------
# Memory


def memory(process: int | str = "self") -> dict[str, int]:
    """Return what a process holds, in bytes.

    `resident` is all of it, `peak` the most that it ever was; `anonymous` is what no file backs, memory in tmpfs
    included: the kernel can take back the rest without writing anything to swap.
    """
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    found = {words[0]: 1024 * int(words[1]) for words in lines if words[0].startswith(("VmRSS", "VmHWM", "Rss"))}
    if not found:
        raise ProcessLookupError(f"process {process} has ended")
    anonymous = found["RssAnon:"] + found["RssShmem:"]
    return {"resident": found["VmRSS:"], "peak": found["VmHWM:"], "anonymous": anonymous}


class Peak:
    """The most memory that this process holds inside a `with` block, above what it held before, in bytes.

    `resident` is from the counter behind getrusage's ru_maxrss, which misses nothing, set back at the start of the
    block. `anonymous` leaves out pages of mapped files; it is looked at every few milliseconds.
    """

    resident = anonymous = 0

    def __enter__(self) -> Self:
        gc.collect()
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self._before = memory()
        self._most = self._before["anonymous"]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        now = memory()
        self.resident = now["peak"] - self._before["resident"]
        self.anonymous = max(self._most, now["anonymous"]) - self._before["anonymous"]

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            self._most = max(self._most, memory()["anonymous"])
