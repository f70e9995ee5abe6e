"""Moments: all that coupled groups need to know of two models, contracted once from their weights.

The squared distance of a moved source from its anchor is, summed over blocks,

    ||T s - a||^2 = ||s - a||^2 + (||T s||^2 - ||s||^2) - 2 (<T s, a> - <s, a>).

Contracting source and anchor over the axes on which no group acts leaves a `Term` that gives all three parts for every
T: the inner products, axis by axis of those that a group mixes, and the squared distances and norms, entry by entry of
those that it does not. Every sweep, certificate and distance follows from terms, without touching a weight again.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_TOGETHER = 2**19


@dataclass(frozen=True)
class Piece:
    """One block of source and anchor in some layers, which are read when they are used.

    `source_block` and `anchor_block` differ in the names of parameters alone. The source is first moved by the elements
    `known`.
    """

    source_block: Block
    anchor_block: Block
    positions: tuple[int, ...]
    source: Params
    anchor: Params
    known: Elements = field(default_factory=dict)

    @property
    def actions(self) -> tuple[Action, ...]:
        """How groups act on the block."""
        return self.source_block.actions

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the block."""
        return tuple(self.source_block.layers[position] for position in self.positions)

    @cached_property
    def terms(self) -> dict[tuple[str, ...], "Term"]:
        """What the piece was contracted to, by the groups whose axes were kept."""
        return {}

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
        places = [place for place, p in enumerate(self.positions) if self.source_block.layers[p] in wanted]
        if not places:
            return None
        piece = replace(self, positions=tuple(self.positions[place] for place in places))
        if "_small" in self.__dict__:
            # What was read is not read again; neighbours are a view of it.
            first, last = places[0], places[-1]
            which = slice(first, last + 1) if last - first == len(places) - 1 else places
            piece.__dict__["_small"] = tuple(side[which] for side in self._small)
        return piece

    def of_anchor(self) -> "Piece":
        """Return the piece with the anchor as the source, too."""
        piece = Piece(self.anchor_block, self.anchor_block, self.positions, self.anchor, self.anchor)
        if "_small" in self.__dict__:
            _, anchor = self._small
            piece.__dict__["_small"] = anchor, anchor
        return piece

    def under(self, known: Elements) -> "Piece":
        """Return the piece with its source moved by further elements."""
        acting = {name: element for name, element in known.items() if name in self.source_block.groups}
        if not acting:
            return self
        moved = replace(self, known={**self.known, **acting})
        if self.is_small:
            source, anchor = self._small
            moved.__dict__["_small"] = act(source, self.actions, acting, self.layers), anchor
        return moved

    def repeated(self, name: str, elements: Sequence[Tensor], layers: int) -> "Piece":
        """Return the piece under each of several elements of a group, as so many times the `layers` of that group."""
        source, anchor = self._small
        copies = [act(source, self.actions, {name: element}, self.layers) for element in elements]
        piece = replace(self)
        piece.__dict__["_small"] = torch.cat(copies), anchor.repeat(len(elements), *(1 for _ in anchor.shape[1:]))
        piece.__dict__["layers"] = tuple(
            layer + number * layers for number in range(len(elements)) for layer in self.layers if layer is not None
        )
        return piece

    def chunks(self) -> Iterator[tuple[tuple[Layer, ...], Tensor, Tensor]]:
        """Yield the layers by one or several: numbers, source and anchor as `(layers, *shape)`, to compute with."""
        if self.is_small:
            yield self.layers, *self._small
            return
        step = max(1, _TOGETHER // self.source_block.size)
        for start in range(0, len(self.positions), step):
            yield self.layers[start : start + step], *self._read(self.positions[start : start + step])

    def anchor_chunks(self) -> Iterator[tuple[tuple[Layer, ...], Tensor]]:
        """Yield layers and anchor as `chunks` does, without reading the source."""
        if "_small" in self.__dict__:
            yield self.layers, self._small[1]
            return
        step = max(1, _TOGETHER // self.source_block.size)
        for start in range(0, len(self.positions), step):
            anchor = self.anchor_block.read(self.anchor, self.positions[start : start + step]).detach()
            yield self.layers[start : start + step], anchor.to(compute_type(anchor.dtype))

    @property
    def is_small(self) -> bool:
        """Whether all layers are read together, once."""
        return self.entries <= _TOGETHER

    @cached_property
    def _small(self) -> tuple[Tensor, Tensor]:
        return self._read(self.positions)

    def _read(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        source = self.source_block.read(self.source, positions).detach()
        anchor = self.anchor_block.read(self.anchor, positions).detach()
        dtype = compute_type(source.dtype, anchor.dtype)
        layers = tuple(self.source_block.layers[position] for position in positions)
        return act(source.to(dtype), self.actions, self.known, layers), anchor.to(source.device, dtype)


@dataclass(frozen=True)
class Term:
    """What is left of a block after contraction, in float64.

    `inner`, `(layers, *kept, k)`, keeps the dimensions of the block on which groups act; all others have size 1. Along
    `how.mixed`, the one dimension whose coordinates a group adds up, it has the source's coordinates, along the last
    dimension the anchor's. `distance2` and `norm2`, `(layers, *kept, 1)`, are the squared distances and the source's
    squared norms, of size 1 along the mixed one too. Where no group but permutations acts, there is no `inner`.
    """

    how: "Plan"
    layers: tuple[Layer, ...]
    inner: Tensor | None
    distance2: Tensor
    norm2: Tensor | None

    @property
    def actions(self) -> tuple[Action, ...]:
        """How groups act on the dimensions that are kept."""
        return self.how.actions

    def action(self, name: str) -> Action | None:
        """Return how the group of a name acts, None where it does not."""
        return next((action for action in self.actions if action.group.name == name), None)

    @cached_property
    def rows(self) -> Tensor:
        """The numbers of the layers, as a tensor."""
        return torch.tensor(self.layers, device=self.distance2.device)

    @cached_property
    def still(self) -> Tensor:
        """The inner products of the source, where it is, with the anchor."""
        assert self.inner is not None
        return self._products(self.inner)

    @cached_property
    def energy(self) -> Tensor:
        """The squared norms of source and anchor together."""
        return self.distance2 + 2 * self.still

    def products(self, elements: Elements) -> Tensor:
        """Return the inner products of the moved source with the anchor, `(layers, *kept, 1)`."""
        assert self.inner is not None
        return self._products(act(self.inner, self.actions, elements, self.layers))

    def _products(self, moved: Tensor) -> Tensor:
        if self.how.mixed is None:
            return moved
        dim = self.how.mixed + 1
        return moved.diagonal(dim1=dim, dim2=-1).sum(-1)[..., None].unsqueeze(dim)

    def norms(self, elements: Elements) -> Tensor | None:
        """Return the squared norms of the moved source, None where no group changes them."""
        if self.norm2 is None:
            return None
        # A factor acts on a squared norm twice.
        scales = self.how.scales
        return act(act(self.norm2, scales, elements, self.layers), scales, elements, self.layers)

    def distances(self, elements: Elements) -> Tensor:
        """Return the squared distances of the moved source from the anchor, `(layers, *kept, 1)`."""
        if self.inner is None:
            return self.distance2
        nearer = self.products(elements) - self.still
        norms = self.norms(elements)
        longer = 0.0 if norms is None or self.norm2 is None else norms - self.norm2
        return self.distance2 + longer - 2 * nearer

    def longer(self, elements: Elements) -> float:
        """Return by how much the moved source's squared norm is larger."""
        norms = self.norms(elements)
        return 0.0 if norms is None or self.norm2 is None else float((norms - self.norm2).sum())


@dataclass(frozen=True)
class Plan:
    """How a block is contracted over the axes on which none of some groups acts.

    `actions` are those of the groups, `mixed` the one axis whose coordinates they add up, `gone` the dimensions of
    `(layers, *shape)` that are contracted, `kept` those that stay entry by entry. Layers are added up unless `layered`.
    """

    actions: tuple[Action, ...]
    mixed: int | None
    kept: tuple[int, ...]
    gone: tuple[int, ...]
    layered: bool
    scales: tuple[Action, ...]

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """What two blocks must share for their terms to be added up."""
        return tuple((a.group.name, a.dual, a.index, a.axis) for a in self.actions), self.mixed

    @property
    def moves(self) -> bool:
        """Whether a group does more than to change the places of units."""
        return bool(self.scales) or self.mixed is not None

    def total(self, x: Tensor) -> Tensor:
        """Add up `(layers, *shape)` over the dimensions that are contracted."""
        return (x.sum(self.gone, keepdim=True) if self.gone else x)[..., None]

    def products(self, source: Tensor, anchor: Tensor) -> Tensor:
        """Contract source and anchor to `(layers or 1, *kept, k)`, with `k` of the anchor's coordinates."""
        if self.mixed is None:
            return self.total(source * anchor)
        dim = self.mixed + 1
        batch = ((0,) if self.layered else ()) + self.kept
        rest = [d for d in range(source.ndim) if d not in batch and d != dim]
        order = (*batch, dim, *rest)
        count, n = math.prod(source.shape[d] for d in batch), source.shape[dim]
        flat = source.permute(order).reshape(count, n, -1)
        product = flat @ anchor.permute(order).reshape(flat.shape).mT
        # The dimensions kept come in order, with the mixed one where it belongs.
        place = sorted(range(len(batch) + 1), key=(*batch, dim).__getitem__)
        product = product.reshape(*(source.shape[d] for d in batch), n, n).permute(*place, len(place))
        sizes = [source.shape[d] if d in self.kept or d == dim else 1 for d in range(1, source.ndim)]
        return product.reshape(source.shape[0] if self.layered else 1, *sizes, n)

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        """Join what was contracted of some layers each, in float64."""
        wide = [small(one) for one in found]
        return torch.cat(wide) if self.layered else torch.stack([one.sum(0, keepdim=True) for one in wide]).sum(0)


def plan(piece: Piece, groups: Sequence[str]) -> Plan:
    """Return how to contract a piece; made once for a block and groups. At most one axis may be mixed by a group."""
    block = piece.source_block
    key = tuple(groups)
    if key not in block.plans:
        actions = tuple(action for action in block.actions if action.group.name in groups)
        kept = {dim + 1 for action in actions for dim in action.index}
        kept |= {a.axis + 1 for a in actions if a.axis is not None and not a.group.kind.mixes}
        mixed = mixed_axes(piece, groups)
        assert len(mixed) < 2, (block.names[0], groups)
        gone = tuple(dim for dim in range(1, len(block.shape) + 1) if dim not in kept)
        layered = any(action.group.layered for action in actions)
        scales = tuple(action for action in actions if action.group.kind.multiplies)
        block.plans[key] = Plan(actions, mixed[0] if mixed else None, tuple(sorted(kept)), gone, layered, scales)
    found: Plan = block.plans[key]
    return found


def contract(piece: Piece, groups: Sequence[str]) -> Term:
    """Contract a piece over the axes on which none of `groups` acts; done once for a piece and groups."""
    how, key = plan(piece, groups), tuple(groups)
    if (known := piece.terms.get(key)) is not None:
        return known
    inner, distance2, norm2 = [], [], []
    for _, source, anchor in piece.chunks():
        distance2.append(how.total((source - anchor).square_()))
        if how.scales:
            norm2.append(how.total(source.square()))
        if how.moves:
            inner.append(how.products(source, anchor))
    term = piece.terms[key] = Term(
        how,
        piece.layers if how.layered else (None,),
        how.joined(inner) if inner else None,
        how.joined(distance2),
        how.joined(norm2) if norm2 else None,
    )
    return term


def renewed(term: Term, piece: Piece, groups: Sequence[str]) -> Term:
    """Contract a piece anew after its source was turned by other groups, which keep all norms in `term`."""
    how = plan(piece, groups)
    found = [how.products(source, anchor) for _, source, anchor in piece.chunks()]
    turned = replace(term, inner=how.joined(found))
    return replace(turned, distance2=term.energy - 2 * turned.still)


def merged(terms: Iterable[Term]) -> list[Term]:
    """Add up terms on which the same groups act alike, which are one to every group."""
    found: dict[object, Term] = {}
    for term in terms:
        shape = None if term.inner is None else term.inner.shape
        key = term.how.signature, term.layers, shape, term.distance2.shape
        if (other := found.get(key)) is not None:
            inner = None if term.inner is None or other.inner is None else term.inner + other.inner
            norm2 = None if term.norm2 is None or other.norm2 is None else term.norm2 + other.norm2
            term = replace(term, inner=inner, distance2=term.distance2 + other.distance2, norm2=norm2)
        found[key] = term
    return list(found.values())


def mixed_axes(piece: Piece, groups: Iterable[str]) -> list[int]:
    """Return the axes of a block whose coordinates some groups mix."""
    return sorted(
        {a.axis for a in piece.actions if a.axis is not None and a.group.kind.mixes and a.group.name in groups}
    )


def solve(
    group: Group, terms: Iterable[Term], elements: Elements, pull: Pull, reflections: bool, noise: float
) -> Tensor:
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
        _add(energy, action, term, action.unfold(term.energy).sum((-2, -1)))
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
    if not action.group.layered:
        total += found.sum(0)
    elif len(found) == len(total):
        total += found
    else:
        total.index_add_(0, term.rows, found)


def per_index(group: Group, terms: Iterable[Term], values: Iterable[Tensor], units: int) -> Tensor:
    """Add up what terms give entry by entry over a group's index, and over the units that a permutation moves.

    Returns `(*batch, units)`, zero in layers that no term has.
    """
    total: Tensor | None = None
    for term, value in zip(terms, values, strict=True):
        for action in (action for action in term.actions if action.group.name == group.name):
            if total is None:
                total = torch.zeros(*group.batch, units, dtype=torch.float64, device=value.device)
            _add(total, action, term, action.unfold(value).sum(-1))
    return torch.zeros(*group.batch, units, dtype=torch.float64) if total is None else total


def per_layer(group: Group, terms: Iterable[Term], values: Iterable[Tensor]) -> Tensor:
    """Add up what terms give in each layer of a group, `(layers, 1, ..., 1)`, or in all where the layers share it."""
    total = torch.zeros(group.batch[0] if group.layered else 1, dtype=torch.float64)
    for term, value in zip(terms, values, strict=True):
        total = total.to(value.device)
        if group.layered and term.how.layered:
            total.index_add_(0, term.rows, value.flatten(1).sum(1))
        else:
            total += value.sum()
    return total.reshape(-1, *(1 for _ in group.batch[1:]), 1) if group.layered else total
