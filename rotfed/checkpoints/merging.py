"""One model directory out of several: `merge_checkpoints`, the library call behind `rotfed merge`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rotfed.align import AlignOptions
from rotfed.barrier import Score
from rotfed.checkpoints.common import Common, common_parameters, differences
from rotfed.checkpoints.folder import Checkpoint, read_checkpoint
from rotfed.checkpoints.form import Form, common_form, layer_names
from rotfed.checkpoints.measuring import Learned, Measurement
from rotfed.checkpoints.weights import SHARD_SIZE, Widened, in_memory
from rotfed.checkpoints.writing import check_target, write_checkpoint
from rotfed.errors import AlignmentError
from rotfed.frames import align_all, chosen_anchor
from rotfed.mergers import mean_by_rows, normalised_weights, shared_rows
from rotfed.spec import SymmetrySpec
from rotfed.tensors import compute_type, meta_of

ANCHORS = ("medoid", "consensus", "progressive", "tree")
LEARNED_ANCHORS = ("progressive", "tree")

# The values of a parameter that are averaged at once: few enough for a processor's cache.
_PORTION = 1 << 18

# Models of up to so many bytes are read once and held; larger ones are read when, and as often as, they are needed.
_HELD = 1 << 28


@dataclass(frozen=True)
class MergeOptions:
    """How `merge_checkpoints` merges.

    `anchor` is the frame to merge in, one of `ANCHORS`: `"consensus"` by default, `"tree"` with `learn`. `weights` are
    the shares of the models, equal by default. `residual` aligns the residual stream, too, where the spec knows it and
    the models allow it; by default it does so up to 150 million parameters. `layers` are the numbers of the layers to
    align, all by default. `data` is a safetensors file of examples to measure losses on, `batch_size` of them at once;
    with `learn`, that many steps at most refine each alignment on four fifths of them. `force` replaces a model
    directory that is there. `shard_size` is the number of bytes beyond which the weights are written in several files.
    Raises AlignmentError for options that do not go together.
    """

    anchor: str = ""
    weights: Sequence[float] | None = None
    residual: bool | None = None
    layers: Sequence[int] | None = None
    data: str | Path | None = None
    learn: int = 0
    batch_size: int = 64
    force: bool = False
    shard_size: int = SHARD_SIZE

    @property
    def frame(self) -> str:
        """The anchor, chosen or by default. Raises AlignmentError for one that cannot be."""
        usual, choices = ("tree", LEARNED_ANCHORS) if self.learn else ("consensus", ANCHORS)
        return chosen_anchor(self.anchor or usual, choices)

    def __post_init__(self) -> None:
        _ = self.frame
        if self.learn and self.data is None:
            raise AlignmentError("learn: expected examples to learn from, found none; add --data FILE")
        if self.learn and self.layers is not None:
            shown = ",".join(map(str, self.layers))
            raise AlignmentError(f"learn: expected all layers, found --layers {shown}; leave one of the two out")
        if self.learn and self.weights is not None and 0 in self.weights:
            raise AlignmentError("learn: expected models that all count, found a weight of zero; leave that model out")


@dataclass(frozen=True)
class MergeReport:
    """The figures of a merge.

    `spec` is the one aligned by, `anchor` the frame, `shares` the models' weights, which sum to one. `differences` and
    `stream` are sentences; `kept`, `left_out` and `uneven` are those of `Common`. `distances` are by layer, and under
    `all`: the distance of the models from their mean, averaged over the models, before and after alignment. With data,
    `scores` are those of every model (None for one with another head), of the plain mean, and of the merged model;
    `barriers` are how far the last two lie above the mean of the models' own losses; `learned` has an entry for each
    refined alignment.
    """

    spec: SymmetrySpec
    anchor: str
    shares: Sequence[float]
    differences: Sequence[str]
    stream: str
    kept: Mapping[str, str]
    left_out: Mapping[str, str]
    uneven: Mapping[str, str]
    distances: Mapping[str, tuple[float, float]]
    scores: Sequence[tuple[str, Score | None]] = ()
    learned: Sequence[Learned] = ()

    @property
    def barriers(self) -> tuple[float, float] | None:
        """The barrier of the plain mean and that of the merged model; None without the losses of all models."""
        if not self.scores or any(score is None for _, score in self.scores):
            return None
        *own, plain, merged = (score.loss for _, score in self.scores if score is not None)
        level = sum(share * loss for share, loss in zip(self.shares, own, strict=True))
        return plain - level, merged - level


def merge_checkpoints(
    paths: Sequence[str | Path], out: str | Path, options: MergeOptions = MergeOptions()
) -> MergeReport:
    """Make one model directory of several.

    Brings the models into one frame, which changes none of their outputs, takes their weighted mean, and writes it as
    a model directory with the first one's configuration, tokenizer, names and types.

    Parameters: `paths`, transformers model directories of one architecture; `out`, the directory to write, which
    appears whole or not at all; `options`. Returns the figures. Raises RotfedError where the models cannot be merged,
    and issues a ConvergenceWarning where an alignment had not settled.
    """
    models, out = [Path(path) for path in paths], Path(out)
    if len(models) < 2:
        raise AlignmentError(f"models: expected at least two to merge, found {len(models)}")
    shares = normalised_weights(len(models), options.weights)
    check_target(out, models, options.force)
    checkpoints = [read_checkpoint(model) for model in models]
    first = checkpoints[0]
    common = common_parameters(checkpoints)
    if options.learn and common.uneven:
        name, shapes = next(iter(common.uneven.items()))
        raise AlignmentError(f"learn: expected tables of one length, found {name} {shapes}; merge without --learn")
    form = common_form(checkpoints, common, options.residual, options.layers)
    distances = _Distances(layer_names(form.spec, form.models[0]), shares)
    measured = None
    if options.data is not None:
        measured = Measurement(first, Path(options.data), options.learn, options.batch_size)
        for checkpoint in checkpoints:
            alike = checkpoint is first or not (common.kept or common.left_out)
            measured.add(str(checkpoint.path), checkpoint.params if alike else None)
        plain = ((name, [model[name] for model in common.models]) for name in common.models[0])
        measured.add("plain mean", dict(_means(first, common, plain, shares)))
    merged = _merged_parameters(first, common, form, options, distances, measured)
    if measured is not None:
        held = dict(merged)
        measured.add("merged", held)
        merged = iter(held.items())
    write_checkpoint(out, merged, first.path, shard_size=options.shard_size)
    return MergeReport(
        spec=form.spec,
        anchor=options.frame,
        shares=shares,
        differences=differences(checkpoints, common),
        stream=form.stream,
        kept=common.kept,
        left_out=common.left_out,
        uneven=common.uneven,
        distances=distances.by_layer(),
        scores=measured.scores if measured else (),
        learned=measured.learned if measured else (),
    )


def _merged_parameters(
    first: Checkpoint,
    common: Common,
    form: Form,
    options: MergeOptions,
    distances: "_Distances",
    measured: Measurement | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the merged model, in the types of the first one's files."""
    folded = form.spec.residual is not None and form.spec.residual.folded

    def watched() -> Iterator[tuple[str, Sequence[Tensor]]]:
        for name, before, after in _aligned_parameters(form, options, distances.shares, measured):
            distances.add(name, before, after)
            if folded and name in first.types:
                source = first.params[name]
                for tensor in before:
                    first.restored(name, tensor, source)
            yield name, after

    return _means(first, common, watched(), distances.shares)


