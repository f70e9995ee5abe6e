"""Evidence that the frames of models differ: alignment has to gain more than it would gain on noise.

Models that were trained from one start lie a little apart, and alignment always finds a rotation that takes some of
that distance away, though no frame has turned. Of a small displacement without a direction of its own, a group of
dimension m that acts on D numbers takes away the share m / D: what lies in the m directions, of D, along which the
group moves a model. Training moves a model less than noise would in these directions, along which the loss is constant.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotfed.align import DEFAULTS, Alignment, AlignOptions, Component, Pair, Solved
from rotfed.errors import AlignmentError
from rotfed.frames import in_one_frame
from rotfed.matching import Anchor
from rotfed.mergers import normalised_weights
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params

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
class Framed:
    """Models in one frame where their frames differed, as they were elsewhere.

    `alignments`, one a model, in order; of models that are read from files each is made when it is asked for. `groups`,
    those in which some model was moved; `gain`, the largest gain over noise found; `far`, whether some models lay in
    frames of their own, rather than a little apart.
    """

    alignments: Sequence[Alignment]
    groups: tuple[str, ...] = ()
    gain: float = 0.0
    far: bool = False


Keep = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Puts tensors where they take no memory, and returns them as a mapping that reads them."""


def align_where_frames_differ(
    models: Sequence[Params],
    spec: SymmetrySpec,
    anchor: str,
    weights: Sequence[float],
    centre: Params | Anchor,
    min_gain: float = MIN_GAIN,
    options: AlignOptions = DEFAULTS,
    keep: Keep = dict,
) -> Framed:
    """Bring models into one frame, in those groups alone in which that gains more than it would on noise.

    Parameters: `anchor`, `"global"`, `"medoid"` or `"consensus"`, as in `align_all`; `weights`, the models' shares;
    `centre`, the model to align to under `"global"`, otherwise the plain mean of the models; `min_gain`, the least gain
    over noise for which a set of coupled groups is aligned: 0 aligns all; `keep`, where the elements that were found
    wait. Towards the global anchor each model is judged by itself, as privacy asks for; otherwise all are judged
    together. Models a little apart are then moved by the very moments that they were judged by: toward their plain
    mean, which one renewal leaves as near as twenty. Where no frame differs the very models come back.
    """
    shared = centre if isinstance(centre, Anchor) else Anchor(centre, spec, checked=True)
    if anchor == "global" and len(models) > 1:
        each = [align_where_frames_differ([m], spec, anchor, [1.0], shared, min_gain, options, keep) for m in models]
        groups = tuple(name for name in spec.groups if any(name in one.groups for one in each))
        far, gain = any(one.far for one in each), max(one.gain for one in each)
        return Framed(_Each([partial(_first, one) for one in each]), groups, gain, far)
    shares = normalised_weights(len(models), weights)
    pairs, tried, found = [], [], []
    for model in models:
        pair = Pair(model, shared, options)
        solved = {component: _kept(one, keep) for component, one in pair.solved().items()}
        # A pull to the identity is for moving, not for judging.
        judged = solved if options.strength == 1 else pair.solved(replace(options, strength=1.0, max_sweeps=1))
        pairs.append(pair)
        found.append(solved)
        tried.append(judged)
        pair.forget()
    gains = gains_over_noise(pairs, tried, shares)
    kept = {component: gain for component, gain in gains.items() if gain.over_noise > min_gain or not min_gain}
    largest = max((gain.over_noise for gain in gains.values()), default=0.0)
    groups = tuple(name for component in kept for name in component)
    far = any(gain.far for gain in kept.values())
    if len(models) == 2 and anchor != "global" and not far:
        # Of the mean of two models each is a half, so that no unit gains by another place: they tell it of each other.
        other = Pair(models[1], Anchor(models[0], spec, checked=True), options)
        apart = gains_over_noise([other], [other.solved(replace(options, strength=1.0, max_sweeps=1))], [1.0])
        beyond = {component: gain for component, gain in apart.items() if gain.far}
        kept, far = {**kept, **beyond}, bool(beyond)
        largest = max(largest, *(gain.over_noise for gain in beyond.values())) if beyond else largest
        groups = tuple(name for component in kept for name in component)
    alignments: Sequence[Alignment]
    if kept and anchor != "global" and (far or anchor == "medoid"):
        alignments = in_one_frame(models, spec, anchor, shares, None, replace(options, groups=groups))
    else:
        one_by_one = [partial(_aligned, pair, one, kept) for pair, one in zip(pairs, found, strict=True)]
        alignments = _Each(one_by_one)
        if all(isinstance(model, dict) for model in models):
            alignments = list(alignments)
    return Framed(alignments, groups, largest, far)


