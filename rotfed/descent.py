"""Coordinate descent over the groups of a spec: the elements that bring a source nearest to an anchor.

Groups that share no parameter are solved apart, exactly. Groups that do are solved in turn, each exactly with the
others held. Permutations come first: which head is which has to be known before a head is rotated.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from rotfed.errors import AlignmentError, ConvergenceWarning
from rotfed.groups import CentredOrthogonal
from rotfed.solvers import (
    assign,
    identity_radius,
    linear_assignment,
    optimal_scale,
    orthogonal_procrustes,
    plane_procrustes,
    proximal_weight,
)
from rotfed.spec import Action, Block, Group, Resolution, SymmetrySpec, check_is_spec
from rotfed.transform import act, to_work

Params = Mapping[str, Tensor]
Elements = dict[str, Tensor]

# A gain in squared distance below this share of the squared norms is float64 rounding: keep the identity, to the bit.
_NOISE = 1e-13

# Sums of squares and their ratios stay finite up to here, and no float32 comes near.
_LARGEST = 1e70

# Sweeps over coupled groups end when one of them lowers the squared distance by less than this share of it.
_SETTLED = 1e-12

# Worth a warning: by more of the anchor's squared norm than this the last sweep still lowered the squared distance.
_STILL_FALLING = 1e-2


class Anchor(Mapping[str, Tensor]):
    """Parameters to align to, with what many alignments to them share: float64 blocks and certificate radii."""

    def __init__(self, params: Params, spec: SymmetrySpec) -> None:
        check_is_spec(spec)
        self.params = params
        self.spec = spec
        self.resolution: Resolution = spec.resolve(params)
        check_finite(params, "anchor")
        self._radii: dict[object, Tensor] = {}

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

    def radius(self, key: object, compute: Callable[[], Tensor]) -> Tensor:
        """Certificate radii of one permutation, or of all of a group, computed once for all that they depend on."""
        if key not in self._radii:
            self._radii[key] = compute()
        return self._radii[key]


def check_finite(params: Params, role: str) -> None:
    """Raise AlignmentError that names the first parameter with a value that is not finite, or that squares overflow."""
    for name, tensor in params.items():
        if tensor.is_meta:
            raise AlignmentError(f"{name}: expected values in the {role}, found a meta tensor; load the model first")
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # torch has no maximum for the float8 types.
        largest = float((tensor.float() if tensor.element_size() < 2 else tensor).detach().abs().amax())
        if not largest <= _LARGEST:
            finite = math.isfinite(largest)
            expected, found = (
                (f"values up to {_LARGEST:g}", f"{largest:.3g}") if finite else ("finite values", "NaN or infinity")
            )
            raise AlignmentError(f"{name}: expected {expected} in the {role}, found {found}; leave this model out")


@dataclass(frozen=True)
class Piece:
    """One block of source and anchor, in float64."""

    block: Block
    source: Tensor
    anchor: Tensor

    def action(self, name: str) -> Action | None:
        """How the group of a name acts on the block, None where it does not."""
        return next((action for action in self.block.actions if action.group.name == name), None)

    def once(self, name: str) -> bool:
        """Whether the group of a name acts on one axis alone; on two, its problem is not linear in its element."""
        return sum(action.group.name == name for action in self.block.actions) == 1

    def touched_by(self, names: Iterable[str]) -> bool:
        """Whether any of the groups acts on the block."""
        return any(self.action(name) is not None for name in names)


@dataclass(frozen=True)
class _Pair:
    """One parameter's part in a group's problem: source and anchor unfolded to `(*batch, n, m)`."""

    layer: int | EllipsisType
    source: Tensor
    anchor: Tensor
    dual: bool


class _Units(NamedTuple):
    """One parameter's part in an assignment: `(n, m)` rows of source and anchor, and what may scale each of them."""

    source: Tensor
    anchor: Tensor
    scale: Action | None


