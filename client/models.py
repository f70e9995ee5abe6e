"""The transformer of a run, its examples and the encoder of their inputs, from the run config and the data.

What differs between tasks stands in one table, `_TASKS`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import interpolate
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

from client.data import Corpus, Examples, Indices, Inputs
from client.settings import BUILT_IN_MODELS, ConfigError, Settings

Encoder = Callable[[Inputs], dict[str, Tensor]]
"""A batch of inputs -> the keyword arguments of the model's forward, on the CPU."""

# Maps pixels in [0, 1] to [-1, 1]: what ViT was published with, and all that a model from scratch needs.
DEFAULT_MEAN = DEFAULT_STD = 0.5


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says of every loading, which at each node and round hides what the app has to say."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(max(level, ERROR))
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


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
        When the model cannot be loaded, or its architecture has no head for the task.
    """
    if settings.built_in:
        return _in_float32(_TASKS[settings.task].built_in(settings, corpus))
    return load_model(settings, corpus, pretrained)[0]


def load_model(settings: Settings, corpus: Corpus, pretrained: bool = True) -> tuple[PreTrainedModel, list[str]]:
    """As `build_model`, of a folder or the hub, and the names of what has new weights, which the checkpoint lacks."""
    task, lacking = _TASKS[settings.task], []
    try:
        config = AutoConfig.from_pretrained(settings.model, **task.changes(corpus))
        if pretrained:
            # A head for other labels is replaced by a new one.
            options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, info = task.auto.from_pretrained(settings.model, config=config, **options)
            lacking = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
        else:
            model = task.auto.from_config(config)
    except (OSError, ValueError) as error:
        raise _unloadable(settings, error) from error
    if getattr(model, "peft_config", None):
        raise ConfigError(
            f"run config model = {settings.model!r} holds an adapter beside its weights: expected one model; merge it "
            "(PEFT's merge_and_unload), or take its adapter_config.json away"
        )
    return _in_float32(model), lacking


def build_encoder(settings: Settings, corpus: Corpus, config: PretrainedConfig) -> Encoder:
    """The encoder that fits the model of `config`.

    Raises
    ------
    ConfigError
        When its tokenizer cannot be loaded, or a causal language model takes no window of max-length tokens.
    """
    return _TASKS[settings.task].encoder(settings, config)


def build_examples(settings: Settings, corpus: Corpus, rows: Indices) -> Examples:
    """Decode the given rows; for language, cut into windows.

    Raises
    ------
    ConfigError
        When its texts make fewer than two windows, one to train on and one to validate on.
    """
    return _TASKS[settings.task].examples(settings, corpus, rows)


def build_tokenizer(settings: Settings) -> Any:
    """The tokenizer of a model of texts; the built-in ones read bytes, which needs no vocabulary file."""
    if settings.built_in:
        return _byte_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise _unloadable(settings, error) from error


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """transformers loads a bfloat16 checkpoint as bfloat16; AdamW's small steps need float32 weights."""
    Module.to(model, dtype=torch.float32)
    model.eval()
    return model


def _byte_tokenizer() -> ByT5Tokenizer:
    """All 256 bytes and three special tokens, without those by which T5 marks gaps."""
    return ByT5Tokenizer(extra_ids=0)


def _new_llama(settings: Settings, corpus: Corpus) -> PreTrainedModel:
    # 107,200 parameters. A step of 32 windows of 64 tokens takes 31 ms on one core; with twice the layers 56 ms.
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=settings.max_length,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def _new_bert(settings: Settings, corpus: Corpus) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=len(_byte_tokenizer()),
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


def _causal(corpus: Corpus) -> dict[str, Any]:
    # Without it BERT and its kin see the token that they are to predict.
    return {"is_decoder": True}


def _whole(settings: Settings, corpus: Corpus, rows: Indices) -> Examples:
    return corpus.examples(rows)


