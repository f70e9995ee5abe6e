"""Many runs on all cores, each written down as it ends, so that the next call goes on from there."""

import hashlib
import json
import logging
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rotfed.errors import ConvergenceWarning
from server.results import write_json
from simulations.bench.cells import FIRST_SEED, Cell
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
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_set_up) as pool,
    ):
        task = progress.add_task("runs", total=sum(cell.cost for cell, _ in listed))
        futures = {pool.submit(_run_unit, cell, seed, places, folder): (cell, seed) for cell, seed in listed}
        for number, future in enumerate(as_completed(futures), start=1):
            cell, seed = futures[future]
            progress.advance(task, cell.cost)
            error = future.exception()
            said = f"failed: {type(error).__name__}: {error}" if error else future.result()
            console.print(f"{number}/{len(listed)} {cell.name}, seed {seed}: {said}", highlight=False, soft_wrap=True)


def read_all(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The runs of the cells that have ended, in order."""
    for cell, seed in units(cells):
        for method in cell.methods:
            path = _path(folder, cell, method, seed)
            if path.exists():
                yield json.loads(path.read_text())


def _set_up() -> None:
    import datasets

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", ConvergenceWarning)


def _run_unit(cell: Cell, seed: int, places: Places, folder: Path) -> str:
    """Run every method that is not yet there; say the last accuracies."""
    said = []
    for method in cell.methods:
        path = _path(folder, cell, method, seed)
        if not path.exists():
            write_json(path, run(cell, method, seed, places))
        said.append(f"{method} {json.loads(path.read_text())['accuracy'][-1]:.1%}")
    return ", ".join(said)


def _path(folder: Path, cell: Cell, method: str, seed: int) -> Path:
    """Where a run is written down; the name holds what decides it, so that another config is another run."""
    config = json.dumps(sorted(config_of(cell, method, seed).items()))
    digest = hashlib.sha256(config.encode()).hexdigest()[:8]
    name = f"{cell.name}, {method}, {seed}".replace(", ", "-").replace(" ", "_").replace("/", "_")
    return folder / f"{name}-{digest}.json"
