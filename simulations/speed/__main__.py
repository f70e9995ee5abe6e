"""Measure what has not been measured, and write the page."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.fingerprint import fingerprint
from server.results import environment
from simulations.schedule import end_politely
from simulations.speed.report import write
from simulations.speed.run import kept, run_all
from simulations.speed.sections import DEFAULT, FULL, QUICK, SECTIONS, pieces

# Processes that run or wait to, beside this one, in the mean of a minute.
_BUSY = 0.5

DOCS = Path(__file__).parents[2] / "docs"


def main(
    full: Annotated[bool, typer.Option("--full", help="More repeats and points, and the page into docs.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Models scaled down, to see that all runs.")] = False,
    only: Annotated[str, typer.Option(help=f"Sections to measure, of {','.join(SECTIONS)}; all by default.")] = "",
    without: Annotated[str, typer.Option(help="Sections to leave out.")] = "",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = os.cpu_count() or 1,
    results: Annotated[Path, typer.Option(help="Where runs are kept, to go on from.")] = Path("results/speed"),
    docs: Annotated[Path | None, typer.Option(help="Where the page goes: with --full docs, else the results.")] = None,
) -> None:
    """Measure seconds and memory of rotfed beside FedAvg and the published procedure, and write them down.

    Pieces run one at a time, each in a process of its own; leave the machine alone meanwhile. What was measured with
    the same code, threads and effort is kept, also of other sections, and is not measured again: remove the results'
    folder to do so. Models and replies take up to 30 GB of disk meanwhile, beside the results.
    """
    end_politely()
    if full and quick:
        raise typer.BadParameter("expected --full or --quick, found both")
    effort = FULL if full else QUICK if quick else DEFAULT
    chosen = [name for name in _sections("--only", only) or SECTIONS if name not in _sections("--without", without)]
    settings = {"effort": effort.name, "threads": threads, "repeats": effort.repeats, "code": fingerprint()}
    scratch = results / "scratch"
    console = Console()
    if (load := os.getloadavg()[0]) > _BUSY:
        console.print(f"The machine is busy (load {load:.1f}): seconds will be too many, and ratios uncertain.")
    every = pieces(effort, scratch.resolve())
    failed = run_all(
        [piece for piece in every if piece.section in chosen], settings, threads, results, scratch, console
    )
    runs = [run for piece in every for run in kept(piece, settings, results) or []]
    document = {"environment": environment(), **settings, "failed": failed, "runs": runs}
    page = write(document, docs or (DOCS if full else results))
    console.print(f"{len(runs)} runs. Page: {page}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _sections(option: str, names: str) -> list[str]:
    """The sections that an option names."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in found if name not in SECTIONS]:
        raise typer.BadParameter(f"expected some of {','.join(SECTIONS)}, found {unknown[0]!r}", param_hint=option)
    return found


if __name__ == "__main__":
    typer.run(main)
