"""Runs of one cell or method, their differences, and how these are written in tables."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from simulations.bench.cells import ALIGNED, PLAIN
from simulations.bench.statistics import Difference, paired

Run = Mapping[str, Any]
Document = Mapping[str, Any]

# In points of accuracy: a cell whose interval reaches below this is named.
TOLERANCE = -0.003


def starts_alike(run: Run) -> bool:
    """Whether all clients begin with one model, of the apps' own size."""
    return not run["cell"].startswith(("own starts", "size"))


def cells_of(runs: Iterable[Run], method: str) -> list[str]:
    """The cells in which a method was run with two seeds at least."""
    seeds: dict[str, int] = {}
    for run in runs:
        seeds[run["cell"]] = seeds.get(run["cell"], 0) + (run["method"] == method)
    return [cell for cell, count in seeds.items() if count > 1]


def runs_of(runs: Iterable[Run], cell: str | None, method: str) -> list[Run]:
    """A method's runs, of one cell or of all."""
    return [run for run in runs if run["method"] == method and cell in (None, run["cell"])]


def one_of(runs: Iterable[Run], cell: str, method: str, seed: int) -> Run:
    """The run of a cell, method and seed."""
    return next(run for run in runs_of(runs, cell, method) if run["seed"] == seed)


def differences(
    runs: Sequence[Run], cell: str, method: str, plain: str, figure: str = "accuracy"
) -> tuple[Difference, Difference]:
    """Accuracy (or loss) of one method minus that of another, after the first round and after the last."""
    pairs = [(run, one_of(runs, cell, plain, run["seed"])) for run in runs_of(runs, cell, method)]
    first, last = (paired([a[figure][at] for a, _ in pairs], [b[figure][at] for _, b in pairs]) for at in (1, -1))
    return first, last


def below(runs: Sequence[Run], cell: str) -> bool:
    """Whether the interval of alignment's gain at the end reaches below the tolerance."""
    return differences(runs, cell, ALIGNED, PLAIN)[1].low < TOLERANCE


def nats(difference: Difference) -> str:
    """A difference in loss."""
    return difference.text(1.0, 3)


def lower(difference: Difference) -> str:
    """The verdict of what is better the lower it is."""
    return {"gain": "loss", "loss": "gain"}.get(difference.verdict, difference.verdict)


def by_round(runs: Sequence[Run], start: bool = False) -> str:
    """Mean accuracies in percent by round, with the start before the first if that is asked."""
    rounds = zip(*(run["accuracy"][0 if start else 1 :] for run in runs), strict=True)
    return ", ".join(f"{100 * mean(values):.1f}" for values in rounds)