@dataclass(frozen=True)
class Problem:
    """A source and an anchor, block by block, and how the elements between them are restricted."""

    source: Params
    resolution: Resolution
    anchor: Anchor
    layers: tuple[int, ...]
    proper: bool
    strength: float

    @property
    def spec(self) -> SymmetrySpec:
        """The spec of both."""
        return self.anchor.spec

    @cached_property
    def device(self) -> torch.device:
        """Where the computation runs: where the source is."""
        return to_work(next(iter(self.source.values()))).device

    def identity(self, name: str) -> Tensor:
        """The neutral elements of a group."""
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

    def distance2(self, params: Params, component: Iterable[str]) -> float:
        """Squared distance from the anchor over the blocks that a component's groups act on."""
        return sum(
            float((to_work(block.read(params)) - anchor).square().sum()) for block, anchor in self._touched(component)
        )

    def solve(self, component: tuple[str, ...], max_sweeps: int) -> Elements:
        """The elements of coupled groups that bring the source nearest."""
        pieces = [Piece(block, to_work(block.read(self.source)), a) for block, a in self._touched(component)]
        groups = [self.spec.groups[name] for name in component]
        permutations = [group.name for group in groups if group.kind_name == "permutation"]
        # What all layers share comes last: it is known from embeddings and head before anything else is.
        rest = sorted(
            (g.name for g in groups if g.name not in permutations), key=lambda n: not self.spec.groups[n].layered
        )
        in_place = {name: self.identity(name) for name in component}
        paired = self._pair_up(permutations, rest, pieces)
        starts = [in_place]
        if any(not torch.equal(paired[name], in_place[name]) for name in component):
            starts.append(paired)
        # The pairing is solved before the rest is known, so the distance at the end decides whether it holds.
        best = min((self._descend(rest, start, pieces, max_sweeps) for start in starts), key=lambda found: found[0])
        for _ in range(max_sweeps if len(permutations) > 1 else 0):
            # With everything else known each permutation sees all of its parameters.
            again = self._pair_again(permutations, rest, best[1], pieces)
            if all(torch.equal(again[name], best[1][name]) for name in permutations):
                break
            found = self._descend(rest, again, pieces, max_sweeps)
            if found[0] >= best[0] * (1 - _SETTLED):
                break
            best = found
        if best[2] > _STILL_FALLING and max_sweeps > 1:
            warnings.warn(
                f"{', '.join(component)}: the squared distance fell by another {best[2]:.1%} of the anchor's "
                f"squared norm in the last of {max_sweeps} sweeps; the models are aligned, but not as near as they "
                "could be: raise max_sweeps",
                ConvergenceWarning,
                stacklevel=3,
            )
        return best[1]

    def _descend(
        self, groups: list[str], start: Elements, pieces: list[Piece], max_sweeps: int
    ) -> tuple[float, Elements, float]:
        """Solve groups in turn, permutations held, until the squared distance settles.

        Returns it, the elements, and by how much of the anchor's squared norm it fell in the last sweep.
        """
        permutations = {name: element for name, element in start.items() if name not in groups}
        pieces = [Piece(p.block, act(p.source, p.block, permutations), p.anchor) for p in pieces]
        elements = {name: start[name] for name in groups}
        norm2 = sum(float(piece.anchor.square().sum()) for piece in pieces) or 1.0
        best, previous, fell = dict(elements), math.inf, 0.0
        for _ in range(max_sweeps if len(groups) > 1 else 1):
            for name in groups:
                elements[name] = self._solve_group(name, elements, pieces)
            distance2 = _distance2(pieces, elements)
            # With a pull to the identity a sweep may also lose: the pull is to the identity, not to the last sweep.
            if distance2 < previous:
                best = dict(elements)
            if distance2 >= previous * (1 - _SETTLED):
                fell = 0.0
                break
            fell = 0.0 if previous == math.inf else (previous - distance2) / norm2
            previous = distance2
        return min(distance2, previous), {**permutations, **best}, fell

    def _solve_group(self, name: str, elements: Elements, pieces: Iterable[Piece]) -> Tensor:
        """The optimal element at every index of one group with the others held; the identity where nothing acts."""
        others = {other: element for other, element in elements.items() if other != name}
        pairs = list(_pairs(name, others, pieces))
        group = self.spec.groups[name]
        return _SOLVERS[group.kind_name](self, group, pairs) if pairs else self.identity(name)

    def _pair_up(self, permutations: list[str], rest: list[str], pieces: list[Piece]) -> Elements:
        """A start: permutations from the outside in, each from what the ones still unsettled leave in place."""
        known = {name: self.identity(name) for name in rest}
        for position, name in enumerate(permutations):
            open_ones = permutations[position:]
            # What turns the residual stream is known from embeddings and head, which nothing else touches; what turns
            # a query head of a shared key from the key, which the query heads do not touch.
            for number, other in reversed(list(enumerate(rest))):
                free = [piece for piece in pieces if not piece.touched_by([*open_ones, *rest[:number]])]
                known[other] = self._solve_group(other, known, free)
            own = [p for p in pieces if p.touched_by([name]) and not p.touched_by(open_ones[1:])]
            known[name] = self._pair_one(self.spec.groups[name], known, rest, own)
        return known

    def _pair_again(self, permutations: list[str], rest: list[str], known: Elements, pieces: list[Piece]) -> Elements:
        """The permutations solved anew in turn, with the elements of all other groups held."""
        known = dict(known)
        for name in permutations:
            own = [piece for piece in pieces if piece.touched_by([name])]
            known[name] = self._pair_one(self.spec.groups[name], known, rest, own)
        return known

    def _pair_one(self, group: Group, known: Elements, rest: list[str], pieces: list[Piece]) -> Tensor:
        """One permutation: of plain units, or of units each of which may also turn in a way of its own."""
        inner = [other for other in rest if self.spec.groups[other].indexed_by(group)]
        scales = [other for other in inner if self._is_factor(self.spec.groups[other], group)]
        turns = [other for other in inner if other not in scales]
        outer = {name: element for name, element in known.items() if name not in inner and name != group.name}
        pieces = [piece for piece in pieces if piece.once(group.name)]
        if not pieces:
            return self.identity(group.name)
        if turns:
            return self._pair_turning(group, outer, turns, scales, pieces)
        pairs = list(_pairs(group.name, outer, pieces))
        scaling = [next(filter(None, map(piece.action, scales)), None) for piece in pieces]
        return self._pair_plain(group, pairs, scaling, _signature(pieces))

    @staticmethod
    def _is_factor(group: Group, units: Group) -> bool:
        """Whether a group only multiplies each unit of a permutation by one number."""
        return group.kind_name == "scale" or (group.kind_name == "sign" and group.per == (*units.per, units.axis))

    def _pair_plain(self, group: Group, pairs: list[_Pair], scales: list[Action | None], signature: object) -> Tensor:
        """Linear assignment of units; what each unit may scale, as `scales` say, counts up to that scale."""
        order = self.identity(group.name).reshape(-1, group.size)
        stacked = torch.arange(len(order), device=self.device).reshape(group.batch)
        units: dict[int, list[_Units]] = {}
        for pair, scale in zip(pairs, scales, strict=True):
            columns = pair.source.shape[-1]
            sources = pair.source.reshape(-1, group.size, columns)
            anchors = pair.anchor.reshape(-1, group.size, columns)
            for index, source, anchor in zip(stacked[pair.layer].reshape(-1).tolist(), sources, anchors, strict=True):
                units.setdefault(index, []).append(_Units(source, anchor, scale))
        for index, parts in units.items():
            source = torch.cat([part.source for part in parts], dim=-1)
            anchor = torch.cat([part.anchor for part in parts], dim=-1)
            key = (group.name, index, signature, self.device)
            radius = self.anchor.radius(key, lambda anchor=anchor: identity_radius(anchor))  # type: ignore[misc]
            if not any(part.scale for part in parts):
                order[index] = linear_assignment(source, anchor, radius, self.strength)
            elif not bool(((source - anchor).square().sum(-1).sqrt() < radius).all()):
                order[index] = assign(_gain_up_to_scale(parts), self.strength)
        return order.reshape(group.kind.element_shape(group.batch, group.size))

    def _pair_turning(
        self, group: Group, outer: Elements, turns: list[str], scales: list[str], pieces: list[Piece]
    ) -> Tensor:
        """Assignment by the distance left between two units after each has been turned, and scaled, to the other.

        For orthogonal groups alone the gain is the nuclear norm of the units' cross-covariance.
        """

        def anchor_radii() -> Tensor:
            # Without a pull and with reflections the distances are the smallest, and so is the radius: safe for all.
            freest = replace(self, strength=1.0, proper=False)
            themselves = [Piece(piece.block, piece.anchor, piece.anchor) for piece in pieces]
            apart = freest._turned_distances(group, {}, turns, themselves, range(1, group.size))
            return 0.5 * apart.amin(-1).clamp_min(0).sqrt()

        in_place = self._turned_distances(group, outer, turns, pieces, range(1)).diagonal(dim1=-2, dim2=-1)
        # The triangle inequality between orbits, which depend on what turns: as in `identity_radius`.
        radii = self.anchor.radius((group.name, *turns, _signature(pieces), self.device), anchor_radii)
        if bool((in_place.sqrt() < radii).all()):
            return self.identity(group.name)
        apart = self._turned_distances(group, outer, turns + scales, pieces, range(group.size))
        order = [assign(-matrix / 2, self.strength) for matrix in apart.reshape(-1, group.size, group.size)]
        return torch.stack(order).reshape(group.kind.element_shape(group.batch, group.size))

    def _turned_distances(
        self, group: Group, outer: Elements, turns: list[str], pieces: list[Piece], shifts: Iterable[int]
    ) -> Tensor:
        """Squared distances `(*batch, n, n)` of anchor unit i from source unit j, turned; infinite where not asked.

        All units are paired with the one `shift` places on at once, so that the solvers stay batched.
        """
        distances = torch.full((*group.batch, group.size, group.size), math.inf, dtype=torch.float64)
        distances = distances.to(self.device)
        place = torch.arange(group.size, device=self.device)
        for shift in shifts:
            other = (place + shift) % group.size
            elements = {**outer, group.name: other.expand(*group.batch, group.size)}
            for name in turns:
                elements[name] = self._solve_group(name, elements, pieces)
            total = torch.zeros(*group.batch, group.size, dtype=torch.float64, device=self.device)
            for piece in pieces:
                action = piece.action(group.name)
                assert action is not None
                left = (act(piece.source, piece.block, elements) - piece.anchor).square()
                total[_layer(action, piece.block)] += action.unfold(left).sum(-1)
            distances[..., place, other] = total
        return distances

    def orthogonal(self, group: Group, pairs: list[_Pair]) -> Tensor:
        rotation = self.identity(group.name)
        cross, energy = self._cross(group, pairs)
        if isinstance(group.kind, CentredOrthogonal):
            basis = group.kind.complement(group.size).to(self.device)
            best = group.kind.extend(orthogonal_procrustes(basis.T @ cross @ basis, self.proper, self.strength))
        else:
            best = orthogonal_procrustes(cross, self.proper, self.strength)
        gain = ((best - rotation) * cross).sum((-2, -1))
        return torch.where((gain > _NOISE * energy)[..., None, None], best, rotation)

    def rope_planes(self, group: Group, pairs: list[_Pair]) -> Tensor:
        cross, energy = self._cross(group, pairs)
        best = plane_procrustes(cross, self.strength)
        even, odd = cross.diagonal(dim1=-2, dim2=-1).sum(-1), cross[..., 1, 0] - cross[..., 0, 1]
        gain = (best.cos() - 1) * even + best.sin() * odd
        return torch.where(gain > _NOISE * energy, best, torch.zeros_like(best))

    def _cross(self, group: Group, pairs: list[_Pair]) -> tuple[Tensor, Tensor]:
        """The sum of anchor times source, `(*batch, n, n)`, and of the squared norms of both, `(*batch,)`."""
        cross = torch.zeros(*group.batch, group.size, group.size, dtype=torch.float64, device=self.device)
        energy = cross.new_zeros(group.batch)
        for pair in pairs:
            cross[pair.layer] += pair.anchor @ pair.source.mT
            energy[pair.layer] += pair.anchor.square().sum((-2, -1)) + pair.source.square().sum((-2, -1))
        return cross, energy

    def scale(self, group: Group, pairs: list[_Pair]) -> Tensor:
        ones = self.identity(group.name)
        norm2, inner = self._scale_moments(ones, pairs)
        best = optimal_scale(norm2[0], inner[0], norm2[1], inner[1], self.strength, self.proper)
        return torch.where((best - 1).abs() > _NOISE, best, ones)

    def sign(self, group: Group, pairs: list[_Pair]) -> Tensor:
        ones = self.identity(group.name)
        if self.proper:
            return ones
        norm2, inner = self._scale_moments(ones, pairs)
        # The proximal pull is in units of the identity's own gain, as for a rotation.
        pull = proximal_weight(self.strength) * norm2.sum(0)
        return torch.where(inner.sum(0) + pull < -_NOISE * norm2.sum(0), -ones, ones)

    def _scale_moments(self, like: Tensor, pairs: list[_Pair]) -> tuple[Tensor, Tensor]:
        """Squared norms of the source and inner products with the anchor: direct first, dual second."""
        norm2, inner = (torch.zeros(2, *like.shape, dtype=like.dtype, device=self.device) for _ in range(2))
        for pair in pairs:
            norm2[int(pair.dual)][pair.layer] += pair.source.square().sum(-1)
            inner[int(pair.dual)][pair.layer] += (pair.source * pair.anchor).sum(-1)
        return norm2, inner


