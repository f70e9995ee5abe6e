"""Alignment around any Flower strategy that speaks the message API."""

import time
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
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

from rotfed.adapters import AdapterSpec
from rotfed.adapters.client import residual_record
from rotfed.adapters.factors import Factors
from rotfed.descent import check_finite
from rotfed.errors import AlignmentError, RecordError
from rotfed.flower.adapters import RESIDUAL_KEY, AdapterRounds, averages, chain
from rotfed.flower.models import ModelRounds
from rotfed.flower.mods import refuse_options
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import floating, match_params, record_key, sort_replies, widened
from rotfed.flower.reports import AdapterReport, RoundReport
from rotfed.mergers import mean_tensor, normalised_weights
from rotfed.spec import SymmetrySpec

_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


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
        The bound spec of the model, from `rotfed.load_spec`, or a LoRA adapter's, from `rotfed.load_adapter_spec`. With
        the residual stream the norms of the model sent out and of every reply are folded where that needs it
        (`rotfed.fold_norms`), so that what clients train and what comes out has other weights than without, of the same
        function at the start.
    anchor
        `"global"`: the model that was sent out. `"medoid"` or `"consensus"`: what the clients agree on, in the frame
        nearest to the model that was sent out (see `rotfed.align_all`). Only `"global"` keeps one client's influence
        bounded, so it is the only one allowed around differential privacy, and the default there and of adapters;
        since no reply moves away from the model sent out, a clipping bound that held before holds after. Elsewhere the
        consensus is the default.
    groups, layers, proper, strength, max_sweeps
        As in `rotfed.align`.
    min_gain
        Of whole models: a round whose frames do not differ is aggregated as it came, to the bit. Only those groups are
        aligned that gain more, in units of what they would gain on noise (see `rotfed.evidence`); 0.75 by default. 0
        aligns every round, infinity none.
    carry
        Of whole models, around FedAvg and its like: what the next round starts from. `"plain"`, the mean of the replies
        as they came: the rounds run as without alignment, and each delivers the aligned mean. `"aligned"`: what was
        delivered. `"auto"`, the default: plain while clients lie a little apart, as they do that started from one
        model, and aligned where they lie in frames of their own (units changed places, or alignment takes away more
        than half of the spread), whose plain mean would mean nothing. The aligned mean of a round is the better model;
        that it is the better start was not shown (docs/benchmark.md).
    aggregation
        Of adapters only, which are sent and answered as `get_peft_model_state_dict(model)` gives them: what stands for
        the mean of updates, `"optimal"` by default (`"rotation"` around differential privacy, `"mean"` with a frozen
        factor; see `rotfed.aggregate_adapters`). `inner` sees replies whose mean is the result. `"exact"` and
        `"stack"` leave a residual for the base weights: it is sent beside the adapter as the record `"residual"`, for
        `rotfed.add_residual`, and `residual` holds it, summed over all rounds. `anchor`, `proper` and `strength`
        are those of `"rotation"`, refused with any other; `groups` and `layers` have no meaning.
    over
        Of adapters, `"rotation"` only: over `"both"` factors, `"A"`, `"B"`, or `"alternate"`, A in the first round and
        B in the next, which with `strength` is FedRot-LoRA (arXiv 2602.23638).
    train
        Of adapters only: `"both"` factors; `"B"` alone, A frozen as it was sent (FFA-LoRA, arXiv 2403.12313); or
        `"alternate"`, B in the first round and A in the next (RoLoRA, arXiv 2502.01755). The train config says which
        under `"rotfed-train"`, for `rotfed.train_factors`; a reply that changed the other is refused.

    Clients' adapters may have lower ranks than the server's; each node is sent its own rank once it has answered, and
    the highest before, which `rotfed.fit_adapter` fits to it.

    A reply that cannot be used (not finite, misshapen, incomplete, without a weight) is refused with its node and
    reason, and reaches `inner` as an error reply, so that `inner`'s own rule for failures applies. `reports` holds
    one `RoundReport` (`AdapterReport` for adapters) a round; its figures are also in the round's metrics.
    """

    def __init__(
        self,
        inner: Strategy,
        spec: SymmetrySpec | AdapterSpec,
        anchor: str | None = None,
        groups: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        proper: bool = False,
        strength: float = 1.0,
        max_sweeps: int = 20,
        min_gain: float | None = None,
        carry: str | None = None,
        aggregation: str | None = None,
        over: str | None = None,
        train: str | None = None,
    ) -> None:
        if not isinstance(inner, Strategy):
            raise TypeError(f"inner: expected a flwr.serverapp.strategy.Strategy, found {type(inner).__name__}")
        private = self._private = next((type(one).__name__ for one in chain(inner) if isinstance(one, _PRIVATE)), "")
        self.rounds: ModelRounds | AdapterRounds
        if isinstance(spec, AdapterSpec):
            refuse_options("an adapter", groups=groups, layers=layers, min_gain=min_gain, carry=carry)
            self.rounds = AdapterRounds(
                spec, chain(inner), private, anchor or "global", proper, strength, max_sweeps, aggregation, over, train
            )
        else:
            refuse_options("a whole model", aggregation=aggregation, over=over, train=train)
            options = (anchor, groups, layers, proper, strength, max_sweeps, min_gain, carry)
            self.rounds = ModelRounds(spec, private, *options, averages(inner))
        self.inner = inner
        self.spec = spec
        self.reports: list[RoundReport | AdapterReport] = []
        self._broadcast: dict[str, Tensor] = {}
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None
        self._sent: list[Message] = []

    @property
    def weight_key(self) -> str:
        """The metric by which the inner strategy weights replies."""
        return str(
            next((s.weighted_by_key for s in chain(self.inner) if hasattr(s, "weighted_by_key")), "num-examples")
        )

    @property
    def residual(self) -> dict[str, Tensor]:
        """What all rounds so far left for the base weights, for `rotfed.add_residual`; empty of most methods."""
        return dict(self.rounds.residual)

    @residual.setter
    def residual(self, left: Mapping[str, Tensor | Factors]) -> None:
        """Go on from the residual of an earlier run, with the adapter that it belongs to."""
        self.rounds.residual = residual_record(left)

    def summary(self) -> None:
        """Log the alignment's settings, then the inner strategy's."""
        log(INFO, "\t├──> Alignment:")
        *settings, last = self.rounds.settings()
        for name, value in settings:
            log(INFO, "\t│\t├── %s: %s", name, value)
        log(INFO, "\t│\t└── %s: %s", *last)
        log(INFO, "\t├──> Inner strategy: %s", type(self.inner).__name__)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the model that goes out, and let the inner strategy choose to whom."""
        if self._last is not None and arrays == self._last[0]:
            arrays = self._last[1]
        self._broadcast = self.rounds.begin(server_round, to_state_dict(arrays), config)
        self.spec.resolve(self._broadcast)
        check_finite(self._broadcast, "model sent out")
        self._sent = self._narrowed(self.inner.configure_train(server_round, self._widened(), config, grid))
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Align the usable replies, let the inner strategy aggregate them, restore names, types and shapes."""
        if not self._broadcast:
            raise RecordError("aggregate_train: expected configure_train to have sent a model out first")
        started = time.perf_counter()
        received = sort_replies(replies, self._sent, self.weight_key, self.rounds.read)
        for node_id, reason in received.refused.items():
            log(WARNING, "aggregate_train: node %d left out of round %d: %s", node_id, server_round, reason)
        models, report = self.rounds.combine(received, received.refused, started)
        self.reports.append(report)
        log(INFO, "aggregate_train: %s", report.line())
        weights = [entry.weight for entry in received.usable]
        for entry, model in zip(received.usable, models, strict=True):
            entry.reply.content[record_key(entry.reply)] = to_record(widened(floating(model), torch.float32))
        merged, metrics = self.inner.aggregate_train(server_round, received.messages)
        for entry in received.usable:
            # Flower keeps a round's replies until the next round has ended.
            entry.reply.content[record_key(entry.reply)].clear()
        arrays = None if merged is None or not models else self._restored(merged, models, weights)
        if arrays is not None:
            metrics = MetricRecord() if metrics is None else metrics
            metrics.update(report.metrics())
            self.rounds.settle()
            self._last = None
            if self.rounds.delivered:
                delivered = to_record(self._typed({**to_state_dict(arrays), **self.rounds.delivered}))
                # A copy, by value: whoever drives the rounds may copy what was delivered, and may change it.
                self._last = ArrayRecord(dict(delivered.items())), arrays
                arrays = delivered
        self._sent = []
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose who evaluates."""
        self._broadcast = to_state_dict(arrays)
        messages = self.inner.configure_evaluate(server_round, self._widened(), config, grid)
        self._sent = self._narrowed(messages)
        return self._sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy aggregate the usable evaluations."""
        received = sort_replies(replies, self._sent, self.weight_key, read=None)
        for node_id, reason in received.refused.items():
            log(WARNING, "aggregate_evaluate: node %d left out of round %d: %s", node_id, server_round, reason)
        self._sent = []
        return self.inner.aggregate_evaluate(server_round, received.messages)

    def _widened(self) -> ArrayRecord:
        """A copy of the model sent out as the inner strategy may compute with it."""
        return to_record(widened(floating(self._broadcast), torch.float32))

    def _narrowed(self, messages: Iterable[Message]) -> list[Message]:
        """The inner strategy's messages with the model in its own types and with its buffers."""
        done: dict[tuple[int, ...], ArrayRecord] = {}
        residual = to_record(self.rounds.residual) if self.rounds.residual else None
        listed = list(messages)
        for message in listed:
            node_id = message.metadata.dst_node_id
            # Strategies give all messages one content.
            content = RecordDict(dict(message.content.items()))
            for key, record in list(content.array_records.items()):
                if set(record) == set(floating(self._broadcast)):
                    # Most strategies send one record to all nodes: pack it once.
                    packed = (id(record), *self.rounds.ranks(node_id))
                    if packed not in done:
                        done[packed] = to_record(self.rounds.for_node(node_id, self._typed(to_state_dict(record))))
                    content[key] = done[packed]
            if residual is not None:
                content[RESIDUAL_KEY] = residual
            message.content = content
        return listed

    def _typed(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`params` in the order and types of the model sent out, whose buffers fill the places of those missing."""
        return {name: params[name].to(like.dtype) if name in params else like for name, like in self._broadcast.items()}

    def _restored(
        self, merged: ArrayRecord, models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
    ) -> ArrayRecord | None:
        """What the inner strategy made, as a model like the one sent out; None where it is not finite."""
        expected = floating(self._broadcast)
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
        if not self._private:
            shares = normalised_weights(len(models), weights)
            buffers = [name for name, tensor in self._broadcast.items() if not tensor.is_floating_point()]
            params.update({name: mean_tensor(name, [model[name] for model in models], shares) for name in buffers})
        return to_record(self._typed({**params, **self.rounds.frozen()}))


class RotFedAvg(AlignedStrategy):
    """FedAvg in one common frame.

    Parameters: `spec`, from `rotfed.load_spec` or `rotfed.load_adapter_spec`; `anchor` and all others as in
    `AlignedStrategy`; every keyword of Flower's `FedAvg`.
    """

    def __init__(
        self,
        spec: SymmetrySpec | AdapterSpec,
        anchor: str | None = None,
        groups: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        proper: bool = False,
        strength: float = 1.0,
        max_sweeps: int = 20,
        min_gain: float | None = None,
        carry: str | None = None,
        aggregation: str | None = None,
        over: str | None = None,
        train: str | None = None,
        **fedavg_keywords: Any,
    ) -> None:
        inner = FedAvg(**fedavg_keywords)
        options = (anchor, groups, layers, proper, strength, max_sweeps, min_gain, carry, aggregation, over, train)
        super().__init__(inner, spec, *options)


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
