"""The first run: FedAvg against RotFedAvg on digits, from different initialisations and from one.

    make demo        (or: python -m simulations.demo --help)

Four runs on Flower's real simulation engine, a table, a picture, and one JSON file that holds every figure.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from server.results import environment, write_json
from simulations.engine import PROJECT, Engine, EngineError
from simulations.plots import plot_accuracy

METHODS = {"fedavg": "FedAvg", "rotfed": "RotFedAvg"}
STARTS = {"different": "different initialisations", "same": "one initialisation"}
RUN_TIMEOUT = 900.0

# Chosen so that a client's own model learns, and so that all four runs take about two minutes on two cores.
TRAINING: dict[str, bool | int | float | str] = {
    "task": "image",
    "dataset": "digits",
    "model": "vit-small",
    "partition": "iid",
    "anchor": "consensus",
    "local-epochs": 10,
    "batch-size": 16,
    "learning-rate": 0.001,
    "fraction-evaluate": 0.0,
    "evaluate-clients": True,
}

console = Console()
cli = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Run:
    """A run that was started: what it compares, its id at the engine, and where its server writes results."""

    start: str
    method: str
    run_id: str
    results_file: Path

    @property
    def name(self) -> str:
        """How it is called on the screen."""
        return f"{METHODS[self.method]}, {STARTS[self.start]}"


@dataclass(frozen=True)
class Outcome:
    """A run that has ended: how ("completed" or "failed"), why if it failed, and its server's results."""

    start: str
    method: str
    status: str
    error: str
    results: Mapping[str, Any]

    @property
    def accuracies(self) -> list[float]:
        """Accuracy on held-out data, before the first round and after each."""
        return [entry["accuracy"] for entry in self.results.get("rounds", [])]

    @property
    def single_accuracy(self) -> float | None:
        """Mean accuracy of the clients' own models after their training in round one."""
        rounds = self.results.get("rounds", [])
        if len(rounds) < 2:
            return None
        accuracies: list[float] = rounds[1]["train"]["client-accuracies"]
        return sum(accuracies) / len(accuracies)


@cli.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 3,
    clients: Annotated[int, typer.Option(min=2, help="Clients, each with an equal share of the data.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Decides initialisations, splits and batch order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results file and the picture.")] = Path("results/demo"),
    picture: Annotated[Path | None, typer.Option(help="Write the picture here instead.")] = None,
) -> None:
    """Run FedAvg and RotFedAvg on digits, from different initialisations and from one; compare them."""
    # A polite kill must end the engine as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.perf_counter()
    config = {**TRAINING, "num-server-rounds": rounds, "min-nodes": clients, "seed": seed}
    results_file = out.resolve() / "demo.json"
    picture = picture or out / "demo.png"
    outcomes: list[Outcome] = []
    error = "interrupted"
    try:
        console.print(f"Flower simulation: 4 runs, {clients} clients, {rounds} rounds, seed {seed}")
        with Engine() as engine:
            runs: list[Run] = []
            for start, method in product(STARTS, METHODS):
                # The next run starts while the engine still winds down the one before.
                runs.append(_start(engine, config, start, method, clients))
                if not _follow(engine, runs[-1]):
                    break
            outcomes = _outcomes(engine, runs)
        failed = [outcome for outcome in outcomes if outcome.status != "completed"]
        error = "; ".join(f"{outcome.start}, {outcome.method}: {outcome.error}" for outcome in failed)
    except EngineError as engine_error:
        error = str(engine_error)
    finally:
        seconds = time.perf_counter() - started
        status = "failed" if error else "completed"
        write_json(results_file, _summary(config, outcomes, status, error, seconds))

    if status == "completed":
        show_table(outcomes)
        _plot(picture, outcomes, clients)
        console.print(f"{seconds:.0f} s. Picture: {picture}  Figures: {results_file}", soft_wrap=True)
    else:
        console.print(f"[bold red]failed:[/] {error}", soft_wrap=True)
        raise typer.Exit(1)


