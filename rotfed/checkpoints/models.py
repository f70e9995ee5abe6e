"""Models in memory, as transformers builds them from a model directory, and batches of examples for them."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotfed.checkpoints.folder import Checkpoint, loading, quiet_transformers, transformers_config
from rotfed.checkpoints.weights import read_tensors
from rotfed.checks import with_plain_experts
from rotfed.errors import SpecError
from rotfed.layout import lay_out


def load_model(path: Path) -> tuple[nn.Module, list[str]]:
    """Load the model of a directory; returns it and the names of the weights that the files do not hold."""
    with loading(path):
        model, found = _model_class(transformers_config(path)).from_pretrained(
            str(path), local_files_only=True, output_loading_info=True
        )
    return model, sorted(found["missing_keys"])


def new_model(path: Path) -> nn.Module:
    """Build a model of a directory's configuration, or of a `config.json`, freshly initialised."""
    config = transformers_config(path)
    with loading(path):
        model: nn.Module = _model_class(config)._from_config(config)
    return model


def model_with(checkpoint: Checkpoint, params: Mapping[str, Tensor]) -> nn.Module:
    """Build a directory's model in float32, ready to be evaluated, with `params` under the names of its files."""
    with loading(checkpoint.path):
        model, found = _model_class(checkpoint.config).from_pretrained(
            None,
            config=checkpoint.config,
            # transformers takes a mapping apart while it loads it.
            state_dict=dict(params),
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        raise SpecError(
            f"{missing[0]}: expected by {type(model).__name__}, found none in {checkpoint.path}; save the whole model"
        )
    return with_plain_experts(model.float().eval()).to(compute_device())


def compute_device() -> torch.device:
    """Return the device for models: a GPU that this process sees, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def names_in_memory(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """Return the name in a directory's files of each parameter and buffer that its model has in memory.

    Names differ between versions of transformers, and tied parameters have one name in the files. Raises SpecError
    where memory holds a parameter in other pieces than the files, as it does the experts of a mixture.
    """
    held = model.state_dict(keep_vars=True)
    stored, present = lay_out(checkpoint.params, checkpoint.spec), lay_out(held, checkpoint.spec)
    table = {present.names[name]: stored.names[name] for name in present.names if name in stored.names}
    table |= {name: name for name in present.unmatched if name in checkpoint.params}
    owners = {id(held[name]): file for name, file in table.items()}
    for name, tensor in held.items():
        if isinstance(tensor, nn.Parameter) and id(tensor) not in owners:
            raise SpecError(
                f"{name}: expected in {checkpoint.path} as in memory, found in other pieces or under another name; "
                "merge these models without --learn"
            )
    return {name: table.get(name, owners[id(tensor)]) for name, tensor in held.items() if id(tensor) in owners}


def read_examples(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Read labelled examples.

    Parameters: `path`, a safetensors file of tensors named as the arguments of the model's forward pass, `labels`
    among them, whose first dimension counts the examples. Floating-point ones come back in float32. Raises SpecError
    for a file that the model cannot take.
    """
    if not path.is_file():
        raise SpecError(f"{path}: expected a safetensors file of examples, found nothing there")
    tensors = read_tensors(path)
    forward: Any = model.forward
    accepted = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = f"the arguments of {type(model).__name__}: {', '.join(accepted)}"
    if "labels" not in accepted:
        raise SpecError(f"labels: expected among {taken}; measure a model with a task head")
    if "labels" not in tensors:
        raise SpecError(f"labels: expected in {path}, found {', '.join(tensors) or 'no tensor'}; add them")
    if unknown := [name for name in tensors if name not in accepted]:
        raise SpecError(f"{unknown[0]}: expected in {path} are {taken}; rename it or take it out")
    counts = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1 or not counts["labels"]:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise SpecError(f"{path}: expected as many examples in every tensor, at least one, found {shown}")
    wide = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    if odd := [name for name, tensor in wide.items() if tensor.is_complex() or not bool(tensor.isfinite().all())]:
        found = str(wide[odd[0]].dtype) if wide[odd[0]].is_complex() else "NaN or infinity"
        raise SpecError(f"{odd[0]}: expected finite real numbers in {path}, found {found}; take these examples out")
    return wide


def batches_of(examples: Mapping[str, Tensor], batch_size: int) -> list[dict[str, Tensor]]:
    """Cut examples into batches, in their order, on the device for models."""
    device = compute_device()
    return [
        {name: tensor[start : start + batch_size].to(device) for name, tensor in examples.items()}
        for start in range(0, len(examples["labels"]), batch_size)
    ]


def examples_in(batches: Sequence[Mapping[str, Tensor]]) -> int:
    """Return the number of examples in batches."""
    return sum(len(batch["labels"]) for batch in batches)


def _model_class(config: Any) -> Any:
    """Return the class that a configuration was saved from, a bare backbone's where it does not say."""
    transformers = quiet_transformers()
    architecture = next(iter(config.architectures or []), None)
    named = getattr(transformers, architecture, None) if architecture else None
    return named or transformers.MODEL_MAPPING[type(config)]
