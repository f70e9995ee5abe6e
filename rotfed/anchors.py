"""Anchors: which frame several models are brought into before they are merged."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rotfed.align import Alignment, align, identity_share
from rotfed.descent import Anchor, Params
from rotfed.errors import AlignmentError, ConvergenceWarning, TransformError
from rotfed.mergers import alike, distance2, normalised_weights, weighted_mean
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec, check_is_spec, check_parameters
from rotfed.transform import Transform, identity_transform

ANCHORS = ("global", "medoid", "consensus", "progressive", "tree")

Step = Callable[[Params, Params, float], Alignment]
"""Aligns a source to an anchor that it will then be averaged with; the number is the source's share of that average."""


def chosen_anchor(name: str, choices: Sequence[str]) -> str:
    """The anchor that a name stands for. Raises AlignmentError unless it is one of the choices."""
    known = "consensus" if name == "generalized_procrustes" else name
    if known not in choices:
        raise AlignmentError(f"anchor: expected one of {', '.join(choices)}, found {name!r}")
    return known


def align_all(
    models: Iterable[Params],
    spec: SymmetrySpec,
    anchor: str = "consensus",
    weights: Sequence[float] | None = None,
    reference: Params | None = None,
    step: Step | None = None,
    **options: Any,
) -> list[Alignment]:
    """Bring several models into one frame.

    Parameters
    ----------
    models
        Mappings from parameter name to tensor, of equal names and shapes.
    anchor
        `"global"`: each model is aligned to `reference`, on its own (what works under secure aggregation, with
        differential-privacy accounting, and in a stream). `"medoid"`: each to the model nearest to the plain mean
        (the multi-model rule of arXiv 2502.00264). `"consensus"`: generalized Procrustes analysis (Gower 1975), each
        to the mean of all, which is renewed until it settles; `"generalized_procrustes"` is a second name of it.
        `"progressive"`: one after another to the mean of those before it. `"tree"`: pairs, then pairs of pairs, log2
        of the number of models in depth.
    weights
        Shares of the models in the mean, equal by default.
    reference
        The frame in which the result is expressed. The medoid and the consensus fix where the models stand to each
        other, not the common frame; it is then the one nearest to `reference` (for the medoid and the consensus the
        medoid itself by default), so that what outlives a round, such as a server optimiser's moments, keeps its
        meaning.
    step
        What aligns one model, or the mean of some, to another, in `"progressive"` and `"tree"`; `align` with `options`
        by default. A learned alignment goes in here.
    options
        `groups`, `layers`, `proper`, `strength`, `max_sweeps` of `align`.

    Returns one Alignment a model, in order; their distances are those to the anchor chosen. Nothing is mutated.
    Raises RotfedError for models that differ, an unknown anchor, or a `"global"` one without a reference.
    """
    check_is_spec(spec)
    anchor = chosen_anchor(anchor, ANCHORS)
    models = alike(models)
    shares = normalised_weights(len(models), weights)
    if anchor == "global":
        if reference is None:
            raise AlignmentError(
                "anchor 'global': expected a model to align to, found none; pass reference=its parameters, or merge("
                "..., anchor=its parameters)"
            )
        prepared = reference if isinstance(reference, Anchor) else Anchor(reference, spec)
        return [align(model, prepared, spec, **options) for model in models]
    if anchor == "medoid":
        aligned = _align_to_medoid(models, spec, shares, options)
    elif anchor == "consensus":
        aligned = _align_to_consensus(models, spec, shares, options)
    else:
        one_step = step or (lambda source, target, share: align(source, target, spec, **options))
        aligned = _align_in_turn(models, spec, shares, one_step, anchor == "tree", options)
    if reference is None and anchor != "consensus":
        return aligned
    home = models[medoid(models, shares)] if reference is None else reference
    mean = weighted_mean([alignment.params for alignment in aligned], shares)
    return _follow(models, aligned, align(mean, home, spec, **options).transform, options)


def medoid(models: Iterable[Params], weights: Sequence[float] | None = None) -> int:
    """The index of the model nearest to the weighted mean of all; the first of equals."""
    models = alike(models)
    mean = weighted_mean(models, weights)
    distances2 = [distance2(model, mean) for model in models]
    return distances2.index(min(distances2))


def _align_to_medoid(
    models: Sequence[Params], spec: SymmetrySpec, shares: Sequence[float], options: Mapping[str, Any]
) -> list[Alignment]:
    centre = Anchor(models[medoid(models, shares)], spec)
    return [align(model, centre, spec, **options) for model in models]


