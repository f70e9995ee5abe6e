"""Much work on all cores, each piece written down by itself as it ends, so that the next call goes on from there."""

import json
import logging
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rotfed.checkpoints.folder import quiet_transformers
from rotfed.errors import ConvergenceWarning


@dataclass(frozen=True)
class Piece:
    """Work for one core. `do` can be pickled, writes down what it finds, and returns the last of it in a line.

    `cost` is what it takes beside the others, in any unit.
    """

    name: str
    do: Callable[[], str]
    cost: float = 1.0


def do_all(pieces: Sequence[Piece], jobs: int, console: Console, first: Sequence[Piece] = ()) -> int:
    """Do all pieces, so many at a time, after `first`; return how many failed, which does not end the others.

    Progress with the time left where a person watches, a line a piece elsewhere. Ctrl-C, and a polite kill after
    `end_politely`, end the processes at once.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    pool, failed = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _set_up), 0
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("runs", total=sum(piece.cost for piece in pieces))
            for future in [pool.submit(piece.do) for piece in first]:
                future.result()
            futures = {pool.submit(piece.do): piece for piece in pieces}
            for number, future in enumerate(as_completed(futures), start=1):
                piece = futures[future]
                failed += future.exception() is not None
                progress.advance(bar, piece.cost)
                said = f"{number}/{len(pieces)} {piece.name}: {_said(future)}"
                console.print(said, highlight=False, soft_wrap=True, markup=False)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    pool.shutdown()
    return failed


def end_politely() -> None:
    """Make a polite kill end the processes, and write down what there is, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def lines_of_runs(document: Mapping[str, Any]) -> str:
    """JSON with a run a line, so that a change of one shows as such."""
    return json.dumps(document, separators=(",", ":")).replace('{"cell"', '\n{"cell"') + "\n"


def _said(future: Future[str]) -> str:
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        return "failed: a process was killed, by want of memory perhaps; call again with fewer jobs to go on"
    return f"failed: {type(error).__name__}: {error}" if error else future.result()


def _set_up() -> None:
    """Make a process fit to share the machine with others, and quiet."""
    # Each sets up its own logging as it is imported.
    import datasets
    from flwr.common.logger import FLOWER_LOGGER

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    FLOWER_LOGGER.setLevel(logging.ERROR)
    quiet_transformers()
    warnings.simplefilter("ignore", ConvergenceWarning)
    # PEFT reads an attribute of models that transformers has renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
