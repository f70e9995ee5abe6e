"""Mergers: from models in one frame to one model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rotfed.errors import AlignmentError, TransformError
from rotfed.layout import check_parameters
from rotfed.tensors import AT_ONCE, Params, compute_type, meta_of, round_to


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
        if not isinstance(model, Mapping):
            check_parameters(model)
    metas = [meta_of(model) for model in listed]
    for model, meta in zip(listed, metas, strict=True):
        check_parameters(meta)
        for name, tensor in meta.items():
            # A model read from files knows its shapes without values.
            if tensor.is_complex() or (tensor.is_meta and model is meta):
                found = "a meta tensor" if tensor.is_meta else f"{tensor.dtype}"
                raise AlignmentError(f"{name}: expected a dense tensor of real numbers, found {found}")
    first = metas[0]
    for number, meta in enumerate(metas[1:], start=1):
        if odd := sorted(set(meta) ^ set(first)):
            place = "model 0" if odd[0] in first else f"model {number}"
            raise AlignmentError(f"{odd[0]}: expected in every model, found in {place} only; merge like models")
        for name, tensor in meta.items():
            if tensor.shape != first[name].shape:
                raise AlignmentError(
                    f"{name}: expected shape {tuple(first[name].shape)} as in model 0, found {tuple(tensor.shape)} "
                    f"in model {number}; merge models of one architecture"
                )
    return listed


def weighted_mean(models: Iterable[Params], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of models that share a frame.

    Accumulated in float32, float64 where a model has it; returned in the types of the first model; whole-number
    buffers are rounded, flags go with the majority. Nothing is mutated. Raises RotfedError for models that differ in
    names or shapes, and for a mean that is too large for its type.
    """
    return dict(MeanOf(alike(models), weights))


class MeanOf(Mapping[str, Tensor]):
    """The weighted mean of like models, each parameter computed when it is read: for models that are read from files.

    `wide` keeps half precision in float32, to compute with, instead of in the types of the first model.
    """

    def __init__(self, models: Sequence[Params], weights: Sequence[float] | None = None, wide: bool = False) -> None:
        self.models = models
        self.shares = normalised_weights(len(models), weights)
        self.wide = wide

    def __iter__(self) -> Iterator[str]:
        return iter(self.models[0])

    def __len__(self) -> int:
        return len(self.models[0])

    def __getitem__(self, name: str) -> Tensor:
        types = [meta_of(model)[name].dtype for model in self.models]
        return _mean(name, (model[name] for model in self.models), types, self.shares, self.wide)

    def meta(self) -> Params:
        """Names, shapes and types of the mean."""
        return {
            name: torch.empty_like(tensor, dtype=self._type(tensor.dtype), device="meta")
            for name, tensor in meta_of(self.models[0]).items()
        }

    def _type(self, dtype: torch.dtype) -> torch.dtype:
        return compute_type(dtype) if self.wide and dtype.is_floating_point else dtype


def mean_tensor(name: str, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean of one parameter, as in `weighted_mean`, by shares that sum to one."""
    return _mean(name, tensors, [tensor.dtype for tensor in tensors], shares)


def _mean(
    name: str, tensors: Iterable[Tensor], types: Sequence[torch.dtype], shares: Sequence[float], wide: bool = False
) -> Tensor:
    """The mean of tensors, each of which is read, and let go, in turn; unless `wide`, in the type of the first."""
    whole = not types[0].is_floating_point
    # What counts for nothing may be as large as it likes, and would leave the others its rounding.
    dtype = torch.float64 if whole else compute_type(*(t for t, share in zip(types, shares, strict=True) if share > 0))
    total = base = None
    device = None
    for tensor, share in zip(tensors, shares, strict=True):
        device = device or tensor.device
        if share == 0:
            continue
        if total is None or base is None:
            base = tensor.detach().to(dtype).contiguous()
            total = base.clone()
            continue
        # From the first on, so that values on which all agree (a folded norm's ones) stay as they are.
        sums, firsts, others = (x.flatten() for x in (total, base, tensor.detach().to(base.device).contiguous()))
        for start in range(0, len(sums), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            sums[part].add_(others[part].to(dtype) - firsts[part], alpha=share)
    assert total is not None
    if wide and not whole:
        return total
    return restore_type(total, types[0], name, "in the mean; put a model of a wider type first").to(device)


def shared_rows(models: Sequence[Params]) -> list[Params]:
    """The models without what follows the rows that all have, where tables begin alike and end at different rows."""
    metas = [meta_of(model) for model in models]
    uneven = {
        name: min(len(meta[name]) for meta in metas)
        for name, tensor in metas[0].items()
        if any(meta[name].shape != tensor.shape for meta in metas)
    }
    if not uneven:
        return list(models)
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
    if value.dtype == dtype:
        # The sum of finite numbers in their own type may be none.
        if not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
            raise TransformError(f"{name}: expected values that {dtype} can hold, found larger ones {cause}")
        return value
    return round_to(value, dtype, name, cause, source, noise=1e-13)
