"""What every rotfed strategy shares around another strategy: who was sent what, replies, refusals, names and types."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
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
from rotfed.align import AlignOptions
from rotfed.errors import AlignmentError, RecordError, SpecError
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import Reader, Received, floating, match_params, record_key, sort_replies, widened
from rotfed.mergers import mean_tensor
from rotfed.spec import SymmetrySpec, check_is_spec
from rotfed.tensors import Params, meta_of

_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


class Wrapper(Strategy):
    """A strategy around another one, which it gives replies that can be used and takes a model like the one sent out.

    `inner` sees names, order and shapes of the model sent out, with float32 in place of half precision and no integer
    buffers. A reply that cannot be used is refused with its node and reason, and reaches `inner` as an error reply, so
    that `inner`'s own rule for failures applies.
    """

    def __init__(self, inner: Strategy) -> None:
        if not isinstance(inner, Strategy):
            raise TypeError(f"inner: expected a flwr.serverapp.strategy.Strategy, found {type(inner).__name__}")
        self.inner = inner
        self.private = next((type(one).__name__ for one in chain(inner) if isinstance(one, _PRIVATE)), "")
        self.broadcast: dict[str, Tensor] = {}
        self._sent: list[Message] = []

    @property
    def weight_key(self) -> str:
        """The metric by which the inner strategy weights replies."""
        return str(
            next((s.weighted_by_key for s in chain(self.inner) if hasattr(s, "weighted_by_key")), "num-examples")
        )

    @abstractmethod
    def settings(self) -> list[tuple[str, str]]:
        """Return the settings as `summary` logs them."""

    def summary(self) -> None:
        """Log the wrapper's settings, then the inner strategy's."""
        log(INFO, "\t├──> Alignment:")
        *settings, last = self.settings()
        for name, value in settings:
            log(INFO, "\t│\t├── %s: %s", name, value)
        log(INFO, "\t│\t└── %s: %s", *last)
        log(INFO, "\t├──> Inner strategy: %s", type(self.inner).__name__)
        self.inner.summary()

    # --- what goes out -----------------------------------------------------------------------------------------------

    def send_out(self, server_round: int, packed: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Let the inner strategy choose who trains the model in `packed`, which is `broadcast`; return the messages."""
        wide = self._widened(packed)
        self._sent = self._narrowed(self.inner.configure_train(server_round, wide, config, grid), packed, wide)
        return self._sent

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose who evaluates."""
        self.broadcast = to_state_dict(arrays, shared=True)
        wide = self._widened(arrays)
        messages = self.inner.configure_evaluate(server_round, wide, config, grid)
        self._sent = self._narrowed(messages, arrays, wide)
        return self._sent

    def for_node(self, node_id: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what one node is sent of a model."""
        return params

    def sent_alike(self, node_id: int) -> tuple[object, ...]:
        """Return what decides how a node's model differs from that of others: nodes with equal answers share it."""
        return ()

    def beside(self) -> dict[str, ArrayRecord]:
        """Return further records that every node is sent."""
        return {}

    def _widened(self, packed: ArrayRecord) -> ArrayRecord:
        """Return the model sent out as the inner strategy may compute with it; what is wide enough as it is packed."""
        narrow = {n: t.float() for n, t in floating(self.broadcast).items() if t.element_size() < 4}
        wider = to_record(narrow)
        return ArrayRecord({name: wider.get(name, packed[name]) for name in floating(self.broadcast)})

    def _narrowed(self, messages: Iterable[Message], packed: ArrayRecord, wide: ArrayRecord) -> list[Message]:
        """Return the inner strategy's messages with the model in its own types and with its buffers."""
        done: dict[tuple[object, ...], ArrayRecord] = {}
        beside = self.beside()
        listed = list(messages)
        for message in listed:
            node_id = message.metadata.dst_node_id
            # Strategies give all messages one content.
            content = RecordDict(dict(message.content.items()))
            for key, record in list(content.array_records.items()):
                if set(record) == set(wide):
                    # Most strategies send one record to all nodes: pack it once.
                    alike = self.sent_alike(node_id)
                    if (id(record), *alike) not in done:
                        own = self._in_own_types(record, packed, wide)
                        params = self.for_node(node_id, to_state_dict(own, shared=True)) if alike else None
                        done[id(record), *alike] = own if params is None else to_record(params)
                    content[key] = done[id(record), *alike]
            content.update(beside)
            message.content = content
        return listed

    def _in_own_types(self, record: ArrayRecord, packed: ArrayRecord, wide: ArrayRecord) -> ArrayRecord:
        """Return a model of the inner strategy in the types sent out; what it left as it was, as it was packed."""
        changed = {name: record[name] for name in record if record[name] is not wide[name]}
        if not changed:
            return packed
        found = to_state_dict(ArrayRecord(changed))
        own = to_record({name: tensor.to(self.broadcast[name].dtype) for name, tensor in found.items()})
        return ArrayRecord({name: own.get(name, packed[name]) for name in self.broadcast})

    # --- what comes back ---------------------------------------------------------------------------------------------

    def receive(self, server_round: int, replies: Iterable[Message], read: Reader) -> Received:
        """Sort the replies of a training round, and log which of them are refused."""
        if not self.broadcast:
            raise RecordError("aggregate_train: expected configure_train to have sent a model out first")
        received = sort_replies(replies, self._sent, self.weight_key, read)
        self._log_refused("aggregate_train", server_round, received)
        return received

    def aggregate_inside(
        self, server_round: int, received: Received, models: Iterable[Params]
    ) -> tuple[dict[str, Tensor] | None, MetricRecord | None]:
        """Let the inner strategy aggregate models in place of the replies; return the model that it made.

        There is none where it made none, or one that is not finite: the last one then stays.
        """
        for entry, model in zip(received.usable, models, strict=True):
            entry.reply.content[record_key(entry.reply)] = to_record(widened(floating(model), torch.float32))
        merged, metrics = self.inner.aggregate_train(server_round, received.messages)
        for entry in received.usable:
            # Flower keeps a round's replies until the next round has ended.
            entry.reply.content[record_key(entry.reply)].clear()
        if merged is None or not received.usable:
            return None, metrics
        try:
            return match_params(to_state_dict(merged), floating(self.broadcast)), metrics
        except AlignmentError as error:
            self.log_not_finite(error)
            return None, metrics

    def completed(
        self, made: dict[str, Tensor], models: Sequence[Params], shares: Sequence[float]
    ) -> dict[str, Tensor]:
        """Return the model that the inner strategy made, with tied weights alike and, without privacy, with buffers."""
        for first, *others in tied(self.broadcast, models):
            # Noise of a privacy mechanism would part weights that the model shares.
            made = {**made, **{name: made[first] for name in others}}
        return made if self.private else {**made, **buffers_of(models, shares)}

    def log_not_finite(self, error: AlignmentError) -> None:
        """Say that a round leaves the model as it was."""
        log(
            WARNING,
            "aggregate_train: %s made a model that is not finite, so the last one stays: %s",
            type(self.inner).__name__,
            error,
        )

    def done(self) -> None:
        """Let go of a round's messages."""
        self._sent = []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy aggregate the usable evaluations."""
        received = sort_replies(replies, self._sent, self.weight_key, read=None)
        self._log_refused("aggregate_evaluate", server_round, received)
        self._sent = []
        return self.inner.aggregate_evaluate(server_round, received.messages)

    def _log_refused(self, where: str, server_round: int, received: Received) -> None:
        for node_id, reason in received.refused.items():
            log(WARNING, "%s: node %d left out of round %d: %s", where, node_id, server_round, reason)

    def typed(self, params: Params) -> dict[str, Tensor]:
        """Return parameters in the order and types of the model sent out, whose own stand in for missing ones."""
        return {name: params[name].to(like.dtype) if name in params else like for name, like in self.broadcast.items()}


def averages(strategy: Strategy) -> bool:
    """Whether a strategy takes the weighted mean of the replies, as FedAvg does."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def chain(strategy: Strategy) -> list[Strategy]:
    """A strategy and those that it wraps, outermost first."""
    found = [strategy]
    while isinstance(nested := getattr(found[-1], "strategy", None), Strategy):
        found.append(nested)
    return found


