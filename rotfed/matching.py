"""Which unit is which: permutations of plain units, and of units each of which may turn in a way of its own.

Near an anchor every unit is in its place, and a certificate proves it at a small part of the cost of an assignment: if
each unit of the source is nearer to its counterpart than half the distance from there to any other unit of the anchor,
the identity is the optimum (triangle inequality). Lower bounds of these distances do, and are kept with the anchor.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rotfed.errors import SpecError
from rotfed.layout import Action, Layout, lay_out
from rotfed.moments import Elements, Piece, contract, per_index, solve
from rotfed.solvers import Pull, assign
from rotfed.spec import Group, SymmetrySpec
from rotfed.tensors import Params, check_finite, meta_of, small
from rotfed.transform import act

# A first bound goes by so many coordinates of each unit, or by a part of them where the units turn.
_COORDINATES, _PART = 64, 4


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


Solver = Callable[[str, Elements, list[Piece]], Tensor]
"""Solves one group, by name, with those of others held, from pieces."""


def units_of(group: Group, pieces: Iterable[Piece], by_source: bool, known: Elements) -> Iterator[tuple[Action, Tensor]]:
    """Yield how a permutation acts on pieces of one layer, with their units as `(batch, n, m)`, one unit a row."""
    for piece in pieces:
        action = piece.source_block.action(group.name)
        assert action is not None
        for layers, source, anchor in piece.chunks():
            x = act(source, piece.actions, known, layers) if by_source else anchor
            rows = action.unfold(x)
            # Where layers share the group, each of them gives a unit further coordinates.
            batch = math.prod(rows.shape[:-2]) if group.layered else math.prod(rows.shape[1:-2])
            rows = rows if group.layered else rows.movedim(0, -1)
            yield action, rows.reshape(batch, group.size, -1)


def by_layer(group: Group, pieces: Sequence[Piece]) -> Iterator[tuple[int | None, list[Piece]]]:
    """Yield the layers of a group with the pieces in each, or all pieces at once where the layers share the group."""
    if not group.layered:
        yield None, list(pieces)
        return
    for layer in sorted({layer for piece in pieces for layer in piece.layers if layer is not None}):
        yield layer, [here for piece in pieces if (here := piece.within([layer])) is not None]


def pair_plain(group: Group, pieces: Sequence[Piece], scales: Sequence[str], known: Elements, pull: Pull) -> Tensor:
    """Assign plain units by linear assignment: min_p sum_i ||source[p[i]] - anchor[i]||^2.

    Whatever may scale a unit, by one of the groups `scales`, counts up to that scale.
    """
    order = group.kind.identity(group.batch, group.size)
    flat = order.reshape(group.batch[0] if group.layered else 1, -1, group.size)
    for layer, here in by_layer(group, pieces):
        device = order.device
        gain: Tensor | None = None
        sides: dict[str, list[tuple[Tensor, Tensor, bool]]] = {}
        for piece in here:
            scale = next((a for name in scales if (a := piece.source_block.action(name)) is not None), None)
            source = torch.cat([rows for _, rows in units_of(group, [piece], True, known)], dim=-1)
            anchor = torch.cat([rows for _, rows in units_of(group, [piece], False, {})], dim=-1)
            device = source.device
            if scale is None:
                product = anchor @ source.mT
                gain = product if gain is None else gain.add_(product)
            else:
                sides.setdefault(scale.group.name, []).append((source, anchor, scale.dual))
        for name, found in sides.items():
            # One side is scaled by c, the other by 1/c: units are compared where both sides have one norm, and in
            # absolute value. Exact where two models differ by permutation and scale alone.
            duals = [dual for *_, dual in found]
            beside = _balanced if _group(pieces, name).kind_name == "scale" else _beside
            source = beside([source for source, *_ in found], duals)
            anchor = beside([anchor for _, anchor, _ in found], duals)
            product = (anchor @ source.mT).abs_()
            gain = product if gain is None else gain.add_(product)
        if gain is not None:
            for index, matrix in enumerate(gain):
                flat[layer or 0, index] = assign(matrix, pull).to(flat.device)
        order = order.to(device)
        flat = order.reshape(flat.shape)
    return order


def _group(pieces: Iterable[Piece], name: str) -> Group:
    return next(action.group for piece in pieces for action in piece.actions if action.group.name == name)


def _beside(sides: Sequence[Tensor], duals: Sequence[bool]) -> Tensor:
    return torch.cat(list(sides), dim=-1)


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
    outer: Elements,
    solver: Callable[[Group, list[object], Elements], Tensor],
    pull: Pull,
) -> Tensor:
    """Assign units by the distance left between two of them after each has been turned, and scaled, to the other.

    For orthogonal groups alone the gain is the nuclear norm of the units' cross-covariance.
    """
    apart = turned_distances(group, pieces, [*turns, *scales], outer, solver, range(group.size))
    order = [assign(-matrix / 2, pull) for matrix in apart.reshape(-1, group.size, group.size)]
    return torch.stack(order).reshape(group.kind.element_shape(group.batch, group.size))


def turned_distances(
    group: Group,
    pieces: Sequence[Piece],
    turns: Sequence[str],
    outer: Elements,
    solver: Callable[[Group, list[object], Elements], Tensor],
    shifts: Iterable[int],
) -> Tensor:
    """Return squared distances `(*batch, n, n)` of anchor unit i from source unit j, turned; infinite where not asked.

    All units are paired with the one `shift` places on at once, so that the solvers stay batched.
    """
    groups = {action.group.name: action.group for piece in pieces for action in piece.actions}
    place = torch.arange(group.size)
    distances: Tensor | None = None
    for shift in shifts:
        other = (place + shift) % group.size
        known = {**outer, group.name: other.expand(*group.batch, group.size)}
        terms = [contract(piece, [group.name, *turns], known) for piece in pieces]
        elements: dict[str, Tensor] = {}
        for name in turns:
            if name in groups:
                elements[name] = solver(groups[name], terms, elements)
        total = per_index(group, terms, [term.distances(elements) for term in terms], group.size)
        if distances is None:
            distances = total.new_full((*group.batch, group.size, group.size), math.inf)
        distances[..., place, other] = total
    assert distances is not None
    return distances


# ----------------------------------------------------------------------------------------------------------
# Certificates


def plain_units_stay(group: Group, pieces: Sequence[Piece], moved2: Tensor, anchor: Anchor) -> set[int | None]:
    """Return the layers in which every plain unit provably stays in its place.

    `moved2`, `(*batch, n)`, is each unit's squared distance from its counterpart. Layers that share a group are `None`.
    """
    stay: set[int | None] = set()
    for layer, here in by_layer(group, pieces):
        radii_needed = moved2[layer] if layer is not None else moved2
        needed = radii_needed.reshape(-1, group.size)
        if not bool(needed.any()):
            stay.add(layer)
            continue
        key = (group.name, layer, _signature(here))
        rows: Tensor | None = None
        bound = anchor.radii.get(key)
        if bound is None:
            rows = _anchor_rows(group, here, _COORDINATES)
            bound = anchor.radii[key] = _nearest2(rows, None) / 4
        open_ones = ~(needed < bound.to(needed.device))
        if bool(open_ones.any()):
            rows = _anchor_rows(group, here, None)
            for index, missing in enumerate(open_ones):
                wanted = missing.nonzero().flatten()
                if len(wanted):
                    bound[index, wanted] = _nearest2(rows[index : index + 1], wanted)[0] / 4
        if bool((needed < bound.to(needed.device)).all()):
            stay.add(layer)
    return stay


def _anchor_rows(group: Group, pieces: Sequence[Piece], coordinates: int | None) -> Tensor:
    """Return the anchor's units `(batch, n, m)`, by all of their coordinates or by some, evenly spread."""
    found = []
    for _, rows in units_of(group, pieces, False, {}):
        step = 1 if coordinates is None else max(1, rows.shape[-1] * len(pieces) // (2 * coordinates))
        found.append(rows[..., ::step])
    return torch.cat(found, dim=-1)


def _nearest2(rows: Tensor, wanted: Tensor | None) -> Tensor:
    """Return a lower bound of each unit's squared distance to the nearest other one, in float64.

    Parameters: `rows` of shape `(batch, n, m)`; `wanted`, the units asked for, all by default.
    """
    square = rows.square().sum(-1)
    chosen = torch.arange(rows.shape[-2], device=rows.device) if wanted is None else wanted
    # Cancellation leaves an error of some eps times the squares: take it off so that the bound stays one.
    safety = 32 * torch.finfo(rows.dtype).eps
    found = []
    for one, norm2 in zip(rows, square, strict=True):
        shrunk = norm2 * (1 - safety)
        apart = torch.addmm(shrunk[None, :], one[chosen], one.mT, alpha=-2)
        apart[torch.arange(len(chosen), device=rows.device), chosen] = torch.inf
        found.append(small(apart.amin(-1) + shrunk[chosen]).clamp_min(0))
    return torch.stack(found)


def turning_units_stay(
    group: Group,
    pieces: Sequence[Piece],
    turns: Sequence[str],
    moved2: Tensor,
    anchor: Anchor,
    solver: Callable[[Group, list[object], Elements], Tensor],
) -> set[int | None]:
    """Return the layers in which every unit that may turn provably stays in its place.

    Distances are those between orbits: of all that a unit can be turned to. `moved2` as for `plain_units_stay`, after
    each unit has been turned to its counterpart.
    """
    layers = sorted({layer for piece in pieces for layer in piece.layers if layer is not None}) if group.layered else []

    def staying(bound: Tensor) -> set[int | None]:
        near = (moved2 < bound.to(moved2.device)).flatten(1).all(1) if group.layered else (moved2 < bound.to(moved2.device))
        if not group.layered:
            return {None} if bool(near.all()) else set()
        return {layer for layer in layers if bool(near[layer])}

    wanted: set[int | None] = set(layers) if group.layered else {None}
    key = (group.name, tuple(turns), _signature(pieces))
    if key not in anchor.radii:
        anchor.radii[key] = _orbits_apart2(group, pieces, turns) / 4
    stay = staying(anchor.radii[key])
    if left := wanted - stay:
        here = [p for piece in pieces if (p := piece.within(left if group.layered else piece.layers)) is not None]
        exact = ("exact", group.name, tuple(turns), _signature(here))
        if exact not in anchor.radii:
            themselves = [Piece(p.anchor_block, p.anchor_block, p.positions, p.anchor, p.anchor) for p in here]
            apart = turned_distances(group, themselves, turns, {}, solver, range(1, group.size))
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
        actions = [(piece, action) for piece in pieces if (action := piece.source_block.action(name)) is not None]
        if not actions:
            continue
        turn = actions[0][1].group
        sizes = [size for size in turn.per if size != "layer"]
        if any(size not in sizes for size in group.per if size != "layer"):
            raise SpecError(f"{turn.name}: expected an element for each index of {group.name}, found {sizes}")
        keep = [sizes.index(size) for size in group.per if size != "layer"]
        unit = sizes.index(group.axis or "")
        others = [i for i in range(len(sizes)) if i not in (*keep, unit)]
        cross: Tensor | None = None
        for piece, action in actions:
            for layers, _, x in piece.chunks():
                rows = action.unfold(x)
                rows = rows.permute(0, *(1 + i for i in (*keep, *others, unit)), rows.ndim - 2, rows.ndim - 1)
                rows = rows.reshape(
                    len(rows), math.prod(rows.shape[1 : 1 + len(keep)]), -1, group.size * rows.shape[-2], rows.shape[-1]
                )
                part = _PART if rows.shape[-1] >= _PART * _COORDINATES else 1
                rows = rows[..., ::part]
                found = rows @ rows.mT
                if cross is None:
                    cross = found.new_zeros(turn.batch[0] if turn.layered else 1, *found.shape[1:])
                if turn.layered:
                    cross.index_add_(0, torch.tensor(layers, device=found.device), found)
                else:
                    cross += found.sum(0, keepdim=True)
        assert cross is not None
        n = cross.shape[-1] // group.size
        blocks = small(cross).unflatten(-1, (group.size, n)).unflatten(-3, (group.size, n))
        overlap = blocks.square().sum((-3, -1)).sqrt() * n**0.5
        norm2 = blocks.diagonal(dim1=-3, dim2=-1).sum(-1).diagonal(dim1=-2, dim2=-1)
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
    return tuple((piece.anchor_block.names[piece.positions[0]], piece.anchor_block.steps, piece.positions) for piece in pieces)
