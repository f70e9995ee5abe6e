"""Moments: all that coupled groups need to know of two models, contracted once from their weights.

The squared distance of a moved source from its anchor is, summed over blocks,

    ||T s - a||^2 = ||s - a||^2 + (||T s||^2 - ||s||^2) - 2 (<T s, a> - <s, a>).

Contracting source and anchor over the axes on which no group acts leaves a `Term` that gives all three parts for every
T: the inner products, axis by axis of those that a group mixes, and the squared distances and norms, entry by entry of
those that it does not. Every sweep, certificate and distance follows from terms, without touching a weight again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotfed.groups import Moment
from rotfed.layout import Action, Block, Layer
from rotfed.solvers import Pull
from rotfed.spec import Group
from rotfed.tensors import Params, compute_type, small
from rotfed.transform import act

Elements = Mapping[str, Tensor]

# Layers are read together up to so many entries: below, calls cost more than copies do.
_TOGETHER = 2**17


@dataclass(frozen=True)
class Piece:
    """One block of source and anchor in some layers, which are read when they are used.

    `source_block` and `anchor_block` differ in the names of parameters alone.
    """

    source_block: Block
    anchor_block: Block
    positions: tuple[int, ...]
    source: Params
    anchor: Params

    @property
    def actions(self) -> tuple[Action, ...]:
        """How groups act on the block."""
        return self.source_block.actions

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the block."""
        return tuple(self.source_block.layers[position] for position in self.positions)

    @property
    def entries(self) -> int:
        """The number of entries of the block in all of its layers."""
        return self.source_block.size * len(self.positions)

    def touched_by(self, names: Iterable[str]) -> bool:
        """Return whether any of the groups acts on the block."""
        return any(name in self.source_block.groups for name in names)

    def within(self, layers: Iterable[Layer]) -> "Piece | None":
        """Return the piece in some layers alone, None where it has none of them."""
        wanted = set(layers)
        kept = tuple(p for p in self.positions if self.source_block.layers[p] in wanted)
        return Piece(self.source_block, self.anchor_block, kept, self.source, self.anchor) if kept else None

    def chunks(self) -> Iterator[tuple[tuple[Layer, ...], Tensor, Tensor]]:
        """Yield the layers by one or several: their numbers, source and anchor as `(layers, *shape)`, to compute with."""
        if self.entries <= _TOGETHER:
            yield self.layers, *self._small
            return
        step = max(1, _TOGETHER // self.source_block.size)
        for start in range(0, len(self.positions), step):
            yield self.layers[start : start + step], *self._read(self.positions[start : start + step])

    @cached_property
    def _small(self) -> tuple[Tensor, Tensor]:
        return self._read(self.positions)

    def _read(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        source = self.source_block.read(self.source, positions).detach()
        anchor = self.anchor_block.read(self.anchor, positions).detach()
        dtype = compute_type(source.dtype, anchor.dtype)
        return source.to(dtype), anchor.to(source.device, dtype)


@dataclass(frozen=True)
class Term:
    """What is left of a block after contraction, in float64.

    `inner`, `(layers, *kept, k)`, keeps the dimensions of the block on which groups act; all others have size 1. Along
    `mixed`, the one dimension whose coordinates a group adds up, it has the source's coordinates, along the last
    dimension the anchor's. `distance2` and `norm2`, `(layers, *kept, 1)`, are the squared distances and the source's
    squared norms, of size 1 along `mixed` too. Where no group but permutations acts, there is no `inner`.
    """

    actions: tuple[Action, ...]
    layers: tuple[Layer, ...]
    mixed: int | None
    inner: Tensor | None
    distance2: Tensor
    norm2: Tensor | None

    def action(self, name: str) -> Action | None:
        """Return how the group of a name acts, None where it does not."""
        return next((action for action in self.actions if action.group.name == name), None)

    def products(self, elements: Elements) -> Tensor:
        """Return the inner products of the moved source with the anchor, `(layers, *kept, 1)`."""
        assert self.inner is not None
        moved = act(self.inner, self.actions, elements, self.layers)
        if self.mixed is None:
            return moved
        return moved.diagonal(dim1=self.mixed + 1, dim2=-1).sum(-1)[..., None].unsqueeze(self.mixed + 1)

    def norms(self, elements: Elements) -> Tensor | None:
        """Return the squared norms of the moved source, None where no group changes them."""
        if self.norm2 is None:
            return None
        # A factor acts on a squared norm twice.
        scales = [action for action in self.actions if action.group.kind.multiplies]
        return act(act(self.norm2, scales, elements, self.layers), scales, elements, self.layers)

    def distances(self, elements: Elements) -> Tensor:
        """Return the squared distances of the moved source from the anchor, `(layers, *kept, 1)`."""
        if self.inner is None:
            return self.distance2
        nearer = self.products(elements) - self.products({})
        norms = self.norms(elements)
        longer = 0.0 if norms is None or self.norm2 is None else norms - self.norm2
        return self.distance2 + longer - 2 * nearer


def contract(piece: Piece, groups: Sequence[str], known: Elements) -> Term:
    """Contract a piece over the axes on which none of `groups` acts, its source first moved by the elements `known`.

    At most one axis may be mixed by a group. Layers are added up where no group has an element for each.
    """
    # On a second axis that it acts on, a group's problem is not linear in its element: that part is left out.
    first = {action.group.name: action for action in reversed(piece.actions) if action.group.name in groups}
    actions = tuple(action for action in piece.actions if first.get(action.group.name) is action)
    dims = len(piece.source_block.shape)
    mixed = mixed_axis(piece, groups)
    kept = {dim for action in actions for dim in action.index}
    kept |= {a.axis for a in actions if a.axis is not None and not a.group.kind.mixes}
    layered = any(action.group.layered for action in actions)
    multiplies = any(action.group.kind.multiplies for action in actions)
    moves = multiplies or mixed is not None
    gone = [dim + 1 for dim in range(dims) if dim not in kept]
    inner, distance2, norm2 = [], [], []
    for layers, source, anchor in piece.chunks():
        if known:
            source = act(source, piece.actions, known, layers)
        distance2.append(_total((source - anchor).square_(), gone))
        if multiplies:
            norm2.append(_total(source.square(), gone))
        if moves:
            inner.append(_inner(source, anchor, kept, mixed, layered))
    layers = piece.layers if layered else (None,)

    def joined(found: list[Tensor]) -> Tensor | None:
        wide = [small(one) for one in found]
        if not wide:
            return None
        return torch.cat(wide) if layered else sum(one.sum(0, keepdim=True) for one in wide)  # type: ignore[return-value]

    squared = joined(distance2)
    assert squared is not None
    return Term(actions, layers, mixed, joined(inner), squared, joined(norm2))


def merged(terms: Iterable[Term]) -> list[Term]:
    """Add up terms on which the same groups act alike, which are one to every group."""
    found: dict[object, Term] = {}
    for term in terms:
        actions = tuple((a.group.name, a.dual, a.index, a.axis) for a in term.actions)
        shape = None if term.inner is None else term.inner.shape
        key = actions, term.layers, term.mixed, shape, term.distance2.shape
        if (other := found.get(key)) is not None:
            inner = None if term.inner is None or other.inner is None else term.inner + other.inner
            norm2 = None if term.norm2 is None or other.norm2 is None else term.norm2 + other.norm2
            term = Term(term.actions, term.layers, term.mixed, inner, term.distance2 + other.distance2, norm2)
        found[key] = term
    return list(found.values())


def mixed_axis(piece: Piece, groups: Iterable[str]) -> int | None:
    """Return the axis of a block whose coordinates some groups mix. Raises ValueError where there are several."""
    axes = mixed_axes(piece, groups)
    if len(axes) > 1:
        raise ValueError(f"{piece.source_block.names[0][0]}: expected one axis that is turned, found {len(axes)}")
    return axes[0] if axes else None


def mixed_axes(piece: Piece, groups: Iterable[str]) -> list[int]:
    """Return the axes of a block whose coordinates some groups mix; of a group that acts on two, the first."""
    found = {
        action.group.name: action.axis
        for action in reversed(piece.actions)
        if action.group.kind.mixes and action.group.name in groups and action.axis is not None
    }
    return sorted(set(found.values()))


def _total(x: Tensor, gone: list[int]) -> Tensor:
    return (x.sum(gone, keepdim=True) if gone else x)[..., None]


def _inner(source: Tensor, anchor: Tensor, kept: set[int], mixed: int | None, layered: bool) -> Tensor:
    """Contract source and anchor `(layers, *shape)` to `(layers or 1, *kept, k)`, with `k` of the anchor's coordinates."""
    dims = source.ndim - 1
    if mixed is None:
        return _total(source * anchor, [dim + 1 for dim in range(dims) if dim not in kept])
    sizes = [source.shape[dim + 1] if dim in kept or dim == mixed else 1 for dim in range(dims)]
    batch = [0] if layered else []
    batch += [dim + 1 for dim in range(dims) if dim in kept]
    rest = [dim for dim in range(dims + 1) if dim not in batch and dim != mixed + 1]
    n = source.shape[mixed + 1]

    def matrices(x: Tensor) -> Tensor:
        return x.permute(*batch, mixed + 1, *rest).reshape(-1, n, x.numel() // max(1, n * lead))

    lead = 1
    for dim in batch:
        lead *= source.shape[dim]
    product = matrices(source) @ matrices(anchor).mT
    product = product.reshape(*(source.shape[dim] for dim in batch), n, n)
    # The dimensions kept come in order, with the mixed one where it belongs.
    order = [*batch, mixed + 1]
    place = [order.index(dim) for dim in sorted(order)]
    product = product.permute(*place, len(order))
    return product.reshape(source.shape[0] if layered else 1, *sizes, n)


def solve(group: Group, terms: Iterable[Term], elements: Elements, pull: Pull, reflections: bool, noise: float) -> Tensor:
    """Return the elements of a group that bring the source nearest, those of the other groups held at `elements`."""
    others = {name: element for name, element in elements.items() if name != group.name}
    device = next((term.distance2.device for term in terms), torch.device("cpu"))
    n = 1 if group.axis is None else group.size
    cross = torch.zeros(*group.batch, n, n, dtype=torch.float64, device=device) if group.kind.mixes else None
    inner, norm2 = (torch.zeros(2, *group.batch, n, dtype=torch.float64, device=device) for _ in range(2))
    energy = torch.zeros(group.batch, dtype=torch.float64, device=device)
    for term in terms:
        if (action := term.action(group.name)) is None or term.inner is None:
            continue
        products = term.products({})
        _add(energy, action, term, action.unfold(term.distance2 + 2 * products).sum((-2, -1)))
        if cross is not None:
            # A group that mixes another axis than this one, or none, has been held: what it did is in the products.
            moved = action.unfold(act(term.inner, term.actions, others, term.layers))
            _add(cross, action, term, moved.unflatten(-1, (-1, n)).sum(-2).mT)
            continue
        _add(inner[int(action.dual)], action, term, action.unfold(term.products(others)).sum(-1))
        norms = term.norms(others)
        assert norms is not None
        _add(norm2[int(action.dual)], action, term, action.unfold(norms).sum(-1))
    return group.kind.solve(Moment(cross, inner, norm2, energy, noise), pull, reflections)


def _add(total: Tensor, action: Action, term: Term, found: Tensor) -> None:
    """Add what a term gives, `(layers, *batch, ...)`, where its layers stand in what is stacked over the group."""
    if action.group.layered:
        total.index_add_(0, torch.tensor(term.layers, device=total.device), found)
    else:
        total += found.sum(0)


def per_index(group: Group, terms: Iterable[Term], values: Iterable[Tensor], units: int) -> Tensor:
    """Add up what terms give entry by entry over a group's index, and over the units that a permutation moves.

    Returns `(*batch, units)`, zero in layers that no term has.
    """
    total: Tensor | None = None
    for term, value in zip(terms, values, strict=True):
        if (action := term.action(group.name)) is None:
            continue
        if total is None:
            total = torch.zeros(*group.batch, units, dtype=torch.float64, device=value.device)
        _add(total, action, term, action.unfold(value).sum(-1))
    return torch.zeros(*group.batch, units, dtype=torch.float64) if total is None else total