def _start(
    engine: Engine, config: Mapping[str, bool | int | float | str], start: str, method: str, clients: int
) -> Run:
    results_file = engine.home / f"{start}-{method}.json"
    own = {**config, "start": start, "align": method == "rotfed", "results": str(results_file)}
    return Run(start, method, engine.submit(own, nodes=clients), results_file)


def _follow(engine: Engine, run: Run) -> bool:
    """Print a line a round until the run's server has said its last word; tell whether that is a good one."""
    shown = 0
    console.print(run.name)

    def done() -> bool:
        nonlocal shown
        results = _read(run.results_file)
        rounds = results.get("rounds", [])
        for entry in rounds[shown:]:
            when = f"round {entry['round']}" if entry["round"] else "before"
            console.print(f"  {when:9} accuracy {entry['accuracy']:6.1%}  ({entry['seconds']:.0f} s)")
        shown = len(rounds)
        return bool(results.get("status", "running") != "running")

    with console.status("training") if console.is_terminal else nullcontext():
        engine.follow(run.run_id, done, timeout=RUN_TIMEOUT)
    return bool(_read(run.results_file).get("status") == "completed")


def _outcomes(engine: Engine, runs: list[Run]) -> list[Outcome]:
    """How each run ended; the end of a failed run's log is shown."""
    outcomes = []
    for run, ended in zip(runs, engine.wait([run.run_id for run in runs], timeout=RUN_TIMEOUT), strict=True):
        results = _read(run.results_file)
        if ended.completed and results.get("status") == "completed":
            outcomes.append(Outcome(run.start, run.method, "completed", "", results))
            continue
        console.print(f"[red]{run.name}: {ended.status}; the run's log ends:[/]")
        console.print(engine.log(run.run_id), markup=False, highlight=False)
        error = results.get("error") or ended.details or ended.status
        outcomes.append(Outcome(run.start, run.method, "failed", error, results))
    return outcomes


def show_table(outcomes: list[Outcome]) -> None:
    """Accuracy per round, one line a run."""
    rounds = max(len(outcome.accuracies) for outcome in outcomes)
    table = Table(title="Accuracy on held-out digits")
    table.add_column("start")
    table.add_column("method")
    table.add_column("single models,\nround 1 (mean)", justify="right")
    for number in range(1, rounds):
        table.add_column(f"average,\nround {number}", justify="right")
    for outcome in outcomes:
        single = outcome.single_accuracy
        table.add_row(
            outcome.start,
            METHODS[outcome.method],
            "" if single is None else f"{single:.1%}",
            *(f"{accuracy:.1%}" for accuracy in outcome.accuracies[1:]),
            end_section=outcome.method == list(METHODS)[-1],
        )
    console.print(table)


def _plot(path: Path, outcomes: list[Outcome], clients: int) -> None:
    panels: dict[str, dict[str, list[float]]] = {}
    single: dict[str, float] = {}
    for outcome in outcomes:
        panel = f"clients start from {STARTS[outcome.start]}"
        panels.setdefault(panel, {})[METHODS[outcome.method]] = outcome.accuracies
        if outcome.single_accuracy is not None:
            single[panel] = outcome.single_accuracy
    plot_accuracy(path, panels, single, f"A small ViT on digits, {clients} clients, equal shares of the data")


def _summary(
    config: Mapping[str, Any], outcomes: list[Outcome], status: str, error: str, seconds: float
) -> dict[str, Any]:
    return {
        "status": status,
        "error": error,
        "command": "python -m simulations.demo " + " ".join(sys.argv[1:]),
        "config": dict(config),
        "seed": config["seed"],
        "commit": _commit(),
        **environment(),
        "seconds": round(seconds, 3),
        "runs": [
            {
                "start": outcome.start,
                "method": outcome.method,
                **outcome.results,
                # Without the temporary file of this one run.
                "config": {key: value for key, value in outcome.results.get("config", {}).items() if key != "results"},
                "status": outcome.status,
            }
            for outcome in outcomes
        ],
    }


def _commit() -> str:
    """The commit that is checked out, with "+" for local changes; empty outside a git checkout."""
    command = ["git", "-C", str(PROJECT), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _read(path: Path) -> dict[str, Any]:
    """A results file, or nothing before the server has written one."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content


if __name__ == "__main__":
    cli()
