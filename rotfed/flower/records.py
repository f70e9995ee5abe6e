"""The codec between state dicts and Flower's records, with the types that NumPy does not have."""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from rotfed.errors import RecordError

# Arrays of these types travel as their bits. The serialization type is rotfed's own, so that code which does not know
# it fails instead of averaging bit patterns.
BITS, NUMPY = "rotfed.bits", "numpy.ndarray"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
_CARRIER = {torch.bfloat16: torch.int16, **dict.fromkeys(_FLOAT8, torch.uint8)}


def to_record(params: Mapping[str, Tensor]) -> ArrayRecord:
    """Pack parameters into an ArrayRecord, each in its own type.

    Parameters: a mapping from name to tensor of any layout and device, as `model.state_dict()` gives. bfloat16 and
    the float8 types, which NumPy lacks, keep their size on the wire. Nothing is mutated. Raises RecordError for a
    tensor that holds no plain data (sparse, quantised, meta).
    """
    record = ArrayRecord()
    for name, tensor in params.items():
        record[name] = _to_array(name, tensor)
    return record


def to_state_dict(record: ArrayRecord, shared: bool = False) -> dict[str, Tensor]:
    """Unpack an ArrayRecord into CPU tensors, each in the type it was packed with.

    Reads what `to_record` packed and every record of NumPy arrays. The tensors own their memory, or, where it may be
    `shared`, lie in the record's own, which nobody may write to. Raises RecordError for an array that cannot be read.
    """
    return {name: _to_tensor(name, array, shared) for name, array in record.items()}


def _to_array(name: str, tensor: Tensor) -> Array:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise RecordError(
            f"{name}: expected a dense tensor with data, found {tensor.layout} {tensor.dtype} on {tensor.device}; "
            "make it dense (and load it) before it is sent"
        )
    plain = tensor.detach().cpu().contiguous()
    carrier = _CARRIER.get(plain.dtype)
    try:
        array = (plain if carrier is None else plain.view(carrier)).numpy()
    except TypeError:
        raise RecordError(f"{name}: expected a numeric type, found {tensor.dtype}; cast it before it is sent") from None
    # As numpy.save writes it, without its copies.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    data = b"".join([header.getvalue(), array.data.cast("B") if array.size else b""])
    dtype = str(array.dtype) if carrier is None else str(tensor.dtype).removeprefix("torch.")
    return Array(dtype=dtype, shape=tuple(tensor.shape), stype=NUMPY if carrier is None else BITS, data=data)


def _to_tensor(name: str, array: Array, shared: bool) -> Tensor:
    try:
        tensor = torch.from_numpy(_unpacked(array.data, shared))
        if array.stype != BITS:
            if array.stype != NUMPY:
                raise TypeError(f"the serialization type {array.stype!r}")
            return tensor
        dtype = getattr(torch, array.dtype, None)
        if dtype not in _CARRIER:
            raise TypeError(f"the type {array.dtype!r}")
        return tensor.view(dtype)
    except Exception as error:  # NumPy parses what a stranger sent: zip files and Python literals among others
        raise RecordError(
            f"{name}: expected an array packed by to_record or by NumPy, found {array.stype!r} that cannot be read: "
            f"{error}"
        ) from error


class _Shared:
    """An array in memory that is never written to, in the form in which torch takes it without a warning."""

    def __init__(self, array: np.ndarray[Any, np.dtype[Any]]) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _unpacked(data: bytes, shared: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """Read what `numpy.save` wrote, without a copy where that is asked for."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        count = math.prod(shape)
        if not fortran and not dtype.hasobject and len(data) == file.tell() + count * dtype.itemsize:
            array = np.frombuffer(data, dtype, count, file.tell()).reshape(shape)
            return np.asarray(_Shared(array)) if shared else array.copy()
    return np.array(np.load(io.BytesIO(data), allow_pickle=False))
