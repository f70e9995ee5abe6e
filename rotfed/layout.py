"""A spec bound to a model's names and shapes: the one place where names are resolved.

`lay_out` makes a `Layout` once for each set of names and shapes, and every model with that layout shares it. A layout
is made of blocks: rectangular parts of parameters, the same part in every layer, on which groups act.
"""

import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotfed.axes import ANY, Atom, Step, cuts, parts, size_of
from rotfed.errors import SpecError
from rotfed.spec import Entry, Group, SymmetrySpec, acting_groups, check_is_spec
from rotfed.tensors import Params, meta_of

# What adapter libraries put into a backbone, and beside it. Left alone it would act on in the frame that is gone.
_ADAPTER_INSIDE = re.compile(r"\.base_layer\.|lora_|ia3_|vera_|hada_|lokr_|oft_[rs]")
_ADAPTER_BESIDE = re.compile(r"prompt_encoder|prompt_embeddings|prefix|adapt(er|ion)")

Layer = int | None
"""The number of a layer, None for a parameter outside the layers."""


@dataclass(frozen=True)
class Action:
    """How one group acts on a block of some layers, a tensor `(layers, *shape)`.

    `index` are the dimensions of the block's shape that count the group's elements within a layer, `axis` the one that
    they act on, None where each element multiplies all of its entries.
    """

    group: Group
    dual: bool
    index: tuple[int, ...]
    axis: int | None

    @cached_property
    def _orders(self) -> dict[int, tuple[list[int], list[int]]]:
        return {}

    def _order(self, ndim: int) -> tuple[list[int], list[int]]:
        """Return the dimensions in the order of `unfold`, and the order that undoes it."""
        if ndim not in self._orders:
            first = [0, *(dim + 1 for dim in self.index), *([] if self.axis is None else [self.axis + 1])]
            order = [*first, *(dim for dim in range(ndim) if dim not in first)]
            self._orders[ndim] = order, [order.index(dim) for dim in range(ndim)]
        return self._orders[ndim]

    def unfold(self, x: Tensor) -> Tensor:
        """View `(layers, *shape)` as `(layers, *batch, n, m)`: `m` vectors of length `n` at every index of the group.

        Dimensions may have size 1 in place of the block's own, and further ones may follow.
        """
        order, _ = self._order(x.ndim)
        batch = [x.shape[dim] for dim in order[: 1 + len(self.index)]]
        n = 1 if self.axis is None else x.shape[self.axis + 1]
        return x.permute(order).reshape(*batch, n, x.numel() // max(1, math.prod(batch) * n))

    def fold(self, vectors: Tensor, shape: torch.Size) -> Tensor:
        """Bring the result of `unfold` back to a tensor of the given shape."""
        order, back = self._order(len(shape))
        return vectors.reshape([shape[dim] for dim in order]).permute(back)

    def in_layers(self, stacked: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """Select the part of the group's stacked elements that acts in some layers, `(layers or 1, ...)`."""
        if not self.group.layered:
            return stacked.unsqueeze(0)
        first, last = layers[0], layers[-1]
        if first is not None and last is not None and last - first == len(layers) - 1:
            return stacked[first : last + 1]
        return stacked[list(layers)]


@dataclass(frozen=True)
class Block:
    """A part of a parameter on which the same groups act throughout, in all layers that have it.

    `names` holds, for each of `layers`, the parameter's name, or the names that are stacked along a first dimension;
    `shape` has one dimension for each atom of the part's axes. `actions` come in the order in which they are carried
    out: a permutation before the groups whose elements it indexes.
    """

    names: tuple[tuple[str, ...], ...]
    layers: tuple[Layer, ...]
    stacked: bool
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    actions: tuple[Action, ...]

    @cached_property
    def plans(self) -> dict[tuple[str, ...], Any]:
        """How the block is contracted, by groups; see `rotfed.moments.plan`."""
        return {}

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of the groups that act."""
        return frozenset(action.group.name for action in self.actions)

    @cached_property
    def size(self) -> int:
        """The number of entries in one layer."""
        return math.prod(self.shape)

    def action(self, name: str) -> Action | None:
        """Return how the group of a name acts, None where it does not."""
        return next((action for action in self.actions if action.group.name == name), None)

    def once(self, name: str) -> bool:
        """Return whether a group acts on one axis alone; on two, its problem is not linear in its element."""
        return sum(action.group.name == name for action in self.actions) == 1

    def view(self, parameter: Tensor) -> Tensor:
        """View what `gather` gave as the block, `shape`."""
        for step in self.steps:
            parameter = parameter.narrow(step.dim, step.start, step.length).unflatten(step.dim, step.sizes)
        return parameter

    def read(self, params: Params, positions: Iterable[int]) -> Tensor:
        """Return the block in some of its layers, by their position: `(layers, *shape)`, a view where it is one."""
        views = [self.view(gather(params, self.names[position], self.stacked)) for position in positions]
        return views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)


def gather(params: Params, names: tuple[str, ...], stacked: bool) -> Tensor:
    """Return a parameter, or the stack of those that stand for one."""
    return torch.stack([params[name] for name in names]) if stacked else params[names[0]]


@dataclass(frozen=True)
class Layout:
    """A spec laid over the names and shapes of a model.

    `names` maps the spec's name of each parameter to the model's, `blocks` come in the spec's order, `stacks` are the
    stacks of layers that are there, `unmatched` the parameters of a task head, outside the backbone's `prefix`.
    """

    spec: SymmetrySpec
    prefix: str
    naming: str
    names: Mapping[str, str]
    blocks: tuple[Block, ...]
    stacks: tuple[str | None, ...]
    unmatched: tuple[str, ...]

    @cached_property
    def units(self) -> Mapping[str, "Unit"]:
        """The parameters that are moved, each with those that are moved together with it."""
        found: dict[tuple[str, ...], list[tuple[Block, int]]] = {}
        for block in self.blocks:
            for position, names in enumerate(block.names):
                found.setdefault(names, []).append((block, position))
        units = [Unit(names, tuple(blocks)) for names, blocks in found.items()]
        return {name: unit for unit in units for name in unit.names}

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """What two layouts must share for their blocks to be paired one by one."""
        return tuple(
            (b.layers, b.shape, tuple((a.group.name, a.dual, a.index, a.axis) for a in b.actions)) for b in self.blocks
        )


@dataclass(frozen=True)
class Unit:
    """Parameters that are moved together, one or a stack, and the blocks in them with their position among layers."""

    names: tuple[str, ...]
    blocks: tuple[tuple[Block, int], ...]


def lay_out(params: Params, spec: SymmetrySpec, folded: bool = True) -> Layout:
    """Lay a spec over parameters, a mapping from name to tensor; the layout of like models is made once.

    Names may carry any prefix (a bare backbone, a task model, a wrapper); what stands outside the prefix is a task
    head and left alone. A stack of layers of which nothing is there (the encoder of an encoder-decoder on its own) is
    left out. With the residual stream the head that reads it has to be there, and, unless `folded` is False, the norms
    have to be folded. Raises SpecError for a parameter that is missing, unknown, misshapen, shared with another one, or
    held in a type that no group can act on.
    """
    check_is_spec(spec)
    if not isinstance(params, Mapping):
        check_parameters(params)
    meta = meta_of(params)
    check_parameters(meta)
    key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in meta.items())
    layout = spec.layouts.get(key)
    if layout is None:
        layout = spec.layouts[key] = _laid_out(meta, spec)
    if folded and spec.residual is not None and spec.residual.folded:
        _check_folded(params, layout)
    _check_storage(layout, meta)
    return layout


def _laid_out(params: Params, spec: SymmetrySpec) -> Layout:
    prefix, naming = locate(params, spec)
    beside = prefix[: prefix.rstrip(".").rfind(".") + 1] if prefix else ""
    blocks: list[Block] = []
    names: dict[str, str] = {}
    stacks = tuple(stack for stack in spec.layers if _has_stack(stack, prefix, naming, params, spec))
    for entry in spec.entries:
        if entry.naming not in (None, naming) or (entry.stack is not None and entry.stack not in stacks):
            continue
        start = beside if entry.head else prefix
        present: dict[Layer, tuple[str, ...]] = {}
        for layer in entry.layers if entry.layered else (None,):
            spread = {name: start + spec.renamed(name, naming, layer) for name in spec.spread(entry, layer)}
            missing = [name for name in spread.values() if name not in params]
            if missing and entry.optional:
                continue
            if missing:
                raise SpecError(
                    f"{missing[0]}: expected by {spec.source}, not found among the parameters; pass a whole state "
                    "dict of the model that the configuration describes"
                )
            names.update(spread)
            if spread:
                present[layer] = tuple(spread.values())
        blocks.extend(_blocks(entry, present, params, spec))
    known = set(names.values())
    inside = [name for name in params if name.startswith(prefix) and name not in known]
    for name in inside:
        bare = name.removeprefix(prefix)
        if any(fnmatch.fnmatchcase(bare, pattern) for pattern in spec.untouched):
            names[bare] = name
            known.add(name)
    if inside := [name for name in inside if name not in known]:
        if spec.residual is not None:
            raise _unknown_reader(inside[0], spec)
        more = f" (and {len(inside) - 1} more)" if len(inside) > 1 else ""
        raise SpecError(
            f"{inside[0]}: no entry in {spec.source}{more}; the architecture differs from the family's, so rotfed "
            f"refuses it: add an entry, then run 'rotfed check'"
        )
    unmatched = tuple(name for name in params if not name.startswith(prefix) and name not in known)
    if adapters := [name for name in unmatched if _ADAPTER_BESIDE.search(name)]:
        raise _adapter(adapters[0])
    if spec.residual is not None:
        if unmatched:
            raise _unknown_reader(unmatched[0], spec)
        if not any(entry.name in names for entry in spec.entries if entry.head):
            raise SpecError(
                "task head: expected beside the backbone, not found; what a bare backbone puts out is in the frame of "
                "its residual stream: load the spec of the whole model, tied weights included, or without residual=True"
            )
    return Layout(spec, prefix, naming, names, tuple(blocks), stacks, unmatched)


def moving(params: Params, spec: SymmetrySpec, groups: Collection[str]) -> list[str]:
    """Return the names of the parameters on which some of the groups act."""
    units = lay_out(params, spec, folded=False).units
    return [name for name in params if name in units and any(b.groups & set(groups) for b, _ in units[name].blocks)]


def locate(params: Params, spec: SymmetrySpec) -> tuple[str, str]:
    """Return the prefix and the naming under which most of the spec's parameters are found in `params`."""
    found: list[tuple[str, str]] = []
    probes = []
    for naming in spec.namings():
        for stack in spec.layers:
            entries = [entry for entry in spec.entries if entry.stack == stack and entry.layers]
            entry = next((e for e in entries if not e.optional and e.naming in (None, naming)), None)
            if entry is None:
                continue
            probe = spec.renamed(spec.spread(entry, entry.layers[0])[0], naming, entry.layers[0])
            probes.append(probe)
            for name in params:
                if name == probe or name.endswith("." + probe):
                    found.append((name[: len(name) - len(probe)], naming))
    if not found:
        raise SpecError(
            f"no parameter is named {' or '.join(dict.fromkeys(probes))}, with or without prefix, so {spec.source} "
            f"does not fit; found e.g. {', '.join(itertools.islice(params, 3)) or 'no parameter at all'}"
        )
    fits = {
        (prefix, naming): sum(prefix + name in params for name in spec.names(naming, optional=False))
        for prefix, naming in dict.fromkeys(found)
    }
    best = [place for place in fits if fits[place] == max(fits.values())]
    if len(prefixes := {prefix for prefix, _ in best}) > 1:
        raise SpecError(
            f"{spec.source} fits in more than one place: under the prefixes "
            f"{', '.join(map(repr, sorted(prefixes)))}; pass the parameters of one backbone"
        )
    return best[0]


def _has_stack(stack: str | None, prefix: str, naming: str, params: Params, spec: SymmetrySpec) -> bool:
    if stack is None:
        return True
    return any(
        prefix + spec.renamed(spec.spread(entry, layer)[0], naming, layer) in params
        for entry in spec.entries
        if entry.stack == stack and entry.naming in (None, naming)
        for layer in entry.layers
    )


def _blocks(entry: Entry, present: Mapping[Layer, tuple[str, ...]], params: Params, spec: SymmetrySpec) -> list[Block]:
    """Check a parameter's shape and type in every layer against its axis string and cut it into blocks."""
    acted_on = any(acting_groups(part, spec.groups) for part in parts(entry.axes))
    axes = entry.axes if entry.index is None else entry.axes[1:]
    expected = [None if axis == ANY else size_of(axis, spec.atom_size) for axis in axes]
    by_shape: dict[tuple[int, ...], list[Layer]] = {}
    for layer, names in present.items():
        for name in names:
            _check_parameter(name, params[name], expected, acted_on, spec)
        shapes = {tuple(params[name].shape) for name in names}
        if acted_on and len(shapes) > 1:
            raise SpecError(f"{names[0]}: expected one shape in all experts, found {sorted(shapes)}; see {spec.source}")
        by_shape.setdefault(shapes.pop(), []).append(layer)
    blocks = []
    for found, layers in by_shape.items() if acted_on else ():
        shape = list(found) if entry.index is None else [len(present[layers[0]]), *found]

        def atom_size(atom: Atom, dim: int, shape: list[int] = shape) -> int:
            return shape[dim] if atom == ANY[0] else spec.atom_size(atom)

        # From the last axis to the first, so that the dimensions still to be cut keep their numbers.
        found_parts: list[tuple[tuple[Atom, ...], tuple[Step, ...]]] = [((), ())]
        for dim in reversed(range(len(shape))):
            pieces = cuts(entry.axes[dim], dim, lambda atom, dim=dim: atom_size(atom, dim))  # type: ignore[misc]
            found_parts = [
                ((*atoms, *later), (*before, *steps)) for later, before in found_parts for atoms, steps in pieces
            ]
        everywhere = tuple(present[layer] for layer in layers)
        for atoms, steps in found_parts:
            block = Block(everywhere, tuple(layers), entry.index is not None, steps, (), ())
            sizes = tuple(block.view(torch.empty(shape, device="meta")).shape)
            if actions := _actions(atoms, spec):
                blocks.append(replace(block, shape=sizes, actions=actions))
    return blocks


def _check_parameter(name: str, tensor: Tensor, expected: list[int | None], acted_on: bool, spec: SymmetrySpec) -> None:
    found = tuple(tensor.shape)
    if len(found) != len(expected) or any(e not in (None, f) for e, f in zip(expected, found, strict=True)):
        shown = ", ".join("any" if e is None else str(e) for e in expected)
        raise SpecError(
            f"{name}: expected shape ({shown}) from {spec.source}, found {found}; "
            "pass the configuration that the parameters were made with"
        )
    if acted_on and (not tensor.is_floating_point() or tensor.element_size() < 2):
        raise SpecError(
            f"{name}: expected float16, bfloat16, float32 or float64, found {tensor.dtype}; rotfed cannot "
            "rotate quantised weights: dequantise the model first"
        )


def _actions(atoms: tuple[Atom, ...], spec: SymmetrySpec) -> tuple[Action, ...]:
    groups = spec.groups
    axes = [groups[atom.name].axis if atom.name in groups else atom.name for atom in atoms]
    found: list[Action] = []
    for position, atom in enumerate(atoms):
        own = [(atom.name, False)] if atom.name in groups else []
        for name, dual in [*own, *atom.actions]:
            group = groups[name]
            index = tuple(axes.index(size) for size in group.per if size != "layer")
            found.append(Action(group, dual, index, None if group.axis is None else position))
    return tuple(action for name in groups for action in found if action.group.name == name)


def _check_folded(params: Params, layout: Layout) -> None:
    """Raise SpecError for a norm or layer scale whose gain is not folded into the layers beside it."""
    assert layout.spec.residual is not None
    for name, value in layout.spec.residual.units(layout.spec.num_layers):
        own = layout.names.get(name)
        if own is not None and not (gain := params[own]).is_meta and bool((gain != value).any()):
            raise SpecError(
                f"{own}: expected a gain that is folded into the layers beside it; pass "
                "rotfed.fold_norms(params, spec), which computes the same"
            )


def _unknown_reader(name: str, spec: SymmetrySpec) -> SpecError:
    return SpecError(
        f"{name}: no entry in {spec.source} for this class of model, so it may read the residual stream, or what does; "
        "pass load_spec the model itself, of a class of transformers, load the spec without residual=True, or add an "
        "entry"
    )


def _adapter(name: str) -> SpecError:
    return SpecError(
        f"{name}: expected a whole model, found an adapter's parameter, which would stay behind in the old frame; "
        "merge the adapter into the model first (PEFT's merge_and_unload), or federate the adapter alone, with "
        "load_adapter_spec in place of load_spec"
    )


def check_parameters(params: Any) -> None:
    """Raise SpecError unless `params` maps names to tensors on which groups can act, all with values or none."""
    if not isinstance(params, Mapping):
        remedy = "its state_dict()" if isinstance(params, torch.nn.Module) else "what state_dict() gives"
        raise SpecError(
            f"parameters: expected a mapping from name to tensor, found {type(params).__name__}; pass {remedy}"
        )
    for name, tensor in params.items():
        if not isinstance(name, str):
            raise SpecError(f"{name!r}: expected a string as a parameter's name, found {type(name).__name__}")
        if found := no_plain_tensor(tensor):
            raise SpecError(f"{name}: expected a dense torch.Tensor, found {found}; convert it first")
        if _ADAPTER_INSIDE.search(name):
            raise _adapter(name)
    # What accelerate keeps elsewhere would stay behind in the old frame. A directory's headers have no values at all.
    absent = [name for name, tensor in params.items() if tensor.is_meta]
    if 0 < len(absent) < len(params):
        raise SpecError(f"{absent[0]}: expected values, found a meta tensor; load the whole model first")


def no_plain_tensor(value: Any) -> str:
    """Return what `value` is instead of a dense tensor with values of its own; empty for a tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    # DTensor, jagged tensors and torchao's quantised ones wrap others; torch has this protocol for them.
    if hasattr(value, "__tensor_flatten__") or torch.nn.parameter.is_lazy(value):
        return f"a {type(value).__name__}"
    if value.is_nested or value.is_quantized:
        return f"a {'nested' if value.is_nested else 'quantised'} tensor"
    return "" if value.layout == torch.strided else f"a {value.layout} tensor"


def _check_storage(layout: Layout, params: Params) -> None:
    """Raise SpecError where two parameters share values, unless they move alike: moved apart they are tied no more."""
    for owner, name, same_view in shared_values(params):
        moves = [_move_of(layout.units.get(one), one) for one in (owner, name)]
        if any(moves) and not (same_view and moves[0] == moves[1]):
            raise SpecError(
                f"{name}: shares its values with {owner}, and each would be moved in a way of its own; rotfed does "
                "not align models that tie these parameters: untie them by a copy first"
            )


def _move_of(unit: Unit | None, name: str) -> tuple[object, ...]:
    """Return what decides how a parameter is moved, empty where it is not."""
    if unit is None:
        return ()
    return unit.names.index(name), *(
        (
            # Elements that differ by layer move two layers apart.
            block.layers[position] if any(action.group.layered for action in block.actions) else None,
            block.steps,
            block.shape,
            tuple((action.group.name, action.dual, action.index, action.axis) for action in block.actions),
        )
        for block, position in unit.blocks
    )


def shared_values(params: Params) -> Iterator[tuple[str, str, bool]]:
    """Yield pairs of names that have values in memory in common, and whether both are one view of it."""
    owners: dict[object, str] = {}
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in params.items():
        if tensor.is_meta or not tensor.numel():
            continue
        start, device = tensor.data_ptr(), str(tensor.device)
        owner = owners.setdefault((device, start, tensor.dtype, tensor.shape, tensor.stride()), name)
        if owner != name:
            yield owner, name, True
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((device, start, start + (last + 1) * tensor.element_size(), name))
    together: list[tuple[str, int, int, str]] = []
    furthest = 0
    for span in sorted(spans):
        if together and not (span[0] == together[0][0] and span[1] < furthest):
            yield from _overlaps(together, params)
            together, furthest = [], 0
        together.append(span)
        furthest = max(furthest, span[2])
    yield from _overlaps(together, params)


def _overlaps(spans: list[tuple[str, int, int, str]], params: Params) -> Iterator[tuple[str, str, bool]]:
    """Yield pairs of names that have values in common, of spans of memory that lie over each other."""
    if len(spans) < 2:
        return
    # Two columns of one matrix span the same memory and share none of it: every cell remembers who was there.
    _, first, _, _ = spans[0]
    unit = math.gcd(*(params[name].element_size() for *_, name in spans), *(start - first for _, start, _, _ in spans))
    cells = torch.full(((max(stop for _, _, stop, _ in spans) - first) // unit,), -1)
    for number, (_, start, _, name) in enumerate(spans):
        tensor = params[name]
        per = tensor.element_size() // unit
        # A dimension that an expanded tensor repeats lies in memory once.
        sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        own = cells.as_strided((*sizes, per), (*(per * s for s in tensor.stride()), 1), (start - first) // unit)
        for other in own.unique().tolist():
            if other >= 0:
                yield spans[other][3], name, False
        own.fill_(number)
