"""What one round of alignment did, for logs, metrics and files."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ClientReport:
    """One client's alignment: Euclidean distances to the anchor, and the share of identity permutations."""

    node_id: int
    distance_before: float
    distance_after: float
    identity_permutations: float


@dataclass(frozen=True)
class RoundReport:
    """One round: its clients, the nodes that were refused and why, and the seconds it took.

    `groups` are those that were aligned, none where no frame differed; `gain` is the largest gain of any, in units of
    what it would be on noise, and infinite where units had changed places; `next_round_from`,
    whether the next round starts from the "plain" or the "aligned" mean.
    """

    round: int
    anchor: str
    clients: tuple[ClientReport, ...]
    groups: tuple[str, ...] = ()
    gain: float = 0.0
    next_round_from: str = "plain"
    refused: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def _mean(self, name: str) -> float:
        return float(sum(getattr(client, name) for client in self.clients)) / max(1, len(self.clients))

    @property
    def distance_before(self) -> float:
        """Mean distance of the clients' models to the anchor as they came."""
        return self._mean("distance_before")

    @property
    def distance_after(self) -> float:
        """Mean distance of the clients' models to the anchor once aligned."""
        return self._mean("distance_after")

    @property
    def identity_permutations(self) -> float:
        """Share of permutations, over clients, groups and layers, that were the identity."""
        return self._mean("identity_permutations")

    def line(self) -> str:
        """The round in one line."""
        return (
            f"aligned {', '.join(self.groups) or 'nothing'} of {len(self.clients)} replies in {self.seconds:.2f} s, "
            f"gain over noise {self.gain:.2f}, mean distance {self.distance_before:.4g} -> {self.distance_after:.4g}"
        )

    def metrics(self) -> dict[str, float]:
        """The round's figures under the names that they have in a MetricRecord."""
        return {
            "rotfed-distance-before": self.distance_before,
            "rotfed-distance-after": self.distance_after,
            "rotfed-identity-permutations": self.identity_permutations,
            "rotfed-gain": self.gain,
            "rotfed-refused": float(len(self.refused)),
            "rotfed-seconds": self.seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for a JSON file."""
        means = {name: getattr(self, name) for name in ("distance_before", "distance_after", "identity_permutations")}
        refused = {str(node): why for node, why in self.refused.items()}
        # JSON has no infinity.
        gain = self.gain if math.isfinite(self.gain) else None
        return {**asdict(self), **means, "gain": gain, "refused": refused}


@dataclass(frozen=True)
class AdapterReport:
    """One round of adapters.

    Aggregation errors are ||result - mean of products|| / ||mean of products||, of the method and of the mean of
    factors, by module and over all, NaN where no adapter could be used; `ranks` are the nodes' own, the highest of
    their modules; then the nodes that were refused and why, and the seconds it took.
    """

    round: int
    aggregation: str
    ranks: dict[int, int] = field(default_factory=dict)
    error: float = math.nan
    mean_error: float = math.nan
    errors: dict[str, float] = field(default_factory=dict, repr=False)
    mean_errors: dict[str, float] = field(default_factory=dict, repr=False)
    refused: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        """The round in one line."""
        if not self.ranks:
            return f"no adapter could be used, {len(self.refused)} refused"
        return (
            f"{len(self.ranks)} adapters by '{self.aggregation}' in {self.seconds:.2f} s, aggregation error "
            f"{self.error:.4g} (mean of factors {self.mean_error:.4g})"
        )

    def metrics(self) -> dict[str, float]:
        """The round's figures over all modules under the names that they have in a MetricRecord, which Flower logs."""
        return {
            "rotfed-aggregation-error": self.error,
            "rotfed-mean-aggregation-error": self.mean_error,
            "rotfed-refused": float(len(self.refused)),
            "rotfed-seconds": self.seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for a JSON file."""
        named = {key: {str(node): value for node, value in getattr(self, key).items()} for key in ("ranks", "refused")}
        # JSON has no NaN.
        errors = {"error": self.error, "mean_error": self.mean_error}
        return {**asdict(self), **named, **{key: x if math.isfinite(x) else None for key, x in errors.items()}}
