"""The spec files that rotfed ships, and `load_spec`, which binds one of them to a model's configuration.

A file `specs/<family>.toml` is data: sizes as expressions over the configuration, groups, one axis string a
parameter, older names, and the switches of the configuration under which the symmetry does not hold.
"""

import contextlib
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import torch

from rotfed.axes import ANY, Atom, Axis, parse_axes, parts, rename_atoms
from rotfed.errors import RotfedError, SpecError
from rotfed.groups import KINDS, Scale
from rotfed.residual import bound_residual, with_residual
from rotfed.spec import Entry, Group, SymmetrySpec

_KEYS: dict[str, dict[str, type]] = {
    "": {
        "model_type": list,
        "stacks": str,
        "layers": str,
        "sizes": dict,
        "groups": dict,
        "params": dict,
        "untouched": list,
        "aliases": dict,
        "refuse": list,
        "residual": dict,
        "tiny": dict,
        "examples": list,
    },
    "groups": {"kind": str, "axis": str, "per": list, "when": str},
    "params": {"axes": str, "when": str, "optional": bool, "stack": str, "naming": str, "head": bool},
    "residual": {
        "kind": str,
        "axes": list,
        "unit": str,
        "pooled": str,
        "shared": bool,
        "folds": dict,
        "scales": dict,
        "head": dict,
    },
    "head": {"axes": str, "pooled": str},
    "refuse": {"when": str, "because": str, "config": dict},
    "examples": {"name": str, "model_type": str, "classes": list, "config": dict},
}
_INDEX = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Far more than any model has; a configuration that says otherwise would fill the memory with names.
_MOST_LAYERS = 10_000
_MOST_NAMES = 1_000_000


@cache
def spec_files() -> dict[str, dict[str, Any]]:
    """All spec files that rotfed ships, by family name, checked for unknown keys."""
    files = {}
    for path in sorted(resources.files("rotfed.specs").iterdir(), key=lambda p: p.name):
        if path.name.endswith(".toml"):
            family = path.name.removesuffix(".toml")
            files[family] = parse_spec_file(path.read_text(encoding="utf-8"), path.name)
    return files


def supported_model_types() -> dict[str, str]:
    """Every `model_type` that has a spec, with the family whose file describes it."""
    return {model_type: family for family, data in spec_files().items() for model_type in data["model_type"]}


def parse_spec_file(text: str, name: str) -> dict[str, Any]:
    """Parse and check a spec file's text, independent of any configuration. Raises SpecError that names the fault."""
    try:
        data = tomllib.loads(text)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(f"{name}: expected TOML, found {error}") from error
    _check_table(name, data, "")
    if missing := sorted({"model_type", "layers", "sizes", "groups", "params"} - set(data)):
        raise SpecError(f"{name}: expected the keys {', '.join(missing)}, not found")
    for number, rule in enumerate(data.get("refuse", [])):
        _check_table(f"{name}: refuse[{number}]", rule, "refuse")
        if missing := sorted({"when", "because"} - set(rule)):
            raise SpecError(f"{name}: refuse[{number}]: expected the keys {', '.join(missing)}, not found")
    for number, example in enumerate(data.get("examples", [])):
        _check_table(f"{name}: examples[{number}]", example, "examples")
        if example.get("model_type") not in data["model_type"]:
            raise SpecError(f"{name}: examples[{number}]: expected a model_type of this file, found {example}")
    for key in ("model_type", "untouched"):
        _check_strings(f"{name}: {key}", data.get(key, []))
    for naming, renames in data.get("aliases", {}).items():
        if naming == "current" or not isinstance(renames, dict):
            raise SpecError(f"{name}: aliases.{naming}: expected a table of older names, under a name of its own")
        _check_strings(f"{name}: aliases.{naming}", renames.values())
    for own in (*data["sizes"], *data["groups"]):
        if not _NAME.fullmatch(own) or own in ("_", "layer", "stack"):
            raise SpecError(f"{name}: {own!r}: expected letters, digits and '_' as the name of a size or a group")
    for group, table in data["groups"].items():
        _check_table(f"{name}: groups.{group}", table, "groups")
    for group, table in data["groups"].items():
        _check_group(f"{name}: groups.{group}", group, table, data)
    for param, value in data["params"].items():
        data["params"][param] = table = {"axes": value} if isinstance(value, str) else value
        where = f"{name}: {param}"
        _check_table(where, table, "params")
        if "axes" not in table:
            raise SpecError(f"{where}: expected an axis string, or a table with the key 'axes'")
        if "stacks" not in data and ("{stack}" in param or "stack" in table):
            raise SpecError(f"{where}: expected no stack in a file without the key 'stacks', found one")
        _check_axes(where, param, _axes(where, table["axes"]), table, data)
    if "residual" in data:
        _check_residual(f"{name}: residual", data["residual"], data)
    if not any("{layer}" in param for param in data["params"]):
        raise SpecError(f"{name}: expected a parameter with {{layer}} in its name, found none")
    return data


