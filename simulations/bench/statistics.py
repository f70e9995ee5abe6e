"""Paired differences and their intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy.stats import t

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over `seeds` seeds, and the ends of its 95% interval (Student's t)."""

    mean: float
    low: float
    high: float
    seeds: int
    worst: float

    @property
    def verdict(self) -> str:
        """What the interval shows."""
        if self.low == self.high == 0:
            return "equal"
        if self.low > 0:
            return "gain"
        return "loss" if self.high < 0 else "no difference shown"

    def text(self, scale: float = 100.0, digits: int = 1) -> str:
        """Mean and interval, in points by default."""
        if self.verdict == "equal":
            return "0 (equal)"
        values = (f"{scale * value:+.{digits}f}" for value in (self.mean, self.low, self.high))
        return "{} ({} to {})".format(*values)


def paired(ones: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of `ones` and `others`, seed by seed; needs two at least."""
    differences = [one - other for one, other in zip(ones, others, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"paired: expected two seeds at least, found {len(differences)}")
    return Difference(mean(differences), *interval(differences), len(differences), min(differences))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The ends of the 95% interval of the mean (Student's t)."""
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return mean(values) - half, mean(values) + half