def _aligned_parameters(
    form: Form, options: MergeOptions, shares: Sequence[float], measured: Measurement | None
) -> Iterator[tuple[str, Sequence[Tensor], Sequence[Tensor]]]:
    """Yield each parameter: its name, and its tensor in every model, before alignment and after."""
    size = sum(tensor.nbytes for model in form.models for tensor in meta_of(model).values())
    held = measured is not None or size <= _HELD
    models = [in_memory(model) if held else Widened(model) for model in form.models]
    align_pair = measured.learned_alignment(form.spec) if measured is not None and options.learn else None
    how = AlignOptions(layers=options.layers)
    found = align_all(shared_rows(models), form.spec, options.frame, shares, None, align_pair, how)
    # A transform moves all rows of a table, also those beyond the ones that all models have.
    aligned = [alignment.transform.over(model) for alignment, model in zip(found, models, strict=True)]
    for name in models[0]:
        yield name, [model[name] for model in models], [model[name] for model in aligned]


def _means(
    first: Checkpoint, common: Common, parameters: Iterable[tuple[str, Sequence[Tensor]]], shares: Sequence[float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the mean of each parameter that the first model's files hold, in their types, and what is kept of them."""
    for name, tensors in parameters:
        if name in first.types:
            mean = torch.empty(tensors[0].shape, dtype=first.types[name])
            rows = mean.reshape(1) if mean.ndim == 0 else mean
            for place, portion in _portions(tensors):
                models = [{name: part} for part in portion]
                rows[place] = first.restored(name, mean_by_rows(models, shares)[name])
            yield name, mean
    for name in common.kept:
        yield name, first.params[name]


def _portions(tensors: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the tensors some rows at a time; one that ends before others yields what it has."""
    tables = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
    rows = max(len(table) for table in tables)
    step = max(1, _PORTION // max(1, math.prod(tables[0].shape[1:])))
    for start in range(0, rows, step):
        place = slice(start, min(start + step, rows))
        yield place, [table[place] for table in tables]


class _Distances:
    """Adds up the distances of models from their mean, by layer, while the parameters pass by.

    It sums G[i, j] = <x_i - x_0, x_j - x_0>, before alignment and after. With shares s the squared distance of model i
    from the mean is G[i, i] - 2 (G s)_i + s'Gs: exactly zero for equal models.
    """

    def __init__(self, layers: Mapping[str, Sequence[str]], shares: Sequence[float]) -> None:
        self.shares = shares
        self._layer_of = {name: layer for layer, names in layers.items() for name in names}
        self._products = {layer: torch.zeros(2, len(shares), len(shares)).double() for layer in layers}

    def add(self, name: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Take one parameter of all models, before alignment and after; only rows that all have count."""
        if not before[0].is_floating_point():
            return
        for products, tensors in zip(self._products[self._layer_of[name]], (before, after), strict=True):
            for _, portion in _portions(tensors):
                rows = min(len(tensor) for tensor in portion)
                dtype = compute_type(*(tensor.dtype for tensor in portion))
                wide = torch.stack([tensor[:rows].to(dtype).flatten() for tensor in portion])
                wide -= wide[0].clone()
                products += wide @ wide.T

    def by_layer(self) -> dict[str, tuple[float, float]]:
        """Return the distances before and after alignment, averaged over the models, by layer and under `all`."""
        shares = torch.tensor(self.shares).double()
        found = {}
        for layer, products in {**self._products, "all": torch.stack([*self._products.values()]).sum(0)}.items():
            inner = products @ shares
            squared = products.diagonal(dim1=1, dim2=2) - 2 * inner + (inner @ shares)[:, None]
            before, after = squared.clamp_min(0).sqrt().mean(1).tolist()
            found[layer] = (before, after)
        return found
