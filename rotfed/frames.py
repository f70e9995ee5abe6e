"""Frames: which one several models are brought into before they are merged."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rotfed.align import DEFAULTS, Alignment, AlignOptions, Pair, align, identity_share
from rotfed.errors import AlignmentError, ConvergenceWarning, TransformError
from rotfed.layout import check_parameters, lay_out
from rotfed.matching import Anchor
from rotfed.mergers import MeanOf, alike, normalised_weights, weighted_mean
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec, check_is_spec
from rotfed.tensors import Params, squared_distance
from rotfed.transform import Transform, identity_transform

ANCHORS = ("global", "medoid", "consensus", "progressive", "tree")

AlignPair = Callable[[Params, Params, float], Alignment]
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
    reference: Params | Anchor | None = None,
    align_pair: AlignPair | None = None,
    options: AlignOptions = DEFAULTS,
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
    align_pair
        Aligns one model, or the mean of some, to another, in `"progressive"` and `"tree"`; `align` with `options` by
        default. A learned alignment goes in here.

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
        return [align(model, prepared, spec, options) for model in models]
    if anchor == "consensus":
        near = _a_little_apart(models, spec, shares, options)
        if near and reference is None:
            # They are in the frame of their plain mean.
            return near
        aligned = near or _align_to_consensus(models, spec, shares, options)
    else:
        aligned = in_one_frame(models, spec, anchor, shares, align_pair, options)
    if reference is None and anchor != "consensus":
        return aligned
    # From the medoid's frame a consensus drifts a little, and no unit leaves its place.
    home = models[medoid(models, shares)] if reference is None else reference
    return follow(models, aligned, shares, spec, home, options, near=reference is None)


def in_one_frame(
    models: Sequence[Params],
    spec: SymmetrySpec,
    anchor: str,
    shares: Sequence[float],
    align_pair: AlignPair | None = None,
    options: AlignOptions = DEFAULTS,
) -> list[Alignment]:
    """Bring models into one frame, whichever that is; as `align_all` otherwise."""
    if anchor == "medoid":
        return _align_to_medoid(models, spec, shares, options)
    if anchor == "consensus":
        return _a_little_apart(models, spec, shares, options) or _align_to_consensus(models, spec, shares, options)
    one_pair = align_pair or (lambda source, target, share: align(source, target, spec, options))
    return _align_in_turn(models, spec, shares, one_pair, anchor == "tree", options)


def medoid(models: Iterable[Params], weights: Sequence[float] | None = None) -> int:
    """The index of the model nearest to the weighted mean of all; the first of equals."""
    models = alike(models)
    distances2 = distances_from_mean2(models, normalised_weights(len(models), weights))
    return distances2.index(min(distances2))


def distances_from_mean2(models: Sequence[Params], shares: Sequence[float]) -> list[float]:
    """Return each model's squared distance from the weighted mean of all, reading every parameter once."""
    mean = MeanOf(models, shares, wide=True)
    found: list[list[float]] = [[] for _ in models]
    for name in mean:
        tensors = {name: mean[name]}
        for distances, model in zip(found, models, strict=True):
            distances.append(squared_distance({name: model[name]}, tensors))
    return [math.fsum(distances) for distances in found]


def spread2(models: Sequence[Params], shares: Sequence[float]) -> float:
    """Return the weighted mean squared distance of models from their mean."""
    return math.fsum(s * d for s, d in zip(shares, distances_from_mean2(models, shares), strict=True))


def follow(
    models: Sequence[Params],
    aligned: Sequence[Alignment],
    shares: Sequence[float],
    spec: SymmetrySpec,
    home: Params | Anchor,
    options: AlignOptions,
    near: bool = False,
) -> list[Alignment]:
    """Return the same alignments, all moved on by the one transform that brings their mean nearest to `home`.

    Where the mean is `near`, its units are in their places. The alignments stay as they are where the type of some
    model cannot hold the transform.
    """
    mean = _mean_of([alignment.params for alignment in aligned], shares)
    transform = to_home(mean, home, spec, options, near)
    if not any(transform.moving.values()):
        return list(aligned)
    moved = []
    for model, alignment in zip(models, aligned, strict=True):
        total = transform.compose(alignment.transform)
        try:
            params = total.apply(model)
        except TransformError:
            # They share a frame as they are, only not the nearest to the reference.
            return list(aligned)
        share = identity_share(total, lay_out(model, spec), options)
        moved.append(replace(alignment, params=params, transform=total, identity_permutations=share))
    return moved


def to_home(
    mean: Params, home: Params | Anchor, spec: SymmetrySpec, options: AlignOptions, near: bool = False
) -> Transform:
    """Return the transform that brings a mean nearest to `home`; where it is `near`, no unit changes places."""
    pair = Pair(mean, home if isinstance(home, Anchor) else Anchor(home, spec, checked=True), options)
    found = pair.resolved(identity_transform(spec).elements) if near else pair.solved()
    return pair.transform(one for one in found.values() if one.after < one.before)


def _mean_of(models: Sequence[Params], shares: Sequence[float]) -> Params:
    """Return the plain mean to compute with: in memory where the models are, else computed as it is read."""
    mean = MeanOf(models, shares, wide=True)
    return dict(mean) if all(isinstance(model, dict) for model in models) else mean


