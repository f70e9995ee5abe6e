"""Symmetry specs: which groups act on which axes of which parameters of a transformer.

A `SymmetrySpec` is bound to one configuration (`library.py` reads the files and binds them) and knows no parameter's
value. `layout.py` binds it to the names and shapes of a model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rotfed.axes import Atom, Axis, parts
from rotfed.errors import SpecError
from rotfed.groups import KINDS, Kind


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
    layouts: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The layouts of models that were seen, by names and shapes; see `rotfed.layout.lay_out`."""

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

    def names(self, naming: str = "current", optional: bool = True) -> Iterator[str]:
        """Every name that the spec has for a parameter, in the given naming and without prefix."""
        for entry in self.entries:
            if entry.naming in (None, naming) and (optional or not entry.optional):
                for layer in entry.layers if entry.layered else (None,):
                    for name in self.spread(entry, layer):
                        yield self.renamed(name, naming, layer)

    def names_of(self, entry: Entry) -> Iterator[str]:
        """The spec's names of an entry's parameters, over layers and over what it is spread over."""
        for layer in entry.layers if entry.layered else (None,):
            yield from self.spread(entry, layer)

    def spread(self, entry: Entry, layer: int | None) -> list[str]:
        """The spec's names of an entry's parameters in one layer: one, or one for each expert."""
        name = entry.name if layer is None else entry.name.replace("{layer}", str(layer))
        if entry.index is None:
            return [name]
        base = entry.index.rsplit(".", 1)[-1]
        return [name.replace(f"{{{base}}}", str(number)) for number in range(self.atom_size(Atom(entry.index)))]

    def namings(self) -> tuple[str, ...]:
        """The sets of names that the spec knows: the newest transformers first, then the aliases."""
        tied = [entry.naming for entry in self.entries if entry.naming is not None]
        return tuple(dict.fromkeys(["current", *self.aliases, *tied]))

    def renamed(self, name: str, naming: str, layer: int | None = None) -> str:
        """Return the name that a parameter of the spec has in a naming; the layer's number is in the name."""
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
        return self.renamed(name, naming)

    def atom_size(self, atom: Atom) -> int:
        """Return the number of entries along one factor of an axis."""
        if atom.name in self.groups:
            return self.groups[atom.name].size
        if atom.name in self.sizes:
            return self.sizes[atom.name]
        return int(atom.name)


def acting_groups(part: tuple[Atom, ...], groups: Collection[str]) -> set[str]:
    """The names of the groups that act on a part of a parameter, directly or by their dual."""
    return {atom.name for atom in part if atom.name in groups} | {g for atom in part for g, _ in atom.actions}


def in_layers(name: str, layers: int) -> list[str]:
    """The names that a name stands for: one in each layer, or itself."""
    return [name.replace("{layer}", str(layer)) for layer in range(layers)] if "{layer}" in name else [name]


def check_is_spec(spec: Any) -> None:
    """Raise SpecError for a model, a name or None in the place of a spec."""
    if not isinstance(spec, SymmetrySpec):
        raise SpecError(f"spec: expected a SymmetrySpec, found {type(spec).__name__}; pass what load_spec(model) gives")
