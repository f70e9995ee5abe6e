"""Directories of models in the form in which they are aligned, for `rotfed merge` and `rotfed barrier`."""

from collections.abc import Sequence

from rich.console import Console
from torch import Tensor

from rotfed.barrier import Batch
from rotfed.checkpoints import (
    Checkpoint,
    Common,
    other_settings,
    with_tied_head,
)
from rotfed.errors import SpecError
from rotfed.library import load_spec
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec


def common_form(
    checkpoints: Sequence[Checkpoint], common: Common, residual: bool, layers: Sequence[int] | None
) -> tuple[SymmetrySpec, list[dict[str, Tensor]], str]:
    """The spec to align by, the models in the form that it takes, and what that means for the residual stream."""
    first = checkpoints[0]
    refused = ""
    if not residual:
        refused = "--no-residual"
    elif len(first.spec.select_layers(layers)) < first.spec.num_layers:
        refused = "--layers leaves out some of the layers that share it"
    elif heads := [name for name in common.kept if first.params[name].is_floating_point()]:
        refused = f"{heads[0]} differs between the models"
    if not refused:
        try:
            spec = load_spec(first.path, residual=True)
            models = [fold_norms(with_tied_head(model, spec, first.path), spec) for model in common.models]
        except SpecError as refusal:
            refused = str(refusal)
        else:
            for model in models:
                first.restored({**first.params, **model}, first.params)
            return spec, models, f"residual stream: aligned ({stream_of_spec(spec)})"
    return first.spec, common.models, f"residual stream: left as it is ({refused})"


def stream_of_spec(spec: SymmetrySpec) -> str:
    """What a spec with the residual stream does to it."""
    assert spec.residual is not None
    kinds = ", ".join(group.kind_name for group in spec.groups.values() if group.name.startswith("residual"))
    return kinds + ("; norms folded into the layers that read them" if spec.residual.folded else "")


def print_differences(console: Console, checkpoints: Sequence[Checkpoint], common: Common) -> None:
    first, *others = checkpoints
    for other in others:
        if settings := other_settings(first, other):
            console.print(f"note: {other.path} has {'; '.join(settings)}; the configuration of {first.path} is used")
    for title, names in [
        (f"kept from {first.path}, not merged", common.kept),
        ("left out", common.left_out),
        ("merged row by row, each over the models that have it", common.uneven),
    ]:
        if names:
            console.print(f"{title}: {', '.join(f'{name} ({what})' for name, what in names.items())}")


def examples_in(batches: Sequence[Batch]) -> int:
    return sum(len(batch["labels"]) for batch in batches)