def _check_table(where: str, table: Any, kind: str) -> None:
    allowed = _KEYS[kind]
    if not isinstance(table, dict):
        raise SpecError(f"{where}: expected a table, found {table!r}")
    if unknown := sorted(set(table) - set(allowed)):
        raise SpecError(f"{where}: unknown key {unknown[0]!r}; expected some of {', '.join(sorted(allowed))}")
    for key, value in table.items():
        if not isinstance(value, allowed[key]):
            raise SpecError(f"{where}: {key}: expected a {allowed[key].__name__}, found {value!r}")


def _check_strings(where: str, values: Iterable[Any]) -> None:
    if odd := [value for value in values if not isinstance(value, str)]:
        raise SpecError(f"{where}: expected strings, found {odd[0]!r}")


def _check_residual(where: str, table: Any, data: Mapping[str, Any]) -> None:
    _check_table(where, table, "residual")
    if missing := sorted({"kind", "folds", "head"} - set(table)):
        raise SpecError(f"{where}: expected the keys {', '.join(missing)}, not found")
    axes = table.get("axes", ["d_model"])
    if not axes or any(not isinstance(axis, str) or axis not in data["sizes"] for axis in axes):
        raise SpecError(f"{where}.axes: expected names of [sizes], found {axes}")
    for key in ("folds", "scales"):
        for name, others in table.get(key, {}).items():
            _check_strings(f"{where}.{key}: {name}", others if isinstance(others, list) else [others, None])
    for param, value in table["head"].items():
        place = f"{where}.head: {param}"
        table["head"][param] = entry = {"axes": value} if isinstance(value, str) else value
        _check_table(place, entry, "head")
        if "axes" not in entry:
            raise SpecError(f"{place}: expected an axis string, or a table with the key 'axes'")
        for text in entry.values():
            _check_axes(place, param, _axes(place, text), {}, data)


def _axes(where: str, text: str) -> tuple[Axis, ...]:
    """Parse an axis string, naming the entry where it is at fault."""
    try:
        return parse_axes(text)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


