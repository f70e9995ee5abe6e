"""The spec files that rotfed ships, and `load_spec`, which binds one of them to a model's configuration.

A file `specs/<family>.toml` is data: sizes as expressions over the configuration, groups, one axis string a
parameter, older names, and the switches of the configuration under which the symmetry does not hold.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import torch

from rotfed.axes import Atom, Axis, parse_axes
from rotfed.errors import SpecError
from rotfed.groups import KINDS
from rotfed.spec import Entry, Group, SymmetrySpec, acting_groups, parts

_KEYS = {
    "": {"model_type", "layers", "sizes", "groups", "params", "aliases", "refuse"},
    "groups": {"kind", "axis", "per"},
    "params": {"axes", "when", "optional"},
    "refuse": {"when", "because"},
}


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
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{name}: expected TOML, found {error}") from error
    _check_keys(name, data, _KEYS[""])
    if missing := sorted({"model_type", "layers", "sizes", "groups", "params"} - set(data)):
        raise SpecError(f"{name}: expected the keys {', '.join(missing)}, not found")
    for group, table in data["groups"].items():
        _check_keys(f"{name}: groups.{group}", table, _KEYS["groups"])
        if table.get("kind") not in KINDS:
            raise SpecError(
                f"{name}: groups.{group}.kind: expected one of {', '.join(KINDS)}, found {table.get('kind')!r}"
            )
        if unknown := [size for size in table.get("per", []) if size != "layer" and size not in data["sizes"]]:
            raise SpecError(f"{name}: groups.{group}.per: {', '.join(unknown)} not in [sizes]")
    for param, value in data["params"].items():
        table = value if isinstance(value, dict) else {"axes": value}
        _check_keys(f"{name}: {param}", table, _KEYS["params"])
        _check_axes(f"{name}: {param}", parse_axes(table["axes"]), table, data)
    for number, rule in enumerate(data.get("refuse", [])):
        _check_keys(f"{name}: refuse[{number}]", rule, _KEYS["refuse"])
    return data


def _check_keys(where: str, table: Mapping[str, Any], allowed: set[str]) -> None:
    if unknown := sorted(set(table) - allowed):
        raise SpecError(f"{where}: unknown key {unknown[0]!r}; expected some of {', '.join(sorted(allowed))}")


def _axis_of(group: str, data: Mapping[str, Any]) -> str | None:
    """The axis that a group acts on; None for one that scales everything alike, or for what is no group."""
    if group not in data["groups"]:
        return None
    axis: str | None = data["groups"][group].get("axis", group if group in data["sizes"] else None)
    return axis


def _check_axes(where: str, axes: tuple[Axis, ...], table: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    groups, sizes = data["groups"], data["sizes"]
    for axis in axes:
        if any(atom.name == "_" for segment in axis for atom in segment) and axis != ((Atom("_"),),):
            raise SpecError(f"{where}: '_' stands for a whole axis and takes no group")
        for atom in (atom for segment in axis for atom in segment):
            if atom.name != "_" and not atom.name.isdigit() and atom.name not in groups and atom.name not in sizes:
                raise SpecError(f"{where}: {atom.name!r} is neither in [sizes] nor in [groups]")
            for name, _ in atom.actions:
                if name not in groups:
                    raise SpecError(f"{where}: {name!r} after '*' or '/' is not in [groups]")
            on_axis = [name for name in (atom.name, *(g for g, _ in atom.actions)) if _axis_of(name, data)]
            if len(on_axis) > 1:
                raise SpecError(
                    f"{where}: {' and '.join(on_axis)} act on the same axis and do not commute, which rotfed cannot "
                    "compose; keep one of them"
                )
    for part in parts(axes):
        names = [atom.name for segment in part for atom in segment]
        for group in sorted(acting_groups(part, groups)):
            if table.get("optional"):
                # A state dict without the parameter would be moved only in part.
                raise SpecError(f"{where}: a parameter that groups act on cannot be optional; state 'when' it exists")
            per = groups[group].get("per", [])
            if "layer" in per and "{layer}" not in where:
                raise SpecError(f"{where}: group {group} differs by layer, but the parameter is shared by all")
            if lacking := [size for size in per if size != "layer" and size not in names]:
                raise SpecError(f"{where}: group {group} differs by {lacking[0]}, which is not an axis here")


_JINJA = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)


def _evaluate(expression: Any, config: Mapping[str, Any], where: str) -> Any:
    """Evaluate a spec's expression, such as `hidden_size // num_attention_heads`, over a configuration's attributes."""
    try:
        return _JINJA.compile_expression(str(expression), undefined_to_none=False)(**config)
    except (jinja2.TemplateError, TypeError, ArithmeticError) as error:
        raise SpecError(f"{where}: cannot evaluate {expression!r} over the configuration: {error}") from error


def _read_config(source: Any) -> Any:
    """A transformers configuration from a configuration, its dict, a model, a directory, or a `config.json`."""
    import transformers

    if isinstance(source, transformers.PretrainedConfig):
        return source
    if isinstance(source, torch.nn.Module):
        module = source
        while not isinstance(getattr(module, "config", None), transformers.PretrainedConfig):
            # DistributedDataParallel keeps the model in `module`, torch.compile in `_orig_mod`.
            inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
            if inner is None:
                raise SpecError(
                    f"{type(source).__name__}: expected a transformers model, found a module without a 'config'; "
                    "pass the configuration of the backbone instead"
                )
            module = inner
        return module.config
    if isinstance(source, Mapping):
        values = dict(source)
        model_type = values.pop("model_type", None)
        if model_type is None:
            raise SpecError("configuration: expected the key 'model_type', not found; pass a transformers config dict")
        if model_type not in supported_model_types():
            raise _no_spec(model_type)
        return transformers.AutoConfig.for_model(model_type, **values)
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.exists():
            raise SpecError(f"{path}: expected a model directory or a config.json, found nothing there")
        if path.is_dir() and not (path / "config.json").is_file():
            raise SpecError(f"{path}: expected a transformers model directory, found no config.json in it")
        try:
            values, _ = transformers.PretrainedConfig.get_config_dict(str(path))
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: expected a transformers configuration, found {error}") from error
        return _read_config(values)
    raise SpecError(
        f"expected a transformers configuration, its dict, a model or a directory, found {type(source).__name__}"
    )


def _no_spec(model_type: str) -> SpecError:
    return SpecError(
        f"{model_type}: no spec for this model_type; rotfed knows {', '.join(sorted(supported_model_types()))}"
    )


def load_spec(source: Any) -> SymmetrySpec:
    """Find the spec that describes a model and bind it to the model's configuration.

    Parameters: `source`, a transformers configuration, its dict, a model (wrapped or not), or the path of a model
    directory or `config.json`. Returns the bound spec. Raises SpecError, in one sentence, where rotfed has no spec
    for the `model_type` or a switch of the configuration takes away the symmetry.
    """
    config = _read_config(source)
    model_type = config.model_type
    if model_type not in supported_model_types():
        raise _no_spec(model_type)
    family = supported_model_types()[model_type]
    values = {**config.to_dict(), **{new: getattr(config, new) for new in config.attribute_map}}
    return bind_spec(spec_files()[family], family, model_type, values)


def bind_spec(data: Mapping[str, Any], family: str, model_type: str, config: Mapping[str, Any]) -> SymmetrySpec:
    """Bind a parsed spec file to a configuration's values: sizes become numbers, conditions are decided."""
    name = f"specs/{family}.toml"
    for rule in data.get("refuse", []):
        if _evaluate(rule["when"], config, f"{name}: refuse"):
            raise SpecError(f"{model_type}: {rule['because']}")

    def size(expression: Any, where: str) -> int:
        value = _evaluate(expression, config, f"{name}: {where}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name}: {where}: expected a positive whole number, found {value!r} ({expression})")
        return value

    layers = size(data["layers"], "layers")
    sizes = {axis: size(expression, f"sizes.{axis}") for axis, expression in data["sizes"].items()}
    groups = {}
    for group, table in data["groups"].items():
        per = tuple(table.get("per", []))
        batch = tuple(layers if index == "layer" else sizes[index] for index in per)
        axis = _axis_of(group, data)
        groups[group] = Group(group, table["kind"], axis, per, batch, 1 if axis is None else sizes[axis])
    entries = []
    for param, value in data["params"].items():
        table = value if isinstance(value, dict) else {"axes": value}
        if _evaluate(table.get("when", "true"), config, f"{name}: {param}"):
            entries.append(Entry(param, parse_axes(table["axes"]), bool(table.get("optional", False))))
    return SymmetrySpec(family, model_type, layers, sizes, groups, tuple(entries), data.get("aliases", {}))
