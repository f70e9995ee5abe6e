"""A Grid that calls a ClientApp in this process: the same strategies, messages and apps, without an engine.

For benchmarks and tests, where the start of an engine would take most of the time. Users who outgrow one machine run
Flower's own engines, to which strategies and apps go unchanged.
"""

import copy
import random
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

_SERVER_NODE = 1


class InProcessGrid(Grid):
    """Nodes that live in this process; node ids are `first_node + partition`.

    Parameters: `client_app`, called once a message; `num_nodes`; `run_config`, what the apps read as
    `context.run_config`. Messages are copied on their way in both directions, as a network would, and an exception in
    the app becomes an error reply with Flower's code for it. A node answers when its reply is pulled.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: Mapping[str, bool | int | float | str] | None = None,
        first_node: int = 101,
    ) -> None:
        self.client_app = client_app
        self._waiting: dict[str, Message] = {}
        self._run = Run.create_empty(run_id=1)
        # A message's constructor reads the identity of the process that it is made in.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, _SERVER_NODE
        self.contexts = {
            first_node + partition: Context(
                run_id=1,
                node_id=first_node + partition,
                node_config={"partition-id": partition, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for partition in range(num_nodes)
        }

    def set_run(self, run: Run) -> None:
        """Take over the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, in order."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep a copy of every message for its node, and return the messages' ids."""
        pushed = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self._waiting[message.metadata.message_id] = copy.deepcopy(message)
            pushed.append(message.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand messages to the app, one after another, each when its reply is asked for, and yield the replies."""
        for message_id in message_ids:
            if (message := self._waiting.pop(message_id, None)) is not None:
                yield self._reply(message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Hand every message to the app, one after another, and return the replies in order."""
        return list(self.pull_messages(self.push_messages(messages)))

    def _reply(self, message: Message) -> Message:
        try:
            with _own_generators():
                reply = self.client_app(copy.deepcopy(message), self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # what a SuperNode does with any exception of an app, and how it says it
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        return copy.deepcopy(reply)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leave the process's generators as they were: a node that seeds its own would decide whom the server samples."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