def _align_to_consensus(
    models: Sequence[Params],
    spec: SymmetrySpec,
    shares: Sequence[float],
    options: Mapping[str, Any],
    tolerance: float = 1e-3,
    max_renewals: int = 20,
) -> list[Alignment]:
    """Align every model to the mean, renew the mean, until the spread settles to a relative `tolerance`."""
    # Descent from the plain mean finds what is near; models in frames of their own have a mean that tells nothing,
    # and start from the medoid's frame. The spread of the two starts decides.
    best = _align_to_medoid(models, spec, shares, options)
    at_medoid = [alignment.params for alignment in best]
    lowest = _spread(at_medoid, shares)
    plain = _spread(models, shares)
    members: Sequence[Params] = models if plain <= lowest else at_medoid
    spread = min(plain, lowest)
    for _ in range(max_renewals):
        mean = Anchor(weighted_mean(members, shares), spec)
        aligned = [align(model, mean, spec, **options) for model in models]
        members = [alignment.params for alignment in aligned]
        previous, spread = spread, _spread(members, shares)
        # With a pull to the identity a renewal may also lose what the one before it had gained.
        if spread < lowest:
            best, lowest = aligned, spread
        if previous - spread <= tolerance * previous:
            return best
    warnings.warn(
        f"consensus: the spread still fell by {1 - spread / previous:.1%} in the last of {max_renewals} renewals; the "
        "models are aligned, but not as near to each other as they could be",
        ConvergenceWarning,
        stacklevel=3,
    )
    return best


def _align_in_turn(
    models: Sequence[Params],
    spec: SymmetrySpec,
    shares: Sequence[float],
    step: Step,
    tree: bool,
    options: Mapping[str, Any],
) -> list[Alignment]:
    """Join models two by two, the second moved to the first, until all are in one frame."""
    transforms = [identity_transform(spec) for _ in models]
    distances = [(0.0, 0.0) for _ in models]

    def join(left: "_Joined", right: "_Joined") -> "_Joined":
        share = right.weight + left.weight and right.weight / (left.weight + right.weight)
        alignment = step(right.mean, left.mean, share)
        if not isinstance(alignment, Alignment):
            raise AlignmentError(
                f"step: expected an Alignment, as align returns, found {type(alignment).__name__}; return one"
            )
        for member in right.members:
            transforms[member] = alignment.transform.compose(transforms[member])
            distances[member] = (alignment.distance_before, alignment.distance_after)
        mean = weighted_mean([left.mean, alignment.params], [1 - share, share])
        return _Joined((*left.members, *right.members), mean, left.weight + right.weight)

    joined = [
        _Joined((number,), model, share) for number, (model, share) in enumerate(zip(models, shares, strict=True))
    ]
    while len(joined) > 1:
        ends = len(joined) - len(joined) % 2 if tree else 2
        pairs = [join(left, right) for left, right in zip(joined[:ends:2], joined[1:ends:2], strict=True)]
        joined = [*pairs, *joined[ends:]]
    return [
        Alignment(transform.apply(model), transform, *distance, _identity_share(transform, model, options))
        for model, transform, distance in zip(models, transforms, distances, strict=True)
    ]


@dataclass(frozen=True)
class _Joined:
    """Some of the models in one frame: their numbers, their mean, and their share of all."""

    members: tuple[int, ...]
    mean: Params
    weight: float


def _follow(
    models: Sequence[Params], aligned: Iterable[Alignment], transform: Transform, options: Mapping[str, Any]
) -> list[Alignment]:
    """The same alignments, all moved on by one more transform, unless the type of some model cannot hold that."""
    aligned, moved = list(aligned), []
    for model, alignment in zip(models, aligned, strict=True):
        total = transform.compose(alignment.transform)
        try:
            params = total.apply(model)
        except TransformError:
            # They share a frame as they are, only not the nearest to the reference.
            return aligned
        share = _identity_share(total, model, options)
        moved.append(Alignment(params, total, alignment.distance_before, alignment.distance_after, share))
    return moved


def _identity_share(transform: Transform, model: Params, options: Mapping[str, Any]) -> float:
    resolution = transform.spec.resolve(model)
    return identity_share(transform, resolution, options.get("groups"), options.get("layers"))


def _spread(models: Sequence[Params], shares: Sequence[float]) -> float:
    """The weighted mean squared distance of models from their mean."""
    mean = weighted_mean(models, shares)
    return math.fsum(share * distance2(model, mean) for model, share in zip(models, shares, strict=True))


def merge(
    models: Iterable[Params],
    spec: SymmetrySpec,
    weights: Sequence[float] | None = None,
    anchor: str | Params = "consensus",
    **options: Any,
) -> dict[str, Tensor]:
    """Make one model of several: bring them into one frame, then take their weighted mean.

    Parameters: `models`, mappings from parameter name to tensor; `weights`, their shares, equal by default; `anchor`,
    any of `align_all` but `"global"`, or the parameters of a model to align all of them to; `options` of `align_all`
    and `align`. Where the spec has a residual stream to rotate, norms are folded first. Returns a new mapping in the
    types of the first model. Nothing is mutated.
    """
    check_is_spec(spec)
    models = alike(models)
    if not isinstance(anchor, str):
        check_parameters(anchor)
    if spec.residual is not None:
        models = [fold_norms(model, spec) for model in models]
        anchor = anchor if isinstance(anchor, str) else fold_norms(anchor, spec)
    if isinstance(anchor, str):
        aligned = align_all(models, spec, anchor, weights, **options)
    else:
        aligned = align_all(models, spec, "global", weights, reference=anchor, **options)
    return weighted_mean([alignment.params for alignment in aligned], weights)
