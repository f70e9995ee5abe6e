"""Alignment: the transform that moves one model nearest to another without changing what it computes.

Groups that share no parameter are solved apart, exactly. Groups that do are solved in turn, each exactly with the
others held. Permutations come first: which head is which has to be known before a head is rotated.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rotfed.errors import AlignmentError, ConvergenceWarning, TransformError
from rotfed.layout import Layer, Layout, lay_out
from rotfed.matching import (
    Anchor,
    pair_plain,
    pair_turning,
    plain_units_stay,
    turning_units_stay,
)
from rotfed.moments import Elements, Piece, Term, contract, merged, mixed_axes, per_index, per_layer, renewed, solve
from rotfed.solvers import Pull
from rotfed.spec import Group, SymmetrySpec
from rotfed.tensors import Params, check_finite, compute_type, meta_of, squared_difference
from rotfed.transform import Transform, identity_transform

# Sweeps over coupled groups end when one of them lowers the squared distance by less than this share of it.
_SETTLED = 1e-12

# Worth a warning: by more of the anchor's squared norm than this the last sweep still lowered the squared distance.
_STILL_FALLING = 1e-2

# So many sweeps between two pairings of units: more of them change distances that the next pairing changes again.
_BETWEEN = 3

# A pairing that lowers the squared distance by a smaller share of it is the last.
_WORTH_PAIRING = 1e-3

# Below this share of what it was, a squared distance is measured anew: the difference of larger ones has lost digits.
_MEASURED = 1e-3


@dataclass(frozen=True)
class AlignOptions:
    """How models are aligned.

    `groups` (names in the spec) and `layers` (numbers) are those to use, all by default; a group that all layers share
    is used only where all layers are. `reflections`: O(n), or rotations only, SO(n), and positive scales. `strength`
    in (0, 1]: less than 1 pulls every element toward the identity, by a proximal term. `max_sweeps`: groups that act on
    the same parameters (rotation and scale of a head) are solved in turn, each exactly, until the distance settles: the
    joint optimum. 1 gives the sequential solution of arXiv 2502.00264, Algorithm 1.
    """

    groups: Iterable[str] | None = None
    layers: Iterable[int] | None = None
    reflections: bool = True
    strength: float = 1.0
    max_sweeps: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.strength, bool) or not isinstance(self.strength, int | float) or not 0 < self.strength <= 1:
            raise AlignmentError(f"strength: expected a number in (0, 1], found {self.strength!r}; 1 aligns fully")
        if type(self.max_sweeps) is not int or self.max_sweeps < 1:
            raise AlignmentError(f"max_sweeps: expected a whole number, at least 1, found {self.max_sweeps!r}")
        if not isinstance(self.reflections, bool):
            raise AlignmentError(f"reflections: expected True or False, found {self.reflections!r}")
        for name in ("groups", "layers"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))

    def select(self, spec: SymmetrySpec) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the layers and groups of a spec that are used. Raises SpecError for those that it lacks."""
        numbers = spec.select_layers(self.layers)
        whole = len(numbers) == spec.num_layers
        return numbers, tuple(name for name in spec.select_groups(self.groups) if whole or spec.groups[name].layered)


DEFAULTS = AlignOptions()


@dataclass(frozen=True, eq=False)
class Alignment:
    """A source model in the anchor's frame.

    `params` compute what the source computes; `transform.apply(source)` gives them. Distances are Euclidean, over
    all floating-point parameters that source and anchor share; `distance_after <= distance_before` always.
    `identity_permutations` is the share of the permutations asked for, over groups and layers that the model has, that
    turned out to be the identity (1.0 where there is none).
    """

    params: Params
    transform: Transform
    distance_before: float
    distance_after: float
    identity_permutations: float


def align(source: Params, anchor: Params | Anchor, spec: SymmetrySpec, options: AlignOptions = DEFAULTS) -> Alignment:
    """Move `source` as near to `anchor` as its symmetries allow: min_T ||T(source) - anchor||.

    Parameters
    ----------
    source, anchor
        Mappings from parameter name to tensor, as `model.state_dict()` gives. The two may name their parameters
        differently (another prefix, another version of transformers). Pass an `Anchor` to align many models to one.
    spec
        The bound spec of both.
    options
        Which groups and layers, and how.

    Returns an `Alignment`; nothing is mutated, and parameters that nothing moves are the very same tensors. Products
    are in the weights' own type, half precision in float32; small matrices in float64. Raises SpecError where the spec
    does not fit, AlignmentError for values that are not finite. A ConvergenceWarning tells where the squared distance
    had not settled after several sweeps.
    """
    pair = Pair(
        source, anchor if isinstance(anchor, Anchor) and anchor.spec == spec else _anchor(anchor, spec), options
    )
    check_finite(source, "source")
    found = pair.solved()
    return pair.aligned(found)


