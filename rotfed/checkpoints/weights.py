"""The weights of a model directory: read one tensor at a time, written in shards as they come."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotfed.errors import SpecError
from rotfed.library import refusing
from rotfed.tensors import check_finite

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "model.safetensors"

SHARD_SIZE = 1 << 29
"""The bytes that a file of weights holds at most, unless one tensor is larger: so much is held while it is written."""

_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class _Unread(Mapping[str, Tensor]):
    """Parameters whose names are known, and which are read when they are asked for."""

    _names: Mapping[str, object]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    # Mapping's own would read the tensor.
    def __contains__(self, name: object) -> bool:
        return name in self._names


class StoredWeights(_Unread):
    """The tensors in a directory's safetensors files, by name; empty for a directory without any.

    The headers are read at once. A tensor is read, in the type of its file, every time it is asked for, and nothing
    is kept or mapped. Raises SpecError for a file that is damaged, AlignmentError, when a tensor is read for the first
    time, for values in it that are not finite.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, tuple[Path, Tensor]] = {
            name: (file, tensor) for file in weight_files(path) for name, tensor in _entries(file, _header)
        }
        self._checked: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        file, _ = self._names[name]
        ((_, tensor),) = _entries(file, _data, name)
        if name not in self._checked:
            check_finite({name: tensor}, f"model {self.path}")
            self._checked.add(name)
        return tensor

    def meta(self) -> dict[str, Tensor]:
        """Return the names, shapes and types, as tensors without data."""
        return {name: tensor for name, (_, tensor) in self._names.items()}


class Renamed(_Unread):
    """Parameters under other names, some left out, some under several names; none is read before it is asked for.

    `names` maps each name to the one that it has in `source`. Names of one parameter have one and the same tensor in
    `meta()`.
    """

    def __init__(self, source: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self.source, self.names = source, names
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return self.source[self.names[name]]

    def meta(self) -> dict[str, Tensor]:
        """Return the names, shapes and types, as tensors without data."""
        below = without_data(self.source)
        return {name: below[stored] for name, stored in self.names.items()}


class Widened(_Unread):
    """Parameters whose half precision is read as float32, so that what is computed with them is rounded once."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self.source = source
        self._names = without_data(source)
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        # A mean of models and the models themselves are asked for the same parameter one after the other.
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, widened(self.source[name])
        return self._last[1]

    def meta(self) -> dict[str, Tensor]:
        """Return the names, shapes and types, as tensors without data."""
        return self._meta

    @cached_property
    def _meta(self) -> dict[str, Tensor]:
        return {name: widened(tensor) for name, tensor in without_data(self.source).items()}


def widened(tensor: Tensor) -> Tensor:
    """Return half precision as float32, anything else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def without_data(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the names, shapes and types of parameters, as tensors without data; nothing is read for it."""
    if (meta := getattr(params, "meta", None)) is not None:
        found: dict[str, Tensor] = meta()
        return found
    return {name: tensor.to("meta") for name, tensor in params.items()}


def in_memory(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all parameters, half-precision ones as float32; several names of one have the same tensor."""

    if isinstance(params, Renamed):
        read = {stored: widened(params.source[stored]) for stored in set(params.names.values())}
        return {name: read[stored] for name, stored in params.names.items()}
    return {name: widened(tensor) for name, tensor in params.items()}


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory: the one file, else those of its index, else all."""
    if not path.is_dir():
        return []
    single = path / WEIGHTS
    if single.is_file():
        return [single]
    index = path / f"{WEIGHTS}.index.json"
    if index.is_file():
        with refusing(f"{index}: expected an index of safetensors files"):
            return sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
    if is_adapter(path):
        raise SpecError(
            f"{path}: expected a whole model, found an adapter; rotfed merges adapters with adapters, or merge it into "
            "its model first (PEFT's merge_and_unload)"
        )
    return sorted(path.glob("*.safetensors"))


def is_adapter(path: Path) -> bool:
    """Return whether a directory is that of an adapter alone, without a model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read one safetensors file. Raises SpecError for one that is missing or damaged."""
    return dict(_entries(file, _data))


def _entries(file: Path, read: Callable[[Any, str], Tensor], *names: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of a safetensors file, all by default, as `read` takes them from the open file."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in names or opened.keys():
                yield name, read(opened, name)
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{file}: expected a safetensors file, found {error}; download it again") from error


def _header(opened: Any, name: str) -> Tensor:
    entry = opened.get_slice(name)
    dtype = _SAFETENSORS_TYPES.get(entry.get_dtype(), torch.uint8)
    return torch.empty(entry.get_shape(), dtype=dtype, device="meta")


def _data(opened: Any, name: str) -> Tensor:
    # safetensors gives a view of the mapped file, which would stay mapped as long as the tensor is held.
    tensor: Tensor = opened.get_tensor(name)
    return tensor.clone()


class ShardWriter:
    """Writes tensors into safetensors files of `folder` as they come, and holds those of one file at a time.

    `file` is the name of the only file, or, where one of `limit` bytes does not hold all, the name that its shards
    and their index are made from. `close` writes what is held and gives the files their names.
    """

    def __init__(self, folder: Path, file: str = WEIGHTS, limit: float = SHARD_SIZE) -> None:
        self._folder, self._file, self._limit = folder, file, limit
        self._held: dict[str, Tensor] = {}
        self._size = self._total = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it must not change before the writer is closed."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._size + size > self._limit:
            self._write()
        self._held[name] = tensor.contiguous()
        self._size += size

    def close(self) -> None:
        """Write what is held, name the files, and write their index where there are several."""
        if self._held or not self._shards:
            self._write()
        count = len(self._shards)
        stem, suffix = Path(self._file).stem, Path(self._file).suffix
        places: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = self._file if count == 1 else f"{stem}-{number + 1:05}-of-{count:05}{suffix}"
            self._shard(number).rename(self._folder / file)
            places |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (self._folder / f"{self._file}.index.json").write_text(text, encoding="utf-8")

    def _shard(self, number: int) -> Path:
        return self._folder / f"{self._file}.{number}"

    def _write(self) -> None:
        file = self._shard(len(self._shards))
        save_file(self._held, file, metadata={"format": "pt"})
        # safetensors lets only its owner read a file.
        file.chmod(self._folder.stat().st_mode & 0o666)
        self._shards.append(list(self._held))
        self._total += self._size
        self._held, self._size = {}, 0
