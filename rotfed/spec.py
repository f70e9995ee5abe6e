"""Symmetry specs: which groups act on which axes of which parameters of a transformer.

A `SymmetrySpec` is bound to one configuration (`library.py` reads the files and binds them). It turns a mapping of
parameters into blocks, views on which the groups act, and refuses every mapping that it does not cover completely: a
parameter that no entry names could be one that a group must move.
"""

import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotfed.axes import ANY, Atom, Axis, Step, cuts, parts, size_of
from rotfed.errors import SpecError
from rotfed.groups import KINDS, Kind

# What adapter libraries put into a backbone, and beside it. Left alone it would act on in the frame that is gone.
_ADAPTER_INSIDE = re.compile(r"\.base_layer\.|lora_|ia3_|vera_|hada_|lokr_|oft_[rs]")
_ADAPTER_BESIDE = re.compile(r"prompt_encoder|prompt_embeddings|prefix|adapt(er|ion)")


@dataclass(frozen=True)
class Group:
    """A group of a bound spec: one element of kind `kind` on vectors of length `size` for every index in `batch`.

    Where a model has several stacks of layers, `name`, `axis` and `per` are qualified: `encoder.qk`.
    """

    name: str
    kind_name: str
    axis: str | None
    per: tuple[str, ...]
    batch: tuple[int, ...]
    size: int

    @property
    def kind(self) -> Kind:
        """The functions of the group's kind."""
        return KINDS[self.kind_name]

    @property
    def layered(self) -> bool:
        """Whether each layer has an element of its own; the layer is then the first index of the stack."""
        return "layer" in self.per

    @property
    def base_name(self) -> str:
        """The group's name in the spec file, without the stack."""
        return self.name.rsplit(".", 1)[-1]

    def indexed_by(self, other: "Group") -> bool:
        """Whether `other` permutes an index of this group, so that its elements change places with it."""
        return other.kind_name == "permutation" and other.axis in self.per


@dataclass(frozen=True)
class Entry:
    """One line of a spec's `[params]` that applies to the bound configuration.

    `layers` are the layers that have the parameter, empty for one outside the layers. `index` is the size over which
    the parameter is spread, one tensor for each expert; it is then the first axis. `naming` ties the entry to one set
    of names, None for all of them. `head` marks a parameter of a task head, beside the backbone.
    """

    name: str
    axes: tuple[Axis, ...]
    optional: bool = False
    stack: str | None = None
    layers: tuple[int, ...] = ()
    index: str | None = None
    naming: str | None = None
    head: bool = False

    @property
    def layered(self) -> bool:
        """Whether the entry stands for one parameter in every layer."""
        return "{layer}" in self.name


