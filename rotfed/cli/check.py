"""`rotfed check` and `rotfed specs`: what rotfed knows, and whether a model is safe to align."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rotfed.checkpoints.folder import quiet_transformers
from rotfed.checkpoints.form import stream_of_spec, with_tied_head
from rotfed.checkpoints.models import load_model, new_model
from rotfed.checkpoints.weights import ADAPTER_CONFIG, StoredWeights, is_adapter, weight_files
from rotfed.checks import check_spec, randomize
from rotfed.cli.adapters import check_folder, refuse_options
from rotfed.cli.console import open_console, refusals, refuse
from rotfed.errors import SpecError
from rotfed.layout import Layout, lay_out
from rotfed.library import load_spec, read_config, refusing, spec_files, supported_model_types
from rotfed.nearest import nearest_spec
from rotfed.spec import SymmetrySpec
from rotfed.specfile import SpecFile


def check(
    model: Annotated[Path, typer.Argument(help="A model's or an adapter's directory, or its configuration.")],
    run: Annotated[bool, typer.Option("--run", help="Load the model and measure that its outputs stay.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random transforms, weights and inputs.")] = 0,
) -> None:
    """Say which spec fits a model, and what it may change.

    Reads the configuration and the headers of the safetensors files, no weights. With --run it also runs the model
    before and after random transforms of every group, with its own weights where the directory has them, else with
    random ones. Exits with 1 and one sentence where rotfed does not support the model; for an unknown architecture it
    also says which spec comes closest. Of a LoRA adapter's directory it says what is in it.
    """
    console = open_console()
    with refusals():
        if model.name == ADAPTER_CONFIG or is_adapter(model):
            refuse_options("an adapter, which has no model to run", {"run": run})
            check_folder(console, model.parent if model.name == ADAPTER_CONFIG else model)
            return
        stored = StoredWeights(model).meta()
        try:
            spec = load_spec(model)
            layout = lay_out(stored, spec) if stored else None
        except SpecError as refusal:
            nearest = nearest_spec(stored) if stored and _unknown(model) else None
            if stored and nearest is None and _unknown(model):
                refusal = SpecError(f"{refusal}; none of them comes close")
            refuse(refusal, nearest)
        errors = {}
        weights = "from its headers" if stored else "from its configuration alone"
        if run:
            module, weights = _load_model(model, seed)
            forms = [spec]
            with contextlib.suppress(SpecError):
                forms.append(load_spec(module, residual=True))
                lay_out(module.state_dict(), forms[-1], folded=False)
            for dtype in (torch.float64, torch.float32):
                errors[dtype] = max(
                    check_spec(form, module, dtype, generator=torch.Generator().manual_seed(seed)) for form in forms
                )
            layout = layout or lay_out(module.state_dict(), spec)
        _print_spec(console, spec, layout, weights)
        console.print(f"residual stream: {_stream_of(model, stored)}")
    for dtype, error in errors.items():
        name = str(dtype).removeprefix("torch.")
        console.print(f"largest relative change of any output under random transforms, {name}: {error:.1e}")
    if run:
        console.print(f"ok: rotfed keeps the function of this {spec.model_type} model")
    elif stored:
        console.print("ok: every parameter has its place; --run measures that the outputs stay")
    else:
        console.print("ok: the configuration is supported; no safetensors file here to compare with, --run builds one")


def specs(
    family: Annotated[str, typer.Argument(help="A family or a model_type, for its groups; all by default.")] = "",
) -> None:
    """List the architectures that rotfed knows, with the groups of each."""
    console = open_console()
    quiet_transformers()
    known = spec_files()
    chosen = supported_model_types().get(family, family)
    if chosen and chosen not in known:
        refuse(SpecError(f"{family}: no such family or model_type; rotfed knows {', '.join(known)}"))
    for name, file in known.items():
        if chosen in ("", name):
            console.print(f"{name}: {', '.join(file.model_type)}")
            for group, table in file.groups.items():
                each = f" per {', '.join(table.per)}" if table.per else ""
                condition = f", when {table.when}" if table.when != "true" else ""
                console.print(f"  {group} ({table.kind}{each}{condition})")
            for kinds, model_types in _streams(file).items():
                console.print(f"  residual stream ({kinds}): {', '.join(model_types)}")
    if not chosen:
        console.print(f"{len(supported_model_types())} model types in {len(known)} families")


def _stream_of(model: Path, stored: Mapping[str, Tensor]) -> str:
    """What load_spec(model, residual=True) would do to the residual stream, or why it stays as it is."""
    try:
        spec = load_spec(model, residual=True)
        if stored:
            lay_out(with_tied_head(stored, spec, model), spec, folded=False)
    except SpecError as refusal:
        return f"left as it is ({refusal})"
    return f"known ({stream_of_spec(spec)})"


def _streams(file: SpecFile) -> dict[str, list[str]]:
    """The model types of a spec file that know the residual stream, by what is done to it."""
    found: dict[str, list[str]] = {}
    for model_type in file.model_type if file.residual else ():
        kinds = []
        for tied in (False, True):
            with contextlib.suppress(SpecError):
                config = {"model_type": model_type, "tie_word_embeddings": tied}
                kinds.append(stream_of_spec(load_spec(config, residual=True)))
        if kinds:
            found.setdefault("; with a tied head: ".join(dict.fromkeys(kinds)), []).append(model_type)
    return found


def _unknown(model: Path) -> bool:
    return read_config(model).get("model_type") not in list(supported_model_types())


def _print_spec(console: Console, spec: SymmetrySpec, layout: Layout | None, weights: str) -> None:
    fits = ""
    if layout is not None:
        prefix = f"prefix {layout.prefix!r}" if layout.prefix else "no prefix"
        naming = "" if layout.naming == "current" else f", names of {layout.naming}"
        fits = f" fits {len(layout.names)} parameters ({prefix}{naming})"
    console.print(f"{spec.model_type}: {spec.source}{fits}, {weights}")
    table = Table("group", "kind", "acts on", "elements")
    for group in spec.groups.values():
        counts = " x ".join(f"{count} {index}" for index, count in zip(group.per, group.batch, strict=True))
        vectors = f"{group.axis}, {group.size} long" if group.axis else "everything as one"
        table.add_row(group.name, group.kind_name, vectors, counts or "1")
    console.print(table)
    if layout is not None and layout.unmatched:
        console.print(f"task head, left alone: {', '.join(layout.unmatched)}")


def _load_model(path: Path, seed: int) -> tuple[torch.nn.Module, str]:
    """The model of a directory with its weights, or a random one of its configuration, and which of the two it is."""
    if path.is_dir() and (weight_files(path) or any(path.glob("pytorch_model*.bin"))):
        module, fresh = load_model(path)
        if not fresh:
            return module, "its own weights"
        if not {name for name, _ in module.named_parameters()} <= set(fresh):
            more = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
            return module, f"its own weights, but a fresh {fresh[0]}{more}, which its files lack"
    with refusing(f"{path}: expected a model that transformers can build"):
        return randomize(new_model(path), torch.Generator().manual_seed(seed)), "random weights"
