"""Alignment around any Flower strategy that speaks the message API."""

import time
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from torch import Tensor

from rotfed.anchors import chosen_anchor
from rotfed.descent import Anchor
from rotfed.errors import AlignmentError, RecordError
from rotfed.evidence import MIN_GAIN, Aligned, align_where_frames_differ, check_min_gain
from rotfed.flower.mods import align_options, folded
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import Received, match_params, record_key, sort_replies, widened
from rotfed.flower.reports import ClientReport, RoundReport
from rotfed.mergers import weighted_mean
from rotfed.spec import SymmetrySpec

_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


# In a round all clients come from one model: joining them one by one or two by two is for models of their own.
ROUND_ANCHORS = ("global", "medoid", "consensus")


class AlignedStrategy(Strategy):
    """Bring every reply into one frame, then let another strategy aggregate.

    Parameters
    ----------
    inner
        Any message-API strategy: FedAvg, FedAdam, Krum, a differential-privacy wrapper, your own. It sees replies
        that are aligned, named and ordered like the model sent out, with float32 in place of half precision and no
        integer buffers. Alignment belongs outermost: wrap it around a privacy wrapper, not the reverse, which would
        clip before aligning.
    spec
        The bound spec of the model, from `rotfed.load_spec`. With the residual stream the norms of the model sent out
        and of every reply are folded where that needs it (`rotfed.fold_norms`), so that what clients train and what
        comes out has other weights than without, of the same function at the start.
    anchor
        `"global"`: the model that was sent out. `"medoid"` or `"consensus"`: what the clients agree on, in the frame
        nearest to the model that was sent out (see `rotfed.align_all`). Only `"global"` keeps one client's influence
        bounded, so it is the only one allowed around differential privacy; since no reply moves away from the
        model sent out, a clipping bound that held before holds after.
    groups, layers, proper, strength, max_sweeps
        As in `rotfed.align`.
    min_gain
        A round whose frames do not differ is aggregated as it came, to the bit: only those groups are aligned that gain
        more, in units of what they would gain on noise (see `rotfed.evidence`). 0 aligns every round, infinity none.

    A reply that cannot be used (not finite, misshapen, incomplete, without a weight) is refused with its node and
    reason, and reaches `inner` as an error reply, so that `inner`'s own rule for failures applies. `reports` holds
    one `RoundReport` a round; its figures are also in the round's metrics.
    """

    def __init__(
        self,
        inner: Strategy,
        spec: SymmetrySpec,
        anchor: str = "consensus",
        groups: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        proper: bool = False,
        strength: float = 1.0,
        max_sweeps: int = 20,
        min_gain: float = MIN_GAIN,
    ) -> None:
        if not isinstance(inner, Strategy):
            raise TypeError(f"inner: expected a flwr.serverapp.strategy.Strategy, found {type(inner).__name__}")
        self.options = align_options(spec, groups, layers, proper, strength, max_sweeps)
        self.min_gain = check_min_gain(min_gain)
        anchor = chosen_anchor(anchor, ROUND_ANCHORS)
        if isinstance(inner, _PRIVATE) and anchor != "global":
            raise AlignmentError(
                f"anchor: expected 'global' around {type(inner).__name__}, found {anchor!r}; aligning one client's "
                "reply to those of others lets it depend on their data, which breaks the privacy accounting"
            )
        self.inner = inner
        self.spec = spec
        self.anchor = anchor
        self.reports: list[RoundReport] = []
        self._broadcast: dict[str, Tensor] = {}
        self._sent: list[Message] = []

    @property
    def weight_key(self) -> str:
        """The metric by which the inner strategy weights replies."""
        strategy: Any = self.inner
        while not hasattr(strategy, "weighted_by_key") and hasattr(strategy, "strategy"):
            strategy = strategy.strategy
        return str(getattr(strategy, "weighted_by_key", "num-examples"))

    def summary(self) -> None:
        """Log the alignment's settings, then the inner strategy's."""
        options = self.options
        log(INFO, "\t├──> Alignment:")
        log(INFO, "\t│\t├── Spec: %s (%s)", self.spec.source, self.spec.model_type)
        log(INFO, "\t│\t├── Anchor: '%s'", self.anchor)
        log(INFO, "\t│\t├── Groups: %s", ", ".join(options["groups"]))
        log(INFO, "\t│\t├── Layers: %s of %d", _span(options["layers"]), self.spec.num_layers)
        log(INFO, "\t│\t├── Rotations: %s", "SO(n)" if options["proper"] else "O(n)")
        log(INFO, "\t│\t├── Strength: %g", options["strength"])
        log(INFO, "\t│\t└── Least gain over noise: %g", self.min_gain)
        log(INFO, "\t├──> Inner strategy: %s", type(self.inner).__name__)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the model that goes out, and let the inner strategy choose to whom."""
        self._broadcast = dict(folded(to_state_dict(arrays), self.spec))
        self.spec.resolve(self._broadcast)
        widened_model = to_record(widened(_floating(self._broadcast), torch.float32))
        self._sent = self._narrowed(self.inner.configure_train(server_round, widened_model, config, grid))
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Align the usable replies, let the inner strategy aggregate them, restore names, types and shapes."""
        if not self._broadcast:
            raise RecordError("aggregate_train: expected configure_train to have sent a model out first")
        started = time.perf_counter()
        received = sort_replies(
            replies,
            self._sent,
            self.weight_key,
            lambda entry: folded(match_params(entry.params, self._broadcast), self.spec),
        )
        for node_id, reason in received.refused.items():
            log(WARNING, "aggregate_train: node %d left out of round %d: %s", node_id, server_round, reason)
        found = self._align(received)
        aligned = found.alignments
        report = RoundReport(
            round=server_round,
            anchor=self.anchor,
            clients=tuple(
                ClientReport(entry.node_id, a.distance_before, a.distance_after, a.identity_permutations)
                for entry, a in zip(received.usable, aligned, strict=True)
            ),
            groups=found.groups,
            gain=found.gain,
            refused=dict(received.refused),
            seconds=time.perf_counter() - started,
        )
        self.reports.append(report)
        log(
            INFO,
            "aggregate_train: aligned %s of %d replies in %.2f s, gain over noise %.2f, mean distance %.4g -> %.4g",
            ", ".join(report.groups) or "nothing",
            len(aligned),
            report.seconds,
            report.gain,
            report.distance_before,
            report.distance_after,
        )
        models = [alignment.params for alignment in aligned]
        weights = [entry.weight for entry in received.usable]
        del found, aligned
        for entry, model in zip(received.usable, models, strict=True):
            entry.reply.content[record_key(entry.reply)] = to_record(widened(_floating(model), torch.float32))
        merged, metrics = self.inner.aggregate_train(server_round, received.messages)
        for entry in received.usable:
            # Flower keeps a round's replies until the next round has ended.
            entry.reply.content[record_key(entry.reply)].clear()
        arrays = None if merged is None or not models else self._restored(merged, models, weights)
        if arrays is not None:
            metrics = MetricRecord() if metrics is None else metrics
            metrics.update(report.metrics())
        self._sent = []
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose who evaluates."""
        self._broadcast = to_state_dict(arrays)
        widened_model = to_record(widened(_floating(self._broadcast), torch.float32))
        self._sent = self._narrowed(self.inner.configure_evaluate(server_round, widened_model, config, grid))
        return self._sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy aggregate the usable evaluations."""
        received = sort_replies(replies, self._sent, self.weight_key, read=None)
        for node_id, reason in received.refused.items():
            log(WARNING, "aggregate_evaluate: node %d left out of round %d: %s", node_id, server_round, reason)
        self._sent = []
        return self.inner.aggregate_evaluate(server_round, received.messages)

    def _align(self, received: Received) -> Aligned:
        if not received.usable:
            return Aligned([], (), 0.0)
        reference = Anchor(self._broadcast, self.spec)
        weights = [entry.weight for entry in received.usable]
        models = [entry.params for entry in received.usable]
        return align_where_frames_differ(
            models, self.spec, self.anchor, weights, reference, self.min_gain, **self.options
        )

    def _narrowed(self, messages: Iterable[Message]) -> list[Message]:
        """The inner strategy's messages with the model in its own types and with its buffers."""
        done: dict[int, ArrayRecord] = {}
        listed = list(messages)
        for message in listed:
            for key, record in list(message.content.array_records.items()):
                if set(record) == set(_floating(self._broadcast)):
                    # Most strategies send one record to all nodes: pack it once.
                    if id(record) not in done:
                        done[id(record)] = to_record(self._typed(to_state_dict(record)))
                    message.content[key] = done[id(record)]
        return listed

    def _typed(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`params` in the order and types of the model sent out, whose buffers fill the places of those missing."""
        return {name: params[name].to(like.dtype) if name in params else like for name, like in self._broadcast.items()}

    def _restored(
        self, merged: ArrayRecord, models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
    ) -> ArrayRecord | None:
        """What the inner strategy made, as a model like the one sent out; None where it is not finite."""
        expected = _floating(self._broadcast)
        try:
            params = match_params(to_state_dict(merged), expected)
        except AlignmentError as error:
            log(
                WARNING,
                "aggregate_train: %s made a model that is not finite, so the last one stays: %s",
                type(self.inner).__name__,
                error,
            )
            return None
        for first, *others in _tied(self._broadcast, models):
            # Noise of a privacy mechanism would part weights that the model shares.
            params.update({name: params[first] for name in others})
        if not isinstance(self.inner, _PRIVATE):
            buffers = [{n: t for n, t in model.items() if not t.is_floating_point()} for model in models]
            params.update(weighted_mean(buffers, weights))
        return to_record(self._typed(params))


class RotFedAvg(AlignedStrategy):
    """FedAvg in one common frame.

    Parameters: `spec`, from `rotfed.load_spec`; `anchor`, `groups`, `layers`, `proper`, `strength`, `max_sweeps`,
    `min_gain` as in
    `AlignedStrategy`; every keyword of Flower's `FedAvg`.
    """

    def __init__(
        self,
        spec: SymmetrySpec,
        anchor: str = "consensus",
        groups: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        proper: bool = False,
        strength: float = 1.0,
        max_sweeps: int = 20,
        min_gain: float = MIN_GAIN,
        **fedavg_keywords: Any,
    ) -> None:
        inner = FedAvg(**fedavg_keywords)
        super().__init__(inner, spec, anchor, groups, layers, proper, strength, max_sweeps, min_gain)


def _floating(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in params.items() if tensor.is_floating_point()}


def _tied(broadcast: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]]) -> list[list[str]]:
    """Sets of matrices that are equal in the model sent out and in every reply: weights that the model shares."""
    sets: list[list[str]] = []
    for name, tensor in broadcast.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            continue
        for tied in sets:
            if all(_same(model[name], model[tied[0]]) for model in (broadcast, *models)):
                tied.append(name)
                break
        else:
            sets.append([name])
    return [tied for tied in sets if len(tied) > 1]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _span(layers: Sequence[int]) -> str:
    contiguous = list(layers) == list(range(layers[0], layers[-1] + 1)) if layers else False
    return f"{layers[0]}-{layers[-1]}" if contiguous and len(layers) > 1 else ", ".join(map(str, layers)) or "none"
