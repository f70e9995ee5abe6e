"""Spec files as typed values: the content of `specs/<family>.toml`, the same for every configuration.

A file holds sizes as expressions over the configuration, groups, one axis string a parameter, older names, and the
switches of the configuration under which the symmetry does not hold. `parse_spec_file` reads its text into a frozen
`SpecFile`. Every fault raises SpecError with the file, the place in it (`groups.qk.per[0]`), what was expected and
what was found.
"""

import dataclasses
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rotfed.axes import ANY, Atom, Axis, atoms_of, parse_axes, parts
from rotfed.errors import SpecError
from rotfed.groups import KINDS, Scale

Axes = tuple[Axis, ...]
"""The axes of a parameter, written as one axis string."""

_T = TypeVar("_T")
_field_types = cache(get_type_hints)
_TOML_NAMES: dict[type, str] = {str: "a string", bool: "true or false", dict: "a table", list: "a list"}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class GroupTable:
    """A group: its kind, the axis it acts on (by default the size of its own name), and the indices it differs by."""

    kind: str
    axis: str | None = None
    per: tuple[str, ...] = ()
    when: str = "true"


@dataclass(frozen=True)
class ParamTable:
    """A parameter: its axes, and the condition, stack and naming in which it is there. `head` marks a task head's."""

    axes: Axes
    when: str = "true"
    optional: bool = False
    stack: str | None = None
    naming: str | None = None
    head: bool = False


@dataclass(frozen=True)
class HeadTable:
    """A parameter of a task head: its axes where it reads the residual stream, and where it reads a pooler."""

    axes: Axes
    pooled: Axes | None = None


@dataclass(frozen=True)
class ResidualTable:
    """The residual stream: the group that its norms allow, its axes, and the parameters that meet it.

    `folds` maps each norm to the layers that read it, `scales` each layer scale to the layers that it multiplies.
    `kind`, `unit` and `pooled` are expressions.
    """

    kind: str
    folds: Mapping[str, tuple[str, ...]]
    head: Mapping[str, HeadTable]
    axes: tuple[str, ...] = ("d_model",)
    unit: str = "1"
    pooled: str = "none"
    shared: bool = False
    scales: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RefuseRule:
    """A condition under which the symmetry does not hold, the sentence to say then, and an example of it."""

    when: str
    because: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExampleTable:
    """A small model to prove the spec on: its configuration, beside `tiny`, and the classes to build from it."""

    model_type: str
    name: str | None = None
    classes: tuple[str, ...] = ("AutoModel",)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SpecFile:
    """A whole spec file. `sizes`, `layers`, `stacks` and every `when` are expressions over the configuration."""

    model_type: tuple[str, ...]
    layers: str
    sizes: Mapping[str, str]
    groups: Mapping[str, GroupTable]
    params: Mapping[str, ParamTable]
    stacks: str | None = None
    untouched: tuple[str, ...] = ()
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refuse: tuple[RefuseRule, ...] = ()
    residual: ResidualTable | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[ExampleTable, ...] = ()

    def axis_of(self, group: str) -> str | None:
        """Return the axis that a group acts on; None for one that scales everything alike, and for no group."""
        if group not in self.groups:
            return None
        axis = self.groups[group].axis
        return group if axis is None and group in self.sizes else axis


def parse_spec_file(text: str, name: str) -> SpecFile:
    """Return a spec file's text as a typed value. Raise SpecError, with the file's name and the place, for a fault."""
    try:
        file: SpecFile = _read(SpecFile, _parse_toml(text), "")
        _check(file)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error
    return file


def read_model_types(text: str) -> list[str]:
    """Return the model types of a sound spec file. They stand before its first table, and no more is parsed."""
    top, *_ = re.split(r"^\[", text, maxsplit=1, flags=re.MULTILINE)
    model_types: list[str] = _parse_toml(top)["model_type"]
    return model_types


