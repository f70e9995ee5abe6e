"""Mergers: from models in one frame to one model."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rotfed.errors import AlignmentError
from rotfed.spec import check_parameters
from rotfed.transform import round_to, to_work

Params = Mapping[str, Tensor]


def normalised_weights(count: int, weights: Sequence[float] | None) -> list[float]:
    """Weights that sum to one, equal where `weights` is None. Raises AlignmentError for impossible ones."""
    if weights is None:
        return [1.0 / count] * count
    try:
        values = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise AlignmentError(f"weights: expected numbers, found {weights!r}") from error
    if len(values) != count:
        raise AlignmentError(f"weights: expected {count}, one a model, found {len(values)}")
    total = sum(values)
    if not all(0.0 <= value < float("inf") for value in values) or not 0.0 < total < float("inf"):
        raise AlignmentError(f"weights: expected non-negative finite numbers, not all zero, found {values}")
    return [value / total for value in values]


def alike(models: Iterable[Params]) -> list[Params]:
    """The models as a list. Raises RotfedError unless all hold dense real tensors of the same names and shapes."""
    if isinstance(models, Mapping | str) or not isinstance(models, Iterable):
        raise AlignmentError(
            f"models: expected a list of mappings from parameter name to tensor, found {type(models).__name__}"
        )
    listed = list(models)
    if not listed:
        raise AlignmentError("models: expected at least one, found none")
    for model in listed:
        check_parameters(model)
        if odd := [name for name, tensor in model.items() if tensor.is_complex() or tensor.is_meta]:
            found = "a meta tensor" if model[odd[0]].is_meta else f"{model[odd[0]].dtype}"
            raise AlignmentError(f"{odd[0]}: expected a dense tensor of real numbers, found {found}")
    first = listed[0]
    for number, model in enumerate(listed[1:], start=1):
        if odd := sorted(set(model) ^ set(first)):
            place = "model 0" if odd[0] in first else f"model {number}"
            raise AlignmentError(f"{odd[0]}: expected in every model, found in {place} only; merge like models")
        for name, tensor in model.items():
            if tensor.shape != first[name].shape:
                raise AlignmentError(
                    f"{name}: expected shape {tuple(first[name].shape)} as in model 0, found {tuple(tensor.shape)} "
                    f"in model {number}; merge models of one architecture"
                )
    return listed


def weighted_mean(models: Iterable[Params], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of models that share a frame.

    Accumulated in float64, returned in the types of the first model; whole-number buffers are rounded, flags go
    with the majority. Nothing is mutated. Raises RotfedError for models that differ in names or shapes, and for a mean
    that is too large for its type.
    """
    models = alike(models)
    shares = normalised_weights(len(models), weights)
    return {name: mean_tensor(name, [model[name] for model in models], shares) for name in models[0]}


def mean_tensor(name: str, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean of one parameter, as in `weighted_mean`, by shares that sum to one."""
    first = tensors[0]
    # What counts for nothing may be as large as it likes, and would leave the others its rounding.
    counted = [(tensor, share) for tensor, share in zip(tensors, shares, strict=True) if share > 0]
    # From the first on, so that values on which all agree (a folded norm's ones) stay as they are.
    total = base = to_work(counted[0][0])
    for tensor, share in counted[1:]:
        total = total + (to_work(tensor).to(base.device) - base) * share
    cause = "in the mean; put a model of a wider type first"
    return restore_type(total, first.dtype, name, cause).to(first.device)


def shared_rows(models: Sequence[Params]) -> list[Params]:
    """The models without what follows the rows that all have, where tables begin alike and end at different rows."""
    uneven = {
        name: min(len(model[name]) for model in models)
        for name, tensor in models[0].items()
        if any(model[name].shape != tensor.shape for model in models)
    }
    return [{**model, **{name: model[name][:rows] for name, rows in uneven.items()}} for model in models]


def mean_by_rows(models: Sequence[Params], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of models in one frame, of each row over those that have it (equal where none of these counts).

    As `weighted_mean` otherwise.
    """
    mean = weighted_mean(shared_rows(models), weights)
    for name, table in mean.items():
        longer = [
            ({name: model[name][len(table) :]}, weight)
            for model, weight in zip(models, weights, strict=True)
            if table.ndim and len(model[name]) > len(table)
        ]
        if longer:
            tables, shares = zip(*longer, strict=True)
            mean[name] = torch.cat([table, mean_by_rows(tables, shares if any(shares) else [1] * len(shares))[name]])
    return mean


def restore_type(value: Tensor, dtype: torch.dtype, name: str, cause: str, source: Tensor | None = None) -> Tensor:
    """A mean computed in floating point as `dtype`: whole numbers rounded, flags by majority, others by `round_to`."""
    if dtype == torch.bool:
        return value >= 0.5
    if not dtype.is_floating_point:
        return value.round().to(dtype)
    return round_to(value, dtype, name, cause, source, noise=1e-13)


def distance2(one: Params, other: Params, names: Iterable[str] | None = None) -> float:
    """The squared Euclidean distance over the floating-point parameters named, all of `one` by default, in float64."""
    return math.fsum(
        float((to_work(one[name]) - to_work(other[name]).to(one[name].device)).square().sum())
        for name in (one if names is None else names)
        if one[name].is_floating_point()
    )
