"""Tensors without names: the types that rotfed computes in, checks of values, squared distances."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rotfed.errors import AlignmentError, TransformError

Params = Mapping[str, Tensor]
"""Parameters by name, as `model.state_dict()` gives them. Reading one may read a file: read each once."""

AT_ONCE = 2**18
"""So many numbers at a time stay in a processor's cache: passes over large tensors go part by part."""

# Sums of squares and their ratios stay finite up to here, and no float32 comes near.
_LARGEST = 1e70

# Between these no float32 product overflows, and none that matters becomes zero.
_SAFE = 1e-30, 1e30


def compute_type(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type that products run in: float64 where a tensor has it, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def small(tensor: Tensor) -> Tensor:
    """Return a small matrix in float64, on its own device where that has such a type."""
    device = torch.device("cpu") if tensor.device.type == "mps" else tensor.device
    return tensor.to(device=device, dtype=torch.float64)


def to_work(tensor: Tensor) -> Tensor:
    """Return a detached tensor in float64, on its own device where that has such a type."""
    return small(tensor.detach())


def meta_of(params: Params) -> Params:
    """Return names, shapes and types of parameters; their values need not be read where the mapping knows these."""
    meta = getattr(params, "meta", None)
    return params if meta is None else meta()


def check_finite(params: Params, role: str) -> None:
    """Raise AlignmentError that names the first parameter with a value that is not finite, or that squares overflow.

    Parameters that are read from elsewhere, which know their shapes without values, are checked by who reads them.
    """
    if meta_of(params) is not params:
        return
    for name, tensor in params.items():
        check_finite_tensor(name, tensor, role)


def check_finite_tensor(name: str, tensor: Tensor, role: str) -> None:
    """Raise AlignmentError where a tensor has no values, or one that is not finite or whose square overflows."""
    if tensor.is_meta:
        raise AlignmentError(f"{name}: expected values in the {role}, found a meta tensor; load the model first")
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # torch has no extrema for the float8 types.
    low, high = (tensor.float() if tensor.element_size() < 2 else tensor).detach().aminmax()
    largest = max(-float(low), float(high))
    if not largest <= _LARGEST:
        expected, found = (
            (f"values up to {_LARGEST:g}", f"{largest:.3g}")
            if math.isfinite(largest)
            else ("finite values", "NaN or infinity")
        )
        raise AlignmentError(f"{name}: expected {expected} in the {role}, found {found}; leave this model out")


def squared_distance(one: Params, other: Params, names: Iterable[str] | None = None) -> float:
    """Return the squared Euclidean distance over the floating-point parameters named, all of `one` by default."""
    return math.fsum(squared_difference(one[name], other[name]) for name in (one if names is None else names))


def squared_difference(one: Tensor, other: Tensor) -> float:
    """Return the squared Euclidean distance of two tensors; 0 for whole numbers. The sum of squares is in float64."""
    if one is other or not one.is_floating_point():
        return 0.0
    dtype = compute_type(one.dtype, other.dtype)
    one, other = one.detach().flatten(), other.detach().to(one.device).flatten()
    buffer = torch.empty(min(len(one), AT_ONCE), dtype=dtype, device=one.device)
    total = 0.0
    for start in range(0, len(one), AT_ONCE):
        mine, theirs = (tensor[start : start + AT_ONCE].to(dtype) for tensor in (one, other))
        difference = torch.sub(mine, theirs, out=buffer[: len(mine)])
        total += float(difference.dot(difference))
    return total


def holds(tensor: Tensor) -> bool:
    """Return whether the largest value lies where float32 products of ordinary factors neither overflow nor vanish."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    largest = max(-float(low), float(high))
    return largest == 0 or _SAFE[0] < largest < _SAFE[1]


def round_to(
    wide: Tensor, dtype: torch.dtype, name: str, cause: str, source: Tensor | None = None, noise: float = 0.0
) -> Tensor:
    """Return what was computed in a wide type in the floating-point type of a parameter.

    Raises TransformError, with `name` and `cause`, where finite values grow beyond the range of `dtype`, and, where the
    `source` is given that they were computed from, where they shrink below it: where the whole tensor loses a larger
    share of its norm than rounding took of its source's. Losses up to `noise` times the source's norm are none.
    """
    rounded, kind = wide.to(dtype), torch.finfo(dtype)
    held = rounded.to(wide.dtype)
    lost, left = float((held - wide).norm()), float(wide.norm())
    before = wide if source is None else source.detach().to(wide.dtype)
    # Nearly all tensors pass at once; what is not finite loses NaN and does not.
    if lost <= kind.eps * left or not bool(before.isfinite().all()):
        return rounded
    found = "" if bool(held.isfinite().all()) else "larger"
    if source is not None and not found:
        norm = float(before.norm())
        # Rounding takes up to half of eps of a value, and below the smallest normal number a step of fixed size.
        took = kind.eps * (norm + kind.smallest_normal * wide.numel() ** 0.5)
        if lost > noise * norm and lost * norm > 4 * took * left:
            found = "smaller"
    if found:
        raise TransformError(f"{name}: expected values that {dtype} can hold, found {found} ones {cause}")
    return rounded
