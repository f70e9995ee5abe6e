"""The form in which models are aligned: with the residual stream where all models allow it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rotfed.checkpoints.common import Common
from rotfed.checkpoints.folder import Checkpoint
from rotfed.checkpoints.models import new_model
from rotfed.checkpoints.weights import Renamed, in_memory
from rotfed.errors import SpecError
from rotfed.layout import lay_out
from rotfed.library import load_spec
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec

LARGEST_STREAM = 150_000_000
"""The number of parameters up to which the residual stream is aligned unless that is asked for."""


@dataclass(frozen=True)
class Form:
    """Models as they are aligned: the spec to align by, their parameters, and a sentence about the residual stream.

    With the residual stream the models also have the head that is tied to their embeddings, and folded norms where
    `spec.residual.folded`.
    """

    spec: SymmetrySpec
    models: Sequence[Mapping[str, Tensor]]
    stream: str


def common_form(
    checkpoints: Sequence[Checkpoint], common: Common, residual: bool | None, layers: Sequence[int] | None
) -> Form:
    """Bring models into the form in which they are aligned.

    `residual` asks for the residual stream, or against it; by default it is left out of models that are too large.
    """
    first = checkpoints[0]
    refused = ""
    size = sum(tensor.numel() for tensor in common.models[0].meta().values())
    if residual is False:
        refused = "--no-residual"
    elif residual is None and size > LARGEST_STREAM:
        refused = (
            f"{size / 1e9:.1f} billion parameters, of which it takes all in memory and many passes; --residual aligns "
            "it all the same"
        )
    elif len(first.spec.select_layers(layers)) < first.spec.num_layers:
        refused = "--layers leaves out some of the layers that share it"
    elif heads := [name for name in common.kept if first.types[name].is_floating_point]:
        refused = f"{heads[0]} differs between the models"
    if not refused:
        try:
            spec = load_spec(first.path, residual=True)
            whole = [with_tied_head(model, spec, first.path) for model in common.models]
            for model in whole:
                lay_out(model, spec, folded=False)
            return Form(spec, _folded(whole, spec), f"residual stream: aligned ({stream_of_spec(spec)})")
        except SpecError as refusal:
            refused = str(refusal)
    return Form(first.spec, common.models, f"residual stream: left as it is ({refused})")


def _folded(models: Sequence[Renamed], spec: SymmetrySpec) -> Sequence[Mapping[str, Tensor]]:
    if spec.residual is None or not spec.residual.folded:
        return models
    return [fold_norms(in_memory(model), spec) for model in models]


def stream_of_spec(spec: SymmetrySpec) -> str:
    """Say how a spec with the residual stream moves it."""
    assert spec.residual is not None
    kinds = ", ".join(group.kind_name for group in spec.groups.values() if group.name.startswith("residual"))
    return kinds + ("; norms folded into the layers that read them" if spec.residual.folded else "")


def with_tied_head(params: Mapping[str, Tensor], spec: SymmetrySpec, path: Path) -> Renamed:
    """Add the head that is tied to other parameters, which files leave out, where the spec names it."""
    heads = {entry.name for entry in spec.entries if entry.head}
    with torch.device("meta"):
        model = new_model(path)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    stored_as = {name: name for name in params}
    for names in owners.values():
        # Files of a bare backbone are read into a model with a head, too.
        stored = next((n for full in names for n in (full, full.partition(".")[2]) if n in params), None)
        if stored is not None:
            stored_as |= {name: stored for name in names if name in heads and name not in params}
    return Renamed(params, stored_as)


def layer_names(spec: SymmetrySpec, params: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the parameters of each layer (of each stack), and under `rest` those outside the layers."""
    names = lay_out(params, spec, folded=False).names
    layers: dict[str, list[str]] = {}
    for entry in spec.entries:
        for layer in entry.layers:
            alone = replace(entry, layers=(layer,))
            found = [names[name] for name in spec.names_of(alone) if name in names] if entry.layered else []
            if found:
                layers.setdefault(f"{entry.stack} {layer}" if entry.stack else str(layer), []).extend(found)
    within = {name for found in layers.values() for name in found}
    return {**layers, "rest": [name for name in params if name not in within]}
