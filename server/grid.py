"""A Grid that makes runs repeatable and failures visible, around any Flower Grid."""

import sys
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from client.app import IDENTITY
from rotfed.flower.spill import Arriving


class RoundFailedError(RuntimeError):
    """No client gave a usable reply; the message carries what the first of them said."""


class OrderedGrid(Arriving):
    """Sorts replies by partition, and raises when every client of a round failed.

    Replies arrive in the order in which clients finish, and float sums depend on the order; node ids are
    drawn anew for every run. Flower's strategies log failed replies and go on, so that a run in which all clients
    fail would end as completed, with nothing learned. A multi-party start, which asks by queries, sees to that itself.

    Parameters: `grid`, the Grid inside; `streams`, to hand replies to training on as they arrive, not sorted, for a
    strategy that sorts them itself.
    """

    def __init__(self, grid: Grid, streams: bool = False) -> None:
        super().__init__(grid)
        self.streams = streams

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait, and return the replies in partition order; RoundFailedError when no client trained."""
        sent = list(messages)
        if not sent:
            return []
        message_type = sent[0].metadata.message_type
        if self.streams and message_type.startswith("train"):
            return _some_usable(super().send_and_receive(sent, timeout=timeout), len(sent), timeout)
        replies = self.grid.send_and_receive(sent, timeout=timeout)
        if not message_type.startswith("query"):
            replies = _some_usable(replies, len(sent), timeout)
        return sorted(replies, key=partition)


def _some_usable(replies: Iterable[Message], asked: int, timeout: float | None) -> Iterator[Message]:
    """Yield replies; raise RoundFailedError at their end where there were none, or errors only."""
    errors, usable = [], 0
    for reply in replies:
        if reply.has_error():
            errors.append(error_text(reply.error.reason or ""))
        else:
            usable += 1
        yield reply
        del reply
    if usable:
        return
    if not errors:
        raise RoundFailedError(f"none of {asked} clients replied in time: expected replies within {timeout} s")
    raise RoundFailedError(f"all {len(errors)} clients failed; the first said: {errors[0]}")


def error_text(reason: str) -> str:
    """The last line of a client's error, which is where a traceback names the exception."""
    lines = [line.strip(" '>") for line in reason.strip().splitlines()]
    return next((line for line in reversed(lines) if line), "nothing")


def partition(reply: Message) -> int:
    """Return the partition of the node that replied; errors, which do not say, come last."""
    if reply.has_error():
        return sys.maxsize
    partition_id = reply.content.config_records[IDENTITY]["partition-id"]
    assert isinstance(partition_id, int)
    return partition_id