def _align_to_medoid(
    models: Sequence[Params], spec: SymmetrySpec, shares: Sequence[float], options: AlignOptions
) -> list[Alignment]:
    centre = Anchor(models[medoid(models, shares)], spec)
    return [align(model, centre, spec, options) for model in models]


def _a_little_apart(
    models: Sequence[Params], spec: SymmetrySpec, shares: Sequence[float], options: AlignOptions
) -> list[Alignment]:
    """Align models whose units all stay in their places to their plain mean; none where some lie farther apart.

    One renewal leaves them as near to each other as twenty.
    """
    mean = Anchor(_mean_of(models, shares), spec, checked=True)
    aligned = []
    for model in models:
        pair = Pair(model, mean, options)
        found = pair.in_place()
        if found is None or 2 * sum(one.after for one in found.values()) < sum(one.before for one in found.values()):
            return []
        aligned.append(pair.aligned(found))
        pair.forget()
    return aligned


def _align_to_consensus(
    models: Sequence[Params],
    spec: SymmetrySpec,
    shares: Sequence[float],
    options: AlignOptions,
    tolerance: float = 1e-2,
    max_renewals: int = 20,
) -> list[Alignment]:
    """Align every model to the mean, renew the mean, until the spread settles to a relative `tolerance`.

    Permutations are those of the start. To solve them anew in each renewal changed none, on models of own starts.
    """
    # Descent from the plain mean finds what is near; models in frames of their own have a mean that tells nothing,
    # and start from the medoid's frame. The spread of the two starts decides.
    at_medoid = _align_to_medoid(models, spec, shares, options)
    lowest = spread2([alignment.params for alignment in at_medoid], shares)
    plain = spread2(models, shares)
    if plain <= lowest:
        mean = Anchor(_mean_of(models, shares), spec, checked=True)
        starts = [align(model, mean, spec, options) for model in models]
    else:
        starts = at_medoid
    transforms = [start.transform for start in starts]
    members: Sequence[Params] = [start.params for start in starts]
    best, previous = at_medoid, min(plain, lowest)
    for _ in range(max_renewals):
        mean = Anchor(_mean_of(members, shares), spec, checked=True)
        pairs = [Pair(model, mean, options) for model in models]
        aligned = [
            pair.aligned(pair.resolved(transform.elements)) for pair, transform in zip(pairs, transforms, strict=True)
        ]
        transforms = [alignment.transform for alignment in aligned]
        members = [alignment.params for alignment in aligned]
        spread = spread2(members, shares)
        # With a pull to the identity a renewal may also lose what the one before it had gained.
        if spread < lowest:
            best, lowest = aligned, spread
        if previous - spread <= tolerance * previous:
            return best
        previous = spread
    warnings.warn(
        f"consensus: the spread still fell in the last of {max_renewals} renewals; the models are aligned, but not as "
        "near to each other as they could be",
        ConvergenceWarning,
        stacklevel=3,
    )
    return best


def _align_in_turn(
    models: Sequence[Params],
    spec: SymmetrySpec,
    shares: Sequence[float],
    align_pair: AlignPair,
    tree: bool,
    options: AlignOptions,
) -> list[Alignment]:
    """Join models two by two, the second moved to the first, until all are in one frame."""
    transforms = [identity_transform(spec) for _ in models]
    distances = [(0.0, 0.0) for _ in models]

    def join(left: "_Joined", right: "_Joined") -> "_Joined":
        share = right.weight + left.weight and right.weight / (left.weight + right.weight)
        alignment = align_pair(right.mean, left.mean, share)
        if not isinstance(alignment, Alignment):
            raise AlignmentError(
                f"align_pair: expected an Alignment, as align returns, found {type(alignment).__name__}; return one"
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
        Alignment(
            transform.apply(model), transform, *distance, identity_share(transform, lay_out(model, spec), options)
        )
        for model, transform, distance in zip(models, transforms, distances, strict=True)
    ]


@dataclass(frozen=True)
class _Joined:
    """Some of the models in one frame: their numbers, their mean, and their share of all."""

    members: tuple[int, ...]
    mean: Params
    weight: float


def merge(
    models: Iterable[Params],
    spec: SymmetrySpec,
    weights: Sequence[float] | None = None,
    anchor: str | Params = "consensus",
    align_pair: AlignPair | None = None,
    options: AlignOptions = DEFAULTS,
) -> dict[str, Tensor]:
    """Make one model of several: bring them into one frame, then take their weighted mean.

    Parameters: `models`, mappings from parameter name to tensor; `weights`, their shares, equal by default; `anchor`,
    any of `align_all` but `"global"`, or the parameters of a model to align all of them to; `align_pair` and `options`
    as in `align_all`. Where the spec has a residual stream to rotate, norms are folded first. Returns a new mapping in
    the types of the first model. Nothing is mutated.
    """
    check_is_spec(spec)
    models = alike(models)
    if not isinstance(anchor, str):
        check_parameters(anchor)
    if spec.residual is not None:
        models = [fold_norms(model, spec) for model in models]
        anchor = anchor if isinstance(anchor, str) else fold_norms(anchor, spec)
    if isinstance(anchor, str):
        aligned = align_all(models, spec, anchor, weights, None, align_pair, options)
    else:
        aligned = align_all(models, spec, "global", weights, reference=anchor, options=options)
    return weighted_mean([alignment.params for alignment in aligned], weights)
