"""Replies outside of memory: each is written to a file as it arrives, and read parameter by parameter.

Flower collects all replies of a round before a strategy sees the first, and holds them until the next round has ended.
`Arriving` hands them on one by one; `Spill` keeps each in a file that has no name, so that nothing is left of it after
the round, or after a crash.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from torch import Tensor

from rotfed.errors import RecordError
from rotfed.flower.records import NUMPY, to_record
from rotfed.flower.replies import floating, widened

# Between two rounds of asking for replies, as Flower waits itself.
_WAIT_SECONDS = 3.0


class Place(NamedTuple):
    """Where a tensor lies in a spill file."""

    offset: int
    like: Tensor


class Spill:
    """The tensors of a round: the first of them in memory, all others in a file without a name.

    Parameters: `folder`, where the file lies, the system's temporary one by default; `in_memory`, how many bytes stay
    in memory. Raises RecordError where no file can be made in the folder.
    """

    def __init__(self, folder: Path | None = None, in_memory: int = 0) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # closed by `close`
        except OSError as error:
            found = "the system's temporary one" if folder is None else str(folder)
            raise RecordError(
                f"spill_folder: expected a folder that can be written to, found {found} ({error.strerror}); "
                "name another"
            ) from error
        self._end = 0
        self._left = in_memory

    def keep(self, params: Mapping[str, Tensor]) -> "Held | Spilled":
        """Put tensors away; return a mapping that has each of them when it is asked for."""
        size = sum(tensor.nbytes for tensor in params.values())
        if size <= self._left:
            self._left -= size
            return Held(params)
        places = {}
        for name, tensor in params.items():
            data = tensor.detach().cpu().contiguous()
            places[name] = Place(self._end, torch.empty_like(data, device="meta"))
            self._file.seek(self._end)
            left = _bytes_of(data)
            while left:
                written = self._file.write(left) or 0
                left, self._end = left[written:], self._end + written
        return Spilled(self, places)

    def read(self, place: Place) -> Tensor:
        """Read one tensor into memory of its own."""
        tensor = torch.empty(place.like.shape, dtype=place.like.dtype)
        self._file.seek(place.offset)
        left = _bytes_of(tensor)
        while left:
            left = left[self._file.readinto(left) or len(left) :]
        return tensor

    def close(self) -> None:
        """Give the file's place on the disk back."""
        self._file.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


class Held(Mapping[str, Tensor]):
    """Tensors in memory, to be read one by one as if they were not."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params

    def __getitem__(self, name: str) -> Tensor:
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)

    def meta(self) -> Mapping[str, Tensor]:
        """Names, shapes and types."""
        return self._params

    def record(self) -> ArrayRecord:
        """Return the floating-point tensors as a strategy is given them."""
        return to_record(widened(floating(self._params), torch.float32))


class Spilled(Mapping[str, Tensor]):
    """Tensors in a spill file, by name; each is read anew when it is asked for."""

    def __init__(self, spill: Spill, places: Mapping[str, Place]) -> None:
        self._spill = spill
        self._meta = {name: place.like for name, place in places.items()}
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        return self._spill.read(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def meta(self) -> dict[str, Tensor]:
        """Names, shapes and types, without values."""
        return self._meta

    def record(self) -> ArrayRecord:
        """Return the floating-point tensors as a strategy is given them; each array is read when it is asked for."""
        record = ArrayRecord()
        for name in floating(self._meta):
            record[name] = SpilledArray(self, name)
        return record


class SpilledArray(Array):
    """An array that lies in a spill file, in float32 or wider; its bytes are read when they are asked for."""

    def __init__(self, spilled: Spilled, name: str) -> None:
        self._spilled, self._name = spilled, name
        like = widened({name: spilled.meta()[name]}, torch.float32)[name]
        self.dtype, self.stype, self.shape = str(like.dtype).removeprefix("torch."), NUMPY, tuple(like.shape)

    def _read(self) -> Array:
        return to_record(widened({self._name: self._spilled[self._name]}, torch.float32))[self._name]

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Return the array's bytes as they travel."""
        return self._read().data

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        """Return the array in memory, where a copy outlives the file."""
        return self._read()


class Arriving(Grid):
    """A Grid that hands replies on as they arrive, instead of all together."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def set_run(self, run: Run) -> None:
        """Take over the run's description."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run's description."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message to a node."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The connected nodes."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to their nodes."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch the replies that are there."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages at once, and return an iterator over the replies, until all are there or time has run out."""
        return self._replies(list(self.grid.push_messages(messages)), timeout)

    def _replies(self, open_ids: list[str], timeout: float | None) -> Iterator[Message]:
        end = None if timeout is None else time.monotonic() + timeout
        while open_ids and (end is None or time.monotonic() < end):
            found = False
            # Asked for one by one, no more than one is in memory.
            for message_id in list(open_ids):
                for reply in self.grid.pull_messages([message_id]):
                    found = True
                    open_ids.remove(message_id)
                    yield reply
                    del reply
            if open_ids and not found:
                time.sleep(_WAIT_SECONDS if end is None else max(0.0, min(_WAIT_SECONDS, end - time.monotonic())))
