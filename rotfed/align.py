"""Alignment: the transform that moves one model nearest to another without changing what it computes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotfed.descent import Anchor, Params, Problem, check_finite
from rotfed.errors import AlignmentError
from rotfed.spec import Resolution, SymmetrySpec
from rotfed.transform import Transform, identity_transform, to_work


@dataclass(frozen=True, eq=False)
class Alignment:
    """A source model in the anchor's frame.

    `params` compute what the source computes; `transform.apply(source)` gives them. Distances are Euclidean, over
    all floating-point parameters that source and anchor share; `distance_after <= distance_before` always.
    `identity_permutations` is the share of the permutations asked for, over groups and layers that the model has, that
    turned out to be the identity (1.0 where there is none).
    """

    params: dict[str, Tensor]
    transform: Transform
    distance_before: float
    distance_after: float
    identity_permutations: float


def align(
    source: Params,
    anchor: Params,
    spec: SymmetrySpec,
    groups: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    proper: bool = False,
    strength: float = 1.0,
    max_sweeps: int = 20,
) -> Alignment:
    """Move `source` as near to `anchor` as its symmetries allow: min_T ||T(source) - anchor||.

    Parameters
    ----------
    source, anchor
        Mappings from parameter name to tensor, as `model.state_dict()` gives. The two may name their parameters
        differently (another prefix, another version of transformers). Pass an `Anchor` to align many models to one.
    spec
        The bound spec of both.
    groups, layers
        The groups (names in the spec) and layers (numbers) to use, all by default. A group that all layers share
        is used only where all layers are.
    proper
        Rotations only, SO(n), instead of rotations and reflections, O(n).
    strength
        In (0, 1]: less than 1 pulls every element toward the identity, by a proximal term.
    max_sweeps
        Groups that act on the same parameters (rotation and scale of a head) are solved in turn, each exactly, until
        the distance settles: the joint optimum. 1 gives the sequential solution of arXiv 2502.00264, Algorithm 1.
        A ConvergenceWarning tells where the squared distance had not settled after several.

    Returns an `Alignment`; nothing is mutated. Computed in float64, returned in the types of `source`. Raises
    SpecError where the spec does not fit, AlignmentError for values that are not finite or options out of range.
    """
    check_options(strength, max_sweeps)
    if not (isinstance(anchor, Anchor) and anchor.spec == spec):
        anchor = Anchor(anchor, spec)
    numbers, chosen = select(spec, groups, layers)
    resolution = spec.resolve(source)
    if _layout(resolution) != _layout(anchor.resolution):
        raise AlignmentError(
            f"source: expected parameters laid out as the anchor's ({anchor.resolution.naming} names), found those of "
            f"{resolution.naming} names, which split them otherwise; load both with the same transformers"
        )
    problem = Problem(source, resolution, anchor, numbers, proper, strength)
    check_finite(source, "source")
    components = spec.components(chosen)
    solved = {component: problem.solve(component, max_sweeps) for component in components}

    def moved_by(kept: Sequence[tuple[str, ...]]) -> Transform:
        elements = {name: element for component in kept for name, element in solved[component].items()}
        return Transform(spec, {name: elements.get(name, problem.identity(name)) for name in spec.groups})

    transform = moved_by(components)
    params = transform.move(source)
    # Rounding to the source's own type (bfloat16) can cost more than the alignment of two near frames gains, and what
    # that type cannot hold is at no distance at all.
    kept = [c for c in components if problem.distance2(params, c) < problem.distance2(source, c)]
    if len(kept) < len(components):
        transform = moved_by(kept)
        params = transform.move(source)
    before, after = _distances(problem, params)
    return Alignment(params, transform, before, after, identity_share(transform, resolution, chosen, numbers))


def check_options(strength: float, max_sweeps: int = 1) -> None:
    """Raise AlignmentError for options of `align` that are out of range."""
    if not isinstance(strength, int | float) or not 0.0 < strength <= 1.0:
        raise AlignmentError(f"strength: expected a number in (0, 1], found {strength!r}; 1 aligns fully")
    if not isinstance(max_sweeps, int) or max_sweeps < 1:
        raise AlignmentError(f"max_sweeps: expected a whole number, at least 1, found {max_sweeps!r}")


def identity_share(
    transform: Transform,
    resolution: Resolution,
    groups: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
) -> float:
    """The share of the permutations that `align` uses under these options, in a model laid out so, that do nothing."""
    numbers, chosen = select(transform.spec, groups, layers)
    used = {
        (action.group.name, block.layer if action.group.layered else ...)
        for block in resolution.blocks
        for action in block.actions
        if action.group.kind_name == "permutation" and action.group.name in chosen and block.layer in (None, *numbers)
    }
    elements = {**identity_transform(transform.spec).elements, **transform.elements}
    stacks = [elements[name][layer].reshape(-1, transform.spec.groups[name].size) for name, layer in used]
    if not stacks:
        return 1.0
    hits = [(stack == torch.arange(stack.shape[-1], device=stack.device)).all(-1) for stack in stacks]
    return float(torch.cat(hits).double().mean())


def select(
    spec: SymmetrySpec, groups: Iterable[str] | None, layers: Iterable[int] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The layers and groups that the options of `align` choose."""
    numbers = spec.select_layers(layers)
    whole = len(numbers) == spec.num_layers
    return numbers, tuple(name for name in spec.select_groups(groups) if whole or spec.groups[name].layered)


def _layout(resolution: Resolution) -> list[object]:
    """What two resolutions must share for their blocks to be paired one by one."""
    return [
        (block.layer, block.shape, [(action.group.name, action.dual, action.order) for action in block.actions])
        for block in resolution.blocks
    ]


def _distances(problem: Problem, params: Params) -> tuple[float, float]:
    """Distance from the anchor over all shared floating-point parameters: of the source, and of `params`."""
    before2 = after2 = 0.0
    for mine, theirs in _shared(problem):
        anchor = to_work(problem.anchor[theirs]).to(problem.device)
        here = float((to_work(problem.source[mine]) - anchor).square().sum())
        before2 += here
        same = params[mine] is problem.source[mine]
        after2 += here if same else float((to_work(params[mine]) - anchor).square().sum())
    return math.sqrt(before2), math.sqrt(after2)


def _shared(problem: Problem) -> Iterator[tuple[str, str]]:
    """The names, in source and anchor, of the floating-point parameters that both have."""
    ours, theirs = problem.resolution, problem.anchor.resolution
    shared = [(ours.names[name], theirs.names[name]) for name in ours.names if name in theirs.names]
    shared += [(name, name) for name in ours.left_alone if name in set(theirs.left_alone)]
    for mine, other in shared:
        found, expected = problem.source[mine].shape, problem.anchor[other].shape
        if found != expected:
            raise AlignmentError(
                f"{mine}: expected shape {tuple(expected)} as in the anchor, found {tuple(found)}; "
                "align models of one architecture and one vocabulary"
            )
        if problem.source[mine].is_floating_point():
            yield mine, other