def _windows(settings: Settings, corpus: Corpus, rows: Indices) -> Examples:
    """Texts one after another, with the tokenizer's end token after each, cut into windows of max-length tokens.

    A window begins with the last token of the one before, so that every token but the first is predicted once. What is
    left at the end, shorter than a window, is dropped, and nothing is padded.
    """
    tokenizer, length = build_tokenizer(settings), settings.max_length
    texts = corpus.read(rows)
    assert isinstance(texts, list)
    # Not verbose: texts may be longer than what the model takes at once.
    tokenized = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = torch.tensor([token for text in tokenized for token in (*text, *end)], dtype=torch.int64)
    if len(tokens) < 2 * length - 1:
        raise ConfigError(
            f"data set {settings.dataset!r} has {len(texts)} texts of {len(tokens)} tokens for a client or the "
            f"held-out split: expected at least {2 * length - 1}, two windows of max-length = {length}; "
            "lower max-length, use fewer clients or add texts"
        )
    windows = tokens.unfold(0, length, length - 1)
    return Examples(windows, windows)


def _window_encoder(settings: Settings, config: PretrainedConfig) -> Encoder:
    positions = getattr(config, "max_position_embeddings", settings.max_length)
    if settings.max_length > positions:
        raise ConfigError(
            f"run config max-length = {settings.max_length} is more than model = {settings.model!r} takes; "
            f"use at most {positions}"
        )

    def encode(inputs: Inputs) -> dict[str, Tensor]:
        assert isinstance(inputs, Tensor)
        return {"input_ids": inputs}

    return encode


def _text_encoder(settings: Settings, config: PretrainedConfig) -> Encoder:
    tokenizer, max_length = build_tokenizer(settings), settings.max_length
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"run config model = {settings.model!r}: expected a tokenizer with a padding token, found none; give it "
            "one (tokenizer.pad_token = tokenizer.eos_token) and save it in the model's folder"
        )
    body = config.get_text_config()
    if getattr(body, "pad_token_id", None) is None:
        # Causal models look for the last token before the padding.
        body.pad_token_id = tokenizer.pad_token_id

    def encode(inputs: Inputs) -> dict[str, Tensor]:
        # Spares the tokenizer a whole document of which it keeps the first lines; words are shorter than this.
        texts = [text[: 16 * max_length] for text in inputs]
        return dict(tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))

    return encode


def _image_encoder(settings: Settings, config: PretrainedConfig) -> Encoder:
    """uint8 (n, c, h, w) -> {"pixel_values": float32 (n, channels, height, width)}, normalised."""
    vision = getattr(config, "vision_config", config)
    size, channels = _pair(vision.image_size), vision.num_channels
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
    # No adapter goes with the built-in model.
    other = "" if settings.lora_rank else f", or {BUILT_IN_MODELS[settings.task]!r}"
    return ConfigError(
        f"run config model = {settings.model!r} could not be loaded ({reason}); it must be the folder or hub id of a "
        f"model for transformers' {_TASKS[settings.task].auto.__name__}{other}"
    )


@dataclass(frozen=True)
class _Task:
    """What a task is made of.

    `auto` is transformers' class that loads any model of the task, its configuration changed by `changes`; `built_in`
    makes the app's own model with new weights, `examples` reads rows, and `encoder` makes batches of their inputs.
    """

    auto: Any
    changes: Callable[[Corpus], dict[str, Any]]
    built_in: Callable[[Settings, Corpus], PreTrainedModel]
    examples: Callable[[Settings, Corpus, Indices], Examples]
    encoder: Callable[[Settings, PretrainedConfig], Encoder]


_TASKS = {
    "image": _Task(AutoModelForImageClassification, _labels, _new_vit, _whole, _image_encoder),
    "text": _Task(AutoModelForSequenceClassification, _labels, _new_bert, _whole, _text_encoder),
    "language": _Task(AutoModelForCausalLM, _causal, _new_llama, _windows, _window_encoder),
}
