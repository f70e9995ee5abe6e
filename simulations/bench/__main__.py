"""Run what has not been run, and write down what came out."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.data import FASHION_MNIST_FOLDER
from simulations.bench.cells import FULL, SMALL
from simulations.bench.runs import Places
from simulations.bench.schedule import run_all

console = Console()


def main(
    full: Annotated[bool, typer.Option(help="All cells, in hours, instead of a look at some in half an hour.")] = False,
    only: Annotated[str, typer.Option(help="Only cells whose names contain this.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on one core.")] = 2,
    images: Annotated[Path, typer.Option(help="Folder of Fashion-MNIST's gzipped IDX files.")] = FASHION_MNIST_FOLDER,
    bbc: Annotated[Path, typer.Option(help="Folder of BBC News, a subfolder a class.")] = Path("bbc"),
    minilm: Annotated[Path, typer.Option(help="Folder of all-MiniLM-L6-v2.")] = Path("minilm"),
    plays: Annotated[Path, typer.Option(help="Folder made by simulations.plays.")] = Path("plays"),
    results: Annotated[Path, typer.Option(help="Where runs are kept, to go on from.")] = Path("results/bench"),
) -> None:
    """Run every method in every cell with every seed, unless it has been run."""
    cells = [cell for cell in (FULL if full else SMALL) if only in cell.name]
    paths = {"fashion-mnist": images, "bbc": bbc, "minilm": minilm, "plays": plays}
    # A name that is no folder here stays one: the apps may know where to get it.
    places = Places({name: str(path.resolve()) for name, path in paths.items() if path.is_dir()}, results / "kept")
    run_all(cells, places, results / "runs", jobs, console)


if __name__ == "__main__":
    typer.run(main)
