"""The command line: `rotfed check` says whether a model is safe to align."""

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
from rotfed.library import load_spec
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
    seed: Annotated[int, typer.Option(help="Seed of the random transforms, weights and inputs.")] = 0,
) -> None:
    """Say which spec fits a model, what it may change, and measure that the function stays the same.

    Runs the model before and after random transforms of every group, with its own weights where the directory has
    them, else with random ones. Exits with 1 and one sentence where rotfed does not support the model.
    """
    console = Console(soft_wrap=True, highlight=False)
    try:
        spec = load_spec(model)
        stored = _stored_parameters(model)
        resolution = spec.resolve(stored) if stored else None
        module, weights = _load_model(model, seed)
        errors = {
            dtype: check_spec(spec, module, dtype, generator=torch.Generator().manual_seed(seed))
            for dtype in (torch.float64, torch.float32)
        }
        resolution = resolution or spec.resolve(module.state_dict())
    except RotfedError as refusal:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"refused: {refusal}", markup=False)
        raise typer.Exit(1) from None
    _print_spec(console, spec, resolution, weights)
    for dtype, error in errors.items():
        name = str(dtype).removeprefix("torch.")
        console.print(f"largest relative change of any output under random transforms, {name}: {error:.1e}")
    console.print(f"ok: rotfed keeps the function of this {spec.model_type} model")


def _print_spec(console: Console, spec: SymmetrySpec, resolution: Resolution, weights: str) -> None:
    prefix = f"prefix {resolution.prefix!r}" if resolution.prefix else "no prefix"
    naming = "" if resolution.naming == "current" else f", names of {resolution.naming}"
    console.print(
        f"{spec.model_type}: {spec.source} fits {len(resolution.names)} parameters ({prefix}{naming}), {weights}"
    )
    table = Table("group", "kind", "acts on", "elements")
    for group in spec.groups.values():
        counts = " x ".join(f"{count} {index}" for index, count in zip(group.per, group.batch, strict=True))
        vectors = f"{group.axis}, {group.size} long" if group.axis else "everything as one"
        table.add_row(group.name, group.kind_name, vectors, counts or "1")
    console.print(table)
    if resolution.left_alone:
        console.print(f"task head, left alone: {', '.join(resolution.left_alone)}")


def _stored_parameters(path: Path) -> dict[str, torch.Tensor]:
    """The names, shapes and types in a directory's safetensors files, as tensors without data; empty without any."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else []:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    entry = opened.get_slice(name)
                    dtype = _SAFETENSORS_TYPES.get(entry.get_dtype(), torch.int8)
                    tensors[name] = torch.empty(entry.get_shape(), dtype=dtype, device="meta")
        except SafetensorError as error:
            raise SpecError(f"{file}: expected a safetensors file, found {error}; download it again") from error
    return tensors


_SAFETENSORS_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _load_model(path: Path, seed: int) -> tuple[Any, str]:
    """The model of a directory with its weights, or a random one of its configuration, and which of the two it is."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = path if path.is_dir() else path.parent
    config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    architecture = next(iter(config.architectures or []), None)
    model_class = getattr(transformers, architecture, None) if architecture else None
    has_weights = (path.is_dir() and any(folder.glob("*.safetensors"))) or any(folder.glob("pytorch_model*.bin"))
    try:
        if has_weights and path.is_dir():
            loader = model_class or transformers.AutoModel
            return loader.from_pretrained(str(folder), local_files_only=True), "its own weights"
        loader = model_class._from_config if model_class else transformers.AutoModel.from_config
        return randomize(loader(config), torch.Generator().manual_seed(seed)), "random weights"
    except (OSError, ValueError, RuntimeError, ImportError, json.JSONDecodeError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise SpecError(f"{path}: expected a model that transformers can load, found: {first_line}") from error
