"""What there is to run, and where it is written down."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from server.results import write_json
from simulations.bench.anatomy import WAYS, dissect
from simulations.bench.cells import ANATOMY, FIRST_SEED, Cell
from simulations.bench.runs import Places, changed, config_of, run
from simulations.schedule import Piece

Unit = tuple[Cell, int]
"""A cell and a seed: its methods share their first round, so that they run one after another."""


def units(cells: Iterable[Cell]) -> list[Unit]:
    """All cells with all of their seeds, in order."""
    return [(cell, seed) for cell in cells for seed in range(FIRST_SEED, FIRST_SEED + cell.seeds)]


def pieces(cells: Iterable[Cell], places: Places, folder: Path) -> list[Piece]:
    """All units as work, of which what is in `folder` is not done again."""
    return [
        Piece(f"{cell.name}, seed {seed}", partial(run_unit, cell, seed, places, folder), cell.cost)
        for cell, seed in units(cells)
    ]


def run_unit(cell: Cell, seed: int, places: Places, folder: Path) -> str:
    """Run every method that is not yet there, and take the first round apart; say the last accuracies."""
    said = []
    for method in cell.methods:
        path = path_of(folder, cell, method, seed)
        if not path.exists():
            write_json(path, run(cell, method, seed, places))
        said.append(f"{method} {json.loads(path.read_text())['accuracy'][-1]:.1%}")
    path = _anatomy_path(folder, cell, seed)
    if cell.name in ANATOMY and seed < FIRST_SEED + ANATOMY[cell.name] and not path.exists():
        write_json(path, {"ways": dissect(cell, seed, places)})
    return ", ".join(said)


def read_runs(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The runs of the cells that have ended, in order."""
    for cell, seed in units(cells):
        paths = [path_of(folder, cell, method, seed) for method in cell.methods]
        yield from (json.loads(path.read_text()) for path in paths if path.exists())


def read_anatomy(cells: Iterable[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """The averages of the first rounds that were taken apart, in order."""
    for cell, seed in units(cells):
        if (path := _anatomy_path(folder, cell, seed)).exists():
            yield from json.loads(path.read_text())["ways"]


def path_of(folder: Path, cell: Cell, method: str, seed: int) -> Path:
    """Where a run is written down; the name holds what decides it, so that another config is another run."""
    return folder / f"{_name(cell, method, seed)}-{_digest(changed(config_of(cell, method, seed)))}.json"


def _anatomy_path(folder: Path, cell: Cell, seed: int) -> Path:
    digest = _digest({**changed(config_of(cell, cell.methods[0], seed)), "ways": repr(WAYS)})
    return folder / f"{_name(cell, 'first round', seed)}-{digest}.json"


def _name(cell: Cell, what: str, seed: int) -> str:
    return f"{cell.name}, {what}, {seed}".replace(", ", "-").replace(" ", "_")


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sorted(config.items())).encode()).hexdigest()[:8]
