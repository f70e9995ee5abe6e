"""The command line: what rotfed knows, and whether a model is safe to align."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import rotfed
from rotfed.checks import check_spec, randomize
from rotfed.errors import RotfedError, SpecError
from rotfed.library import load_spec, read_config, spec_files, supported_model_types
from rotfed.nearest import Nearest, nearest_spec
from rotfed.spec import Resolution, SymmetrySpec

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_show_locals=False
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Put transformers into one common frame before they are averaged."""
    if version:
        typer.echo(f"rotfed {rotfed.__version__}")
        raise typer.Exit()


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="A transformers model directory, or a config.json.")],
    run: Annotated[bool, typer.Option("--run", help="Load the model and measure that its outputs stay.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random transforms, weights and inputs.")] = 0,
) -> None:
    """Say which spec fits a model, and what it may change.

    Reads the configuration and the headers of the safetensors files, no weights. With --run it also runs the model
    before and after random transforms of every group, with its own weights where the directory has them, else with
    random ones. Exits with 1 and one sentence where rotfed does not support the model; for an unknown architecture it
    also says which spec comes closest.
    """
    console = Console(soft_wrap=True, highlight=False)
    try:
        stored = _stored_parameters(model)
        try:
            spec = load_spec(model)
            resolution = spec.resolve(stored) if stored else None
        except SpecError as refusal:
            _refuse(refusal, nearest_spec(stored) if stored and _unknown(model) else None)
        errors = {}
        weights = "from its headers" if stored else "from its configuration alone"
        if run:
            module, weights = _load_model(model, seed)
            for dtype in (torch.float64, torch.float32):
                errors[dtype] = check_spec(spec, module, dtype, generator=torch.Generator().manual_seed(seed))
            resolution = resolution or spec.resolve(module.state_dict())
    except RotfedError as refusal:
        _refuse(refusal)
    _print_spec(console, spec, resolution, weights)
    for dtype, error in errors.items():
        name = str(dtype).removeprefix("torch.")
        console.print(f"largest relative change of any output under random transforms, {name}: {error:.1e}")
    if run:
        console.print(f"ok: rotfed keeps the function of this {spec.model_type} model")
    elif stored:
        console.print("ok: every parameter has its place; --run measures that the outputs stay")
    else:
        console.print("ok: the configuration is supported; no safetensors file here to compare with, --run builds one")


@app.command()
def specs(
    family: Annotated[str, typer.Argument(help="A family or a model_type, for its groups; all by default.")] = "",
) -> None:
    """List the architectures that rotfed knows, with the groups of each."""
    console = Console(soft_wrap=True, highlight=False)
    known = spec_files()
    chosen = supported_model_types().get(family, family)
    if chosen and chosen not in known:
        _refuse(SpecError(f"{family}: no such family or model_type; rotfed knows {', '.join(known)}"))
    for name, data in known.items():
        if chosen in ("", name):
            console.print(f"{name}: {', '.join(data['model_type'])}", markup=False)
            for group, table in data["groups"].items():
                each = f" per {', '.join(table['per'])}" if table.get("per") else ""
                condition = f", when {table['when']}" if "when" in table else ""
                console.print(f"  {group} ({table['kind']}{each}{condition})", markup=False)
    if not chosen:
        console.print(f"{len(supported_model_types())} model types in {len(known)} families")


def _refuse(refusal: RotfedError, nearest: Nearest | None = None) -> None:
    """Print one sentence on the error stream, what comes closest below it, and exit with 1."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"refused: {refusal}", markup=False)
    if nearest is not None:
        total = len(nearest.matched) + len(nearest.unmatched)
        console.print(
            f"closest: specs/{nearest.family}.toml ({', '.join(nearest.model_types)}) has "
            f"{len(nearest.matched)} of the model's {total} kinds of parameter, by name",
            markup=False,
        )
        for title, lines in [
            ("a new file needs an axis string for", [f'"{n}", shape {s}' for n, s in nearest.unmatched.items()]),
            (f"not found here of specs/{nearest.family}.toml", list(nearest.lacking)),
        ]:
            if lines:
                console.print("\n  ".join([f"{title}:", *lines]), markup=False)
        console.print("see docs/new-architecture.md for how to write the file", markup=False)
    raise typer.Exit(1)


def _unknown(model: Path) -> bool:
    return read_config(model).get("model_type") not in supported_model_types()


def _print_spec(console: Console, spec: SymmetrySpec, resolution: Resolution | None, weights: str) -> None:
    fits = ""
    if resolution is not None:
        prefix = f"prefix {resolution.prefix!r}" if resolution.prefix else "no prefix"
        naming = "" if resolution.naming == "current" else f", names of {resolution.naming}"
        fits = f" fits {len(resolution.names)} parameters ({prefix}{naming})"
    console.print(f"{spec.model_type}: {spec.source}{fits}, {weights}")
    table = Table("group", "kind", "acts on", "elements")
    for group in spec.groups.values():
        counts = " x ".join(f"{count} {index}" for index, count in zip(group.per, group.batch, strict=True))
        vectors = f"{group.axis}, {group.size} long" if group.axis else "everything as one"
        table.add_row(group.name, group.kind_name, vectors, counts or "1")
    console.print(table)
    if resolution is not None and resolution.left_alone:
        console.print(f"task head, left alone: {', '.join(resolution.left_alone)}")


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: those of its index, else the one file, else all there are."""
    if not path.is_dir():
        return []
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SpecError(f"{index}: expected an index of safetensors files, found {error!r}") from error
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise SpecError(f"{path}: expected a whole model, found an adapter; merge it into its model first")
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def _stored_parameters(path: Path) -> dict[str, torch.Tensor]:
    """The names, shapes and types in a directory's safetensors files, as tensors without data; empty without any."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    entry = opened.get_slice(name)
                    dtype = _SAFETENSORS_TYPES.get(entry.get_dtype(), torch.int8)
                    tensors[name] = torch.empty(entry.get_shape(), dtype=dtype, device="meta")
        except (SafetensorError, OSError) as error:
            raise SpecError(f"{file}: expected a safetensors file, found {error}; download it again") from error
    return tensors


_SAFETENSORS_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _load_model(path: Path, seed: int) -> tuple[Any, str]:
    """The model of a directory with its weights, or a random one of its configuration, and which of the two it is."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = path if path.is_dir() else path.parent
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        architecture = next(iter(config.architectures or []), None)
        model_class = getattr(transformers, architecture, None) if architecture else None
        if path.is_dir() and (_weight_files(path) or any(folder.glob("pytorch_model*.bin"))):
            loader = model_class or transformers.AutoModel
            return loader.from_pretrained(str(folder), local_files_only=True), "its own weights"
        loader = model_class._from_config if model_class else transformers.AutoModel.from_config
        return randomize(loader(config), torch.Generator().manual_seed(seed)), "random weights"
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError, TypeError, KeyError) as error:
        first_line = next(iter(str(error).strip().splitlines()), repr(error))
        raise SpecError(f"{path}: expected a model that transformers can load, found: {first_line}") from error
