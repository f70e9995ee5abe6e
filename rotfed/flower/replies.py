"""Reading the replies of a round: which node sent what, and which replies cannot be used."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import Error, Message
from torch import Tensor

from rotfed.errors import RecordError, RotfedError
from rotfed.flower.records import to_state_dict
from rotfed.tensors import check_finite

# Flower's own codes end at 8 or so; a reply that rotfed refused is told from one that failed on its way.
REFUSED = 1101
NO_REPLY = "no reply before the timeout"

# One example beside so many still has a share in float64, and sums of as many as there can be nodes stay finite.
_LARGEST_WEIGHT = 1e15


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


Reader = Callable[[Usable], Mapping[str, Tensor]]
"""From a reply with its arrays as they came to what is used of them. Raises RotfedError to refuse the reply."""


def sort_replies(replies: Iterable[Message], sent: Sequence[Message], weight_key: str, read: Reader | None) -> Received:
    """Sort the replies to `sent` into usable ones and failures; of several from one node the first counts.

    Parameters: `weight_key`, the metric that weights a reply; `read`, what a reply's arrays have to pass (None where
    replies carry none, or none yet to look at). Arrays are taken out of the replies as they are read, so that memory
    holds each model once. Returns error replies that carry the id of the true node: Flower reports a lost node's error
    as coming from the SuperLink. Never raises for a bad reply.
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
        if node_id in answered:
            continue
        answered.add(node_id)
        if reply.has_error():
            refuse(node_id, reply.error.reason or f"error code {reply.error.code}", reply, reply.error.code)
            continue
        try:
            usable.append(_usable(reply, node_id, weight_key, read))
        except RotfedError as error:
            for record in reply.content.array_records.values():
                record.clear()
            refuse(node_id, str(error), reply)

    for odd in _laid_out_oddly(usable):
        reason = "metrics: the names differ from those of most replies, of records or in them, or the lengths of lists"
        refuse(odd.node_id, f"{reason}; send the same metrics in records of the same names", odd.reply)
        usable.remove(odd)
    if usable and not any(entry.weight > 0 for entry in usable):
        for entry in usable:
            refuse(entry.node_id, f"{weight_key}: zero in every reply of the round; nothing to weight by", entry.reply)
        usable = []
    for node_id in by_node:
        if node_id not in answered:
            refused[node_id] = NO_REPLY
    return Received(tuple(usable), tuple(failed), refused)


def _usable(reply: Message, node_id: int, weight_key: str, read: Reader | None) -> Usable:
    """Return a reply as it is used. Raises RotfedError to refuse it."""
    entry = Usable(reply, node_id, read_weight(reply, weight_key), {} if read is None else _taken_out(reply))
    return entry if read is None else replace(entry, params=read(entry))


def read_weight(reply: Message, weight_key: str) -> float:
    """The weight that a reply states for itself. Raises RecordError unless it is one number from 0 to 1e15."""
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise RecordError(f"metrics: expected one MetricRecord, found {len(records)}; send one with {weight_key!r}")
    weight = records[0].get(weight_key)
    if not isinstance(weight, int | float) or not 0 <= weight <= _LARGEST_WEIGHT:
        raise RecordError(
            f"{weight_key}: expected one number from 0 to {_LARGEST_WEIGHT:g} in the metrics, found {weight!r}; "
            "send the number of examples"
        )
    return float(weight)


def _taken_out(reply: Message) -> dict[str, Tensor]:
    """A reply's arrays as they came; the reply's own are freed."""
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        raise RecordError(f"arrays: expected one ArrayRecord, found {len(records)}; send the model as one record")
    found = to_state_dict(records[0], shared=True)
    records[0].clear()
    return found


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
        if odd := [t.dtype for t in (tensor, like) if not _computable(t)]:
            raise RecordError(
                f"{name}: expected whole numbers, or real ones of at least two bytes, found {odd[0]}; cast "
                "the parameters to a type that models are averaged in"
            )
        if tensor.is_floating_point() != like.is_floating_point():
            raise RecordError(
                f"{name}: expected {like.dtype} as in the common model, found {tensor.dtype}; send it in that type"
            )
        matched[name] = tensor.to(like.dtype)
    check_finite(matched, "reply")
    return matched


def _computable(tensor: Tensor) -> bool:
    """Whether models run in a tensor's type: not in complex numbers or one of the float8 types."""
    return not tensor.is_complex() and not (tensor.is_floating_point() and tensor.element_size() < 2)


def _laid_out_oddly(usable: Sequence[Usable]) -> list[Usable]:
    """The replies whose records and metrics differ in name or length from the majority's, which end Flower's round."""

    def layout(entry: Usable) -> frozenset[object]:
        content = entry.reply.content
        lengths = {
            (key, name, len(value) if isinstance(value, list) else None)
            for key, record in content.metric_records.items()
            for name, value in record.items()
        }
        return frozenset([*lengths, *content.array_records])

    layouts = [layout(entry) for entry in usable]
    usual = Counter(layouts).most_common(1)
    return [entry for entry, found in zip(usable, layouts, strict=True) if found != usual[0][0]]


def record_key(reply: Message) -> str:
    """The key under which a reply carries its arrays."""
    return next(iter(reply.content.array_records))


def floating(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters without the buffers of whole numbers and flags, which no strategy averages."""
    return {name: tensor for name, tensor in params.items() if tensor.is_floating_point()}


def widened(params: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters with at least the width of `dtype`, so that sums neither overflow nor lose what is small."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and tensor.element_size() < dtype.itemsize else tensor
        for name, tensor in params.items()
    }
