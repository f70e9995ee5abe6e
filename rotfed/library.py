"""The spec files that rotfed ships, and `load_spec`, which binds one of them to a model's configuration.

Binding decides the conditions of a `SpecFile` and turns its expressions into numbers. With the residual stream a group
acts on the stream's axis wherever that stands.
"""

import contextlib
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import torch

from rotfed.axes import Atom, rename_atoms
from rotfed.errors import RotfedError, SpecError
from rotfed.residual import STREAM_GROUP, STREAM_SIGN
from rotfed.spec import Entry, Group, Residual, SymmetrySpec
from rotfed.specfile import (
    Axes,
    GroupTable,
    ParamTable,
    ResidualTable,
    SpecFile,
    parse_spec_file,
    read_model_types,
    spread_over,
)

# Far more than any model has; a configuration that says otherwise would fill the memory with names.
_MOST_LAYERS = 10_000
_MOST_NAMES = 1_000_000

_STREAM_KINDS = ("centred_orthogonal", "orthogonal", "signed_permutation", "permutation")

# Beside a classifier these tell whether it reads them or the stream: what a class has of them has to be there.
_TELLING = {"pooler.dense.weight", "pre_classifier.weight"}


@cache
def spec_files() -> dict[str, SpecFile]:
    """Return every spec file that rotfed ships, by family name; each is parsed and checked."""
    return {family: _spec_file(family) for family in _spec_texts()}


@cache
def supported_model_types() -> dict[str, str]:
    """Return every `model_type` that has a spec, with the family whose file describes it."""
    return {model_type: family for family, text in _spec_texts().items() for model_type in read_model_types(text)}


@cache
def _spec_file(family: str) -> SpecFile:
    return parse_spec_file(_spec_texts()[family], f"{family}.toml")


@cache
def _spec_texts() -> dict[str, str]:
    paths = sorted(resources.files("rotfed.specs").iterdir(), key=lambda path: path.name)
    return {p.name.removesuffix(".toml"): p.read_text(encoding="utf-8") for p in paths if p.name.endswith(".toml")}


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
    """Return the values of a model directory's `config.json`, or of that file. Raise SpecError where there is none."""
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
    """Return the transformers configuration of a configuration, its dict, a model, a directory or a `config.json`."""
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
    """Return the transformers model inside its wrappers."""
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
    """Return the class of transformers of a model or a directory's model, and the names of its parameters.

    A configuration alone may belong to any class: the name is then empty, and None stands for the parameters. A class
    from elsewhere may do anything with its head: the name is empty, and so are the parameters. Tied parameters, which
    files leave out, are not among them.
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
    return bind_spec(_spec_file(family), family, model_type, values, residual, own)


def bind_spec(
    file: SpecFile,
    family: str,
    model_type: str,
    config: Mapping[str, Any],
    residual: bool | str = False,
    own: frozenset[str] | None = None,
) -> SymmetrySpec:
    """Bind a spec file to a configuration's values: sizes become numbers, conditions are decided.

    `own` are the names of the parameters of the model's class, where it is known: no others can read the stream.
    """
    values = _Values(f"specs/{family}.toml", model_type, config)
    stream = None
    if residual:
        file, stream = _with_stream(file, values, residual, own)
    for rule in file.refuse:
        if values.evaluate(rule.when, "refuse"):
            raise SpecError(f"{model_type}: {rule.because}")
    shared = _Stack(file, values, None, {})
    bound = {
        key: shared if key is None else _Stack(file, values, key, shared.groups) for key in _stack_keys(file, values)
    }
    if not any(stack.layers for stack in bound.values()):
        raise SpecError(f"{model_type}: expected at least one layer, found none ({file.layers} in {values.source})")
    stacks = (shared, *bound.values())
    spec = SymmetrySpec(
        family,
        model_type,
        {stack.name: stack.layers for stack in bound.values()},
        {stack.qualified(size): value for stack in stacks for size, value in stack.sizes.items()},
        _outside_in({group.name: group for stack in stacks for group in stack.groups.values()}, values.source),
        tuple(_entries(file, shared, bound)),
        _aliases(file, bound),
        file.untouched,
        stream,
    )
    _check_names(spec)
    return spec


@dataclass(frozen=True)
class _Values:
    """A configuration's values, over which the expressions of the spec file `source` are evaluated."""

    source: str
    model_type: str
    config: Mapping[str, Any]

    def evaluate(self, expression: str, place: str) -> Any:
        """Return the value of a spec's expression, such as `hidden_size // num_attention_heads`."""
        try:
            value = _compiled(expression)(**self.config)
            if isinstance(value, jinja2.Undefined):
                # Raises what is missing; a bare name is not looked at before it is used.
                str(value)
            return value
        except Exception as error:  # an expression may fail in any way over values that it was not made for
            raise SpecError(
                f"{self.source}: {place}: cannot evaluate {expression!r} over the configuration: {error}"
            ) from error

    def size(self, expression: str, place: str, most: int = 2**63 - 1) -> int:
        """Return the value of an expression that is a size. Raise SpecError for another value, or more than `most`."""
        value = self.evaluate(expression, place)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SpecError(f"{self.source}: {place}: expected a whole number, found {value!r} ({expression})")
        if value > most:
            raise SpecError(f"{self.source}: {place}: expected at most {most:,}, found {value:,} ({expression})")
        return value

    def having(self, **more: Any) -> "_Values":
        """Return the same values and more, such as the number of a layer."""
        return replace(self, config={**self.config, **more})


