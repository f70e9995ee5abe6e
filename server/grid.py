"""A Grid that makes runs repeatable and failures visible, around any Flower Grid."""

import sys
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from client.app import IDENTITY


class RoundFailedError(RuntimeError):
    """No client gave a usable reply; the message carries what the first of them said."""


class OrderedGrid(Grid):
    """Sorts replies by partition, and raises when every client of a round failed.

    Replies arrive in the order in which clients finish, and float sums depend on the order; node ids are
    drawn anew for every run. Flower's strategies log failed replies and go on, so that a run in which all clients
    fail would end as completed, with nothing learned. A multi-party start, which asks by queries, sees to that itself.
    """

    def __init__(self, inner: Grid) -> None:
        self._inner = inner

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait, and return the replies in partition order; RoundFailedError when no client trained."""
        sent = list(messages)
        if not sent:
            return []
        replies = sorted(self._inner.send_and_receive(sent, timeout=timeout), key=_partition)
        if sent[0].metadata.message_type.startswith("query"):
            return replies
        if not replies:
            raise RoundFailedError(f"none of {len(sent)} clients replied in time: expected replies within {timeout} s")
        if all(reply.has_error() for reply in replies):
            raise RoundFailedError(
                f"all {len(replies)} clients failed; the first said: {error_text(replies[0].error.reason or '')}"
            )
        return replies

    def set_run(self, run):  # type: ignore[no-untyped-def]  # Flower's Run is not a public type
        """Pass on to the Grid inside."""
        self._inner.set_run(run)

    @property
    def run(self):  # type: ignore[no-untyped-def]
        """The run of the Grid inside."""
        return self._inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Pass on to the Grid inside."""
        return self._inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on to the Grid inside."""
        return self._inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass on to the Grid inside."""
        return self._inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on to the Grid inside."""
        return self._inner.pull_messages(message_ids)


def error_text(reason: str) -> str:
    """The last line of a client's error, which is where a traceback names the exception."""
    lines = [line.strip(" '>") for line in reason.strip().splitlines()]
    return next((line for line in reversed(lines) if line), "nothing")


def _partition(reply: Message) -> int:
    if reply.has_error():
        return sys.maxsize
    partition_id = reply.content.config_records[IDENTITY]["partition-id"]
    assert isinstance(partition_id, int)
    return partition_id