@dataclass(frozen=True)
class Action:
    """How one group acts on one block: `unfold` shows the block as `(*batch, n, m)`, `fold` undoes that."""

    group: Group
    dual: bool
    order: tuple[int, ...]
    unfolded: tuple[int, ...]

    def unfold(self, block: Tensor) -> Tensor:
        """View a block of the parameter as `m` vectors of length `n` at every index of the group in one layer."""
        return block.permute(self.order).reshape(self.unfolded)

    def fold(self, vectors: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Bring what `unfold` gave back to the block's own `shape`."""
        permuted = vectors.reshape([shape[i] for i in self.order])
        return permuted.permute([self.order.index(i) for i in range(len(shape))])


@dataclass(frozen=True)
class Block:
    """A part of a parameter on which the same groups act throughout, with one dimension for each atom of its axes.

    `params` is one name, or the names that are stacked along a first dimension. `actions` come in the order in which
    they are carried out: a permutation before the groups whose elements it indexes.
    """

    params: tuple[str, ...]
    layer: int | None
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    actions: tuple[Action, ...]

    def gather(self, params: Mapping[str, Tensor]) -> Tensor:
        """The whole parameter, or the stack of those that stand for one."""
        tensors = [params[name] for name in self.params]
        return tensors[0] if len(tensors) == 1 and not self.stacked else torch.stack(tensors)

    @property
    def stacked(self) -> bool:
        """Whether the block lies in a stack of tensors, even of a single one."""
        return self.steps[0] == STACKED

    def view(self, parameter: Tensor) -> Tensor:
        """The block as a view of what `gather` gave."""
        for step in self.steps[1:] if self.stacked else self.steps:
            parameter = parameter.narrow(step.dim, step.start, step.length).unflatten(step.dim, step.sizes)
        return parameter

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """The block of `params`."""
        return self.view(self.gather(params))


STACKED = Step(0, 0, 0, ())
"""Leads the steps of a block whose tensors are stacked first."""


@dataclass(frozen=True)
class Resolution:
    """A spec laid over the names of one mapping.

    `names` maps the spec's name of each parameter to the one it has in the mapping, `blocks` come in the spec's
    order, `stacks` are the stacks of layers that are there, `left_alone` the parameters of a task head, outside the
    backbone's `prefix`.
    """

    prefix: str
    naming: str
    names: Mapping[str, str]
    blocks: tuple[Block, ...]
    stacks: tuple[str | None, ...]
    left_alone: tuple[str, ...]


@dataclass(frozen=True)
class Residual:
    """How a spec uses the residual stream.

    `folds` maps each norm to the layers that read it, `scales` each layer scale to the layers that it multiplies. Where
    the stream may be rotated, models have to be `folded`; `centred` where LayerNorm takes the mean off, too. `unit` is
    the weight of a norm that multiplies by one.
    """

    folds: Mapping[str, tuple[str, ...]]
    scales: Mapping[str, tuple[str, ...]]
    folded: bool
    centred: bool
    unit: float

    def units(self, layers: int) -> Iterator[tuple[str, float]]:
        """The parameters that multiply the stream coordinate by coordinate, and what a folded model has there."""
        values = {**{f"{norm}.weight": self.unit for norm in self.folds}, **dict.fromkeys(self.scales, 1.0)}
        for name, value in values.items():
            for here in in_layers(name, layers):
                yield here, value


@dataclass(frozen=True)
class SymmetrySpec:
    """The symmetries of one transformer: groups, and the axis string of every parameter of its backbone.

    Bound to a configuration by `load_spec`; holds no parameter. `layers` holds the number of layers of each stack (an
    encoder, a decoder, a tower; None where there is one), `sizes` the axis sizes by name, `groups` the groups by
    name, those that index others first, `entries` the parameters in the names of the newest transformers, `aliases`
    older names, `untouched` patterns of parameters in which no symmetry is used.
    """

    family: str
    model_type: str
    layers: Mapping[str | None, int]
    sizes: Mapping[str, int]
    groups: Mapping[str, Group]
    entries: tuple[Entry, ...]
    aliases: Mapping[str, Mapping[str, str]]
    untouched: tuple[str, ...] = ()
    residual: Residual | None = None

    def __repr__(self) -> str:
        stream = "with" if self.residual else "without"
        return f"<SymmetrySpec {self.model_type} ({self.source}), {stream} residual stream: {', '.join(self.groups)}>"

    @property
    def source(self) -> str:
        """The file that the spec was read from, as messages name it."""
        return f"specs/{self.family}.toml"

    @property
    def num_layers(self) -> int:
        """The number of layers, of the longest stack where there are several."""
        return max(self.layers.values())

    def without(self, *names: str) -> "SymmetrySpec":
        """A copy that lacks the entries of the given names; for showing that a check would notice."""
        kept = tuple(entry for entry in self.entries if entry.name not in names)
        return replace(self, entries=kept)

    def select_groups(self, names: Iterable[str] | None) -> tuple[str, ...]:
        """The chosen groups in the spec's order, all where `names` is None. Raises SpecError for an unknown one.

        A name without its stack (`qk`) chooses the group in every stack (`encoder.qk`, `decoder.qk`).
        """
        if names is None:
            return tuple(self.groups)
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise SpecError(f"groups: expected a list of names, found {names!r}; write [{str(names)!r}]")
        chosen = {str(name) for name in names}
        known = {known for group in self.groups.values() for known in (group.name, group.base_name)}
        if unknown := sorted(chosen - known):
            raise SpecError(
                f"groups: {', '.join(unknown)} not in {self.source}; expected some of {', '.join(self.groups)}"
            )
        return tuple(group.name for group in self.groups.values() if {group.name, group.base_name} & chosen)

    def select_layers(self, layers: Iterable[int] | None) -> tuple[int, ...]:
        """The chosen layers in order, all where `layers` is None. Raises SpecError for one the model lacks."""
        if layers is None:
            return tuple(range(self.num_layers))
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise SpecError(f"layers: expected layer numbers, found {layers!r}; write [0] or range(2)")
        chosen = list(layers)
        if wrong := [layer for layer in chosen if type(layer) is not int or not 0 <= layer < self.num_layers]:
            raise SpecError(f"layers: {wrong} not in the model; expected numbers from 0 to {self.num_layers - 1}")
        return tuple(sorted(set(chosen)))

    def components(self, groups: Iterable[str]) -> list[tuple[str, ...]]:
        """Sort groups into sets that share no parameter: each set can be solved on its own, exactly."""
        components: list[set[str]] = [{name} for name in groups]
        for entry in self.entries:
            for part in parts(entry.axes):
                acting = acting_groups(part, self.groups)
                touched = [c for c in components if c & acting]
                if len(touched) > 1:
                    components = [c for c in components if c not in touched] + [set().union(*touched)]
        ordered = [tuple(name for name in self.groups if name in c) for c in components]
        return sorted(ordered, key=lambda c: list(self.groups).index(c[0]))

    def resolve(self, params: Mapping[str, Tensor], folded: bool = True) -> Resolution:
        """Lay the spec over `params`, a mapping from parameter names to tensors.

        Names may carry any prefix (a bare backbone, a task model, a wrapper); what stands outside the prefix is a
        task head and left alone. A stack of layers of which nothing is there (the encoder of an encoder-decoder on
        its own) is left out. With the residual stream the head that reads it has to be there, and, unless `folded` is
        False, the norms have to be folded. Raises SpecError for a parameter that is missing, unknown, misshapen, shared
        with another one, or held in a type that no group can act on.
        """
        check_parameters(params)
        prefix, naming = self.locate(params)
        beside = prefix[: prefix.rstrip(".").rfind(".") + 1] if prefix else ""
        blocks: list[Block] = []
        names: dict[str, str] = {}
        stacks = tuple(stack for stack in self.layers if self._has_stack(stack, prefix, naming, params))
        for entry in self.entries:
            if entry.naming not in (None, naming) or (entry.stack is not None and entry.stack not in stacks):
                continue
            for layer in entry.layers if entry.layered else (None,):
                spread = self._spread(entry, layer)
                start = beside if entry.head else prefix
                present = {spec_name: start + self._rename(spec_name, naming, layer) for spec_name in spread}
                missing = [name for name in present.values() if name not in params]
                if missing and entry.optional:
                    continue
                if missing:
                    raise SpecError(
                        f"{missing[0]}: expected by {self.source}, not found among the parameters; pass a whole state "
                        "dict of the model that the configuration describes"
                    )
                names.update(present)
                blocks.extend(self._blocks(entry, tuple(present.values()), layer, params))
        known = set(names.values())
        inside = [name for name in params if name.startswith(prefix) and name not in known]
        for name in inside:
            bare = name.removeprefix(prefix)
            if any(fnmatch.fnmatchcase(bare, pattern) for pattern in self.untouched):
                names[bare] = name
                known.add(name)
        if inside := [name for name in inside if name not in known]:
            if self.residual is not None:
                raise _unknown_reader(inside[0], self.source)
            more = f" (and {len(inside) - 1} more)" if len(inside) > 1 else ""
            raise SpecError(
                f"{inside[0]}: no entry in {self.source}{more}; the architecture differs from the family's, so rotfed "
                f"refuses it: add an entry, then run 'rotfed check'"
            )
        left_alone = tuple(name for name in params if not name.startswith(prefix) and name not in known)
        if adapters := [name for name in left_alone if _ADAPTER_BESIDE.search(name)]:
            raise _adapter(adapters[0])
        if self.residual is not None:
            self._check_residual(params, names, left_alone, folded)
        _check_storage(blocks, params)
        return Resolution(prefix, naming, names, tuple(blocks), stacks, left_alone)

    def _check_residual(
        self, params: Mapping[str, Tensor], names: Mapping[str, str], left_alone: tuple[str, ...], folded: bool
    ) -> None:
        """Refuse a head that may read the residual stream unknown to the spec, a missing one, and unfolded norms."""
        assert self.residual is not None
        if left_alone:
            raise _unknown_reader(left_alone[0], self.source)
        if not any(entry.name in names for entry in self.entries if entry.head):
            raise SpecError(
                "task head: expected beside the backbone, not found; what a bare backbone puts out is in the frame of "
                "its residual stream: load the spec of the whole model, tied weights included, or without residual=True"
            )
        if not (folded and self.residual.folded):
            return
        for name, value in self.residual.units(self.num_layers):
            if name in names and not params[names[name]].is_meta and bool((params[names[name]] != value).any()):
                raise SpecError(
                    f"{names[name]}: expected a gain that is folded into the layers beside it; pass "
                    "rotfed.fold_norms(params, spec), which computes the same"
                )

    def locate(self, params: Mapping[str, Tensor]) -> tuple[str, str]:
        """The prefix and the naming under which most of the spec's parameters are found in `params`."""
        found: list[tuple[str, str]] = []
        probes = []
        for naming in self.namings():
            for stack in self.layers:
                entries = [entry for entry in self.entries if entry.stack == stack and entry.layers]
                entry = next((e for e in entries if not e.optional and e.naming in (None, naming)), None)
                if entry is None:
                    continue
                probe = self._rename(self._spread(entry, entry.layers[0])[0], naming, entry.layers[0])
                probes.append(probe)
                for name in params:
                    if name == probe or name.endswith("." + probe):
                        found.append((name[: len(name) - len(probe)], naming))
        if not found:
            raise SpecError(
                f"no parameter is named {' or '.join(dict.fromkeys(probes))}, with or without prefix, so {self.source} "
                f"does not fit; found e.g. {', '.join(itertools.islice(params, 3)) or 'no parameter at all'}"
            )
        fits = {
            (prefix, naming): sum(prefix + name in params for name in self.names(naming, optional=False))
            for prefix, naming in found
        }
        best = [place for place in fits if fits[place] == max(fits.values())]
        if len(prefixes := {prefix for prefix, _ in best}) > 1:
            raise SpecError(
                f"{self.source} fits in more than one place: under the prefixes "
                f"{', '.join(map(repr, sorted(prefixes)))}; pass the parameters of one backbone"
            )
        return best[0]

    def names(self, naming: str = "current", optional: bool = True) -> Iterator[str]:
        """Every name that the spec has for a parameter, in the given naming and without prefix."""
        for entry in self.entries:
            if entry.naming in (None, naming) and (optional or not entry.optional):
                for layer in entry.layers if entry.layered else (None,):
                    for name in self._spread(entry, layer):
                        yield self._rename(name, naming, layer)

    def names_of(self, entry: Entry) -> Iterator[str]:
        """The spec's names of an entry's parameters, over layers and over what it is spread over."""
        for layer in entry.layers if entry.layered else (None,):
            yield from self._spread(entry, layer)

    def _has_stack(self, stack: str | None, prefix: str, naming: str, params: Mapping[str, Tensor]) -> bool:
        if stack is None:
            return True
        return any(
            prefix + self._rename(self._spread(entry, layer)[0], naming, layer) in params
            for entry in self.entries
            if entry.stack == stack and entry.naming in (None, naming)
            for layer in entry.layers
        )

    def _spread(self, entry: Entry, layer: int | None) -> list[str]:
        """The spec's names of an entry's parameters in one layer: one, or one for each expert."""
        name = entry.name if layer is None else entry.name.replace("{layer}", str(layer))
        if entry.index is None:
            return [name]
        base = entry.index.rsplit(".", 1)[-1]
        return [name.replace(f"{{{base}}}", str(number)) for number in range(self._atom_size(Atom(entry.index)))]

    def namings(self) -> tuple[str, ...]:
        """The sets of names that the spec knows: the newest transformers first, then the aliases."""
        tied = [entry.naming for entry in self.entries if entry.naming is not None]
        return tuple(dict.fromkeys(["current", *self.aliases, *tied]))

    def _rename(self, name: str, naming: str, layer: int | None = None) -> str:
        table = self.aliases.get(naming, {})
        number = "{layer}" if layer is None else str(layer)
        for new in sorted(table, key=len, reverse=True):
            if name.startswith(new.replace("{layer}", number)):
                start, end = new.replace("{layer}", number), table[new].replace("{layer}", number)
                return end + name[len(start) :]
        return name

    def rename(self, name: str, naming: str) -> str:
        """An entry's name in the given naming; `{layer}` stays where it stands."""
        if naming not in self.namings():
            raise SpecError(f"naming {naming!r}: expected one of {', '.join(self.namings())}")
        return self._rename(name, naming)

    def _atom_size(self, atom: Atom) -> int:
        if atom.name in self.groups:
            return self.groups[atom.name].size
        if atom.name in self.sizes:
            return self.sizes[atom.name]
        return int(atom.name)

    def _blocks(
        self, entry: Entry, names: tuple[str, ...], layer: int | None, params: Mapping[str, Tensor]
    ) -> list[Block]:
        """Check shape and type of a parameter against its axis string and cut it into blocks that groups act on."""
        axes = entry.axes if entry.index is None else entry.axes[1:]
        expected = [None if axis == ANY else size_of(axis, self._atom_size) for axis in axes]
        acted_on = any(acting_groups(part, self.groups) for part in parts(entry.axes))
        for name in names:
            tensor = params[name]
            found = list(tensor.shape)
            if len(found) != len(expected) or any(e not in (None, f) for e, f in zip(expected, found, strict=True)):
                shown = ", ".join("any" if e is None else str(e) for e in expected)
                raise SpecError(
                    f"{name}: expected shape ({shown}) from {self.source}, found {tuple(found)}; "
                    "pass the configuration that the parameters were made with"
                )
            if acted_on and (not tensor.is_floating_point() or tensor.element_size() < 2):
                raise SpecError(
                    f"{name}: expected float16, bfloat16, float32 or float64, found {tensor.dtype}; rotfed cannot "
                    "rotate quantised weights: dequantise the model first"
                )
        if not acted_on:
            return []
        shape = list(params[names[0]].shape) if entry.index is None else [len(names), *params[names[0]].shape]
        lead = () if entry.index is None else (STACKED,)

        def any_or_size(atom: Atom, dim: int) -> int:
            return shape[dim] if atom == ANY[0] else self._atom_size(atom)

        # From the last axis to the first, so that the dimensions still to be cut keep their numbers.
        found_parts: list[tuple[tuple[Atom, ...], tuple[Step, ...]]] = [((), lead)]
        for dim in reversed(range(len(shape))):
            pieces = cuts(entry.axes[dim], dim, lambda atom, dim=dim: any_or_size(atom, dim))  # type: ignore[misc]
            found_parts = [
                ((*atoms, *later), (*before, *steps)) for later, before in found_parts for atoms, steps in pieces
            ]
        blocks = []
        for atoms, steps in found_parts:
            block = Block(names, layer, steps, (), ())
            sizes = tuple(block.view(torch.empty(shape, device="meta")).shape)
            if actions := self._actions(atoms, sizes):
                blocks.append(replace(block, shape=sizes, actions=actions))
        return blocks

    def _actions(self, atoms: tuple[Atom, ...], shape: tuple[int, ...]) -> tuple[Action, ...]:
        axes = [self.groups[atom.name].axis if atom.name in self.groups else atom.name for atom in atoms]
        found: list[Action] = []
        for position, atom in enumerate(atoms):
            own = [(atom.name, False)] if atom.name in self.groups else []
            for group_name, dual in [*own, *atom.actions]:
                group = self.groups[group_name]
                batch = [axes.index(index) for index in group.per if index != "layer"]
                acted = batch + ([] if group.axis is None else [position])
                rest = [i for i in range(len(shape)) if i not in acted]
                columns = math.prod(shape[i] for i in rest)
                unfolded = (*(shape[i] for i in batch), group.size, columns)
                found.append(Action(group, dual, (*acted, *rest), unfolded))
        return tuple(action for name in self.groups for action in found if action.group.name == name)


def acting_groups(part: tuple[Atom, ...], groups: Collection[str]) -> set[str]:
    """The names of the groups that act on a part of a parameter, directly or by their dual."""
    return {atom.name for atom in part if atom.name in groups} | {g for atom in part for g, _ in atom.actions}


def _unknown_reader(name: str, source: str) -> SpecError:
    return SpecError(
        f"{name}: no entry in {source} for this class of model, so it may read the residual stream, or what does; pass "
        "load_spec the model itself, of a class of transformers, load the spec without residual=True, or add an entry"
    )


def in_layers(name: str, layers: int) -> list[str]:
    """The names that a name stands for: one in each layer, or itself."""
    return [name.replace("{layer}", str(layer)) for layer in range(layers)] if "{layer}" in name else [name]


def _adapter(name: str) -> SpecError:
    return SpecError(
        f"{name}: expected a whole model, found an adapter's parameter, which would stay behind in the old frame; "
        "merge the adapter into the model first (PEFT's merge_and_unload), or federate the adapter alone, with "
        "load_adapter_spec in place of load_spec"
    )


def check_is_spec(spec: Any) -> None:
    """Raise SpecError for a model, a name or None in the place of a spec."""
    if not isinstance(spec, SymmetrySpec):
        raise SpecError(f"spec: expected a SymmetrySpec, found {type(spec).__name__}; pass what load_spec(model) gives")


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
    """What `value` is instead of a dense tensor with values of its own, such as a quantised one; empty for a tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    # DTensor, jagged tensors and torchao's quantised ones wrap others; torch has this protocol for them.
    if hasattr(value, "__tensor_flatten__") or torch.nn.parameter.is_lazy(value):
        return f"a {type(value).__name__}"
    if value.is_nested or value.is_quantized:
        return f"a {'nested' if value.is_nested else 'quantised'} tensor"
    return "" if value.layout == torch.strided else f"a {value.layout} tensor"


def _check_storage(blocks: Iterable[Block], params: Mapping[str, Tensor]) -> None:
    """Refuse two parameters that share values, unless they move alike: moved apart they could not be tied again."""
    found: dict[tuple[str, ...], list[object]] = {}
    for block in blocks:
        actions = [(action.group.name, action.dual, action.order) for action in block.actions]
        # Elements that differ by layer move two layers apart.
        layer = block.layer if any(action.group.layered for action in block.actions) else None
        found.setdefault(block.params, []).append((layer, block.steps, block.shape, actions))
    moves = {name: (place, move) for names, move in found.items() for place, name in enumerate(names)}
    for owner, name, same_view in shared_values(params):
        if (owner in moves or name in moves) and not (same_view and moves.get(owner) == moves.get(name)):
            raise SpecError(
                f"{name}: shares its values with {owner}, and each would be moved in a way of its own; rotfed does "
                "not align models that tie these parameters: untie them by a copy first"
            )


def shared_values(params: Mapping[str, Tensor]) -> Iterator[tuple[str, str, bool]]:
    """Pairs of names that have values in memory in common, and whether both are one view of it."""
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
    for span in sorted(spans):
        if together and not (span[0] == together[0][0] and span[1] < max(stop for _, _, stop, _ in together)):
            yield from _overlaps(together, params)
            together = []
        together.append(span)
    yield from _overlaps(together, params)


def _overlaps(spans: list[tuple[str, int, int, str]], params: Mapping[str, Tensor]) -> Iterator[tuple[str, str, bool]]:
    """Pairs of names that have values in common, of spans of memory that lie over each other."""
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