def _gain_up_to_scale(parts: list[_Units]) -> Tensor:
    """The inner products `(n, n)` of anchor and source units, where some parts count up to a factor of each unit.

    What a unit may scale, one side by c and the other by 1/c, is compared where both sides have one norm, and in
    absolute value: a candidate for the pairing, exact where two models differ by permutation and scale alone.
    """
    gain = sum((p.anchor @ p.source.mT for p in parts if p.scale is None), torch.zeros((), dtype=torch.float64))
    scaled: dict[str, list[_Units]] = {}
    for part in parts:
        if part.scale is not None:
            scaled.setdefault(part.scale.group.name, []).append(part)
    for found in scaled.values():
        duals = [part.scale is not None and part.scale.dual for part in found]
        sides = [
            list(zip(units, duals, strict=True)) for units in ([p.source for p in found], [p.anchor for p in found])
        ]
        side_by_side = _balanced if found[0].scale and found[0].scale.group.kind_name == "scale" else _beside
        source, anchor = (side_by_side(side) for side in sides)
        gain = gain + (anchor @ source.mT).abs()
    return gain


def _beside(sides: list[tuple[Tensor, bool]]) -> Tensor:
    return torch.cat([units for units, _ in sides], dim=-1)


def _balanced(sides: list[tuple[Tensor, bool]]) -> Tensor:
    """Units `(n, m)` side by side, scaled so that each has one norm on its direct and on its dual sides."""
    tiny = torch.finfo(torch.float64).tiny
    norm2 = [torch.full((len(sides[0][0]),), tiny, dtype=torch.float64, device=sides[0][0].device) for _ in range(2)]
    for units, dual in sides:
        norm2[int(dual)] += units.square().sum(-1)
    factor = (norm2[1] / norm2[0])[:, None] ** 0.25
    return torch.cat([units / factor if dual else units * factor for units, dual in sides], dim=-1)