def _anchor(anchor: Params | Anchor, spec: SymmetrySpec) -> Anchor:
    return Anchor(anchor.params if isinstance(anchor, Anchor) else anchor, spec)


Component = tuple[str, ...]
"""Groups that share parameters, so that they are solved together."""


@dataclass(frozen=True)
class Solved:
    """The elements of coupled groups that bring a source nearest, and what they gain.

    `distances` holds one entry for each set of blocks on which the same groups act. `fell` is the share of the anchor's
    squared norm, `norm2`, by which the last sweep lowered the squared distance, over the blocks whose values a group
    changes.
    """

    elements: Mapping[str, Tensor]
    distances: tuple["Distances", ...]
    fell: float = 0.0
    norm2: float = 0.0

    @property
    def before(self) -> float:
        """The squared distance of the source over all blocks on which the groups act."""
        return math.fsum(found.before for found in self.distances)

    @property
    def after(self) -> float:
        """The squared distance once moved."""
        return math.fsum(found.after for found in self.distances)


class Distances(NamedTuple):
    """Squared distances over blocks on which the same groups act: before, after the first sweep, and after the last."""

    groups: frozenset[str]
    before: float
    first: float
    after: float


class Pair:
    """A source and an anchor, and how the elements between them are restricted."""

    def __init__(self, source: Params, anchor: Anchor, options: AlignOptions = DEFAULTS) -> None:
        self.source = source
        self.anchor = anchor
        self.options = options
        self.spec = anchor.spec
        self.layers, self.groups = options.select(self.spec)
        self.layout: Layout = lay_out(source, self.spec)
        if self.layout is not anchor.layout and self.layout.signature != anchor.layout.signature:
            raise AlignmentError(
                f"source: expected parameters laid out as the anchor's ({anchor.layout.naming} names), found those of "
                f"{self.layout.naming} names, which split them otherwise; load both with the same transformers"
            )
        blocks = zip(self.layout.blocks, anchor.layout.blocks, strict=True)
        self.pieces = [
            Piece(ours, theirs, positions, source, anchor.params)
            for ours, theirs in blocks
            if (positions := tuple(i for i, layer in enumerate(ours.layers) if layer is None or layer in self.layers))
        ]
        types = {tensor.dtype for params in (source, anchor.params) for tensor in meta_of(params).values()}
        double = compute_type(*types) == torch.float64
        # Rounding of the products, in their type: in a moment's null space, and as a gain.
        self.null_space = 1e-11 if double else 1e-6
        self.noise = 1e-13 if double else 1e-11
        self.settled = _SETTLED if double else 1e-4
        self._near: dict[Component, tuple[list[Term], set[Layer]]] = {}

    # ----------------------------------------------------------------------------------------------------------
    # The whole model

    def solved(self, options: AlignOptions | None = None) -> dict[Component, Solved]:
        """Return the elements of all groups, by the sets of groups that share parameters."""
        return {component: self.solve(component, options) for component in self.components}

    def in_place(self) -> dict[Component, Solved] | None:
        """Return the elements of all groups where every unit provably stays in its place, None elsewhere."""
        found = {}
        for component in self.components:
            descent, pieces = self._descent(component), self._touched(component)
            if not descent.stays(pieces):
                return None
            found[component] = descent.descend(pieces, descent.in_place())
        return found

    def resolved(self, start: Elements) -> dict[Component, Solved]:
        """Return the elements of all groups with permutations held, and the rest found from those of `start`."""
        return {c: self._descent(c).descend(self._touched(c), start) for c in self.components}

    @property
    def distance2(self) -> float:
        """The squared distance of the source from the anchor."""
        return math.fsum([self.rest2, *map(_distance2, self._touched(self.groups))])

    @cached_property
    def components(self) -> list[Component]:
        """The sets of chosen groups that share parameters."""
        return self.spec.components(self.groups)

    def transform(self, found: Iterable[Solved]) -> Transform:
        """Return the transform that has the elements found, and the identity elsewhere."""
        elements = {name: element for one in found for name, element in one.elements.items()}
        return Transform(self.spec, {name: elements.get(name, self.identity(name)) for name in self.spec.groups})

    def aligned(self, found: Mapping[Component, Solved], tried: Mapping[Component, Solved] | None = None) -> Alignment:
        """Return the source moved by what was found, where that brings it nearer also in its own type.

        `tried` are solutions of other components, which stay as they are.
        """
        kept = {component: one for component, one in found.items() if one.after < one.before}
        while True:
            transform = self.transform(kept.values())
            moved = transform.over(self.source)
            try:
                # Parameters that are read from elsewhere are moved when they are read, too.
                params: Params = dict(moved) if isinstance(self.source, dict) else moved
                before2, after2 = self._distances(kept, params)
            except TransformError as error:
                # A model that its type cannot hold is at no distance at all.
                lost = {name for name in kept if set(name) & set(error.groups)}
                if not lost:
                    raise
                kept = {name: one for name, one in kept.items() if name not in lost}
                continue
            worse = [name for name, after in after2.items() if not after < before2[name]]
            if not worse:
                break
            kept = {name: one for name, one in kept.items() if name not in worse}
        solved = {**(tried or {}), **found}
        before = math.fsum([self.rest2, *(one.before for one in solved.values())])
        after = math.fsum([self.rest2, *(after2.get(name, one.before) for name, one in solved.items())])
        share = identity_share(transform, self.layout, self.options)
        return Alignment(params, transform, before**0.5, max(0.0, after) ** 0.5, share)

    def _distances(self, kept: Mapping[Component, Solved], params: Params) -> tuple[dict[Component, float], ...]:
        """Return squared distances before and after by component; measured where moments do not tell them."""
        before = {name: one.before for name, one in kept.items()}
        after, types = {}, meta_of(self.source)
        for name, one in kept.items():
            held = {types[n].dtype for piece in self._touched(name) for n in piece.source_block.names[0]}
            half = any(dtype.itemsize < 4 for dtype in held)
            eps = max((torch.finfo(dtype).eps for dtype in held), default=0.0)
            # Rounding the result can cost more than the alignment of two near frames gains: up to this much.
            rounding = 2 * eps * one.norm2**0.5 * (one.before**0.5 + eps * one.norm2**0.5)
            told = not half and one.after >= _MEASURED * one.before and one.before - one.after > rounding
            after[name] = one.after if told else self._measured(name, params)
        return before, after

    def _measured(self, component: Component, params: Params) -> float:
        moved = [replace(piece, source=params) for piece in self._touched(component)]
        return math.fsum(map(_distance2, moved))

    @cached_property
    def rest2(self) -> float:
        """The squared distance over the shared floating-point parameters, or parts of them, on which no group acts."""
        acted: dict[str, list[Piece]] = {}
        for piece in self._touched(self.groups):
            for position in piece.positions:
                for name in piece.source_block.names[position]:
                    acted.setdefault(name, []).append(replace(piece, positions=(position,)))
        ours, theirs = meta_of(self.source), meta_of(self.anchor.params)
        found = []
        for mine, other in self._shared(ours, theirs):
            inside = acted.get(mine, [])
            names = inside[0].source_block.names[inside[0].positions[0]] if inside else (mine,)
            if sum(piece.entries for piece in inside) == sum(ours[name].numel() for name in names):
                continue
            found.append(squared_difference(self.source[mine], self.anchor.params[other]))
            if mine == names[0]:
                found += [-_distance2(piece) for piece in inside]
        return max(0.0, math.fsum(found))

    def _shared(self, ours: Params, theirs: Params) -> Iterator[tuple[str, str]]:
        """Yield the names, in source and anchor, of the parameters that both have."""
        mine, other = self.layout, self.anchor.layout
        shared = [(mine.names[name], other.names[name]) for name in mine.names if name in other.names]
        shared += [(name, name) for name in mine.unmatched if name in set(other.unmatched)]
        for one, two in shared:
            if ours[one].shape != theirs[two].shape:
                raise AlignmentError(
                    f"{one}: expected shape {tuple(theirs[two].shape)} as in the anchor, found "
                    f"{tuple(ours[one].shape)}; align models of one architecture and one vocabulary"
                )
        return iter(shared)

    # ----------------------------------------------------------------------------------------------------------
    # Coupled groups

    def identity(self, name: str) -> Tensor:
        """Return the neutral elements of a group."""
        group = self.spec.groups[name]
        return group.kind.identity(group.batch, group.size)

    def forget(self) -> None:
        """Drop what was read and contracted; it is read again where it is needed."""
        self.pieces = [replace(piece) for piece in self.pieces]
        self._near.clear()

    def _touched(self, groups: Iterable[str]) -> list[Piece]:
        names = list(groups)
        return [piece for piece in self.pieces if piece.touched_by(names)]

    def solve(self, component: Component, options: AlignOptions | None = None) -> Solved:
        """Return the elements of coupled groups that bring the source nearest, by other options where given."""
        pieces = self._touched(component)
        solver = self._descent(component, options)
        if not all(self.spec.groups[name].layered for name in component):
            return solver.solve(pieces)
        layers = {layer for piece in pieces for layer in piece.layers}
        if component not in self._near:
            near = solver.near(pieces)
            self._near[component] = near, solver.stay(pieces, near) if solver.permutations else layers
        near, stay = self._near[component]
        if stay == layers:
            return solver.descend(pieces, solver.in_place(), near)
        apart = [[here for p in pieces if (here := p.within(some)) is not None] for some in (stay, layers - stay)]
        found = solver.descend(apart[0], solver.in_place())
        return _joined(found, solver.solve(apart[1]), [layer for layer in layers - stay if layer is not None])

    def _descent(self, component: Component, options: AlignOptions | None = None) -> "Descent":
        groups = [self.spec.groups[name] for name in component]
        permutations = [group for group in groups if group.kind_name == "permutation"]
        # Groups that all layers share come last: embeddings and head tell them before anything else is known.
        rest = sorted((g for g in groups if g.kind_name != "permutation"), key=lambda group: not group.layered)
        return Descent(permutations, rest, self, options or self.options)