def _check_group(where: str, group: str, table: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    if table.get("kind") not in KINDS:
        raise SpecError(f"{where}.kind: expected one of {', '.join(KINDS)}, found {table.get('kind')!r}")
    per = table.get("per", [])
    _check_strings(f"{where}.per", per)
    if unknown := [size for size in per if size != "layer" and size not in data["sizes"]]:
        raise SpecError(f"{where}.per: {', '.join(unknown)} not in [sizes]")
    axis = _axis_of(group, data)
    if doubled := [size for size in per if per.count(size) > 1 or size == axis]:
        raise SpecError(f"{where}.per: expected each index once, and not the group's own axis, found {doubled[0]}")
    if axis is not None and axis not in data["sizes"]:
        raise SpecError(f"{where}.axis: {axis} not in [sizes]")
    if axis is None and not isinstance(KINDS[table["kind"]], Scale):
        raise SpecError(f"{where}.axis: expected the axis that the group acts on, not found")
    for other, outer in data["groups"].items():
        index = _axis_of(other, data)
        if other == group or index is None or index not in table.get("per", []):
            continue
        if outer.get("kind") != "permutation":
            raise SpecError(f"{where}.per: {index} is mixed by the group {other}, so it cannot index elements")
        before = table["per"][: table["per"].index(index)]
        if outside := [size for size in outer.get("per", []) if size not in before]:
            raise SpecError(f"{where}.per: expected {outside[0]} before {index}, as the group {other} has it")


def _axis_of(group: str, data: Mapping[str, Any]) -> str | None:
    """The axis that a group acts on; None for one that scales everything alike, or for what is no group."""
    if group not in data["groups"]:
        return None
    axis: str | None = data["groups"][group].get("axis", group if group in data["sizes"] else None)
    return axis


def _check_axes(
    where: str, param: str, axes: tuple[Axis, ...], table: Mapping[str, Any], data: Mapping[str, Any]
) -> None:
    groups, sizes = data["groups"], data["sizes"]
    for part in parts(axes):
        if Atom("_") in part and any(axis != ANY and Atom("_") in inner for axis in axes for inner in parts((axis,))):
            raise SpecError(f"{where}: '_' stands for a whole axis and takes no group")
        for atom in part:
            if atom.name == "_" and atom.actions:
                raise SpecError(f"{where}: '_' stands for a whole axis and takes no group")
            if atom.name != "_" and not atom.name.isdigit() and atom.name not in groups and atom.name not in sizes:
                raise SpecError(f"{where}: {atom.name!r} is neither in [sizes] nor in [groups]")
            for name, _ in atom.actions:
                if name not in groups:
                    raise SpecError(f"{where}: {name!r} after '*' or '/' is not in [groups]")
            on_axis = [name for name in (atom.name, *(g for g, _ in atom.actions)) if _axis_of(name, data)]
            if len(on_axis) > 1:
                raise SpecError(
                    f"{where}: {' and '.join(on_axis)} act on the same axis and do not commute, which rotfed cannot "
                    "compose; keep one of them, or let the one scale 'per' the axis that the other permutes"
                )
        acting = [atom.name for atom in part if atom.name in groups] + [g for atom in part for g, _ in atom.actions]
        names = [_axis_of(atom.name, data) or atom.name for atom in part]
        for group in sorted(set(acting)):
            if acting.count(group) > 1:
                raise SpecError(f"{where}: group {group} acts twice on one part, which rotfed cannot solve")
            if table.get("optional"):
                # A state dict without the parameter would be moved only in part.
                raise SpecError(f"{where}: a parameter that groups act on cannot be optional; state 'when' it exists")
            per = groups[group].get("per", [])
            if "layer" in per and "{layer}" not in param:
                raise SpecError(f"{where}: group {group} differs by layer, but the parameter is shared by all")
            if lacking := [size for size in per if size != "layer" and size not in names]:
                raise SpecError(f"{where}: group {group} differs by {lacking[0]}, which is not an axis here")
            if doubled := [size for size in per if names.count(size) > 1]:
                raise SpecError(f"{where}: group {group} differs by {doubled[0]}, which is an axis here twice")
    for index in set(_INDEX.findall(param)) - {"layer", "stack"}:
        if index not in sizes or not axes or _axis_of_first(axes, data) != index:
            raise SpecError(f"{where}: expected the size {index} as the first axis, over which the name is spread")


def _axis_of_first(axes: tuple[Axis, ...], data: Mapping[str, Any]) -> str | None:
    first = axes[0][0] if len(axes[0]) == 1 else None
    return (_axis_of(first.name, data) or first.name) if isinstance(first, Atom) else None


_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)


@cache
def _compiled(expression: str) -> Callable[..., Any]:
    return _JINJA.compile_expression(expression, undefined_to_none=False)


def _evaluate(expression: Any, config: Mapping[str, Any], where: str) -> Any:
    """Evaluate a spec's expression, such as `hidden_size // num_attention_heads`, over a configuration's attributes."""
    try:
        value = _compiled(str(expression))(**config)
        if isinstance(value, jinja2.Undefined):
            # Raises what is missing; a bare name is not looked at before it is used.
            str(value)
        return value
    except Exception as error:  # an expression may fail in any way over values that it was not made for
        raise SpecError(f"{where}: cannot evaluate {expression!r} over the configuration: {error}") from error


@contextlib.contextmanager
def refusing(expected: str) -> Iterator[None]:
    """Turn whatever transformers, torch or the disk raise inside into a SpecError of one sentence."""
    try:
        yield
    except RotfedError:
        raise
    except Exception as error:  # transformers raises errors of any class over what it was not made for
        found = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        raise SpecError(f"{expected}, found: {found}") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """The values of a model directory's `config.json`, or of that file. Raises SpecError where there is none."""
    path = Path(path)
    with refusing(f"{path}: expected a model directory or a config.json"):
        if not path.is_dir() and (path.suffix != ".json" or not path.exists()):
            found = "another file" if path.exists() else "nothing"
            raise SpecError(f"{path}: expected a model directory or a config.json, found {found} there")
    if path.is_dir() and not (path / "config.json").is_file():
        raise SpecError(f"{path}: expected a transformers model directory, found no config.json in it")
    with refusing(f"{path}: expected a transformers configuration"):
        values = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    if not isinstance(values, dict):
        raise SpecError(f"{path}: expected a transformers configuration, found {type(values).__name__}")
    return values


