"""What there is to run, and where it is written down."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from server.results import write_json
from simulations.bench.runs import Places, changed
from simulations.lora.cells import FIRST_SEED, METHODS, Cell
from simulations.lora.runs import resolved, run, task_of
from simulations.schedule import Piece

Unit = tuple[Cell, int]
"""A cell and a seed, whose methods run one after another: what they train alike is trained once."""


def units(cells: Iterable[Cell]) -> list[Unit]:
    """All cells with all of their seeds, in order."""
    return [(cell, seed) for cell in cells for seed in range(FIRST_SEED, FIRST_SEED + cell.seeds)]


def pieces(cells: Iterable[Cell], places: Places, folder: Path) -> list[Piece]:
    """The units as work of which something is not yet in `folder`."""
    return [
        Piece(f"{cell.name}, seed {seed}", partial(run_unit, cell, seed, places, folder))
        for cell, seed in units(cells)
        if not _ended((cell, seed), folder)
    ]


def shared_pieces(cells: Sequence[Cell], places: Places) -> list[Piece]:
    """What all runs of a task share, to be made before them so that no two processes make it at once."""
    firsts = {cell.task: cell for cell in reversed(cells)}
    return [Piece(task, partial(_prepare, cell, places)) for task, cell in firsts.items()]


def run_unit(cell: Cell, seed: int, places: Places, folder: Path) -> str:
    """Run every method that is not yet there; say the last accuracies, or losses."""
    said = []
    for method in cell.methods:
        path = _path(folder, (cell, seed), method)
        if not path.exists():
            write_json(path, run(cell, method, seed, places))
        found = json.loads(path.read_text())
        last = f"{found['accuracy'][-1]:.1%}" if cell.task == "text" else f"{found['loss'][-1]:.4f}"
        said.append(f"{method} {last} (error {found['error'][0]:.2f})")
    return ", ".join(said)


def read_all(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The runs of the cells and seeds of which all have ended, in order."""
    for unit in units(cells):
        if _ended(unit, folder):
            yield from (json.loads(_path(folder, unit, method).read_text()) for method in unit[0].methods)


def _prepare(cell: Cell, places: Places) -> str:
    task_of(resolved(cell, FIRST_SEED, places))
    return "made"


def _ended(unit: Unit, folder: Path) -> bool:
    return all(_path(folder, unit, method).exists() for method in unit[0].methods)


def _path(folder: Path, unit: Unit, method: str) -> Path:
    """Where a run is written down; the name holds what decides it, so that another config is another run."""
    cell, seed = unit
    decides = [sorted(changed(cell.config(seed)).items()), sorted(METHODS[method].items()), cell.rounds]
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]
    name = "-".join([cell.name, method, str(seed)])
    return folder / f"{''.join(c if c.isalnum() or c in '-.' else '_' for c in name)}-{digest}.json"
