"""LoRA in the apps: the adapted model of a run, what of a model travels, and whether nodes adapt the same weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import rotfed
from client.data import Corpus, import_extra
from client.models import build_model, load_model
from client.settings import ConfigError, Settings

if TYPE_CHECKING:
    from peft import PeftModel

Model: TypeAlias = "PreTrainedModel | PeftModel"

KEY = "base-model"
"""Under which the server's config says what its base model is told by."""

_SAMPLES = 64


def build_trained(settings: Settings, corpus: Corpus, *, pretrained: bool = True) -> Model:
    """The run's model as `build_model` gives it or, at a `lora_rank`, a PeftModel around it.

    An adapter starts from weights that every node has to have, so that these are read whatever `pretrained` says. What
    a checkpoint lacks no node could read: such modules are trained, sent and saved as a whole, as a classifier's head
    is.

    Raises
    ------
    ConfigError
        Where the model cannot be loaded or adapted, or PEFT is not installed.
    """
    if not settings.lora_rank:
        return build_model(settings, corpus, pretrained=pretrained)
    peft = _peft()
    model, lacking = load_model(settings, corpus)
    found = [name for name, module in model.base_model.named_modules() if isinstance(module, Linear | Conv1D)]
    linear = dict.fromkeys(name.rpartition(".")[2] for name in found)
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=list(settings.lora_targets) if settings.lora_targets else "all-linear",
        modules_to_save=_whole_modules(settings, model, lacking) or None,
    )
    try:
        with catch_warnings():
            # PEFT reads an attribute of models that transformers has renamed.
            filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # It sets what GPT-2's transposed layers need, and says so.
            filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
            adapted: PeftModel = peft.get_peft_model(model, config)
        # PEFT is content with one name that fits.
        tuner: Any = adapted.base_model
        names = [f".{name}" for name in tuner.targeted_module_names]
        if odd := [each for each in settings.lora_targets or () if not any(n.endswith(f".{each}") for n in names)]:
            raise ValueError(f"no module to adapt is named {odd[0]}")
    except ValueError as error:
        raise ConfigError(
            f"run config lora-targets = {','.join(settings.lora_targets or ())!r} does not fit model = "
            f"{settings.model!r} ({error}); name some of its linear layers, such as {','.join([*linear][:6])!r}, or "
            "leave it empty for all"
        ) from error
    return adapted


def travelling(model: Model) -> dict[str, Tensor]:
    """What of a model is sent: all parameters and buffers or, of a PeftModel, the adapter, by PEFT's names."""
    if isinstance(model, PreTrainedModel):
        return model.state_dict()
    # Not "auto", which sends the base model's embeddings along where they are adapted, and asks the hub.
    found: dict[str, Tensor] = _peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def load_travelled(model: Model, params: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> None:
    """Set what was sent in a model, and add what rounds left for its base weights (see `rotfed.add_base_delta`)."""
    if isinstance(model, PreTrainedModel):
        model.load_state_dict(params)
        return
    _peft().set_peft_model_state_dict(model, dict(params))
    if left:
        rotfed.add_base_delta(model, left)


def base_config(model: Model) -> dict[str, str]:
    """What the frozen weights of a PeftModel are told by, as a config: a digest of names, shapes and some values."""
    if isinstance(model, PreTrainedModel):
        return {}
    digest = hashlib.sha256()
    # Buffers, too: the statistics of a batch norm are weights as good as any.
    for name, parameter in model.state_dict(keep_vars=True).items():
        # What is trained as a whole keeps what it started from, which is new on every node.
        if parameter.requires_grad or ".original_module." in name:
            continue
        flat = parameter.detach().flatten()
        places = torch.arange(min(_SAMPLES, len(flat))) * max(1, len(flat) // _SAMPLES)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(flat[places.to(flat.device)].float().cpu().numpy().astype("<f4").tobytes())
    return {KEY: digest.hexdigest()[:12]}


def check_base(config: Mapping[str, object], model: Model, settings: Settings) -> None:
    """Raise ConfigError unless the server, which sent `config`, has the base model that this node has."""
    expected, found = (each.get(KEY) for each in (config, base_config(model)))
    if expected != found:
        raise ConfigError(
            f"run config model = {settings.model!r} has other weights here than at the server: expected digest "
            f"{expected}, found {found}; an adapter fits one base model only, so put the same files on every node"
        )


def save(model: Model, folder: str, left: Mapping[str, Tensor]) -> str:
    """Write a model's directory, an adapter's of a PeftModel unless its base has changed, and return what it is."""
    if isinstance(model, PreTrainedModel) or left:
        whole = model if isinstance(model, PreTrainedModel) else model.merge_and_unload()
        whole.save_pretrained(folder)
        return "a whole model"
    model.save_pretrained(folder, save_embedding_layers=False)
    # The classes, which an adapter does not tell. As config.json it would have the folder read as a whole model's.
    model.config.to_json_file(Path(folder) / "model_config.json")
    return "an adapter"


def _whole_modules(settings: Settings, model: PreTrainedModel, lacking: list[str]) -> list[str]:
    """The modules that are trained as a whole: a classifier's head, and those whose weights the checkpoint lacks."""
    whole = [
        name
        for name, child in model.named_children()
        if settings.task != "language" and child is not model.base_model and [*child.parameters()]
    ]
    if model.base_model is model:
        # Some (CLIP's kin) do not tell which part is their backbone: the head comes last.
        whole = whole[-1:]
    for name in sorted(dict(model.named_parameters()).keys() & {*lacking}):
        owner = name.rpartition(".")[0]
        if any(f"{name}.".startswith(f"{module}.") for module in whole):
            continue
        if not owner or [*model.get_submodule(owner).children()]:
            raise ConfigError(
                f"run config model = {settings.model!r} has no weights for {name}, which no adapter can hold; use a "
                "complete checkpoint, or lora-rank = 0"
            )
        whole.append(owner)
    return sorted(whole)


def _peft() -> Any:
    return import_extra("peft", "peft")
