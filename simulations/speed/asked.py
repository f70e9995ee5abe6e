"""The figures that were asked for: each with its limit, what was found, and whether that is met."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

from simulations.speed.merging import SAME_START, UNRELATED
from simulations.speed.pairs import PUBLISHED, ROTFED, TRAINED
from simulations.speed.pairs import UNRELATED as UNRELATED_PAIR
from simulations.speed.sections import MEMORY, ROUNDS
from simulations.speed.subjects import ALWAYS, FEDAVG, ROTFEDAVG

# Two float32 sums of one distance differ by less.
_ROUNDING = 1e-6
MOST_MODELS = 4.0


@dataclass(frozen=True)
class Figure:
    """What was asked, the values that were found, one a repeat, and the most that their median may be."""

    name: str
    asked: str
    limit: float
    values: Sequence[float]
    text: Callable[[float], str]

    @property
    def found(self) -> str:
        """The median, and the lowest and highest value where there are several."""
        return spread(self.values, self.text) if len(self.values) else "not measured"

    @property
    def met(self) -> str:
        """Whether the median is within the limit."""
        if not len(self.values):
            return ""
        return "yes" if median(self.values) <= self.limit else "**no**"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the median of some values, with the lowest and the highest."""
    middle = text(median(values))
    return middle if len(values) == 1 else f"{middle} ({text(min(values))} to {text(max(values))})"


def ratios(frame: pd.DataFrame, section: str, case: str, one: str, other: str, column: str = "seconds") -> list[float]:
    """Return one method's values over another's, repeat by repeat; none where either was not measured."""
    rows = pick(frame, section=section, case=case)
    if not {one, other} <= set(rows.get("method", ())):
        return []
    table = rows.pivot(index="repeat", columns="method", values=column)
    return [float(value) for value in (table[one] / table[other]).dropna()]


def pick(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Return the rows in which columns have these values."""
    for column, value in wanted.items():
        frame = frame[frame[column] == value] if column in frame else frame[:0]
    return frame


def exponent(frame: pd.DataFrame, axis: str, method: str) -> float | None:
    """Return the slope of log seconds over the log of an axis, by least squares; None of fewer than two points."""
    rows = pick(frame, section="scaling", axis=axis, method=method)
    if rows.empty or rows[axis].nunique() < 2:
        return None
    middle = rows.groupby(axis)["seconds"].median()
    return float(np.polyfit(np.log(middle.index.to_numpy(float)), np.log(middle.to_numpy()), 1)[0])


def figures(frame: pd.DataFrame) -> list[Figure]:
    """Return all figures that were asked for."""
    return [*_pairs(frame), *_rounds(frame), *_memory(frame), *_small(frame), *_merges(frame), *_exponents(frame)]


def number(value: float) -> str:
    """Return a ratio for a table."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def time(value: float) -> str:
    """Return seconds for a table."""
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def _pairs(frame: pd.DataFrame) -> Iterator[Figure]:
    for case, factor in ((TRAINED, 8.0), (UNRELATED_PAIR, 1.2)):
        took = ratios(frame, "near", case, ROTFED, PUBLISHED)
        name = f"one RoBERTa-base, {case}"
        yield Figure(f"{name}: seconds, rotfed / published", f"at most 1/{factor:g}", 1 / factor, took, number)
        left = ratios(frame, "near", case, ROTFED, PUBLISHED, "distance")
        yield Figure(
            f"{name}: distance left, rotfed / published", "at most 1", 1 + _ROUNDING, left, lambda value: f"{value:.6f}"
        )


def _rounds(frame: pd.DataFrame) -> Iterator[Figure]:
    for case in ROUNDS:
        for method in (ROTFEDAVG, ALWAYS):
            took = ratios(frame, "round", case, method, FEDAVG)
            name = f"a round of {case}: seconds, {method} / FedAvg"
            yield Figure(name, "at most 1.75, better 1.5", 1.75, took, number)


def _memory(frame: pd.DataFrame) -> Iterator[Figure]:
    eight, sixteen, most = MEMORY
    for method in (ROTFEDAVG, ALWAYS):

        def peak(case: str, method: str = method, unit: str = "") -> float | None:
            rows = pick(frame, section="memory", case=case, method=method)
            if rows.empty:
                return None
            return float((rows["anonymous"] / (rows[unit] if unit else 1)).median())

        def over(one: float | None, other: float | None) -> list[float]:
            return [one / other] if one is not None and other else []

        name = f"peak anonymous memory, {method}"
        yield Figure(
            f"{name}, {eight}, / FedAvg's", "below 1", 1 - _ROUNDING, over(peak(eight), peak(eight, FEDAVG)), number
        )
        yield Figure(f"{name}: {most} / {sixteen}", "at most 1.1", 1.1, over(peak(most), peak(sixteen)), number)
        for case in (sixteen, most):
            models = peak(case, unit="model_bytes")
            asked = f"at most {MOST_MODELS:g}"
            yield Figure(f"{name}, {case}: in models", asked, MOST_MODELS, [] if models is None else [models], number)


def _small(frame: pd.DataFrame) -> Iterator[Figure]:
    rows = pick(frame, section="small")
    cases = list(rows["case"].unique()) if not rows.empty else []
    for case in cases:
        limit = 0.4 if case.startswith("pair") else 0.5
        values = [float(value) for value in pick(rows, case=case)["seconds"]]
        yield Figure(f"small ViTs, {case}: seconds", f"at most {limit:g} s", limit, values, time)


def _merges(frame: pd.DataFrame) -> Iterator[Figure]:
    for case, limit in ((SAME_START, 120.0), (UNRELATED, 600.0)):
        rows = pick(frame, section="merge", case=case)
        took = [] if rows.empty else [float(value) for value in rows["seconds"]]
        name = f"two folders of 1.1B parameters, {case}"
        yield Figure(f"{name}: seconds", f"at most {limit:g} s", limit, took, time)
        if case == SAME_START:
            held = [] if rows.empty else [float(value) for value in rows["anonymous"] / rows["model_bytes"]]
            yield Figure(f"{name}: peak anonymous memory, in models", "at most 1.5", 1.5, held, number)


def _exponents(frame: pd.DataFrame) -> Iterator[Figure]:
    for axis in ("layers", "clients"):
        found = exponent(frame, axis, ALWAYS)
        values = [] if found is None else [found]
        yield Figure(f"exponent of seconds over {axis}", "about 1: at most 1.15", 1.15, values, number)
