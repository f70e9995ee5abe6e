"""Alignment: the transform that moves one model nearest to another without changing what it computes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

import torch
from torch import Tensor

from rotfed.errors import AlignmentError
from rotfed.solvers import identity_radius, linear_assignment, optimal_scale, orthogonal_procrustes
from rotfed.spec import Block, Group, Resolution, SymmetrySpec
from rotfed.transform import Transform, act, to_work

Params = Mapping[str, Tensor]

# A gain in squared distance below this share of the squared norms is float64 rounding: keep the identity, to the bit.
_NOISE = 1e-13

# Sweeps over coupled groups end when one of them lowers the squared distance by less than this share of it.
_SETTLED = 1e-12


@dataclass(frozen=True)
class Alignment:
    """A source model in the anchor's frame.

    `params` compute what the source computes; `transform.apply(source)` gives them. Distances are Euclidean, over
    all floating-point parameters that source and anchor share; `distance_after <= distance_before` always.
    `identity_permutations` is the share of the permutations, over groups and layers, that turned out to be the
    identity (1.0 where none was asked for).
    """

    params: dict[str, Tensor]
    transform: Transform
    distance_before: float
    distance_after: float
    identity_permutations: float


class Anchor(Mapping[str, Tensor]):
    """Parameters to align to, with what many alignments to them share: float64 blocks and certificate radii."""

    def __init__(self, params: Params, spec: SymmetrySpec) -> None:
        self.params = params
        self.spec = spec
        self.resolution: Resolution = spec.resolve(params)
        check_finite(params, "anchor")
        self._radii: dict[tuple[str, int], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    @cached_property
    def blocks(self) -> list[Tensor]:
        """The anchor's blocks in float64, in the order of `resolution.blocks`."""
        return [to_work(block.read(self.params)) for block in self.resolution.blocks]

    def radius(self, group: str, index: int, units: Tensor) -> Tensor:
        """`identity_radius` of the anchor's units for one permutation of a group, computed once."""
        if (group, index) not in self._radii:
            self._radii[group, index] = identity_radius(units)
        return self._radii[group, index]


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

    Returns an `Alignment`; nothing is mutated. Computed in float64, returned in the types of `source`. Raises
    SpecError where the spec does not fit, AlignmentError for values that are not finite or options out of range.
    """
    check_options(strength, max_sweeps)
    if not (isinstance(anchor, Anchor) and anchor.spec == spec):
        anchor = Anchor(anchor, spec)
    numbers = spec.select_layers(layers)
    whole = len(numbers) == spec.num_layers
    chosen = tuple(name for name in spec.select_groups(groups) if whole or spec.groups[name].layered)
    problem = _Problem(source, spec.resolve(source), anchor, spec, numbers, proper, strength)
    check_finite(source, "source")
    components = spec.components(chosen)
    solved = {component: problem.solve(component, max_sweeps) for component in components}

    def moved_by(kept: Sequence[tuple[str, ...]]) -> Transform:
        elements = {name: element for component in kept for name, element in solved[component].items()}
        return Transform(spec, {name: elements.get(name, problem.identity(name)) for name in spec.groups})

    transform = moved_by(components)
    params = transform.apply(source)
    # Rounding to the source's own type (bfloat16) can cost more than the alignment of two near frames gains.
    kept = [c for c in components if problem.distance2(params, c) < problem.distance2(source, c)]
    if len(kept) < len(components):
        transform = moved_by(kept)
        params = transform.apply(source)
    before, after = problem.distances(params)
    return Alignment(params, transform, before, after, _identity_share(transform, chosen))


def check_options(strength: float, max_sweeps: int = 1) -> None:
    """Raise AlignmentError for options of `align` that are out of range."""
    if not 0.0 < strength <= 1.0:
        raise AlignmentError(f"strength: expected a number in (0, 1], found {strength}; 1 aligns fully")
    if max_sweeps < 1:
        raise AlignmentError(f"max_sweeps: expected at least 1, found {max_sweeps}")


def check_finite(params: Params, role: str) -> None:
    """Raise AlignmentError that names the first parameter with a value that is not finite."""
    for name, tensor in params.items():
        if tensor.is_meta:
            raise AlignmentError(f"{name}: expected values in the {role}, found a meta tensor; load the model first")
        if not tensor.is_floating_point():
            continue
        # torch has no isfinite for the float8 types.
        wide = tensor.float() if tensor.element_size() < 2 else tensor
        if not bool(wide.isfinite().all()):
            raise AlignmentError(
                f"{name}: expected finite values in the {role}, found NaN or infinity; leave this model out"
            )


def _identity_share(transform: Transform, groups: Iterable[str]) -> float:
    """The share of the chosen groups' permutations that are the identity."""
    stacks = [
        transform.elements[name].reshape(-1, transform.spec.groups[name].size)
        for name in groups
        if transform.spec.groups[name].kind_name == "permutation"
    ]
    if not stacks:
        return 1.0
    hits = [(stack == torch.arange(stack.shape[-1], device=stack.device)).all(-1) for stack in stacks]
    return float(torch.cat(hits).double().mean())