def _signature(pieces: Iterable[Piece]) -> object:
    """Which parts of which parameters a certificate was computed over: it holds for these alone."""
    return tuple((piece.block.params, piece.block.steps) for piece in pieces)


def _distance2(pieces: Iterable[Piece], elements: Elements) -> float:
    return sum(float((act(piece.source, piece.block, elements) - piece.anchor).square().sum()) for piece in pieces)


def _layer(action: Action, block: Block) -> int | EllipsisType:
    """Where a block's share lies in what is stacked over the action's group."""
    return block.layer if action.group.layered and block.layer is not None else ...


def _pairs(name: str, others: Elements, pieces: Iterable[Piece]) -> Iterator[_Pair]:
    """What the problem of one group consists of, with the coupled groups held at `others`."""
    for piece in pieces:
        if (action := piece.action(name)) is not None:
            moved = act(piece.source, piece.block, others)
            yield _Pair(_layer(action, piece.block), action.unfold(moved), action.unfold(piece.anchor), action.dual)


_SOLVERS: dict[str, Callable[[Problem, Group, list[_Pair]], Tensor]] = {
    "orthogonal": Problem.orthogonal,
    "centred_orthogonal": Problem.orthogonal,
    "rope_planes": Problem.rope_planes,
    "scale": Problem.scale,
    "sign": Problem.sign,
}