def _distance2(piece: Piece) -> float:
    """Return the squared distance of a piece's source from its anchor."""
    return float(contract(piece, []).distance2.sum())


def _joined(one: Solved, other: Solved, layers: Sequence[int]) -> Solved:
    """Return what was found in some layers together with what was found in the others, `layers`."""
    elements = {name: element.clone() for name, element in one.elements.items()}
    for name, element in elements.items():
        element[layers] = other.elements[name][layers].to(element)
    fell, norm2 = max(one.fell, other.fell), one.norm2 + other.norm2
    return Solved(elements, (*one.distances, *other.distances), fell, norm2)


@dataclass(frozen=True)
class Descent:
    """Coupled groups, solved in turn: permutations first, then `rest`, in order, until the distance settles."""

    permutations: list[Group]
    rest: list[Group]
    pair: Pair
    options: AlignOptions

    @property
    def pull(self) -> Pull:
        """The pull of every element toward the identity."""
        return Pull(self.options.strength, self.pair.null_space)

    def in_place(self) -> dict[str, Tensor]:
        """Return the neutral elements of all groups."""
        return {group.name: self.pair.identity(group.name) for group in (*self.permutations, *self.rest)}

    @property
    def names(self) -> list[str]:
        """The names of all groups."""
        return [group.name for group in (*self.permutations, *self.rest)]

    def near(self, pieces: Iterable[Piece]) -> list[Term]:
        """Return the moments of units that stay in their places, from which nothing else has to be read."""
        return merged(contract(piece, self.names) for piece in pieces)

    def element(self, group: Group, terms: Iterable[Term], elements: Elements) -> Tensor:
        """Return the optimal elements of one group with those of the others held."""
        return solve(group, terms, elements, self.pull, self.options.reflections, self.pair.noise)

    def nearest(self, group: Group, terms: Iterable[Term], elements: Elements) -> Tensor:
        """Return the optimal elements of one group under no restriction, for bounds that hold under every one."""
        return solve(group, terms, elements, Pull(null_space=self.pair.null_space), True, self.pair.noise)

    # --- units in their places ---------------------------------------------------------------------------------------

    def stay(self, pieces: Sequence[Piece], near: Sequence[Term]) -> set[Layer]:
        """Return the layers in which all units provably stay in their places, however heads turn; scales are held.

        A unit moved alone would lose more on the parts of it that no permutation inside it touches than it could gain
        on all of it together.
        """
        layers = {layer for piece in pieces for layer in piece.layers}
        mixing = [group for group in self.rest if group.kind.mixes]
        for position, group in enumerate(self.permutations):
            later = {other.name for other in self.permutations[position + 1 :]}
            own = [p for p in pieces if p.source_block.once(group.name) and not later & p.source_block.groups]
            if not own:
                continue
            turns = [other for other in mixing if any(p.touched_by([other.name]) for p in own)]
            found = self._in_place(group, own, turns, near, {})
            if mixing and found != layers:
                # They may be in their places, only turned.
                found |= self._in_place(group, own, turns, near, self._turned(mixing, near))
            # A group that all layers share stays in all of them, or in none.
            layers &= (found | {None}) if group.layered else (layers if found else set())
        return layers

    def _turned(self, mixing: Sequence[Group], near: Sequence[Term]) -> dict[str, Tensor]:
        elements: dict[str, Tensor] = {}
        for group in mixing:
            elements[group.name] = self.element(group, near, elements)
        return elements

    def _in_place(
        self, group: Group, pieces: Sequence[Piece], turns: Sequence[Group], near: Sequence[Term], elements: Elements
    ) -> set[Layer]:
        distances = [term.distances(elements) for term in near]
        moved2 = per_index(group, near, distances, group.size).clamp_min(0)
        names = [turn.name for turn in turns]
        if not names:
            return plain_units_stay(group, pieces, moved2, self.pair.anchor)
        together = not all(turn.indexed_by(group) for turn in turns)
        if together:
            # Units that turn together gain together: what all of a layer could gain bounds it.
            moved2 = per_layer(group, near, distances).clamp_min(0).expand_as(moved2)
        return turning_units_stay(group, pieces, names, moved2, self.pair.anchor, None if together else self.nearest)

    def stays(self, pieces: Sequence[Piece]) -> bool:
        """Return whether all units provably stay in their places, with what all layers share held."""
        if not self.permutations:
            return True
        within = replace(self, rest=[group for group in self.rest if group.layered])
        touched = [piece for piece in pieces if piece.touched_by(within.names)]
        return within.stay(touched, within.near(touched)) == {layer for piece in touched for layer in piece.layers}

    # --- units that change places ------------------------------------------------------------------------------------

    def solve(self, pieces: Sequence[Piece]) -> Solved:
        """Return the best elements found from units in their places and, unless they stay there, units paired up."""
        in_place, sweeps = self.in_place(), self.options.max_sweeps
        if self.stays(pieces):
            return self._said(self.descend(pieces, in_place))
        best = self.descend(pieces, in_place, max_sweeps=1)
        paired = self._pair_up(pieces)
        if not all(_same(paired[name], in_place[name]) for name in paired):
            # The pairing is solved before the rest is known, so the distance at the end decides whether it holds.
            best = min(best, self.descend(pieces, paired, max_sweeps=1), key=lambda found: found.after)
        for _ in range(sweeps if len(self.permutations) > 1 else 0):
            # With everything else known each permutation sees all of its parameters; what is known grows with sweeps.
            again = self._pair_again(pieces, best.elements)
            if all(_same(again[group.name], best.elements[group.name]) for group in self.permutations):
                break
            found = self.descend(pieces, again, max_sweeps=min(sweeps, _BETWEEN))
            if found.after >= best.after * (1 - _WORTH_PAIRING):
                best = min(best, found, key=lambda one: one.after)
                break
            best = found
        return self._said(self.descend(pieces, best.elements) if sweeps > 1 else best)

    def _said(self, best: Solved) -> Solved:
        if best.fell > _STILL_FALLING and self.options.max_sweeps > 1:
            warnings.warn(
                f"{', '.join(self.names)}: the squared distance fell by another {best.fell:.1%} of the anchor's "
                f"squared norm in the last of {self.options.max_sweeps} sweeps; the models are aligned, but not as "
                "near as they could be: raise max_sweeps",
                ConvergenceWarning,
                stacklevel=2,
            )
        return best

    def _pair_up(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """Return a start: permutations from the outside in, each from what the ones still unsettled leave in place."""
        known = {group.name: self.pair.identity(group.name) for group in self.rest}
        for position, group in enumerate(self.permutations):
            unsettled = [other.name for other in self.permutations[position:]]
            # Embeddings and head, which nothing else touches, tell the turn of the residual stream; a key, which its
            # query heads do not touch, tells theirs.
            for number, other in reversed(list(enumerate(self.rest))):
                closed = [*unsettled, *(g.name for g in self.rest[:number])]
                free = [p for p in pieces if p.touched_by([other.name]) and not p.touched_by(closed)]
                held = {name: element for name, element in known.items() if name != other.name}
                known[other.name] = self.element(other, [contract(p.under(held), [other.name]) for p in free], {})
            own = [p for p in pieces if p.touched_by([group.name]) and not p.touched_by(unsettled[1:])]
            known[group.name] = self._pair_one(group, known, own)
        return known

    def _pair_again(self, pieces: Sequence[Piece], elements: Elements) -> dict[str, Tensor]:
        """Return the permutations solved anew in turn, with the elements of all other groups held."""
        known = dict(elements)
        for group in self.permutations:
            known[group.name] = self._pair_one(group, known, [p for p in pieces if p.touched_by([group.name])])
        return known

    def _pair_one(self, group: Group, known: Elements, pieces: Sequence[Piece]) -> Tensor:
        """Return one permutation: of plain units, or of units each of which may also turn in a way of its own."""
        inner = [other for other in self.rest if other.indexed_by(group)]
        scales = [other.name for other in inner if _is_factor(other, group)]
        turns = [other.name for other in inner if other.name not in scales]
        left = {*(other.name for other in inner), group.name}
        outer = {name: element for name, element in known.items() if name not in left}
        pieces = [piece.under(outer) for piece in pieces if piece.source_block.once(group.name)]
        if not pieces:
            return self.pair.identity(group.name)
        if turns:
            return pair_turning(group, pieces, turns, scales, self.element, self.pull)
        return pair_plain(group, pieces, scales, self.pull)

    # --- groups that turn and scale ----------------------------------------------------------------------------------

    def descend(
        self,
        pieces: Sequence[Piece],
        start: Elements,
        near: Sequence[Term] | None = None,
        max_sweeps: int | None = None,
    ) -> Solved:
        """Solve the groups that turn and scale in turn, permutations held, until the squared distance settles.

        Parameters: `near`, the moments of `pieces`, where they are known and no unit has changed places.
        """
        sweeps = max_sweeps or self.options.max_sweeps
        held = {group.name: start[group.name] for group in self.permutations}
        names = [group.name for group in self.rest]
        if any(len(mixed_axes(piece, names)) > 1 for piece in pieces):
            return self._descend_by_turns(pieces, held, start, sweeps)
        moved = {name: element for name, element in held.items() if not _same(element, self.pair.identity(name))}
        terms = near
        if terms is None:
            terms = merged(contract(piece.under(moved), self.names) for piece in pieces)
        elements = {name: start[name] for name in names}
        norm2 = _anchor_norm2(terms)
        best, first, after, fell = self._sweeps(self.rest, terms, elements, sweeps, norm2)
        before = terms if not moved else merged(contract(piece, self.names) for piece in pieces)
        groups = [frozenset(action.group.name for action in term.actions) for term in before]
        came = [float(term.distance2.sum()) for term in before]
        return Solved({**held, **best}, tuple(map(Distances, groups, came, first, after)), fell, norm2)

    def _sweeps(
        self, groups: Sequence[Group], terms: Sequence[Term], start: Elements, max_sweeps: int, norm2: float
    ) -> tuple[dict[str, Tensor], list[float], list[float], float]:
        """Solve groups in turn, from moments, until the squared distance settles.

        Returns the best elements, the squared distances by term after the first sweep and with the best elements, and
        the share of the norm that the last sweep gained.
        """
        elements = dict(start)
        factors = [group.name for group in groups if group.kind.multiplies]
        first: list[float] = []
        best, after, previous, fell = dict(start), first, math.inf, 0.0
        for _ in range(max_sweeps if len(groups) > 1 else 1):
            seen = {name: elements[name] for name in factors}
            for group in groups:
                elements[group.name] = self.element(group, terms, elements)
            found = [float(term.distances(elements).sum()) for term in terms]
            distance2 = math.fsum(found)
            first = first or found
            # With a pull to the identity a sweep may also lose: the pull is to the identity, not to the last sweep.
            if distance2 < previous:
                best, after = dict(elements), found
            if distance2 >= previous - self.pair.settled * abs(previous):
                return best, first, after, 0.0
            # A rotation that was found for factors a share e away gains some e^2 of what it turns by a second solution.
            change2 = max(
                (float((elements[name] / was - 1).abs().max()) ** 2 for name, was in seen.items()), default=0.0
            )
            if change2 < self.pair.settled and change2 * norm2 < distance2:
                return best, first, after, 0.0
            fell = 0.0 if previous == math.inf else (previous - distance2) / norm2
            previous = distance2
        return best, first, after, fell

    def _descend_by_turns(self, pieces: Sequence[Piece], held: Elements, start: Elements, max_sweeps: int) -> Solved:
        """Descend where two groups mix different axes of one block: what all layers share, and what each has inside.

        The moments of one side depend on the elements of the other: those of blocks on which both act are contracted
        anew in each sweep.
        """
        inner = [group for group in self.rest if group.layered]
        outer = [group for group in self.rest if not group.layered]
        inside, outside = ([group.name for group in groups] for groups in (inner, outer))
        names = [*inside, *outside]
        # Where a group acts on two axes its problem is not linear in its element: it is found from the other blocks.
        twice = [p for p in pieces if any(not p.source_block.once(g) for g in outside if p.touched_by([g]))]
        once = [p.under(held) for p in pieces if not any(p is other for other in twice)]
        still = math.fsum(_distance2(p) for p in once if not p.touched_by(names))
        crossed = [p for p in once if p.touched_by(outside) and p.touched_by(inside)]
        within = [contract(p, inside) for p in crossed]
        across = [contract(p, outside) for p in crossed]
        alone = merged(contract(p, inside) for p in once if p.touched_by(inside) and not p.touched_by(outside))
        fixed = merged(contract(p, outside) for p in once if p.touched_by(outside) and not p.touched_by(inside))
        norm2 = _anchor_norm2([*within, *alone, *fixed])
        elements = {name: start[name] for name in names}
        best, first, previous, fell = dict(elements), math.inf, math.inf, 0.0
        for _ in range(max_sweeps):
            known = {name: elements[name] for name in outside}
            seen = [renewed(term, p.under(known), inside) for term, p in zip(within, crossed, strict=True)]
            terms = merged([*alone, *seen])
            for group in inner:
                elements[group.name] = self.element(group, terms, elements)
            known = {name: elements[name] for name in inside}
            seen = [renewed(term, p.under(known), outside) for term, p in zip(across, crossed, strict=True)]
            terms = merged([*fixed, *seen])
            for group in outer:
                elements[group.name] = self.element(group, terms, elements)
            moved = {**held, **elements}
            squared = [still, *(float(term.distances(elements).sum()) for term in (*terms, *alone))]
            squared += [term.longer(elements) for term in within]
            distance2 = math.fsum([*squared, *(_distance2(p.under(moved)) for p in twice)])
            if distance2 < previous:
                best = dict(elements)
            if distance2 >= previous - self.pair.settled * abs(previous):
                fell = 0.0
                break
            fell = 0.0 if previous == math.inf else (previous - distance2) / norm2
            first, previous = (distance2 if first == math.inf else first), distance2
        before = math.fsum(map(_distance2, pieces))
        found = Distances(frozenset(self.names), before, first, min(distance2, previous))
        return Solved({**held, **best}, (found,), fell, norm2)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other.to(one.device))


