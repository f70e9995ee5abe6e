"""The codec between state dicts and Flower's records, with the types that NumPy does not have."""

import io
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from rotfed.errors import RecordError

# Arrays of these types travel as their bits. The serialization type is rotfed's own, so that code which does not know
# it fails instead of averaging bit patterns.
BITS = "rotfed.bits"
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


def to_state_dict(record: ArrayRecord) -> dict[str, Tensor]:
    """Unpack an ArrayRecord into CPU tensors that own their memory, each in the type it was packed with.

    Reads what `to_record` packed and every record of NumPy arrays. Raises RecordError for an array that cannot be
    read.
    """
    return {name: _to_tensor(name, array) for name, array in record.items()}


def _to_array(name: str, tensor: Tensor) -> Array:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise RecordError(
            f"{name}: expected a dense tensor with data, found {tensor.layout} {tensor.dtype} on {tensor.device}; "
            "make it dense (and load it) before it is sent"
        )
    plain = tensor.detach().cpu().contiguous()
    try:
        return Array(plain.numpy())
    except TypeError:
        carrier = _CARRIER.get(plain.dtype)
        if carrier is None:
            raise RecordError(
                f"{name}: expected a numeric type, found {tensor.dtype}; cast it before it is sent"
            ) from None
    buffer = io.BytesIO()
    np.save(buffer, plain.view(carrier).numpy(), allow_pickle=False)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Array(dtype=dtype, shape=tuple(tensor.shape), stype=BITS, data=buffer.getvalue())


def _to_tensor(name: str, array: Array) -> Tensor:
    try:
        if array.stype != BITS:
            return torch.from_numpy(np.array(array.numpy()))
        dtype = getattr(torch, array.dtype, None)
        if dtype not in _CARRIER:
            raise TypeError(f"the type {array.dtype!r}")
        bits = np.load(io.BytesIO(array.data), allow_pickle=False)
        return torch.from_numpy(np.array(bits)).view(dtype)
    except Exception as error:  # NumPy parses what a stranger sent: zip files and Python literals among others
        raise RecordError(
            f"{name}: expected an array packed by to_record or by NumPy, found {array.stype!r} that cannot be read: "
            f"{error}"
        ) from error
