"""Run what has not been run, and write down what came out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from simulations import BBC, IAMBIC, MINILM
from simulations.bench.runs import Places
from simulations.lora.cells import CELLS, TASKS
from simulations.lora.page import page, with_table
from simulations.lora.picture import draw
from simulations.lora.schedule import pieces, read_all, shared_pieces
from simulations.schedule import do_all, end_politely, lines_of_runs

DOCS = Path(__file__).parents[2] / "docs"

# The same in all runs, or of no use beside what a cell says of itself.
_ONCE = ("config", "code", "versions", "hardware")


def main(
    only: Annotated[
        str, typer.Option(help="Only cells whose names contain this, such as 'rank 4, long'; others stay as they are.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Only so many seeds of each cell.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on one core.")] = 2,
    bbc: Annotated[Path, typer.Option(help="Folder of BBC News, a subfolder a class.")] = BBC,
    minilm: Annotated[Path, typer.Option(help="Folder of all-MiniLM-L6-v2.")] = MINILM,
    plays: Annotated[Path, typer.Option(help="Folder with plays/*/*.md, as the package iambic has it.")] = IAMBIC,
    results: Annotated[Path, typer.Option(help="Where runs are kept, to go on from.")] = Path("results/lora"),
    output: Annotated[
        Path, typer.Option(help="The JSON file; the page NAME-results.md and the picture NAME.svg lie beside it.")
    ] = DOCS / "lora.json",
) -> None:
    """Federate LoRA adapters by every way of aggregating them, and write down how good the models become.

    A cell is a task (news, or roles of plays), a split among ten clients and a rank. Every method runs in every cell
    with every seed, two to three hours of one core in all, unless it has been run before; the page shows accuracy, or
    loss, and aggregation error by round, with intervals, of all cells and seeds that have ended. With the default
    output the README's table is renewed, too.
    """
    end_politely()
    cells = [replace(cell, seeds=min(seeds, cell.seeds)) for cell in CELLS if only in cell.name]
    if not cells:
        names = "; ".join(cell.name for cell in CELLS)
        raise typer.BadParameter(f"expected part of a cell's name, found {only!r}; cells: {names}", param_hint="--only")
    folders = {"bbc": bbc, "minilm": minilm, "plays": plays}
    for cell in cells:
        for name in {str(value) for value in TASKS[cell.task].values()} & folders.keys():
            if not folders[name].is_dir():
                raise typer.BadParameter(
                    f"{folders[name]}: expected a folder, found none; `make data` makes it", param_hint=f"--{name}"
                )
    places = Places({name: str(path.resolve()) for name, path in folders.items()}, results.resolve() / "kept")
    console = Console()
    try:
        todo = pieces(cells, places, results / "runs")
        failed = do_all(todo, jobs, console, shared_pieces(cells, places)) if todo else 0
    finally:
        document = write(output, list(read_all(CELLS, results / "runs")))
        if document and output == DOCS / "lora.json":
            readme = DOCS.parent / "README.md"
            readme.write_text(with_table(readme.read_text(encoding="utf-8"), document), encoding="utf-8")
    if failed:
        raise typer.Exit(1)


def write(output: Path, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the JSON file, and the page and the picture out of it; return what it holds, nothing of no runs."""
    if not runs:
        return {}
    document = {
        **{key: runs[-1][key] for key in ("versions", "hardware")},
        "code": sorted({run["code"] for run in runs}),
        "cells": {run["cell"]: {k: v for k, v in run["config"].items() if k != "seed"} for run in runs},
        "runs": [{key: _short(value) for key, value in run.items() if key not in _ONCE} for run in runs],
    }
    output.write_text(lines_of_runs(document), encoding="utf-8")
    output.with_name(f"{output.stem}-results.md").write_text(page(document), encoding="utf-8")
    draw(document, output.with_suffix(".svg"))
    return document


def _short(value: Any) -> Any:
    """Six digits after the point."""
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return round(value, 6) if isinstance(value, float) else value


if __name__ == "__main__":
    typer.run(main)
