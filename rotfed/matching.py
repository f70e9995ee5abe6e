"""Which unit is which: permutations of plain units, and of units each of which may turn in a way of its own.

Near an anchor every unit is in its place, and a certificate proves it at a small part of the cost of an assignment: if
each unit of the source is nearer to its counterpart than half the distance from there to any other unit of the anchor,
the identity is the optimum (triangle inequality). Lower bounds of these distances do, and are kept with the anchor.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rotfed.layout import Layer, Layout, lay_out
from rotfed.moments import Elements, Piece, Term, contract, merged, per_index
from rotfed.solvers import Pull, assign
from rotfed.spec import Group, SymmetrySpec
from rotfed.tensors import Params, check_finite, meta_of, small

# A first bound goes by so many coordinates of each unit, or by a part of them where the units turn.
_COORDINATES, _PART = 64, 4

# Assignments of fewer units take less time than threads do.
_WORTH_A_THREAD = 256


class Anchor:
    """Parameters to align to, with what many alignments to them share: their layout and certificates.

    Raises SpecError where the spec does not fit, AlignmentError for values that are not finite.
    """

    def __init__(self, params: Params, spec: SymmetrySpec, checked: bool = False) -> None:
        self.params = params
        self.spec = spec
        self.layout: Layout = lay_out(params, spec)
        self.radii: dict[object, Tensor] = {}
        if not checked:
            check_finite(params, "anchor")

    @property
    def meta(self) -> Params:
        """Names, shapes and types of the parameters."""
        return meta_of(self.params)


Found = TypeVar("Found")

Solver = Callable[[Group, Sequence[Term], Elements], Tensor]
"""Finds the nearest elements of one group from moments, with those of others held."""


def units_of(group: Group, piece: Piece) -> tuple[Tensor, Tensor]:
    """Return source and anchor of a piece in one layer as units `(batch, n, m)`, one unit a row.

    Where layers share the group, each of them gives a unit further coordinates.
    """
    found = [(source, anchor) for _, source, anchor in piece.chunks()]
    source, anchor = (_rows(group, piece, side) for side in zip(*found, strict=True))
    return source, anchor


def _rows(group: Group, piece: Piece, chunks: Sequence[Tensor]) -> Tensor:
    """Lay out what was read of some layers each as units `(batch, n, m)`."""
    action = piece.source_block.action(group.name)
    assert action is not None
    found = []
    for x in chunks:
        unfolded = action.unfold(x)
        if not group.layered:
            unfolded = unfolded.movedim(0, -1).flatten(-2).unsqueeze(0)
        found.append(unfolded.flatten(0, -3))
    return torch.cat(found, dim=-1) if len(found) > 1 else found[0]


def by_layer(group: Group, pieces: Sequence[Piece]) -> Iterator[tuple[Layer, list[Piece]]]:
    """Yield the layers of a group with the pieces in each, or all pieces at once where the layers share the group."""
    if not group.layered:
        yield None, list(pieces)
        return
    for layer in sorted({layer for piece in pieces for layer in piece.layers if layer is not None}):
        yield layer, [here for piece in pieces if (here := piece.within([layer])) is not None]


def pair_plain(group: Group, pieces: Sequence[Piece], scales: Sequence[str], pull: Pull) -> Tensor:
    """Assign plain units by linear assignment: min_p sum_i ||source[p[i]] - anchor[i]||^2.

    Whatever may scale a unit, by one of the groups `scales`, counts up to that scale.
    """
    order = group.kind.identity(group.batch, group.size)
    flat = order.reshape(group.batch[0] if group.layered else 1, -1, group.size)
    # The solver runs on one processor, beside others: as many layers are held at once as there are processors.
    workers = torch.get_num_threads() if group.size >= _WORTH_A_THREAD else 1
    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        for layers in _batched(by_layer(group, pieces), workers):
            gains = [_gain(group, here, scales) for _, here in layers]
            found = (pool.map if pool else map)(lambda gain: torch.stack([assign(one, pull) for one in gain]), gains)
            for (layer, _), element in zip(layers, found, strict=True):
                flat[layer or 0] = element.to(flat.device)
    return order


def _batched(found: Iterable[Found], count: int) -> Iterator[list[Found]]:
    """Yield lists of so many; `itertools.batched` is of Python 3.12."""
    rest = iter(found)
    while batch := list(itertools.islice(rest, count)):
        yield batch


def _gain(group: Group, pieces: Sequence[Piece], scales: Sequence[str]) -> Tensor:
    """Return the inner products `(batch, n, n)` of anchor and source units, up to what may scale each unit."""
    plain: list[tuple[Tensor, Tensor]] = []
    scaled: dict[Group, list[tuple[Tensor, Tensor, bool]]] = {}
    for piece in pieces:
        scale = next((a for name in scales if (a := piece.source_block.action(name)) is not None), None)
        source, anchor = units_of(group, piece)
        if scale is None:
            plain.append((source, anchor))
        else:
            scaled.setdefault(scale.group, []).append((source, anchor, scale.dual))
    gains = []
    if plain:
        source, anchor = (torch.cat(side, dim=-1) for side in zip(*plain, strict=True))
        gains.append(anchor @ source.mT)
    for factor, sides in scaled.items():
        # One side is scaled by c, the other by 1/c: units are compared where both sides have one norm, and in
        # absolute value. Exact where two models differ by permutation and scale alone.
        sources, anchors, duals = zip(*sides, strict=True)
        if factor.kind_name == "scale":
            gains.append((_balanced(anchors, duals) @ _balanced(sources, duals).mT).abs_())
        else:
            gains.append((torch.cat(anchors, dim=-1) @ torch.cat(sources, dim=-1).mT).abs_())
    total = gains[0]
    for gain in gains[1:]:
        total = total + gain
    return total


def _balanced(sides: Sequence[Tensor], duals: Sequence[bool]) -> Tensor:
    """Lay units `(batch, n, m)` side by side, scaled so that each has one norm on its direct and on its dual sides."""
    norm2 = [sides[0].new_full(sides[0].shape[:-1], torch.finfo(sides[0].dtype).tiny) for _ in range(2)]
    for units, dual in zip(sides, duals, strict=True):
        norm2[int(dual)] += units.square().sum(-1)
    factor = (norm2[1] / norm2[0])[..., None] ** 0.25
    scaled = [units / factor if dual else units * factor for units, dual in zip(sides, duals, strict=True)]
    return torch.cat(scaled, dim=-1)


def pair_turning(
    group: Group,
    pieces: Sequence[Piece],
    turns: Sequence[str],
    scales: Sequence[str],
    solver: Solver,
    pull: Pull,
) -> Tensor:
    """Assign units by the distance left between two of them after each has been turned, and scaled, to the other.

    For orthogonal groups alone the gain is the nuclear norm of the units' cross-covariance.
    """
    apart = turned_distances(group, pieces, [*turns, *scales], solver, range(group.size))
    order = [assign(-matrix / 2, pull) for matrix in apart.reshape(-1, group.size, group.size)]
    return torch.stack(order).reshape(group.kind.element_shape(group.batch, group.size))


def turned_distances(
    group: Group,
    pieces: Sequence[Piece],
    turns: Sequence[str],
    solver: Solver,
    shifts: Iterable[int],
) -> Tensor:
    """Return squared distances `(*batch, n, n)` of anchor unit i from source unit j, turned; infinite where not asked.

    All units are paired with the one `shift` places on at once, so that the solvers stay batched.
    """
    acting = {action.group.name: action.group for piece in pieces for action in piece.actions}
    groups = [acting[name] for name in turns if name in acting]
    names = [group.name, *turns]
    place = torch.arange(group.size)
    others = [(place + shift) % group.size for shift in shifts]
    elements = [other.expand(*group.batch, group.size) for other in others]
    # Where each layer has units of its own, all shifts are solved at once, as if they were further layers.
    count = group.batch[0] if group.layered else 1
    at_once = group.layered and all(piece.is_small for piece in pieces)
    if at_once:
        repeated = [merged(contract(piece.repeated(group.name, elements, count), names) for piece in pieces)]
    else:
        repeated = [merged(contract(p.under({group.name: e}), names) for p in pieces) for e in elements]
    totals: list[Tensor] = []
    for terms in repeated:
        wide = {one.name: _times(one, len(elements) if at_once else 1) for one in (group, *groups)}
        found: dict[str, Tensor] = {}
        for turn in groups:
            found[turn.name] = solver(wide[turn.name], terms, found)
        total = per_index(wide[group.name], terms, [term.distances(found) for term in terms], group.size)
        totals += total.unflatten(0, (len(elements), count)).unbind() if at_once else [total]
    distances = totals[0].new_full((*group.batch, group.size, group.size), math.inf)
    for other, total in zip(others, totals, strict=True):
        distances[..., place, other] = total
    return distances


def _times(group: Group, times: int) -> Group:
    """Return a group with so many times the layers."""
    return group if times == 1 else replace(group, batch=(times * group.batch[0], *group.batch[1:]))


# ----------------------------------------------------------------------------------------------------------
# Certificates


def plain_units_stay(group: Group, pieces: Sequence[Piece], moved2: Tensor, anchor: Anchor) -> set[Layer]:
    """Return the layers in which every plain unit provably stays in its place.

    `moved2`, `(*batch, n)`, is each unit's squared distance from its counterpart. Layers that share a group are `None`.
    """
    stay: set[Layer] = set()
    for layer, here in by_layer(group, pieces):
        needed = (moved2 if layer is None else moved2[layer]).reshape(-1, group.size)
        if bool(needed.any()) and not _proved(group, here, needed, (group.name, layer, _signature(here)), anchor):
            continue
        stay.add(layer)
    return stay


def _proved(group: Group, pieces: Sequence[Piece], needed: Tensor, key: object, anchor: Anchor) -> bool:
    """Return whether all units lie nearer to their counterparts than half way to any other of the anchor's units."""
    bound = anchor.radii.get(key)
    if bound is None:
        bound = torch.stack([_nearest2(rows)[0] for rows in _anchor_rows(group, pieces, _COORDINATES)]) / 4
        anchor.radii[key] = bound
    unproved = ~(needed < bound.to(needed.device))
    if not bool(unproved.any()):
        return True
    whole, part = (_anchor_rows(group, pieces, coordinates) for coordinates in (None, _COORDINATES))
    for index, (rows, some) in enumerate(zip(whole, part, strict=True)):
        wanted = unproved[index].nonzero().flatten().to(rows.device)
        # The nearest other unit is no farther than any: where one is too near for a few units, no more is to be proved.
        few = wanted[:64]
        nearest = _nearest2(some, few, which=True)[1]
        farthest2 = small((rows[few] - rows[nearest]).square().sum(-1)).to(needed.device)
        if bool((needed[index, few.to(needed.device)] > farthest2 / 4).any()):
            return False
        bound[index, wanted.to(bound.device)] = _nearest2(rows, wanted)[0] / 4
    return bool((needed < bound.to(needed.device)).all())