def _anchor_norm2(terms: Iterable[Term]) -> float:
    """Return a squared norm to compare falls of the squared distance with: half of source's and anchor's together."""
    total = 0.0
    for term in terms:
        if term.inner is not None:
            total += float(term.energy.sum()) / 2
    return max(total, 1e-300)


def _is_factor(group: Group, units: Group) -> bool:
    """Return whether a group only multiplies each unit of a permutation by one number."""
    return group.kind_name == "scale" or (group.kind_name == "sign" and group.per == (*units.per, units.axis))


def identity_share(transform: Transform, layout: Layout, options: AlignOptions = DEFAULTS) -> float:
    """Return the share of the permutations used under these options, in a model laid out so, that do nothing."""
    numbers, chosen = options.select(transform.spec)
    used = {
        (action.group.name, layer if action.group.layered else ...)
        for block in layout.blocks
        for action in block.actions
        if action.group.kind_name == "permutation" and action.group.name in chosen
        for layer in block.layers
        if layer in (None, *numbers)
    }
    elements = {**identity_transform(transform.spec).elements, **transform.elements}
    stacks = [elements[name][layer].reshape(-1, transform.spec.groups[name].size) for name, layer in used]
    if not stacks:
        return 1.0
    hits = [(stack == torch.arange(stack.shape[-1], device=stack.device)).all(-1).cpu() for stack in stacks]
    return float(torch.cat(hits).double().mean())