def _config_of(source: Any) -> Any:
    """A transformers configuration from a configuration, its dict, a model, a directory, or a `config.json`."""
    import transformers

    if isinstance(source, transformers.PretrainedConfig):
        return source
    if isinstance(source, torch.nn.Module):
        return _unwrapped(source).config
    if isinstance(source, Mapping):
        values = dict(source)
        model_type = values.pop("model_type", None)
        if not isinstance(model_type, str):
            raise SpecError("configuration: expected the key 'model_type', not found; pass a transformers config dict")
        if model_type not in supported_model_types():
            raise _no_spec(model_type)
        with refusing(f"{model_type}: expected a configuration that transformers {transformers.__version__} accepts"):
            return transformers.AutoConfig.for_model(model_type, **values)
    if isinstance(source, str | Path):
        return _config_of(read_config(source))
    raise SpecError(
        f"expected a transformers configuration, its dict, a model or a directory, found {type(source).__name__}"
    )


def _unwrapped(source: torch.nn.Module) -> Any:
    """The transformers model inside what wraps it."""
    import transformers

    # What torch.compile returns shows the attributes of the model, which it keeps in `_orig_mod`.
    module: Any = source._modules.get("_orig_mod") or source
    while not isinstance(getattr(module, "config", None), transformers.PretrainedConfig):
        # DistributedDataParallel keeps the model in `module`.
        module = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if module is None:
            raise SpecError(
                f"{type(source).__name__}: expected a transformers model, found a module without a 'config'; "
                "pass the configuration of the backbone instead"
            )
    return module


def _class_of(source: Any, config: Any) -> tuple[str, frozenset[str] | None]:
    """The class of transformers that a model or a directory's model is of, and the names of its parameters.

    A configuration alone may belong to any class: no class, and None for the names. What a class from elsewhere does
    with its head nobody can tell: no class, and no names. Tied parameters, which files leave out, are not among them.
    """
    import transformers

    if isinstance(source, torch.nn.Module):
        model = _unwrapped(source)
        cls = next((c for c in type(model).__mro__ if c.__module__.startswith("transformers.")), None)
        if cls is None or not type(model).forward.__module__.startswith("transformers."):
            return "", frozenset()
    elif isinstance(source, str | Path) and isinstance(config.architectures, list) and config.architectures:
        cls = getattr(transformers, str(config.architectures[0]), None)
        if cls is None:
            return "", frozenset()
        with refusing(f"{source}: expected a configuration of {cls.__name__}"), torch.device("meta"):
            model = cls(config)
    else:
        return "", None
    return cls.__name__, frozenset(model.state_dict())


def _no_spec(model_type: str) -> SpecError:
    return SpecError(
        f"{model_type or 'this configuration'}: no spec for this model_type; 'rotfed specs' lists the "
        f"{len(supported_model_types())} that rotfed knows"
    )


def load_spec(source: Any, residual: bool | str = False) -> SymmetrySpec:
    """Find the spec that describes a model and bind it to the model's configuration.

    Parameters: `source`, a transformers configuration, its dict, a model (wrapped or not), or the path of a model
    directory or `config.json`; `residual`, whether the spec also acts on the residual stream, which takes a model with
    its head and, in most architectures, `fold_norms` first; `"permutation"` uses no more than the permutations of the
    stream, which every norm allows and which need no folding. Returns the bound spec. Raises SpecError, in one
    sentence, where rotfed has no spec for the `model_type`, a switch of the configuration takes away the symmetry, or
    the spec does not know the residual stream.
    """
    config = _config_of(source)
    model_type = config.model_type
    if model_type not in supported_model_types():
        raise _no_spec(model_type)
    family = supported_model_types()[model_type]
    with refusing(f"{model_type}: expected a configuration of plain values"):
        values = {**config.to_dict(), **{new: getattr(config, new, None) for new in config.attribute_map}}
    values |= {"model_type": model_type, "model_class": ""}
    own = None
    if residual:
        values["model_class"], own = _class_of(source, config)
    return bind_spec(spec_files()[family], family, model_type, values, residual, own)


