"""The transformer of a run and the encoder of its inputs, from the run config and the data.

What differs between tasks stands in one table, `_TASKS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import interpolate
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from client.data import Corpus, Inputs
from client.settings import BUILT_IN_MODELS, ConfigError, Settings

Encoder = Callable[[Inputs], dict[str, Tensor]]
"""A batch of inputs -> the keyword arguments of the model's forward, on the CPU."""

# Maps pixels in [0, 1] to [-1, 1]: what ViT was published with, and all that a model from scratch needs.
DEFAULT_MEAN = DEFAULT_STD = 0.5


def build_model(settings: Settings, corpus: Corpus, *, pretrained: bool = True) -> PreTrainedModel:
    """The run's model in float32, in evaluation mode; new weights come from torch's global generator.

    Parameters
    ----------
    pretrained
        Whether a folder's or hub model's weights are read. A client needs its architecture only: the weights
        that it trains arrive with the message.

    Raises
    ------
    ConfigError
        When the model cannot be loaded, or its architecture has no classification head.
    """
    if settings.built_in:
        return _in_float32(_TASKS[settings.task].built_in(settings, corpus))
    auto = _TASKS[settings.task].auto
    try:
        config = AutoConfig.from_pretrained(settings.model, **_labels(corpus))
        if pretrained:
            # A head for other labels is replaced by a new one.
            model = auto.from_pretrained(settings.model, config=config, ignore_mismatched_sizes=True)
        else:
            model = auto.from_config(config)
    except (OSError, ValueError) as error:
        raise _unloadable(settings, error) from error
    return _in_float32(model)


def build_encoder(settings: Settings, corpus: Corpus, config: PretrainedConfig) -> Encoder:
    """The encoder that fits the model of `config`."""
    return _TASKS[settings.task].encoder(settings, config)


def build_tokenizer(settings: Settings) -> Any:
    """The tokenizer of a text model; the built-in model reads bytes, which needs no vocabulary file."""
    if settings.built_in:
        return ByT5Tokenizer()
    try:
        return AutoTokenizer.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise _unloadable(settings, error) from error


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """transformers loads a bfloat16 checkpoint as bfloat16; AdamW's small steps need float32 weights."""
    Module.to(model, dtype=torch.float32)
    model.eval()
    return model


def _new_bert(settings: Settings, corpus: Corpus) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=len(ByT5Tokenizer()),
        max_position_embeddings=settings.max_length,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        **_labels(corpus),
    )
    return BertForSequenceClassification(config)


def _new_vit(settings: Settings, corpus: Corpus) -> PreTrainedModel:
    assert corpus.image_shape is not None, "settings were checked: an image task reads images"
    channels, side = corpus.image_shape
    # 4 x 4 patches (16 tokens), or 8 x 8 where there are pixels enough; the encoder resizes by the remainder.
    patches = 4 if side < 64 else 8
    if side < patches:
        raise ConfigError(
            f"images of data set {settings.dataset!r} have {side} pixels a side: expected at least {patches}; "
            "choose another data set or a pretrained model"
        )
    config = ViTConfig(
        image_size=side // patches * patches,
        patch_size=side // patches,
        num_channels=channels,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        **_labels(corpus),
    )
    return ViTForImageClassification(config)


def _labels(corpus: Corpus) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(corpus.class_names)),
        "label2id": {name: index for index, name in enumerate(corpus.class_names)},
    }


def _text_encoder(settings: Settings, config: PretrainedConfig) -> Encoder:
    tokenizer, max_length = build_tokenizer(settings), settings.max_length

    def encode(inputs: Inputs) -> dict[str, Tensor]:
        # Spares the tokenizer a whole document of which it keeps the first lines; words are shorter than this.
        texts = [text[: 16 * max_length] for text in inputs]
        return dict(tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))

    return encode


def _image_encoder(settings: Settings, config: PretrainedConfig) -> Encoder:
    """uint8 (n, c, h, w) -> {"pixel_values": float32 (n, channels, height, width)}, normalised."""
    size, channels = _pair(config.image_size), config.num_channels
    mean, std = _normalisation(settings)

    def encode(inputs: Inputs) -> dict[str, Tensor]:
        assert isinstance(inputs, Tensor)
        pixels = inputs.float() / 255
        if pixels.shape[-2:] != size:
            pixels = interpolate(pixels, size=size, mode="bilinear", antialias=True)
        if pixels.shape[1] != channels:
            grey = pixels.mean(1, keepdim=True)
            pixels = grey.expand(-1, channels, -1, -1)
        return {"pixel_values": (pixels - mean) / std}

    return encode


def _normalisation(settings: Settings) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (channels or 1, 1, 1), that a pretrained model's images were scaled by."""
    mean: Any = DEFAULT_MEAN
    std: Any = DEFAULT_STD
    if not settings.built_in:
        try:
            processor = AutoImageProcessor.from_pretrained(settings.model)
        except (OSError, ValueError):
            pass  # the model comes without one, as those saved by this app do
        else:
            mean, std = processor.image_mean, processor.image_std
    return torch.tensor(mean).reshape(-1, 1, 1), torch.tensor(std).reshape(-1, 1, 1)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _unloadable(settings: Settings, error: Exception) -> ConfigError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if settings.model.startswith(("/", ".")) and not Path(settings.model).is_dir():
        reason = "no such folder"
    return ConfigError(
        f"run config model = {settings.model!r} could not be loaded ({reason}); it must be the folder or hub id of a "
        f"model for transformers' {_TASKS[settings.task].auto.__name__}, or {BUILT_IN_MODELS[settings.task]!r}"
    )


@dataclass(frozen=True)
class _Task:
    """The transformers class that loads any model of a task, the built-in one with new weights, and the encoder."""

    auto: Any
    built_in: Callable[[Settings, Corpus], PreTrainedModel]
    encoder: Callable[[Settings, PretrainedConfig], Encoder]


_TASKS = {
    "image": _Task(AutoModelForImageClassification, _new_vit, _image_encoder),
    "text": _Task(AutoModelForSequenceClassification, _new_bert, _text_encoder),
}