def buffers_of(models: Sequence[Params], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the mean of whole numbers and the majority of flags."""
    names = [name for name, tensor in meta_of(models[0]).items() if not tensor.is_floating_point()]
    return {name: mean_tensor(name, [model[name] for model in models], shares) for name in names}


def tied(broadcast: Params, models: Iterable[Params]) -> list[list[str]]:
    """Return sets of matrices that are equal in the model sent out and in every reply: those that it shares."""
    everywhere = [broadcast, *models]
    sets: list[list[str]] = []
    for name, tensor in broadcast.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            continue
        for found in sets:
            if all(_same(model[name], model[found[0]]) for model in everywhere):
                found.append(name)
                break
        else:
            sets.append([name])
    return [found for found in sets if len(found) > 1]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def selected(spec: Any, options: Any, for_adapters: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the layers and groups that `options` choose of `spec`.

    Raises SpecError where `spec` is no SymmetrySpec, naming what is `for_adapters` where it is an AdapterSpec, and
    AlignmentError where `options` are no AlignOptions.
    """
    if isinstance(spec, AdapterSpec):
        raise SpecError(f"spec: expected a SymmetrySpec, found an AdapterSpec; use {for_adapters} for adapters")
    check_is_spec(spec)
    if not isinstance(options, AlignOptions):
        raise AlignmentError(
            f"options: expected AlignOptions, found {type(options).__name__}; pass rotfed.AlignOptions(groups=..., ...)"
        )
    return options.select(spec)


def check_is_adapter_spec(spec: Any, for_models: str) -> None:
    """Raise SpecError where `spec` is no AdapterSpec, naming what is `for_models` where it is a SymmetrySpec."""
    if isinstance(spec, SymmetrySpec):
        raise SpecError(f"spec: expected an AdapterSpec, found a SymmetrySpec; use {for_models} for whole models")
    if not isinstance(spec, AdapterSpec):
        raise SpecError(
            f"spec: expected an AdapterSpec, found {type(spec).__name__}; pass what load_adapter_spec(model) gives"
        )


def require_unset(what: str, **options: Any) -> None:
    """Raise AlignmentError for an option that is set where it has no meaning."""
    if given := [name for name, value in options.items() if value is not None]:
        raise AlignmentError(f"{given[0]}: expected unset for {what}, found {options[given[0]]!r}; leave it out")
