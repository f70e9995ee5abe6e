"""Clients' replies in files, and a grid that hands them to the server one by one, as a network does."""

import copy
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from simulations.grid import InProcessGrid
from simulations.speed.shapes import Shape, fresh, trained

_INDEX = "index.json"


@dataclass(frozen=True)
class StoredRound:
    """The model that a round begins from and what each client answers, in one folder, as they travel."""

    folder: Path

    @classmethod
    def prepare(cls, folder: Path, shape: Shape, clients: int, seed: int = 0) -> "StoredRound":
        """Write what the folder lacks of a round of so many clients, a tensor at a time."""
        folder.mkdir(parents=True, exist_ok=True)
        stored = cls(folder)
        if not stored._path(None).exists():
            index = stored._write(None, fresh(shape, seed))
            (folder / _INDEX).write_text(json.dumps(index))
        for client in range(clients):
            if not stored._path(client).exists():
                stored._write(client, trained(shape, seed, client))
        return stored

    def start(self) -> ArrayRecord:
        """The model that is sent out."""
        return self._read(None)

    def reply(self, client: int) -> RecordDict:
        """What a client answers. Nothing is held of it here."""
        metrics = MetricRecord({"num-examples": 100 + 10 * client, "train-loss": 1.0})
        return RecordDict({"arrays": self._read(client), "metrics": metrics})

    @property
    def model_bytes(self) -> int:
        """The size of one model."""
        return self._path(None).stat().st_size

    def _path(self, client: int | None) -> Path:
        return self.folder / ("start.npys" if client is None else f"{client}.npys")

    def _write(self, client: int | None, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, object]:
        """Write a file of one NumPy array after another; return the place, type and shape of each."""
        index: dict[str, object] = {}
        part = self._path(client).with_suffix(".part")
        with part.open("wb") as file:
            for name, tensor in tensors:
                array, begins = tensor.numpy(), file.tell()
                np.save(file, array, allow_pickle=False)
                index[name] = (str(array.dtype), array.shape, file.tell() - begins)
        part.rename(self._path(client))
        return index

    def _read(self, client: int | None) -> ArrayRecord:
        index: Mapping[str, tuple[str, list[int], int]] = json.loads((self.folder / _INDEX).read_text())
        record = ArrayRecord()
        with self._path(client).open("rb") as file:
            for name, (dtype, shape, length) in index.items():
                record[name] = Array(dtype=dtype, shape=tuple(shape), stype="numpy.ndarray", data=file.read(length))
        return record


class LazyGrid(InProcessGrid):
    """Nodes whose replies come into being when the server pulls them, at most one a call.

    `seconds` is the time that was spent in here on making replies, which is the clients' and the network's part of a
    round. `on_sent` is called when messages have been taken over.
    """

    def __init__(self, stored: StoredRound, clients: int, on_sent: Callable[[], None] | None = None) -> None:
        super().__init__(ClientApp(), clients)
        self.seconds = 0.0
        self._on_sent = on_sent
        self._stored = stored
        self._clients = {node_id: client for client, node_id in enumerate(self.contexts)}
        self._waiting: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages over, each for one reply."""
        ids = []
        for message in messages:
            ids.append(uuid.uuid4().hex)
            message.metadata.__dict__["_message_id"] = ids[-1]
            # What names it alone: the model in it has been sent, and is not the grid's to keep.
            self._waiting[ids[-1]] = copy.copy(message)
            self._waiting[ids[-1]].content = RecordDict()
        if ids and self._on_sent is not None:
            self._on_sent()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the next of the replies to these messages."""
        started = time.perf_counter()
        asked = set(message_ids)
        found = next((name for name in self._waiting if name in asked), None)
        replies = [] if found is None else [self._answer(self._waiting.pop(found))]
        self.seconds += time.perf_counter() - started
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and pull until each has been answered, as Flower's grids do, without their pauses."""
        waiting = set(self.push_messages(messages))
        del messages
        replies: list[Message] = []
        while waiting:
            pulled = list(self.pull_messages(waiting))
            replies.extend(pulled)
            waiting.difference_update(message.metadata.reply_to_message_id for message in pulled)
        return replies

    def _answer(self, message: Message) -> Message:
        reply = Message(self._stored.reply(self._clients[message.metadata.dst_node_id]), reply_to=message)
        reply.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        return reply