_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)


@cache
def _compiled(expression: str) -> Callable[..., Any]:
    return _JINJA.compile_expression(expression, undefined_to_none=False)


def _stream_kind(file: SpecFile, values: _Values, residual: bool | str) -> tuple[ResidualTable, str]:
    """Return what the file states of the residual stream, and the kind of the group that may act on it."""
    kind = values.evaluate(file.residual.kind, "residual.kind") if file.residual else None
    if file.residual is None or kind is None:
        raise SpecError(
            f"{values.model_type}: {values.source} does not know the residual stream; load it without residual=True"
        )
    if residual is not True and residual != "permutation":
        raise SpecError(f"residual: expected True, False or 'permutation', found {residual!r}")
    kind = kind if residual is True else "permutation"
    if kind not in _STREAM_KINDS:
        raise SpecError(f"{values.source}: residual.kind: expected one of {', '.join(_STREAM_KINDS)}, found {kind!r}")
    return file.residual, kind


def _with_stream(
    file: SpecFile, values: _Values, residual: bool | str, own: frozenset[str] | None
) -> tuple[SpecFile, Residual]:
    """Return the spec file with a group that acts on all of the residual stream, and how the bound spec uses it.

    One name may read a pooler in some classes and the stream in others. The file's `pooled` decides; where it is None
    the spec knows neither. Where `own` names the parameters of the model's class, the spec knows only the poolers and
    heads that the class has, and the parameters that tell two classes apart are not optional.
    """
    stream, kind = _stream_kind(file, values, residual)
    unit, pooled = values.evaluate(stream.unit, "residual.unit"), values.evaluate(stream.pooled, "residual.pooled")
    lengths = {name: values.evaluate(file.sizes[name], f"sizes.{name}") for name in stream.axes}
    # An axis of another length in this configuration is another space.
    names = [name for name, length in lengths.items() if length == lengths[stream.axes[0]]]
    groups = {STREAM_GROUP: GroupTable(kind.removeprefix("signed_"), axis=names[0])}
    acting = Atom(STREAM_GROUP)
    if kind == "signed_permutation":
        groups[STREAM_SIGN] = GroupTable("sign", per=(names[0],))
        acting = Atom(STREAM_GROUP, ((STREAM_SIGN, False),))
    # A sign acts on the stream and, through the gain, on what leaves the norm: twice is not at all.
    on_gains = Atom(STREAM_GROUP if kind in ("permutation", "signed_permutation") else names[0])
    gains = {*(f"{norm}.weight" for norm in stream.folds), *stream.scales}

    def of_class(name: str) -> bool:
        return own is None or any(f".{full}".endswith(f".{name}") for full in own)

    params = {
        name: replace(table, axes=_acted_on(table.axes, names, on_gains if name in gains else acting))
        for name, table in file.params.items()
        if not name.startswith("pooler.") or (pooled is not None and of_class(name))
    }
    for name, entry in stream.head.items():
        if of_class(name) and (entry.pooled is None or pooled is not None):
            axes = entry.pooled if pooled and entry.pooled is not None else entry.axes
            params[name] = ParamTable(_acted_on(axes, names, acting), optional=True, head=True)
    if own is not None and pooled is not None:
        for name in _TELLING & set(params):
            params[name] = replace(params[name], optional=False)
    rotated, centred = kind in ("orthogonal", "centred_orthogonal"), kind == "centred_orthogonal"
    with_stream = replace(file, groups={**groups, **file.groups}, params=params)
    return with_stream, Residual(stream.folds, stream.scales, rotated, centred, unit)


