"""Transforms: one element of every group of a spec, and what they do to the parameters of a model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotfed.errors import TransformError
from rotfed.spec import Action, Block, Group, SymmetrySpec, check_is_spec, no_plain_tensor


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

    def apply(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of the same function in the other frame.

        Parameters: `params`, a mapping from name to tensor such as `model.state_dict()`, of which nothing is mutated.
        Returns a new dict with the same names, shapes, types and devices; computed in float64. Tensors on which no
        group acts are the very same objects. Raises SpecError where the spec does not fit `params`, TransformError
        where a value would leave the range of its type.
        """
        return self.move(params, strict=True)

    def move(self, params: Mapping[str, Tensor], strict: bool = False) -> dict[str, Tensor]:
        """What `apply` returns; unless `strict`, a tensor that its type cannot hold is NaN throughout."""
        wide: dict[tuple[str, ...], Tensor] = {}
        acting: dict[tuple[str, ...], dict[str, None]] = {}
        for block in self.spec.resolve(params).blocks:
            groups = [action.group.name for action in block.actions if action.group.name in self.elements]
            if not groups:
                continue
            acting.setdefault(block.params, {}).update(dict.fromkeys(groups))
            if block.params not in wide:
                wide[block.params] = to_work(block.gather(params)).clone(memory_format=torch.contiguous_format)
            view = block.view(wide[block.params])
            view.copy_(act(view, block, self._elements_on(view.device)))
        moved = dict(params)
        for names, tensor in wide.items():
            parts = tensor if len(names) > 1 else [tensor.reshape(params[names[0]].shape)]
            for name, part in zip(names, parts, strict=True):
                source = params[name]
                cause = f"after {', '.join(acting[names])}; apply the transform to parameters in a wider type"
                try:
                    rounded = round_to(part, source.dtype, name, cause, source)
                except TransformError:
                    if strict:
                        raise
                    rounded = torch.full_like(part, torch.nan).to(source.dtype)
                moved[name] = rounded.to(source.device)
        return moved

    def _elements_on(self, device: torch.device) -> dict[str, Tensor]:
        """The elements, ready to act on float64 tensors on `device`."""
        return {
            name: element.to(device=device, dtype=torch.float64 if element.is_floating_point() else element.dtype)
            for name, element in self.elements.items()
        }

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
            composed[name] = groups[name].kind.compose(composed[name], element) if name in composed else element
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
    proper: bool = False,
) -> Transform:
    """A random element of every group of `spec`: Haar rotations, uniform permutations, log-normal scales.

    `dtype` is the type that elements are held in; `proper` leaves out reflections and negative scales.
    """
    return Transform(
        spec,
        {
            name: group.kind.random(group.batch, group.size, generator, dtype, proper)
            for name, group in spec.groups.items()
        },
    )


def act(x: Tensor, block: Block, elements: Mapping[str, Tensor]) -> Tensor:
    """Apply the elements of all groups in `elements` that act on `block` to `x`, a tensor in the block's shape."""
    for action in block.actions:
        if (element := elements.get(action.group.name)) is not None:
            element = in_layer(element, action, block)
            x = action.fold(action.group.kind.act(element, action.unfold(x), action.dual), block.shape)
    return x


def in_layer(stacked: Tensor, action: Action, block: Block) -> Tensor:
    """The part of a group's stacked elements that acts on a block."""
    return stacked[block.layer] if action.group.layered else stacked


def to_work(tensor: Tensor) -> Tensor:
    """A tensor in the type that rotfed computes in, float64, on its own device where that has such a type."""
    device = torch.device("cpu") if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device=device, dtype=torch.float64)


def round_to(
    wide: Tensor, dtype: torch.dtype, name: str, cause: str, source: Tensor | None = None, noise: float = 0.0
) -> Tensor:
    """What was computed in float64, in the floating-point type of a parameter.

    Raises TransformError, with `name` and `cause`, where finite values grow beyond the range of `dtype`, and, where the
    `source` is given that they were computed from, where they shrink below it: where the whole tensor loses a larger
    share of its norm than rounding took of its source's. Losses up to `noise` times the source's norm are none.
    """
    rounded, kind = wide.to(dtype), torch.finfo(dtype)
    held = to_work(rounded)
    lost, left = float((held - wide).norm()), float(wide.norm())
    before = wide if source is None else to_work(source)
    # Nearly all tensors pass at once; what is not finite loses NaN and does not.
    if lost <= kind.eps * left or not bool(before.isfinite().all()):
        return rounded
    found = "" if bool(held.isfinite().all()) else "larger"
    if source is not None and not found:
        norm = float(before.norm())
        # Rounding takes up to half of eps of a value, and below the smallest normal number a step of fixed size.
        took = kind.eps * (norm + kind.smallest_normal * wide.numel() ** 0.5)
        if lost > noise * norm and lost * norm > 4 * took * left:
            found = "smaller"
    if found:
        raise TransformError(f"{name}: expected values that {dtype} can hold, found {found} ones {cause}")
    return rounded
