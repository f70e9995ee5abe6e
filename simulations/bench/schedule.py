"""Many runs on all cores, each written down as it ends, so that the next call goes on from there."""

import hashlib
import json
import logging
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rotfed.errors import ConvergenceWarning
from server.results import write_json
from simulations.bench.anatomy import WAYS, dissect
from simulations.bench.cells import ANATOMY, FIRST_SEED, Cell
from simulations.bench.runs import Places, config_of, run

Unit = tuple[Cell, int]
"""A cell and a seed: its methods share their first round, so that they run one after another."""


def units(cells: Iterable[Cell]) -> list[Unit]:
    """All cells with all of their seeds, in order."""
    return [(cell, seed) for cell in cells for seed in range(FIRST_SEED, FIRST_SEED + cell.seeds)]


def run_all(cells: Sequence[Cell], places: Places, folder: Path, jobs: int, console: Console) -> None:
    """Run what is not yet in `folder`; progress with the time left where a person watches, a line a unit elsewhere."""
    listed = units(cells)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        # Ends its processes with the block, however that is left.
        multiprocessing.get_context("spawn").Pool(jobs, _set_up) as pool,
    ):
        task = progress.add_task("runs", total=sum(cell.cost for cell, _ in listed))
        todo = ((cell, seed, places, folder) for cell, seed in listed)
        for number, (cell, seed, said) in enumerate(pool.imap_unordered(_run_unit, todo), start=1):
            progress.advance(task, cell.cost)
            console.print(f"{number}/{len(listed)} {cell.name}, seed {seed}: {said}", highlight=False, soft_wrap=True)


def read_runs(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The runs of the cells that have ended, in order."""
    for cell, seed in units(cells):
        paths = [_path(folder, cell, method, seed) for method in cell.methods]
        yield from (json.loads(path.read_text()) for path in paths if path.exists())


def read_anatomy(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The averages of the first rounds that were taken apart, in order."""
    for cell, seed in units(cells):
        if (path := _anatomy_path(folder, cell, seed)).exists():
            yield from json.loads(path.read_text())["ways"]


def _set_up() -> None:
    import datasets

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", ConvergenceWarning)


def _run_unit(todo: tuple[Cell, int, Places, Path]) -> tuple[Cell, int, str]:
    """Do what is not yet there of a unit, and say the last accuracies; a unit that fails does not end the others."""
    cell, seed, *_ = todo
    try:
        return cell, seed, _do(*todo)
    except Exception as error:  # what an app raises can be anything
        return cell, seed, f"failed: {type(error).__name__}: {error}"


def _do(cell: Cell, seed: int, places: Places, folder: Path) -> str:
    """Run every method, and take the first round apart."""
    said = []
    for method in cell.methods:
        path = _path(folder, cell, method, seed)
        if not path.exists():
            write_json(path, run(cell, method, seed, places))
        said.append(f"{method} {json.loads(path.read_text())['accuracy'][-1]:.1%}")
    path = _anatomy_path(folder, cell, seed)
    if cell.name in ANATOMY and seed < FIRST_SEED + ANATOMY[cell.name] and not path.exists():
        write_json(path, {"ways": dissect(cell, seed, places)})
    return ", ".join(said)


def _path(folder: Path, cell: Cell, method: str, seed: int) -> Path:
    """Where a run is written down; the name holds what decides it, so that another config is another run."""
    return folder / f"{_name(cell, method, seed)}-{_digest(config_of(cell, method, seed))}.json"


def _anatomy_path(folder: Path, cell: Cell, seed: int) -> Path:
    digest = _digest({**config_of(cell, cell.methods[0], seed), "ways": repr(WAYS)})
    return folder / f"{_name(cell, 'first round', seed)}-{digest}.json"


def _name(cell: Cell, what: str, seed: int) -> str:
    return f"{cell.name}, {what}, {seed}".replace(", ", "-").replace(" ", "_")


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sorted(config.items())).encode()).hexdigest()[:8]