def _acted_on(axes: Axes, names: Collection[str], acting: Atom) -> Axes:
    """Return the axes with `acting` in the place of every size of the given names; groups beside it stay."""

    def replaced(atom: Atom) -> Atom:
        return Atom(acting.name, (*acting.actions, *atom.actions)) if atom.name in names else atom

    return rename_atoms(axes, replaced)


def _stack_keys(file: SpecFile, values: _Values) -> list[str | int | None]:
    """Return the names or numbers of the stacks of layers; None stands for the only one."""
    if file.stacks is None:
        return [None]
    keys = values.evaluate(file.stacks, "stacks")
    odd = not isinstance(keys, list | range) or any(not isinstance(key, str | int | None) for key in keys)
    if odd or len({str(key) for key in keys}) < len(keys):
        raise SpecError(f"{values.source}: stacks: expected a list of names or numbers, each once, found {keys!r}")
    return list(keys)


class _Stack:
    """One stack of layers of a spec that is being bound: its sizes and groups, and the entries that speak of it.

    The key None stands for the only stack, or for what lies outside the stacks where there are several; `shared` are
    the groups that all of them have.
    """

    def __init__(self, file: SpecFile, values: _Values, key: str | int | None, shared: Mapping[str, Group]) -> None:
        self.file = file
        self.values = values if key is None else values.having(stack=key)
        self.name = None if key is None else str(key)
        single = file.stacks is None
        # Outside the stacks of a model that has several there are no layers, and no size that differs by stack.
        outside = key is None and not single
        self.layers = 0 if outside else self.values.size(file.layers, "layers", _MOST_LAYERS)
        self.sizes = {
            axis: self.values.size(expression, f"sizes.{axis}")
            for axis, expression in file.sizes.items()
            if not (outside and re.search(r"\bstack\b", expression))
        }
        common = {STREAM_GROUP, STREAM_SIGN} if file.residual and file.residual.shared else set()
        own = {name: self._group(name) for name in file.groups if single or (name in common) == outside}
        self.groups = {**shared, **{name: group for name, group in own.items() if group}}

    def qualified(self, name: str) -> str:
        """Return the name of a size or group in the bound spec, where those of several stacks stand side by side."""
        return name if self.name is None else f"{self.name}.{name}"

    def _group(self, name: str) -> Group | None:
        """Return the group bound to this stack, None where the configuration lacks it or leaves it nothing to do."""
        table, axis = self.file.groups[name], self.file.axis_of(name)
        if not self.values.evaluate(table.when, f"groups.{name}"):
            return None
        batch = tuple(self.layers if index == "layer" else self.sizes[index] for index in table.per)
        size = 1 if axis is None else self.sizes[axis]
        if table.kind == "rope_planes" and size != 2:
            raise SpecError(f"{self.values.source}: groups.{name}: expected an axis of size 2, found {axis} of {size}")
        # No rotary dimension, no expert, or only one place to be in.
        if 0 in (size, *batch) or (table.kind == "permutation" and size == 1):
            return None
        per = tuple(index if index == "layer" else self.qualified(index) for index in table.per)
        return Group(self.qualified(name), table.kind, axis and self.qualified(axis), per, batch, size)

    def entry(self, param: str) -> Entry | None:
        """Return the entry of a parameter in this stack, None where the configuration is without it."""
        table, where = self.file.params[param], f"{self.values.source}: {param}"
        layers = self._layers_with(param) if "{layer}" in param else ()
        if not layers and ("{layer}" in param or not self.values.evaluate(table.when, param)):
            return None
        axes = rename_atoms(table.axes, lambda atom: self._bound_atom(atom, where))
        index = next(iter(spread_over(param)), None)
        if index and len(layers) * self.sizes[index] > _MOST_NAMES:
            raise SpecError(f"{where}: expected at most {_MOST_NAMES:,} names, found {self.sizes[index]:,} {index}")
        return Entry(
            _in_stack(param, self.name),
            axes,
            table.optional,
            self.name,
            layers,
            index and self.qualified(index),
            table.naming,
            table.head,
        )

    def _layers_with(self, param: str) -> tuple[int, ...]:
        """Return the layers that have a parameter."""
        condition = self.file.params[param].when
        if re.search(r"\blayer\b", condition):
            every = range(self.layers)
            return tuple(layer for layer in every if self.values.having(layer=layer).evaluate(condition, param))
        return tuple(range(self.layers)) if self.layers and self.values.evaluate(condition, param) else ()

    def _bound_atom(self, atom: Atom, where: str) -> Atom:
        """Return an atom in the names of the bound spec; a group that does not apply leaves its axis."""
        actions = tuple((self.groups[name].name, dual) for name, dual in atom.actions if name in self.groups)
        if atom.name == "_" or atom.name.isdigit():
            return Atom(atom.name, actions)
        if atom.name in self.groups:
            return Atom(self.groups[atom.name].name, actions)
        name = self.file.axis_of(atom.name) or atom.name
        if name not in self.sizes:
            raise SpecError(f"{where}: {atom.name} differs by stack, but the parameter belongs to none; state 'stack'")
        return Atom(self.qualified(name), actions)