@dataclass(frozen=True)
class _Pair:
    """One parameter's part in a group's problem: source and anchor unfolded to `(*batch, n, m)`."""

    layer: int | EllipsisType
    source: Tensor
    anchor: Tensor
    dual: bool


@dataclass(frozen=True)
class _Problem:
    """A source and an anchor, block by block."""

    source: Params
    resolution: Resolution
    anchor: Anchor
    spec: SymmetrySpec
    layers: tuple[int, ...]
    proper: bool
    strength: float

    @cached_property
    def device(self) -> torch.device:
        return to_work(next(iter(self.source.values()))).device

    def identity(self, name: str) -> Tensor:
        group = self.spec.groups[name]
        return group.kind.identity(group.batch, group.size).to(self.device)

    def _touched(self, groups: Iterable[str]) -> list[tuple[Block, Tensor]]:
        """The blocks on which any of `groups` acts in the chosen layers, each with the anchor's values."""
        names = set(groups)
        return [
            (block, anchor.to(self.device))
            for block, anchor in zip(self.resolution.blocks, self.anchor.blocks, strict=True)
            if (block.layer is None or block.layer in self.layers)
            and any(action.group.name in names for action in block.actions)
        ]

    def solve(self, component: tuple[str, ...], max_sweeps: int) -> dict[str, Tensor]:
        """The elements of coupled groups that bring the source nearest, by exact steps in one group after another."""
        elements = {name: self.identity(name) for name in component}
        blocks = [(block, to_work(block.read(self.source)), anchor) for block, anchor in self._touched(component)]
        best, previous = dict(elements), math.inf
        for _ in range(max_sweeps if len(component) > 1 else 1):
            for name in component:
                others = {other: elements[other] for other in component if other != name}
                pairs = list(_pairs(name, others, blocks))
                elements[name] = self._solve_group(self.spec.groups[name], pairs)
            distance2 = sum(float((act(s, block, elements) - a).square().sum()) for block, s, a in blocks)
            # With a pull to the identity a sweep may also lose: the pull is to the identity, not to the last sweep.
            if distance2 < previous:
                best = dict(elements)
            if distance2 >= previous * (1 - _SETTLED):
                break
            previous = distance2
        return best

    def _solve_group(self, group: Group, pairs: list[_Pair]) -> Tensor:
        """The optimal element at every index of one group; the identity where nothing acts or nothing is gained."""
        if not pairs:
            return self.identity(group.name)
        return _SOLVERS[group.kind_name](self, group, pairs)

    def orthogonal(self, group: Group, pairs: list[_Pair]) -> Tensor:
        rotation = self.identity(group.name)
        cross = torch.zeros_like(rotation)
        energy = cross.new_zeros(group.batch)
        for pair in pairs:
            cross[pair.layer] += pair.anchor @ pair.source.mT
            energy[pair.layer] += pair.anchor.square().sum((-2, -1)) + pair.source.square().sum((-2, -1))
        best = orthogonal_procrustes(cross, self.proper, self.strength)
        gain = ((best - rotation) * cross).sum((-2, -1))
        return torch.where((gain > _NOISE * energy)[..., None, None], best, rotation)

    def permutation(self, group: Group, pairs: list[_Pair]) -> Tensor:
        order = self.identity(group.name).reshape(-1, group.size)
        stacked = torch.arange(len(order), device=self.device).reshape(group.batch)
        units: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for pair in pairs:
            indices = stacked[pair.layer].reshape(-1).tolist()
            columns = pair.source.shape[-1]
            sources = pair.source.reshape(-1, group.size, columns)
            anchors = pair.anchor.reshape(-1, group.size, columns)
            for index, source, anchor in zip(indices, sources, anchors, strict=True):
                together = units.setdefault(index, ([], []))
                together[0].append(source)
                together[1].append(anchor)
        for index, (mine, theirs) in units.items():
            source_units, anchor_units = torch.cat(mine, dim=-1), torch.cat(theirs, dim=-1)
            radius = self.anchor.radius(group.name, index, anchor_units)
            order[index] = linear_assignment(source_units, anchor_units, radius, self.strength)
        return order.reshape(group.kind.element_shape(group.batch, group.size))

    def scale(self, group: Group, pairs: list[_Pair]) -> Tensor:
        ones = self.identity(group.name)
        norm2, inner = (torch.zeros(2, *ones.shape, dtype=ones.dtype, device=self.device) for _ in range(2))
        for pair in pairs:
            norm2[int(pair.dual)][pair.layer] += pair.source.square().sum(-1)
            inner[int(pair.dual)][pair.layer] += (pair.source * pair.anchor).sum(-1)
        best = optimal_scale(norm2[0], inner[0], norm2[1], inner[1], self.strength, self.proper)
        return torch.where((best - 1).abs() > _NOISE, best, ones)

    def distance2(self, params: Params, component: tuple[str, ...]) -> float:
        """Squared distance from the anchor over the blocks that a component's groups act on."""
        blocks = self._touched(component)
        return sum(float((to_work(block.read(params)) - anchor).square().sum()) for block, anchor in blocks)

    def distances(self, params: Params) -> tuple[float, float]:
        """Distance from the anchor over all shared floating-point parameters: of the source, and of `params`."""
        before2 = after2 = 0.0
        for mine, theirs in self._shared():
            anchor = to_work(self.anchor[theirs]).to(self.device)
            here = float((to_work(self.source[mine]) - anchor).square().sum())
            before2 += here
            same = params[mine] is self.source[mine]
            after2 += here if same else float((to_work(params[mine]) - anchor).square().sum())
        return math.sqrt(before2), math.sqrt(after2)

    def _shared(self) -> Iterator[tuple[str, str]]:
        """The names, in source and anchor, of the floating-point parameters that both have."""
        ours, theirs = self.resolution, self.anchor.resolution
        shared = [(ours.names[name], theirs.names[name]) for name in ours.names if name in theirs.names]
        shared += [(name, name) for name in ours.left_alone if name in set(theirs.left_alone)]
        for mine, other in shared:
            found, expected = self.source[mine].shape, self.anchor[other].shape
            if found != expected:
                raise AlignmentError(
                    f"{mine}: expected shape {tuple(expected)} as in the anchor, found {tuple(found)}; "
                    "align models of one architecture and one vocabulary"
                )
            if self.source[mine].is_floating_point():
                yield mine, other


def _pairs(name: str, others: Mapping[str, Tensor], blocks: Iterable[tuple[Block, Tensor, Tensor]]) -> Iterator[_Pair]:
    """What the problem of one group consists of, with the coupled groups held at `others`."""
    for block, source, anchor in blocks:
        for action in block.actions:
            if action.group.name == name:
                layer = block.layer if action.group.layered and block.layer is not None else ...
                moved = act(source, block, others)
                yield _Pair(layer, action.unfold(moved), action.unfold(anchor), action.dual)


_SOLVERS: dict[str, Callable[[_Problem, Group, list[_Pair]], Tensor]] = {
    "orthogonal": _Problem.orthogonal,
    "permutation": _Problem.permutation,
    "scale": _Problem.scale,
}
