"""Evidence that the frames of models differ: alignment has to gain more than it would gain on noise.

Models that were trained from one start lie a little apart, and alignment always finds a rotation that takes some of
that distance away, though no frame has turned. Of a small displacement without a direction of its own, a group of
dimension m that acts on D numbers takes away the share m / D: what lies in the m directions, of D, along which the
group moves a model. Training moves a model less than noise would in these directions, along which the loss is constant.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rotfed.align import Alignment, align
from rotfed.anchors import align_all
from rotfed.descent import Anchor, Params
from rotfed.errors import AlignmentError
from rotfed.mergers import distance2, weighted_mean
from rotfed.spec import SymmetrySpec
from rotfed.transform import identity_transform, to_work

Component = tuple[str, ...]
"""Groups that share parameters, so that they are solved together."""

MIN_GAIN = 0.75
"""The gain over noise up to which models stay as they are, by default.

Measured over small ViTs: 0.4 to 0.75 in rounds in which alignment changes nothing, 0.75 to 3 in those that gain.
"""


class Gain(NamedTuple):
    """The share of the squared distance that alignment took away, and how many times the share of noise that is."""

    share: float
    over_noise: float

    @property
    def far(self) -> bool:
        """Whether models are so far apart that their plain mean is none of what they have in common."""
        return self.over_noise == math.inf or self.share > 0.5


@dataclass(frozen=True)
class Aligned:
    """Models in one frame where their frames differed, as they were elsewhere.

    `alignments`, one a model; `groups`, those in which some model was moved; `gain`, the largest gain over noise found;
    `far`, whether some models lay in frames of their own, rather than a little apart.
    """

    alignments: list[Alignment]
    groups: tuple[str, ...] = ()
    gain: float = 0.0
    far: bool = False


def align_where_frames_differ(
    models: Sequence[Params],
    spec: SymmetrySpec,
    anchor: str,
    weights: Sequence[float],
    reference: Anchor,
    min_gain: float = MIN_GAIN,
    **options: Any,
) -> Aligned:
    """What `align_all` gives, of the groups alone in which alignment gains more than it would on noise.

    Parameters: as in `align_all`, with all of `groups`, `layers`, `proper`, `strength` and `max_sweeps` given;
    `min_gain`, the least gain over noise for which a set of coupled groups is aligned: 0 aligns all. Towards the
    `"global"` anchor each model is judged by itself, as privacy asks for; otherwise all are judged together, by one
    sweep of alignment to their plain mean. Where no frame differs the very models come back.
    """
    if anchor == "global" and len(models) > 1:
        each = [
            align_where_frames_differ([model], spec, anchor, [1.0], reference, min_gain, **options) for model in models
        ]
        groups = tuple(name for name in spec.groups if any(name in one.groups for one in each))
        far, gain = any(one.far for one in each), max(one.gain for one in each)
        return Aligned([one.alignments[0] for one in each], groups, gain, far)
    centre = reference if anchor == "global" else Anchor(weighted_mean(models, weights), spec)
    tried = [align(model, centre, spec, **{**options, "strength": 1.0, "max_sweeps": 1}) for model in models]
    gains = gains_over_noise(models, tried, centre, weights, options["groups"], options["layers"])
    kept = {component: gain for component, gain in gains.items() if gain.over_noise > min_gain or not min_gain}
    largest = max((gain.over_noise for gain in gains.values()), default=0.0)
    if not kept:
        return Aligned([_unmoved(model, centre, spec) for model in models], gain=largest)
    groups = tuple(name for component in kept for name in component)
    aligned = align_all(models, spec, anchor, weights, reference, **{**options, "groups": groups})
    return Aligned(aligned, groups, largest, any(gain.far for gain in kept.values()))


def check_min_gain(min_gain: float) -> float:
    """Raise AlignmentError for a `min_gain` that is no number from 0 on."""
    if isinstance(min_gain, bool) or not isinstance(min_gain, int | float) or not min_gain >= 0:
        raise AlignmentError(
            f"min_gain: expected a number from 0 on, found {min_gain!r}; 1 is the gain on noise, 0 always aligns"
        )
    return float(min_gain)


def _unmoved(model: Params, anchor: Anchor, spec: SymmetrySpec) -> Alignment:
    distance = math.sqrt(distance2(model, anchor))
    return Alignment(dict(model), identity_transform(spec), distance, distance, 1.0)


def gains_over_noise(
    models: Sequence[Params],
    aligned: Sequence[Alignment],
    anchor: Anchor,
    weights: Sequence[float],
    groups: Iterable[str],
    layers: Iterable[int],
) -> dict[Component, Gain]:
    """What alignment took away of the models' squared distance from the anchor, also in units of what it does of noise.

    Parameters: `aligned`, the alignments of `models` to `anchor` over `groups` and `layers`; `weights`, the models'
    shares. Returns one gain for each set of coupled groups (see `SymmetrySpec.components`): about 1 times noise or less
    where only noise was turned. It is that of the part that gains most (queries and keys, values and outputs), over all
    layers together; infinitely more where units have changed places or signs, which noise does not bring about.
    """
    spec, numbers = anchor.spec, set(layers)
    discrete = {name for name, group in spec.groups.items() if group.kind.dimension(group.size) == 0}
    identity = identity_transform(spec).elements
    moved = {
        name
        for name in discrete
        for element in (alignment.transform.elements[name] for alignment in aligned)
        if not torch.equal(element, identity[name].to(element))
    }
    gains = {}
    for component in spec.components(groups):
        if moved & set(component):
            gains[component] = Gain(_gain(models, aligned, anchor, weights, component, numbers).share, math.inf)
            continue
        parts = spec.components(set(component) - discrete)
        found = [_gain(models, aligned, anchor, weights, part, numbers) for part in parts]
        gains[component] = max(found, key=lambda gain: gain.over_noise, default=Gain(0.0, 0.0))
    return gains


def _gain(
    models: Sequence[Params],
    aligned: Sequence[Alignment],
    anchor: Anchor,
    weights: Sequence[float],
    part: Collection[str],
    layers: Collection[int],
) -> Gain:
    """What some groups took away, in all layers together."""
    before = after = 0.0
    numbers, dimensions = 0, {}
    for block, target in zip(anchor.resolution.blocks, anchor.blocks, strict=True):
        acting = [action.group for action in block.actions if action.group.name in part]
        if not acting or block.layer not in (None, *layers):
            continue
        numbers += target.numel()
        for group in acting:
            count = math.prod(group.batch[1:] if group.layered else group.batch)
            dimensions[group.name, block.layer if group.layered else None] = count * group.kind.dimension(group.size)
        for model, alignment, weight in zip(models, aligned, weights, strict=True):
            before += weight * float((to_work(block.read(model)) - target).square().sum())
            after += weight * float((to_work(block.read(alignment.params)) - target).square().sum())
    if not before > 0:
        return Gain(0.0, 0.0)
    share, dimension = 1 - after / before, sum(dimensions.values())
    return Gain(share, share * numbers / dimension if dimension else 0.0)
