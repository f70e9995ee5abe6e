"""Symmetry specs: which groups act on which axes of which parameters of a transformer.

A `SymmetrySpec` is bound to one configuration (`library.py` reads the files and binds them). It turns a mapping of
parameters into blocks, views on which the groups act, and refuses every mapping that it does not cover completely: a
parameter that no entry names could be one that a group must move.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from rotfed.axes import Atom, Axis, Segment
from rotfed.errors import SpecError
from rotfed.groups import KINDS, Kind


@dataclass(frozen=True)
class Group:
    """A group of a bound spec: one element of kind `kind` on vectors of length `size` for every index in `batch`."""

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


@dataclass(frozen=True)
class Entry:
    """One line of a spec's `[params]` that applies to the bound configuration."""

    name: str
    axes: tuple[Axis, ...]
    optional: bool = False

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
    """A rectangular part of a parameter on which the same groups act throughout."""

    param: str
    layer: int | None
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    actions: tuple[Action, ...]

    def read(self, params: Mapping[str, Tensor]) -> Tensor:
        """The block of `params`, in the shape of its atoms."""
        return params[self.param][self.index].reshape(self.shape)

    def write(self, params: Mapping[str, Tensor], value: Tensor) -> None:
        """Overwrite the block of `params` in place with `value`, in the shape of its atoms."""
        target = params[self.param][self.index]
        target.copy_(value.reshape(target.shape))


@dataclass(frozen=True)
class Resolution:
    """A spec laid over the names of one mapping.

    `names` maps the spec's name of each parameter to the one it has in the mapping, `blocks` come in the spec's
    order, `left_alone` are the parameters of a task head, outside the backbone's `prefix`.
    """

    prefix: str
    naming: str
    names: Mapping[str, str]
    blocks: tuple[Block, ...]
    left_alone: tuple[str, ...]