def _entries(file: SpecFile, shared: _Stack, bound: Mapping[str | int | None, _Stack]) -> Iterator[Entry]:
    """Yield the entries of all parameters, each in the stacks that it belongs to."""
    for param, table in file.params.items():
        if "{stack}" in param:
            owners = list(bound.values())
        elif table.stack is not None:
            owners = [stack for key, stack in bound.items() if key == table.stack]
        else:
            owners = [shared]
        for owner in owners:
            if entry := owner.entry(param):
                yield entry


def _aliases(file: SpecFile, bound: Mapping[str | int | None, _Stack]) -> dict[str, dict[str, str]]:
    """Return the older names of a spec file, in every stack."""
    return {
        naming: {
            _in_stack(new, key): _in_stack(old, key)
            for new, old in renames.items()
            for key in (bound if "{stack}" in new else [None])
        }
        for naming, renames in file.aliases.items()
    }


def _in_stack(name: str, key: str | int | None) -> str:
    return name.replace("{stack}", str(key))


def _outside_in(groups: Mapping[str, Group], source: str) -> dict[str, Group]:
    """Return the groups with each permutation before the groups whose elements it indexes."""
    ordered: dict[str, Group] = {}
    while len(ordered) < len(groups):
        waiting = [group for group in groups.values() if group.name not in ordered]
        ready = [group for group in waiting if not any(group.indexed_by(other) for other in waiting)]
        if not ready:
            raise SpecError(f"{source}: the groups {', '.join(g.name for g in waiting)} index each other in a circle")
        ordered[ready[0].name] = ready[0]
    return ordered


def _check_names(spec: SymmetrySpec) -> None:
    """Raise SpecError where two entries have one name in one naming."""
    for naming in spec.namings():
        named: dict[str, str] = {}
        for entry in (entry for entry in spec.entries if entry.naming in (None, naming)):
            renamed = spec.rename(entry.name, naming)
            if (first := named.setdefault(renamed, entry.name)) != entry.name:
                raise SpecError(f"{spec.source}: aliases.{naming}: {first} and {entry.name} are both named {renamed}")