def _anchor_rows(group: Group, pieces: Sequence[Piece], coordinates: int | None) -> Tensor:
    """Return the anchor's units `(batch, n, m)`, by all of their coordinates or by about as many, evenly spread."""
    found = [_rows(group, piece, [anchor for _, anchor in piece.anchor_chunks()]) for piece in pieces]
    step = 1 if coordinates is None else max(1, sum(rows.shape[-1] for rows in found) // coordinates)
    return torch.cat([rows[..., ::step] for rows in found], dim=-1)


def _nearest2(rows: Tensor, wanted: Tensor | None = None, which: bool = False) -> tuple[Tensor, Tensor]:
    """Return a lower bound of units' squared distances to the nearest other one, in float64, and `which` that is.

    Parameters: `rows` of shape `(n, m)`; `wanted`, the units asked for, all by default.
    """
    norm2 = rows.square().sum(-1)
    # Cancellation leaves an error of some eps times the squares: take it off so that the bound stays one.
    norm2 = norm2 * (1 - 32 * torch.finfo(rows.dtype).eps)
    wanted = torch.arange(len(rows), device=rows.device) if wanted is None else wanted
    found = []
    # A few rows at a time stay in the processor's cache.
    for chosen in wanted.split(256):
        apart2 = torch.addmm(norm2[None, :], rows[chosen], rows.mT, alpha=-2)
        apart2[torch.arange(len(chosen), device=rows.device), chosen] = torch.inf
        nearest = apart2.min(-1) if which else (apart2.amin(-1), chosen)
        found.append((nearest[0] + norm2[chosen], nearest[1]))
    apart2, nearest_ones = (torch.cat(parts) for parts in zip(*found, strict=True))
    return small(apart2).clamp_min(0), nearest_ones


def turning_units_stay(
    group: Group,
    pieces: Sequence[Piece],
    turns: Sequence[str],
    moved2: Tensor,
    anchor: Anchor,
    solver: Solver | None,
) -> set[Layer]:
    """Return the layers in which every unit that may turn provably stays in its place.

    Distances are those between orbits: of all that a unit can be turned to. `moved2` as for `plain_units_stay`, after
    each unit has been turned to its counterpart. Where a first bound fails, the `solver` finds them exactly; None for
    units that turn together, of which it would find others.
    """
    layers = sorted({layer for piece in pieces for layer in piece.layers if layer is not None}) if group.layered else []

    def staying(bound: Tensor) -> set[Layer]:
        near = (
            (moved2 < bound.to(moved2.device)).flatten(1).all(1)
            if group.layered
            else (moved2 < bound.to(moved2.device))
        )
        if not group.layered:
            return {None} if bool(near.all()) else set()
        return {layer for layer in layers if bool(near[layer])}

    wanted: set[Layer] = set(layers) if group.layered else {None}
    key = (group.name, tuple(turns), _signature(pieces))
    if key not in anchor.radii:
        anchor.radii[key] = _orbits_apart2(group, pieces, turns) / 4
    stay = staying(anchor.radii[key])
    if (left := wanted - stay) and solver is not None:
        here = [p for piece in pieces if (p := piece.within(left if group.layered else piece.layers)) is not None]
        exact = ("exact", group.name, tuple(turns), _signature(here))
        if exact not in anchor.radii:
            apart = turned_distances(group, [piece.of_anchor() for piece in here], turns, solver, range(1, group.size))
            anchor.radii[exact] = apart.amin(-1).clamp_min(0) / 4
        stay |= staying(anchor.radii[exact]) & left
    return stay


def _orbits_apart2(group: Group, pieces: Sequence[Piece], turns: Sequence[str]) -> Tensor:
    """Return a lower bound of the squared distance of each of the anchor's units from the orbit of any other.

    min_R ||R s - a||^2 = ||s||^2 + ||a||^2 - 2 ||A S^T||_*, and a nuclear norm is at most sqrt(n) times the Frobenius
    norm. It is a bound also over some of the coordinates that are contracted, as is done here.
    """
    apart: Tensor | None = None
    for name in turns:
        cross: Tensor | None = None
        for piece in pieces:
            own, turn = piece.source_block.action(group.name), piece.source_block.action(name)
            if own is None or turn is None or own.axis is None or turn.axis is None:
                continue
            others = [dim for dim in turn.index if dim not in (*own.index, own.axis)]
            first = [0, *(1 + dim for dim in (*own.index, *others, own.axis, turn.axis))]
            for layers, x in piece.anchor_chunks():
                rows = x.permute(*first, *(dim for dim in range(x.ndim) if dim not in first))
                batch, spread = (math.prod(x.shape[1 + dim] for dim in dims) for dims in (own.index, others))
                rows = rows.reshape(len(rows), batch, spread, group.size * x.shape[1 + turn.axis], -1)
                part = _PART if rows.shape[-1] >= _PART * _COORDINATES else 1
                rows = rows[..., ::part]
                found = rows @ rows.mT
                if cross is None:
                    cross = found.new_zeros(turn.group.batch[0] if turn.group.layered else 1, *found.shape[1:])
                if turn.group.layered:
                    cross.index_add_(0, torch.tensor(layers, device=found.device), found)
                else:
                    cross += found.sum(0, keepdim=True)
        if cross is None:
            continue
        n = cross.shape[-1] // group.size
        blocks = cross.unflatten(-1, (group.size, n)).unflatten(-3, (group.size, n))
        overlap = small(blocks.square().sum((-3, -1))).sqrt() * n**0.5
        norm2 = small(blocks.diagonal(dim1=-3, dim2=-1).sum(-1)).diagonal(dim1=-2, dim2=-1)
        both = norm2[..., :, None] + norm2[..., None, :]
        # Cancellation leaves an error of some eps times the squares: take it off so that the bound stays one.
        found2 = (both * (1 - 1e-5) - 2 * overlap).sum(2)
        found2 = found2 if group.layered else found2.sum(0, keepdim=True)
        apart = found2 if apart is None else apart + found2
    assert apart is not None
    apart.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    return apart.amin(-1).clamp_min(0).reshape(*group.batch, group.size)


def _signature(pieces: Iterable[Piece]) -> object:
    """Return which parts of which parameters a certificate was computed over: it holds for these alone."""
    return tuple(
        (piece.anchor_block.names[piece.positions[0]], piece.anchor_block.steps, piece.positions) for piece in pieces
    )