class _Each(Sequence[Alignment]):
    """Alignments that are made when they are asked for."""

    def __init__(self, made: Sequence[Callable[[], Alignment]]) -> None:
        self._made = made

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]()


def _first(one: Framed) -> Alignment:
    return one.alignments[0]


def _kept(one: Solved, keep: Keep) -> Solved:
    return replace(one, elements=keep(one.elements))


def _aligned(pair: Pair, solved: Mapping[Component, Solved], kept: Collection[Component]) -> Alignment:
    return pair.aligned({component: one for component, one in solved.items() if component in kept}, solved)


def check_min_gain(min_gain: float) -> float:
    """Raise AlignmentError for a `min_gain` that is no number from 0 on."""
    if isinstance(min_gain, bool) or not isinstance(min_gain, int | float) or not min_gain >= 0:
        raise AlignmentError(
            f"min_gain: expected a number from 0 on, found {min_gain!r}; 1 is the gain on noise, 0 always aligns"
        )
    return float(min_gain)


def gains_over_noise(
    pairs: Sequence[Pair], solved: Sequence[Mapping[Component, Solved]], shares: Sequence[float]
) -> dict[Component, Gain]:
    """Return how much of the squared distance from the anchor alignment takes away, in units of how much of noise.

    Parameters: `pairs`, models and the anchor that they share; `solved`, what was found for each; `shares`, the models'
    weights. Returns one gain for each set of coupled groups (see `SymmetrySpec.components`): about 1 times noise or
    less where only noise was turned. It is that of the part that gains most (queries and keys, values and outputs),
    over all layers together; infinitely more where units have changed places or signs, which noise does not bring
    about.
    """
    spec = pairs[0].spec
    discrete = {name for name, group in spec.groups.items() if group.kind.dimension(group.size) == 0}
    gains = {}
    for component in pairs[0].components:
        found = [one[component] for one in solved]
        moved = any(
            not torch.equal(one.elements[name], pairs[0].identity(name).to(one.elements[name]))
            for one in found
            for name in discrete & set(component)
        )
        if moved:
            gains[component] = Gain(_gain(pairs[0], found, shares, component).share, math.inf)
            continue
        parts = spec.components(set(component) - discrete)
        each = [_gain(pairs[0], found, shares, part) for part in parts]
        gains[component] = max(each, key=lambda gain: gain.over_noise, default=Gain(0.0, 0.0))
    return gains


def _gain(pair: Pair, found: Sequence[Solved], shares: Sequence[float], part: Iterable[str]) -> Gain:
    """Return what some groups took away, in all layers together."""
    names = set(part)
    parts = [(share, part) for one, share in zip(found, shares, strict=True) for part in one.distances]
    before = math.fsum(share * part.before for share, part in parts if part.groups & names)
    after = math.fsum(share * part.first for share, part in parts if part.groups & names)
    if not before > 0:
        return Gain(0.0, 0.0)
    numbers, dimensions = 0, {}
    for piece in pair.pieces:
        acting = [action.group for action in piece.actions if action.group.name in names]
        if not acting:
            continue
        numbers += piece.entries
        for group in acting:
            count = math.prod(group.batch[1:] if group.layered else group.batch) * group.kind.dimension(group.size)
            for layer in piece.layers:
                dimensions[group.name, layer if group.layered else None] = count
    share, dimension = 1 - after / before, sum(dimensions.values())
    return Gain(share, share * numbers / dimension if dimension else 0.0)