def bind_spec(
    data: Mapping[str, Any],
    family: str,
    model_type: str,
    config: Mapping[str, Any],
    residual: bool | str = False,
    own: frozenset[str] | None = None,
) -> SymmetrySpec:
    """Bind a parsed spec file to a configuration's values: sizes become numbers, conditions are decided.

    `own` are the names of the parameters of the model's class, where it is known: no others can read the stream.
    """
    name = f"specs/{family}.toml"
    remembered = None
    if residual:
        kind = _evaluate(data["residual"]["kind"], config, f"{name}: residual.kind") if "residual" in data else None
        if kind is None:
            raise SpecError(f"{model_type}: {name} does not know the residual stream; load it without residual=True")
        if residual is not True and residual != "permutation":
            raise SpecError(f"residual: expected True, False or 'permutation', found {residual!r}")
        kind = kind if residual is True else "permutation"
        unit, pooled = (
            _evaluate(data["residual"].get(key, default), config, f"{name}: residual.{key}")
            for key, default in (("unit", "1"), ("pooled", "none"))
        )
        data = with_residual(data, kind, _stream_axes(data, config, name), pooled, name, own)
        remembered = bound_residual(data, kind, unit)
    for rule in data.get("refuse", []):
        if _evaluate(rule["when"], config, f"{name}: refuse"):
            raise SpecError(f"{model_type}: {rule['because']}")
    stacks = _evaluate(data["stacks"], config, f"{name}: stacks") if "stacks" in data else [None]
    odd = not isinstance(stacks, list | range) or any(not isinstance(key, str | int | None) for key in stacks)
    if odd or len({str(key) for key in stacks}) < len(stacks):
        raise SpecError(f"{name}: stacks: expected a list of names or numbers, each once, found {stacks!r}")
    shared = _Stack(data, name, config, None)
    bound = {stack: shared if stack is None else _Stack(data, name, config, stack, shared.groups) for stack in stacks}
    if not any(stack.layers for stack in bound.values()):
        raise SpecError(f"{model_type}: expected at least one layer, found none ({data['layers']} in {name})")
    entries: list[Entry] = []
    aliases: dict[str, dict[str, str]] = {naming: {} for naming in data.get("aliases", {})}
    for param, table in data["params"].items():
        if "{stack}" in param:
            owners = list(bound.values())
        elif "stack" in table:
            owners = [stack for key, stack in bound.items() if key == table["stack"]]
        else:
            owners = [shared]
        for owner in owners:
            if entry := owner.entry(param, table):
                entries.append(entry)
    for naming, renames in data.get("aliases", {}).items():
        for new, old in renames.items():
            for stack in bound if "{stack}" in new else [None]:
                aliases[naming][new.replace("{stack}", str(stack))] = old.replace("{stack}", str(stack))
    unordered = {group.name: group for stack in (shared, *bound.values()) for group in stack.groups.values()}
    spec = SymmetrySpec(
        family,
        model_type,
        {None if stack.key is None else str(stack.key): stack.layers for stack in bound.values()},
        {size: value for stack in (shared, *bound.values()) for size, value in stack.qualified_sizes().items()},
        _outside_in(unordered, name),
        tuple(entries),
        aliases,
        tuple(data.get("untouched", [])),
        remembered,
    )
    for naming in spec.namings():
        named: dict[str, str] = {}
        for entry in (entry for entry in entries if entry.naming in (None, naming)):
            renamed = spec.rename(entry.name, naming)
            if (first := named.setdefault(renamed, entry.name)) != entry.name:
                raise SpecError(f"{name}: aliases.{naming}: {first} and {entry.name} are both named {renamed}")
    return spec


def _stream_axes(data: Mapping[str, Any], config: Mapping[str, Any], where: str) -> list[str]:
    """The names of the residual stream's axis; one that is of another length here is another space."""
    axes: list[str] = data["residual"].get("axes", ["d_model"])
    lengths = [_evaluate(data["sizes"][axis], config, f"{where}: sizes.{axis}") for axis in axes]
    return [axis for axis, length in zip(axes, lengths, strict=True) if length == lengths[0]]


def _outside_in(groups: Mapping[str, Group], where: str) -> dict[str, Group]:
    """The groups with each permutation before the groups whose elements it indexes."""
    ordered: dict[str, Group] = {}
    while len(ordered) < len(groups):
        waiting = [group for group in groups.values() if group.name not in ordered]
        ready = [group for group in waiting if not any(group.indexed_by(other) for other in waiting)]
        if not ready:
            raise SpecError(f"{where}: the groups {', '.join(g.name for g in waiting)} index each other in a circle")
        ordered[ready[0].name] = ready[0]
    return ordered


