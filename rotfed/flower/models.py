"""Rounds of whole models: every reply in one frame, function kept."""

import time
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ConfigRecord
from torch import Tensor

from rotfed.anchors import chosen_anchor
from rotfed.descent import Anchor
from rotfed.errors import AlignmentError
from rotfed.evidence import MIN_GAIN, Aligned, align_where_frames_differ, check_min_gain
from rotfed.flower.mods import align_options, folded
from rotfed.flower.replies import Received, Usable, floating, match_params
from rotfed.flower.reports import ClientReport, RoundReport
from rotfed.mergers import weighted_mean
from rotfed.spec import SymmetrySpec

# In a round all clients come from one model: joining them one by one or two by two is for models of their own.
ROUND_ANCHORS = ("global", "medoid", "consensus")
CARRIES = ("auto", "plain", "aligned")


class ModelRounds:
    """What a spec of a whole model makes of the rounds of an `AlignedStrategy`, whose keywords these are.

    `private` is the name of the privacy wrapper inside, or empty; `averages` tells whether the inner strategy takes the
    weighted mean of the replies.
    """

    def __init__(
        self,
        spec: SymmetrySpec,
        private: str,
        anchor: str | None,
        groups: Iterable[str] | None,
        layers: Iterable[int] | None,
        proper: bool,
        strength: float,
        max_sweeps: int,
        min_gain: float | None,
        carry: str | None,
        averages: bool,
    ) -> None:
        self.options = align_options(spec, groups, layers, proper, strength, max_sweeps)
        self.min_gain = check_min_gain(MIN_GAIN if min_gain is None else min_gain)
        self.anchor = chosen_anchor(anchor or ("global" if private else "consensus"), ROUND_ANCHORS)
        if private and self.anchor != "global":
            raise AlignmentError(
                f"anchor: expected 'global' around {private}, found {self.anchor!r}; aligning one client's "
                "reply to those of others lets it depend on their data, which breaks the privacy accounting"
            )
        self.carry = carry or "auto"
        if self.carry not in CARRIES or (self.carry == "plain" and not averages):
            allowed = ", ".join(name for name in CARRIES if averages or name != "plain")
            raise AlignmentError(
                f"carry: expected one of {allowed}, found {carry!r}; 'plain' is for strategies that take the weighted "
                "mean of the replies, such as FedAvg and FedProx"
            )
        self.averages = averages
        self.spec = spec
        self.residual: dict[str, Tensor] = {}
        self._round = 0
        self._broadcast: dict[str, Tensor] = {}
        self.delivered: dict[str, Tensor] = {}

    def settings(self) -> list[tuple[str, str]]:
        """The settings as `summary` logs them."""
        options = self.options
        return [
            ("Spec", f"{self.spec.source} ({self.spec.model_type})"),
            ("Anchor", f"'{self.anchor}'"),
            ("Groups", ", ".join(options["groups"])),
            ("Layers", f"{_span(options['layers'])} of {self.spec.num_layers}"),
            ("Rotations", "SO(n)" if options["proper"] else "O(n)"),
            ("Strength", f"{options['strength']:g}"),
            ("Least gain over noise", f"{self.min_gain:g}"),
            ("Carries", self.carry),
        ]

    def begin(self, server_round: int, broadcast: dict[str, Tensor], config: ConfigRecord) -> dict[str, Tensor]:
        """Take note of what a round sends, and return it: with folded norms where the spec takes them so."""
        self._round, self._broadcast = server_round, dict(folded(broadcast, self.spec))
        return self._broadcast

    def ranks(self, node_id: int) -> tuple[int, ...]:
        """Models have no ranks."""
        return ()

    def for_node(self, node_id: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a node is sent: the model."""
        return params

    def read(self, entry: Usable) -> dict[str, Tensor]:
        """A reply's model. Raises RotfedError to refuse it."""
        return dict(folded(match_params(entry.params, self._broadcast), self.spec))

    def combine(
        self, received: Received, refused: Mapping[int, str], started: float
    ) -> tuple[list[Mapping[str, Tensor]], RoundReport]:
        """The models that the inner strategy is given in place of the replies, and the round's report."""
        usable = received.usable
        models = [entry.params for entry in usable]
        weights = [entry.weight for entry in usable]
        found = Aligned([])
        if usable:
            reference = Anchor(self._broadcast, self.spec)
            found = align_where_frames_differ(
                models, self.spec, self.anchor, weights, reference, self.min_gain, **self.options
            )
        aligned = found.alignments
        moved: list[Mapping[str, Tensor]] = [alignment.params for alignment in aligned]
        apart = found.groups and self.averages and (self.carry == "plain" or (self.carry == "auto" and not found.far))
        # What the round delivers in place of the model that the next one starts from.
        self.delivered = weighted_mean(map(floating, moved), weights) if apart else {}
        clients = tuple(
            ClientReport(entry.node_id, a.distance_before, a.distance_after, a.identity_permutations)
            for entry, a in zip(usable, aligned, strict=True)
        )
        report = RoundReport(
            round=self._round,
            anchor=self.anchor,
            clients=clients,
            groups=found.groups,
            gain=found.gain,
            carried="plain" if apart or not found.groups else "aligned",
            refused=dict(refused),
            seconds=time.perf_counter() - started,
        )
        return models if apart else moved, report

    def frozen(self) -> dict[str, Tensor]:
        """All parameters are trained."""
        return {}

    def settle(self) -> None:
        """Nothing is left over from a round."""


def _span(layers: Sequence[int]) -> str:
    contiguous = list(layers) == list(range(layers[0], layers[-1] + 1)) if layers else False
    return f"{layers[0]}-{layers[-1]}" if contiguous and len(layers) > 1 else ", ".join(map(str, layers)) or "none"