@dataclass(frozen=True)
class SymmetrySpec:
    """The symmetries of one transformer: groups, and the axis string of every parameter of its backbone.

    Bound to a configuration by `load_spec`; holds no parameter. `sizes` are the axis sizes by name, `groups` the
    groups by name, `entries` the parameters in the names of the newest transformers, `aliases` older names.
    """

    family: str
    model_type: str
    num_layers: int
    sizes: Mapping[str, int]
    groups: Mapping[str, Group]
    entries: tuple[Entry, ...]
    aliases: Mapping[str, Mapping[str, str]]

    @property
    def source(self) -> str:
        """The file that the spec was read from, as messages name it."""
        return f"specs/{self.family}.toml"

    def without(self, *names: str) -> "SymmetrySpec":
        """A copy that lacks the entries of the given names; for showing that a check would notice."""
        kept = tuple(entry for entry in self.entries if entry.name not in names)
        return replace(self, entries=kept)

    def select_groups(self, names: Iterable[str] | None) -> tuple[str, ...]:
        """The chosen groups in the spec's order, all where `names` is None. Raises SpecError for an unknown one."""
        if names is None:
            return tuple(self.groups)
        if isinstance(names, str):
            raise SpecError(f"groups: expected a list of names, found the string {names!r}; write [{names!r}]")
        chosen = set(names)
        if unknown := sorted(chosen - set(self.groups)):
            raise SpecError(
                f"groups: {', '.join(unknown)} not in {self.source}; expected some of {', '.join(self.groups)}"
            )
        return tuple(name for name in self.groups if name in chosen)

    def select_layers(self, layers: Iterable[int] | None) -> tuple[int, ...]:
        """The chosen layers in order, all where `layers` is None. Raises SpecError for one the model lacks."""
        if layers is None:
            return tuple(range(self.num_layers))
        if isinstance(layers, str | int):
            raise SpecError(f"layers: expected layer numbers, found {layers!r}; write [0] or range(2)")
        chosen = sorted(set(layers))
        if wrong := [layer for layer in chosen if not (isinstance(layer, int) and 0 <= layer < self.num_layers)]:
            raise SpecError(f"layers: {wrong} not in the model; expected numbers from 0 to {self.num_layers - 1}")
        return tuple(chosen)

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

    def resolve(self, params: Mapping[str, Tensor]) -> Resolution:
        """Lay the spec over `params`, a mapping from parameter names to tensors.

        Names may carry any prefix (a bare backbone, a task model, a wrapper); what stands outside the prefix is a
        task head and left alone. Raises SpecError for a parameter that is missing, unknown, misshapen, or held in
        a type that no group can act on.
        """
        prefix, naming = self._locate(params)
        blocks: list[Block] = []
        names: dict[str, str] = {}
        for entry in self.entries:
            for layer in range(self.num_layers) if entry.layered else (None,):
                name = prefix + self._rename(entry.name, naming).replace("{layer}", str(layer))
                if name not in params:
                    if entry.optional:
                        continue
                    raise SpecError(
                        f"{name}: expected by {self.source}, not found among the parameters; pass a whole state dict "
                        "of the model that the configuration describes"
                    )
                names[entry.name.replace("{layer}", str(layer))] = name
                blocks.extend(self._blocks(entry, name, layer, params[name]))
        known = set(names.values())
        inside = [name for name in params if name.startswith(prefix) and name not in known]
        if inside:
            more = f" (and {len(inside) - 1} more)" if len(inside) > 1 else ""
            raise SpecError(
                f"{inside[0]}: no entry in {self.source}{more}; the architecture differs from the family's, so rotfed "
                f"refuses it: add an entry, then run 'rotfed check'"
            )
        left_alone = tuple(name for name in params if not name.startswith(prefix))
        return Resolution(prefix, naming, names, tuple(blocks), left_alone)

    def _locate(self, params: Mapping[str, Tensor]) -> tuple[str, str]:
        """The prefix and the naming under which the spec's first layered parameter is found."""
        layered = [entry.name for entry in self.entries if entry.layered and not entry.optional]
        found: list[tuple[str, str]] = []
        probes = []
        for naming in self.namings():
            probe = self._rename(layered[0], naming).replace("{layer}", "0")
            probes.append(probe)
            for name in params:
                if name == probe or name.endswith("." + probe):
                    found.append((name[: len(name) - len(probe)], naming))
        if len(found) == 1:
            return found[0]
        if not found:
            raise SpecError(
                f"no parameter is named {' or '.join(probes)}, with or without prefix, so {self.source} does not fit; "
                f"found e.g. {', '.join(itertools.islice(params, 3)) or 'no parameter at all'}"
            )
        raise SpecError(
            f"{self.source} fits in more than one place: under the prefixes "
            f"{', '.join(repr(prefix) for prefix, _ in found)}; pass the parameters of one backbone"
        )

    def namings(self) -> tuple[str, ...]:
        """The sets of names that the spec knows: the newest transformers first, then the aliases."""
        return ("current", *self.aliases)

    def _rename(self, name: str, naming: str) -> str:
        if naming == "current":
            return name
        table = self.aliases[naming]
        for new in sorted(table, key=len, reverse=True):
            if name.startswith(new):
                return table[new] + name[len(new) :]
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

    def _blocks(self, entry: Entry, name: str, layer: int | None, tensor: Tensor) -> list[Block]:
        """Check a parameter's shape and type against its axis string and cut it into the blocks that groups act on."""
        expected = [_axis_size(axis, self._atom_size) for axis in entry.axes]
        found = list(tensor.shape)
        if len(found) != len(expected) or any(e not in (None, f) for e, f in zip(expected, found, strict=True)):
            shown = ", ".join("any" if e is None else str(e) for e in expected)
            raise SpecError(
                f"{name}: expected shape ({shown}) from {self.source}, found {tuple(found)}; "
                "pass the configuration that the parameters were made with"
            )
        if not any(acting_groups(part, self.groups) for part in parts(entry.axes)):
            return []
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise SpecError(
                f"{name}: expected float16, bfloat16, float32 or float64, found {tensor.dtype}; rotfed cannot rotate "
                "quantised weights: dequantise the model first"
            )
        blocks = []
        cuts = [self._cut(axis, size) for axis, size in zip(entry.axes, tensor.shape, strict=True)]
        for cut in itertools.product(*cuts):
            atoms = [atom for segment, _, _ in cut for atom in segment]
            shape = tuple(size for _, _, sizes in cut for size in sizes)
            if actions := self._actions(atoms, shape):
                blocks.append(Block(name, layer, tuple(span for _, span, _ in cut), shape, actions))
        return blocks

    def _cut(self, axis: Axis, size: int) -> list[tuple[Segment, slice, tuple[int, ...]]]:
        """Each segment of an axis with the range of indices that it takes and the sizes of its atoms."""
        if _is_any(axis):
            return [(axis[0], slice(0, size), (size,))]
        cuts = []
        start = 0
        for segment in axis:
            stop = start + _segment_size(segment, self._atom_size)
            cuts.append((segment, slice(start, stop), tuple(self._atom_size(atom) for atom in segment)))
            start = stop
        return cuts

    def _actions(self, atoms: list[Atom], shape: tuple[int, ...]) -> tuple[Action, ...]:
        actions = []
        for position, atom in enumerate(atoms):
            own = [(atom.name, False)] if atom.name in self.groups else []
            for group_name, dual in [*own, *atom.actions]:
                group = self.groups[group_name]
                names = [a.name for a in atoms]
                batch = [names.index(size) for size in group.per if size != "layer"]
                acted = batch + ([] if group.axis is None else [position])
                rest = [i for i in range(len(shape)) if i not in acted]
                per_layer = tuple(shape[i] for i in batch)
                columns = math.prod(shape[i] for i in rest)
                unfolded = (*per_layer, group.size, columns)
                actions.append(Action(group, dual, (*acted, *rest), unfolded))
        return tuple(actions)


def parts(axes: tuple[Axis, ...]) -> Iterator[tuple[Segment, ...]]:
    """The rectangular parts of a parameter: one segment of every axis, in all combinations."""
    return itertools.product(*axes)


def acting_groups(part: tuple[Segment, ...], groups: Collection[str]) -> set[str]:
    """The names of the groups that act on a part of a parameter, directly or by their dual."""
    atoms = [atom for segment in part for atom in segment]
    return {atom.name for atom in atoms if atom.name in groups} | {g for atom in atoms for g, _ in atom.actions}


def _is_any(axis: Axis) -> bool:
    return axis == ((Atom("_"),),)


def _axis_size(axis: Axis, atom_size: Callable[[Atom], int]) -> int | None:
    """The size of an axis, None where any will do."""
    return None if _is_any(axis) else sum(_segment_size(segment, atom_size) for segment in axis)


def _segment_size(segment: Segment, atom_size: Callable[[Atom], int]) -> int:
    return math.prod(atom_size(atom) for atom in segment)