def spread_over(param: str) -> list[str]:
    """Return the sizes over which a parameter's name is spread: `["experts"]` for `experts.{experts}.{layer}.w`."""
    return [size for size in _PLACEHOLDER.findall(param) if size not in ("layer", "stack")]


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(f"expected TOML, found {error}") from error


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return a value of TOML as what a field of type `kind` holds; `place` is its dotted key, empty for the file."""
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):
        # TOML has no null: None is only what a field holds where the key is absent.
        return _read(get_args(kind)[0], value, place)
    if kind == Axes:
        return _read_axes(_expect(str, value, place), place)
    if dataclasses.is_dataclass(kind):
        return _read_table(kind, value, place)
    if get_origin(kind) is Mapping:
        _, inner = get_args(kind)
        return {key: _read(inner, item, _within(place, key)) for key, item in _expect(dict, value, place).items()}
    if get_origin(kind) is tuple:
        inner, _ = get_args(kind)
        return tuple(_read(inner, item, f"{place}[{i}]") for i, item in enumerate(_expect(list, value, place)))
    return _expect(kind, value, place)


def _read_table(kind: Any, value: Any, place: str) -> Any:
    if kind in (ParamTable, HeadTable) and isinstance(value, str):
        value = {"axes": value}
    table = _expect(dict, value, place)
    kinds = _field_types(kind)
    where = f"{place}: " if place else ""
    if unknown := sorted(set(table) - set(kinds)):
        raise SpecError(f"{where}unknown key {unknown[0]!r}; expected some of {', '.join(sorted(kinds))}")
    required = [f.name for f in dataclasses.fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := sorted(set(required) - set(table)):
        raise SpecError(f"{where}expected the keys {', '.join(missing)}, not found")
    return kind(**{key: _read(kinds[key], item, _within(place, key)) for key, item in table.items()})


def _read_axes(text: str, place: str) -> Axes:
    try:
        return parse_axes(text)
    except SpecError as error:
        raise SpecError(f"{place}: {error}") from error


def _expect(kind: type[_T], value: Any, place: str) -> _T:
    if not isinstance(value, kind):
        raise SpecError(f"{place}: expected {_TOML_NAMES[kind]}, found {value!r}")
    return value


def _within(place: str, key: str) -> str:
    """Return the place of a key in a table as TOML writes it: `params."h.{layer}.q".axes`."""
    key = key if _BARE_KEY.fullmatch(key) else f'"{key}"'
    return f"{place}.{key}" if place else key


def _check(file: SpecFile) -> None:
    """Raise SpecError unless the parts of a spec file fit each other."""
    for number, example in enumerate(file.examples):
        if example.model_type not in file.model_type:
            known = ", ".join(file.model_type)
            raise SpecError(f"examples[{number}].model_type: expected one of {known}, found {example.model_type!r}")
    if "current" in file.aliases:
        raise SpecError("aliases.current: expected a name of its own, found that of the names in [params]")
    for own in (*file.sizes, *file.groups):
        if not _NAME.fullmatch(own) or own in ("_", "layer", "stack"):
            raise SpecError(f"{own!r}: expected letters, digits and '_' as the name of a size or a group")
    for group in file.groups:
        _check_group(group, file)
    for param, table in file.params.items():
        place = _within("params", param)
        if file.stacks is None and ("{stack}" in param or table.stack is not None):
            raise SpecError(f"{place}: expected no stack in a file without the key 'stacks', found one")
        _check_axes(place, param, table.axes, file)
        if table.optional and any(name in file.groups for atom in atoms_of(table.axes) for name in atom.names):
            # A state dict without the parameter would be moved only in part.
            raise SpecError(f"{place}: a parameter that groups act on cannot be optional; state 'when' it exists")
    if file.residual is not None:
        _check_residual(file.residual, file)
    if not any("{layer}" in param for param in file.params):
        raise SpecError("params: expected a parameter with {layer} in its name, found none")


def _check_group(name: str, file: SpecFile) -> None:
    group, axis, place = file.groups[name], file.axis_of(name), f"groups.{name}"
    if group.kind not in KINDS:
        raise SpecError(f"{place}.kind: expected one of {', '.join(KINDS)}, found {group.kind!r}")
    if unknown := [size for size in group.per if size != "layer" and size not in file.sizes]:
        raise SpecError(f"{place}.per: {', '.join(unknown)} not in [sizes]")
    if doubled := [size for size in group.per if group.per.count(size) > 1 or size == axis]:
        raise SpecError(f"{place}.per: expected each index once, and not the group's own axis, found {doubled[0]}")
    if axis is not None and axis not in file.sizes:
        raise SpecError(f"{place}.axis: {axis} not in [sizes]")
    if axis is None and not isinstance(KINDS[group.kind], Scale):
        raise SpecError(f"{place}.axis: expected the axis that the group acts on, not found")
    for other, outer in file.groups.items():
        index = file.axis_of(other)
        if other == name or index not in group.per:
            continue
        if outer.kind != "permutation":
            raise SpecError(f"{place}.per: {index} is mixed by the group {other}, so it cannot index elements")
        before = group.per[: group.per.index(index)]
        if outside := [size for size in outer.per if size not in before]:
            raise SpecError(f"{place}.per: expected {outside[0]} before {index}, as the group {other} has it")


def _check_residual(stream: ResidualTable, file: SpecFile) -> None:
    if not stream.axes or any(axis not in file.sizes for axis in stream.axes):
        raise SpecError(f"residual.axes: expected names of [sizes], found {list(stream.axes)}")
    for param, entry in stream.head.items():
        for axes in (entry.axes, entry.pooled or ()):
            _check_axes(_within("residual.head", param), param, axes, file)


def _check_axes(place: str, param: str, axes: Axes, file: SpecFile) -> None:
    """Raise SpecError unless every name in a parameter's axes is known and its groups can act there together."""
    for axis in axes:
        if axis != ANY and any(atom.name == "_" for atom in atoms_of((axis,))):
            raise SpecError(f"{place}: '_' stands for a whole axis and takes no group")
    for atom in atoms_of(axes):
        name, *actions = atom.names
        if name != "_" and not name.isdigit() and name not in file.groups and name not in file.sizes:
            raise SpecError(f"{place}: {name!r} is neither in [sizes] nor in [groups]")
        if unknown := [group for group in actions if group not in file.groups]:
            raise SpecError(f"{place}: {unknown[0]!r} after '*' or '/' is not in [groups]")
        on_axis = [name for name in atom.names if file.axis_of(name)]
        if len(on_axis) > 1:
            raise SpecError(
                f"{place}: {' and '.join(on_axis)} act on the same axis and do not commute, which rotfed cannot "
                "compose; keep one of them, or let the one scale 'per' the axis that the other permutes"
            )
    for part in parts(axes):
        _check_part(place, param, part, file)
    first = axes[0][0] if axes and len(axes[0]) == 1 else None
    first_size = (file.axis_of(first.name) or first.name) if isinstance(first, Atom) else None
    for index in spread_over(param):
        if index not in file.sizes or index != first_size:
            raise SpecError(f"{place}: expected the size {index} as the first axis, over which the name is spread")


def _check_part(place: str, param: str, part: tuple[Atom, ...], file: SpecFile) -> None:
    """Raise SpecError unless every group that acts on a part of a parameter finds its indices there, each once."""
    acting = [name for atom in part for name in atom.names if name in file.groups]
    sizes = [file.axis_of(atom.name) or atom.name for atom in part]
    for group in sorted(set(acting)):
        if acting.count(group) > 1:
            raise SpecError(f"{place}: group {group} acts twice on one part, which rotfed cannot solve")
        per = file.groups[group].per
        if "layer" in per and "{layer}" not in param:
            raise SpecError(f"{place}: group {group} differs by layer, but the parameter is shared by all")
        if lacking := [size for size in per if size != "layer" and size not in sizes]:
            raise SpecError(f"{place}: group {group} differs by {lacking[0]}, which is not an axis here")
        if doubled := [size for size in per if sizes.count(size) > 1]:
            raise SpecError(f"{place}: group {group} differs by {doubled[0]}, which is an axis here twice")