class _Stack:
    """One stack of layers of a spec that is being bound: its sizes and groups, and the entries that speak of it."""

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str,
        config: Mapping[str, Any],
        key: Any,
        shared: Mapping[str, Group] | None = None,
    ) -> None:
        self.key = key
        self.where = where
        self.config = config if key is None else {**config, "stack": key}
        single = "stacks" not in data
        # Outside the stacks of a model that has several there are no layers, and no size that differs by stack.
        outside = key is None and not single
        self.layers = 0 if outside else self._size(data["layers"], "layers", _MOST_LAYERS)
        self.sizes = {
            axis: self._size(expression, f"sizes.{axis}")
            for axis, expression in data["sizes"].items()
            if not (outside and re.search(r"\bstack\b", str(expression)))
        }
        own = {name: table for name, table in data["groups"].items() if single or bool(table.get("shared")) == outside}
        self.groups = {**(shared or {}), **self._groups(own, data)}
        self.axis_of_group = {group: _axis_of(group, data) for group in data["groups"]}

    def qualified(self, name: str) -> str:
        """The name of a size or group in the bound spec, where those of several stacks stand side by side."""
        return name if self.key is None else f"{self.key}.{name}"

    def qualified_sizes(self) -> dict[str, int]:
        return {self.qualified(size): value for size, value in self.sizes.items()}

    def _size(self, expression: Any, what: str, most: int = 2**63 - 1) -> int:
        value = _evaluate(expression, self.config, f"{self.where}: {what}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SpecError(f"{self.where}: {what}: expected a whole number, found {value!r} ({expression})")
        if value > most:
            raise SpecError(f"{self.where}: {what}: expected at most {most:,}, found {value:,} ({expression})")
        return value

    def _groups(self, tables: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Group]:
        groups = {}
        for name, table in tables.items():
            if not _evaluate(table.get("when", "true"), self.config, f"{self.where}: groups.{name}"):
                continue
            per = tuple(table.get("per", []))
            batch = tuple(self.layers if index == "layer" else self.sizes[index] for index in per)
            axis = _axis_of(name, data)
            size = 1 if axis is None else self.sizes[axis]
            if table["kind"] == "rope_planes" and size != 2:
                raise SpecError(f"{self.where}: groups.{name}: expected an axis of size 2, found {axis} of {size}")
            # Nothing to act on (no rotary dimension, no expert), or only one place to be in.
            if 0 in (size, *batch) or (table["kind"] == "permutation" and size == 1):
                continue
            qualified_per = tuple(index if index == "layer" else self.qualified(index) for index in per)
            group = Group(
                self.qualified(name), table["kind"], axis and self.qualified(axis), qualified_per, batch, size
            )
            groups[name] = group
        return groups

    def _bound_atom(self, atom: Atom, where: str) -> Atom:
        """An atom in the names of the bound spec; a group that does not apply leaves its axis."""
        actions = tuple((self.groups[name].name, dual) for name, dual in atom.actions if name in self.groups)
        if atom.name == "_" or atom.name.isdigit():
            return Atom(atom.name, actions)
        if atom.name in self.groups:
            return Atom(self.groups[atom.name].name, actions)
        name = self.axis_of_group.get(atom.name) or atom.name
        if name not in self.sizes:
            raise SpecError(f"{where}: {atom.name} differs by stack, but the parameter belongs to none; state 'stack'")
        return Atom(self.qualified(name), actions)

    def entry(self, param: str, table: Mapping[str, Any]) -> Entry | None:
        """The entry of a parameter in this stack, None where the configuration is without it."""
        where = f"{self.where}: {param}"
        condition = str(table.get("when", "true"))
        layers: tuple[int, ...] = ()
        if "{layer}" in param:
            if self.layers and not re.search(r"\blayer\b", condition):
                layers = tuple(range(self.layers)) if _evaluate(condition, self.config, where) else ()
            else:
                layers = tuple(
                    layer
                    for layer in range(self.layers)
                    if _evaluate(condition, {**self.config, "layer": layer}, where)
                )
            if not layers:
                return None
        elif not _evaluate(condition, self.config, where):
            return None
        axes = rename_atoms(parse_axes(table["axes"]), lambda atom: self._bound_atom(atom, where))
        index = next((index for index in _INDEX.findall(param) if index not in ("layer", "stack")), None)
        if index and len(layers) * self.sizes[index] > _MOST_NAMES:
            raise SpecError(f"{where}: expected at most {_MOST_NAMES:,} names, found {self.sizes[index]:,} {index}")
        return Entry(
            param.replace("{stack}", str(self.key)),
            axes,
            bool(table.get("optional", False)),
            None if self.key is None else str(self.key),
            layers,
            index and self.qualified(index),
            table.get("naming"),
            bool(table.get("head", False)),
        )
