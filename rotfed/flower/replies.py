"""Reading the replies of a round: which node sent what, and which replies cannot be used."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Error, Message
from torch import Tensor

from rotfed.descent import check_finite
from rotfed.errors import AlignmentError, RecordError
from rotfed.flower.records import to_state_dict

# Flower's own codes end at 8 or so; a reply that rotfed refused is told from one that failed on its way.
REFUSED = 1101


@dataclass(frozen=True)
class Usable:
    """A reply that can be aggregated: its node, its weight and, where it carries a model, the parameters."""

    reply: Message
    node_id: int
    weight: float
    params: Mapping[str, Tensor]


@dataclass(frozen=True)
class Received:
    """The replies of a round, sorted: usable ones, and error replies for all others, with the reasons by node."""

    usable: tuple[Usable, ...]
    failed: tuple[Message, ...]
    refused: Mapping[int, str]

    @property
    def messages(self) -> list[Message]:
        """All replies as a strategy expects them."""
        return [*(usable.reply for usable in self.usable), *self.failed]


def sort_replies(
    replies: Iterable[Message], sent: Sequence[Message], weight_key: str, broadcast: Mapping[str, Tensor] | None
) -> Received:
    """Sort the replies to `sent` into usable ones and failures.

    Parameters: `weight_key`, the metric that weights a reply; `broadcast`, the model that was sent out, with which a
    reply's arrays must agree in names, shapes and kind of type (None where replies carry no arrays). Arrays are taken
    out of the replies as they are read, so that memory holds each model once. Returns error replies that carry the id
    of the true node: Flower reports a lost node's error as coming from the SuperLink. Never raises for a bad reply.
    """
    usable: list[Usable] = []
    failed: list[Message] = []
    refused: dict[int, str] = {}
    by_id = {message.metadata.message_id: message for message in sent if message.metadata.message_id}
    by_node = {message.metadata.dst_node_id: message for message in sent}
    answered: set[int] = set()

    def refuse(node_id: int, reason: str, reply: Message, code: int = REFUSED) -> None:
        refused[node_id] = reason
        if (instruction := by_node.get(node_id)) is not None:
            failed.append(Message(Error(code, reason), reply_to=instruction))
        elif reply.has_error():
            # Nobody that was asked: an error still counts as a failure, a model of unknown origin as nothing.
            failed.append(reply)

    for reply in replies:
        instruction = by_id.get(reply.metadata.reply_to_message_id)
        node_id = reply.metadata.src_node_id if instruction is None else instruction.metadata.dst_node_id
        answered.add(node_id)
        if reply.has_error():
            refuse(node_id, reply.error.reason or f"error code {reply.error.code}", reply, reply.error.code)
            continue
        try:
            weight = read_weight(reply, weight_key)
            params = {} if broadcast is None else _read_arrays(reply, broadcast)
            usable.append(Usable(reply, node_id, weight, params))
        except (RecordError, AlignmentError) as error:
            refuse(node_id, str(error), reply)

    for odd in _with_odd_metrics(usable):
        refuse(odd.node_id, "metrics: the names differ from those of most replies; send the same metrics", odd.reply)
        usable.remove(odd)
    if usable and not any(entry.weight > 0 for entry in usable):
        for entry in usable:
            refuse(entry.node_id, f"{weight_key}: zero in every reply of the round; nothing to weight by", entry.reply)
        usable = []
    for node_id in by_node:
        if node_id not in answered:
            refused[node_id] = "no reply before the timeout"
    return Received(tuple(usable), tuple(failed), refused)


def read_weight(reply: Message, weight_key: str) -> float:
    """The weight that a reply states for itself. Raises RecordError unless it is one finite number >= 0."""
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise RecordError(f"metrics: expected one MetricRecord, found {len(records)}; send one with {weight_key!r}")
    weight = records[0].get(weight_key)
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise RecordError(f"{weight_key}: expected one finite number >= 0 in the metrics, found {weight!r}")
    return float(weight)


def _read_arrays(reply: Message, broadcast: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A reply's parameters in the order and types of `broadcast`; the reply's own arrays are freed."""
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        raise RecordError(f"arrays: expected one ArrayRecord, found {len(records)}; send the model as one record")
    found = to_state_dict(records[0])
    records[0].clear()
    return match_params(found, broadcast)


def match_params(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`found` in the order and types of `expected`.

    Raises RecordError, naming the parameter, where names, shapes or the kind of type differ; AlignmentError for values
    that are not finite.
    """
    if unknown := [name for name in found if name not in expected]:
        raise RecordError(f"{unknown[0]}: not a parameter of the common model; send its names only")
    matched = {}
    for name, like in expected.items():
        if name not in found:
            raise RecordError(f"{name}: expected in the reply, not found; send every parameter of the common model")
        tensor = found[name]
        if tensor.shape != like.shape:
            raise RecordError(
                f"{name}: expected shape {tuple(like.shape)} as in the common model, found {tuple(tensor.shape)}; "
                "send a model of the same architecture"
            )
        if tensor.is_floating_point() != like.is_floating_point() or tensor.is_complex():
            raise RecordError(
                f"{name}: expected {like.dtype} as in the common model, found {tensor.dtype}; send it in that type"
            )
        matched[name] = tensor.to(like.dtype)
    check_finite(matched, "reply")
    return matched


def _with_odd_metrics(usable: Sequence[Usable]) -> list[Usable]:
    """The replies whose metric names differ from those of the majority: a strategy would give up the whole round."""

    def names(entry: Usable) -> frozenset[tuple[str, str]]:
        records = entry.reply.content.metric_records
        return frozenset((key, name) for key, record in records.items() for name in record)

    if not usable:
        return []
    usual, _ = Counter(names(entry) for entry in usable).most_common(1)[0]
    return [entry for entry in usable if names(entry) != usual]


def record_key(reply: Message) -> str:
    """The key under which a reply carries its arrays."""
    return next(iter(reply.content.array_records))
