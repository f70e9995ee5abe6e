"""Many runs on all cores, each written down as it ends, so that the next call goes on from there."""

import hashlib
import json
import logging
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from server.results import write_json
from simulations.bench.runs import Places
from simulations.lora.cells import FIRST_SEED, METHODS, ROUNDS, Cell
from simulations.lora.runs import resolved, run, task_of

Unit = tuple[Cell, int]
"""A cell and a seed, whose methods run one after another: what they train alike is trained once."""


def units(cells: Iterable[Cell]) -> list[Unit]:
    """All cells with all of their seeds, in order."""
    return [(cell, seed) for cell in cells for seed in range(FIRST_SEED, FIRST_SEED + cell.seeds)]


def run_all(cells: Sequence[Cell], places: Places, folder: Path, jobs: int, console: Console) -> int:
    """Run what is not yet in `folder`, and return how many units failed.

    Progress with the time left where a person watches, a line a unit elsewhere.
    """
    listed = [unit for unit in units(cells) if not _ended(unit, folder)]
    if not listed:
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    failed = 0
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        # Ends its processes with the block, however that is left.
        multiprocessing.get_context("spawn").Pool(jobs, _set_up) as pool,
    ):
        bar = progress.add_task("runs", total=len(listed))
        # What all runs of a task share is made by the first, so that no two processes make it at once.
        firsts = {unit[0].task: (unit, places) for unit in reversed(listed)}
        pool.starmap(_prepare, firsts.values())
        todo = ((unit, places, folder) for unit in listed)
        for number, ((cell, seed), error, said) in enumerate(pool.imap_unordered(_try, todo), start=1):
            failed += error
            progress.advance(bar)
            console.print(f"{number}/{len(listed)} {cell.name}, seed {seed}: {said}", highlight=False, soft_wrap=True)
    return failed


def read_all(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The runs of the cells and seeds of which all have ended, in order."""
    for unit in units(cells):
        if _ended(unit, folder):
            yield from (json.loads(_path(folder, unit, method).read_text()) for method in unit[0].methods)


def _ended(unit: Unit, folder: Path) -> bool:
    return all(_path(folder, unit, method).exists() for method in unit[0].methods)


def _set_up() -> None:
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # PEFT reads an attribute of models that transformers has renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def _prepare(unit: Unit, places: Places) -> None:
    cell, seed = unit
    task_of(resolved(cell, seed, places))


def _try(todo: tuple[Unit, Places, Path]) -> tuple[Unit, bool, str]:
    """Run a unit, and say the last figures, or that it failed and why, which does not end the others."""
    try:
        return todo[0], False, _run_unit(*todo)
    except Exception as error:  # what an app raises can be anything
        return todo[0], True, f"failed: {type(error).__name__}: {error}"


def _run_unit(unit: Unit, places: Places, folder: Path) -> str:
    """Run every method that is not yet there; say the last accuracies, or losses."""
    (cell, seed), said = unit, []
    for method in cell.methods:
        path = _path(folder, unit, method)
        if not path.exists():
            write_json(path, run(cell, method, seed, places))
        found = json.loads(path.read_text())
        last = f"{found['accuracy'][-1]:.1%}" if cell.task == "text" else f"{found['loss'][-1]:.4f}"
        said.append(f"{method} {last} (error {found['error'][0]:.2f})")
    return ", ".join(said)


def _path(folder: Path, unit: Unit, method: str) -> Path:
    """Where a run is written down; the name holds what decides it, so that another config is another run."""
    cell, seed = unit
    decides = [sorted(cell.config(seed).items()), sorted(METHODS[method].items()), ROUNDS]
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]
    name = "-".join([cell.name, method, str(seed)])
    return folder / f"{''.join(c if c.isalnum() or c in '-.' else '_' for c in name)}-{digest}.json"
