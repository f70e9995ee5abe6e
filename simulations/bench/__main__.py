"""Run what has not been run, and write down what came out."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client.data import FASHION_MNIST_FOLDER
from server.results import environment, write_json
from simulations import BBC, MINILM, PLAYS
from simulations.bench.cells import FULL, SMALL, Cell
from simulations.bench.engine import compare
from simulations.bench.pictures import draw
from simulations.bench.report import page, with_table
from simulations.bench.runs import Places
from simulations.bench.schedule import pieces, read_anatomy, read_runs
from simulations.schedule import do_all, end_politely, lines_of_runs

PROJECT = Path(__file__).parents[2]

console = Console()


def main(
    full: Annotated[bool, typer.Option(help="All cells, in hours, instead of a look at some in half an hour.")] = False,
    only: Annotated[str, typer.Option(help="Only cells whose names contain this.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time, each on one core; 0 only writes the report.")] = 2,
    engine: Annotated[bool, typer.Option(help="Also compare one run with Flower's simulation engine.")] = False,
    images: Annotated[Path, typer.Option(help="Folder of Fashion-MNIST's gzipped IDX files.")] = FASHION_MNIST_FOLDER,
    bbc: Annotated[Path, typer.Option(help="Folder of BBC News, a subfolder a class.")] = BBC,
    minilm: Annotated[Path, typer.Option(help="Folder of all-MiniLM-L6-v2.")] = MINILM,
    plays: Annotated[Path, typer.Option(help="Folder made by simulations.plays.")] = PLAYS,
    results: Annotated[Path, typer.Option(help="Where runs are kept, to go on from.")] = Path("results/bench"),
    docs: Annotated[Path | None, typer.Option(help="Where the report goes: with --full, docs and README.")] = None,
) -> None:
    """Run every method in every cell with every seed, unless it has been run, and write the report."""
    end_politely()
    cells = FULL if full else SMALL
    paths = {"fashion-mnist": images, "bbc": bbc, "minilm": minilm, "plays": plays}
    # A name that is no folder here stays one: the apps may know where to get it.
    places = Places({name: str(path.resolve()) for name, path in paths.items() if path.is_dir()}, results / "kept")
    asked = [cell for cell in cells if only in cell.name] if jobs else []
    failed = do_all(pieces(asked, places, results / "runs"), jobs, console) if asked else 0
    if engine:
        write_json(results / "engine.json", compare())
    document = _collect(cells, results)
    folder = docs or (PROJECT / "docs" if full else results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").write_text(lines_of_runs(document))
    (folder / "benchmark.md").write_text(page(document))
    draw(document, folder)
    if full and docs is None:
        readme = PROJECT / "README.md"
        readme.write_text(with_table(readme.read_text(), document))
    console.print(f"{len(document['runs'])} runs. Report: {folder / 'benchmark.md'}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _collect(cells: tuple[Cell, ...], results: Path) -> dict[str, Any]:
    """Every run that has ended, without what all share; of one seed alone there is nothing to tell yet."""
    runs = _repeated(read_runs(cells, results / "runs"), "method")
    shared = ("versions", "hardware", "code", "status", "model", "data")
    document = {
        "environment": {**environment(), "code": sorted({run["code"] for run in runs})},
        "runs": [{key: value for key, value in run.items() if key not in shared} for run in runs],
        "anatomy": _repeated(read_anatomy(cells, results / "runs"), "way"),
    }
    if (path := results / "engine.json").exists():
        document["engine"] = json.loads(path.read_text())
    return document


def _repeated(found: Iterable[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Those of which a cell has another seed."""
    listed = list(found)
    seeds = Counter((entry["cell"], entry[by]) for entry in listed)
    return [entry for entry in listed if seeds[entry["cell"], entry[by]] > 1]


if __name__ == "__main__":
    typer.run(main)
