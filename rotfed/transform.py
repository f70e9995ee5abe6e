"""Transforms: one element of every group of a spec, and what they do to the parameters of a model."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotfed.errors import TransformError
from rotfed.layout import Action, Block, Layout, Unit, lay_out, no_plain_tensor
from rotfed.spec import Group, SymmetrySpec, check_is_spec
from rotfed.tensors import Params, compute_type, holds, meta_of, round_to


@dataclass(frozen=True, eq=False)
class Transform:
    """A change of a model's weights that keeps its function.

    `elements` holds, for each group of `spec`, its elements stacked over the group's index: `(layers, heads,
    head_dim, head_dim)` for the rotation of each head, `(layers, d_ff)` for a permutation. Groups that are missing
    stay as they are. Permutations act before the groups whose elements they index: a head's rotation belongs to the
    place that the head has afterwards. Raises TransformError unless every element is a member of its group.
    """

    spec: SymmetrySpec
    elements: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_is_spec(self.spec)
        if not isinstance(self.elements, Mapping):
            raise TransformError(
                f"elements: expected a mapping from group to tensor, found {type(self.elements).__name__}"
            )
        for name, element in self.elements.items():
            if name not in self.spec.groups:
                raise TransformError(
                    f"{name}: no such group in {self.spec.source}; expected some of {', '.join(self.spec.groups)}"
                )
            group = self.spec.groups[name]
            found = no_plain_tensor(element) or ("a meta tensor" if element.is_meta else "")
            if found or (element.is_floating_point() and element.element_size() < 2):
                raise TransformError(f"{name}: expected a dense torch.Tensor, found {found or element.dtype}")
            group.kind.validate(element, group.batch, group.size, name)

    def apply(self, params: Params) -> dict[str, Tensor]:
        """The parameters of the same function in the other frame.

        Parameters: `params`, a mapping from name to tensor such as `model.state_dict()`, of which nothing is mutated.
        Returns a new dict with the same names, shapes, types and devices. Computed in the parameters' own type, half
        precision in float32. Tensors on which nothing acts are the very same objects. Raises SpecError where the spec
        does not fit `params`, TransformError where a value would leave the range of its type.
        """
        return dict(self.over(params))

    def over(self, params: Params) -> "Moved":
        """The same parameters, each moved when it is read: for models that are read from files."""
        return Moved(params, self, lay_out(params, self.spec, folded=False))

    @cached_property
    def moving(self) -> Mapping[str, frozenset[int | None]]:
        """The layers in which each group does something; None stands for a group that all layers share."""
        found: dict[str, frozenset[int | None]] = {}
        for name, element in self.elements.items():
            group = self.spec.groups[name]
            neutral = group.kind.identity(group.batch, group.size, element.dtype).to(element.device)
            if group.layered:
                moved = (element != neutral).flatten(1).any(1).nonzero().flatten().tolist()
                found[name] = frozenset(moved)
            else:
                found[name] = frozenset() if torch.equal(element, neutral) else frozenset([None])
        return found

    def acts(self, block: Block, layer: int | None) -> list[str]:
        """The names of the groups that do something to a block in a layer."""
        return [
            action.group.name
            for action in block.actions
            if (layer if action.group.layered else None) in self.moving.get(action.group.name, ())
        ]

    def inverse(self) -> "Transform":
        """The transform that undoes this one."""
        groups = self.spec.groups
        undone: dict[str, Tensor] = {}
        # T = D P with P permuting the index of D: the inverse is P^-1 D^-1 = (P^-1 D^-1 P) P^-1, innermost P first.
        plain = {name: groups[name].kind.inverse(element) for name, element in self.elements.items()}
        for name, element in plain.items():
            for by in reversed([groups[other] for other in groups if other in plain]):
                if groups[name].indexed_by(by):
                    element = reindex(element, groups[name], by, plain[by.name])
            undone[name] = element
        return Transform(self.spec, undone)

    def compose(self, other: "Transform") -> "Transform":
        """This transform after `other`: `a.compose(b).apply(x)` equals `a.apply(b.apply(x))`."""
        if not isinstance(other, Transform) or other.spec != self.spec:
            raise TransformError("compose: the two transforms belong to different specs; build both from one spec")
        groups = self.spec.groups
        composed = dict(self.elements)
        for name, element in other.elements.items():
            # D2 P2 D1 P1 = D2 (P2 D1 P2^-1) P2 P1.
            for by in (groups[later] for later in groups if later in self.elements):
                if groups[name].indexed_by(by):
                    element = reindex(element, groups[name], by, self.elements[by.name])
            if (own := composed.get(name)) is not None:
                element = groups[name].kind.compose(own, element.to(own.device))
            composed[name] = element
        return Transform(self.spec, composed)


def reindex(element: Tensor, group: Group, by: Group, permutation: Tensor) -> Tensor:
    """The stacked elements of `group` after `permutation`, an element of `by`, has moved the index that they share."""
    dim = group.per.index(by.axis or "")
    shape = [1] * element.ndim
    for position, index in enumerate(by.per):
        shape[group.per.index(index)] = by.batch[position]
    shape[dim] = by.size
    return element.take_along_dim(permutation.to(element.device).reshape(shape), dim)


def identity_transform(spec: SymmetrySpec) -> Transform:
    """The transform that changes nothing."""
    return Transform(spec, {name: group.kind.identity(group.batch, group.size) for name, group in spec.groups.items()})


def random_transform(
    spec: SymmetrySpec,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    reflections: bool = True,
) -> Transform:
    """A random element of every group of `spec`: Haar rotations, uniform permutations, log-normal scales.

    `dtype` is the type that elements are held in; without `reflections` there are none, and no negative scales.
    """
    return Transform(
        spec,
        {
            name: group.kind.random(group.batch, group.size, generator, dtype, reflections)
            for name, group in spec.groups.items()
        },
    )


class Moved(Mapping[str, Tensor]):
    """Parameters in another frame; each is computed when it is read, with those that move together with it."""

    def __init__(self, params: Params, transform: Transform, layout: Layout) -> None:
        self.params = params
        self.transform = transform
        self.layout = layout
        self._held: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def meta(self) -> Params:
        """Names, shapes and types, which are those of the parameters in their own frame."""
        return meta_of(self.params)

    def __getitem__(self, name: str) -> Tensor:
        unit = self.layout.units.get(name)
        if unit is None or not any(self.transform.acts(block, block.layers[at]) for block, at in unit.blocks):
            return self.params[name]
        if name not in self._held:
            # Of a stack only the experts that are still to be read are kept.
            self._held = dict(zip(unit.names, self._move(unit), strict=True))
        return self._held.pop(name)

    def _move(self, unit: Unit) -> list[Tensor]:
        """A unit's parameters in the new frame, rounded to their types."""
        sources = [self.params[name] for name in unit.names]
        stacked = unit.blocks[0][0].stacked
        wide = torch.stack(sources) if stacked else sources[0]
        acting = dict.fromkeys(g for block, at in unit.blocks for g in self.transform.acts(block, block.layers[at]))
        dtype = compute_type(wide.dtype)
        scales = any(self.transform.spec.groups[name].kind_name == "scale" for name in acting)
        if scales and not holds(wide.detach()):
            dtype = torch.float64
        moved = self._acted(unit, wide.detach(), dtype)
        if dtype == torch.float32 and not holds(moved):
            # Products of float32 may leave its range where their result does not, and then it is to be said which did.
            moved = self._acted(unit, wide.detach(), torch.float64)
        parts = moved.unbind() if stacked else [moved]
        cause = f"after {', '.join(acting)}; apply the transform to parameters in a wider type"
        try:
            return [
                part if part.dtype == source.dtype else round_to(part, source.dtype, name, cause, source)
                for name, source, part in zip(unit.names, sources, parts, strict=True)
            ]
        except TransformError as error:
            error.groups = tuple(acting)
            raise

    def _acted(self, unit: Unit, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        wide = parameter.to(dtype, memory_format=torch.contiguous_format)
        whole = len(unit.blocks) == 1 and math.prod(unit.blocks[0][0].shape) == wide.numel()
        if not whole and wide.data_ptr() == parameter.data_ptr():
            wide = wide.clone()
        for block, at in unit.blocks:
            if acts := self.transform.acts(block, block.layers[at]):
                view = block.view(wide)
                elements = {name: self.transform.elements[name] for name in acts}
                moved = act(view.unsqueeze(0), block.actions, elements, (block.layers[at],)).squeeze(0)
                if whole:
                    return moved.reshape(parameter.shape).contiguous()
                view.copy_(moved)
        return wide


def act(x: Tensor, actions: Iterable[Action], elements: Mapping[str, Tensor], layers: tuple[int | None, ...]) -> Tensor:
    """Apply the elements of all groups in `elements` to blocks of some layers, `(layers, *shape)`.

    A permutation comes before the groups whose elements it indexes. `x` may have size 1 in dimensions on which nothing
    acts, and further dimensions behind its own.
    """
    for action in actions:
        if (stacked := elements.get(action.group.name)) is not None:
            element = action.in_layers(stacked, layers)
            # The type first: not every device has float64.
            element = (element.to(x.dtype) if element.is_floating_point() else element).to(x.device)
            x = action.fold(action.group.kind.act(element, action.unfold(x), action.dual), x.shape)
    return x
