"""News in five classes, by an encoder of the BERT family with adapters in its upper layers.

The layers below the first adapter are frozen and alike with all clients, so what they make of a document is computed
once and kept. What clients train is the rest of the model, under the full model's names: the same function.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from client.data import MIN_PARTITION_SIZE, Corpus, Examples, Indices, Inputs, load_corpus
from client.models import Encoder, build_encoder, build_model
from client.settings import Settings
from client.training import seed_everything
from simulations.lora.tasks import Task

UPPER = 2
"""How many layers have adapters."""


class _Through(nn.Module):
    """In place of a part whose output is already there."""

    def forward(self, hidden_states: Tensor | None = None, *_: Any, **named: Any) -> Any:
        return named["inputs_embeds"] if hidden_states is None else hidden_states


def split(model: Any) -> tuple[Any, Any]:
    """The two parts of a BERT classifier: its backbone up to the last `UPPER` layers, and the model without it.

    `upper(inputs_embeds=lower(...).last_hidden_state, attention_mask=...)` is what the model gives. `model` is left as
    it is.
    """
    lower, upper = copy.deepcopy(model.bert), copy.deepcopy(model)
    first = len(model.bert.encoder.layer) - UPPER
    lower.encoder.layer, lower.pooler = lower.encoder.layer[:first], None
    upper.bert.embeddings = _Through()
    for number in range(first):
        upper.bert.encoder.layer[number] = _Through()
    return lower, upper


def adapter_config(layers: int, rank: int, alpha: int) -> LoraConfig:
    """Adapters of the queries and values of the upper ones of so many layers, and the head as a whole."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=["query", "value"],
        layers_to_transform=list(range(layers - UPPER, layers)),
        modules_to_save=["classifier"],
    )


def text_task(settings: Settings, clients: int, rank: int, alpha: int, kept: Path) -> Task:
    """Documents of a folder with a subfolder a class."""
    corpus = load_corpus(settings)
    seed_everything(settings.seed, 0)
    model: Any = build_model(settings, corpus)
    lower, upper = split(model)
    hidden = entering(lower, build_encoder(settings, corpus, model.config), corpus, settings, kept)
    states, mask = hidden["states"], hidden["mask"]

    def encode(rows: Inputs) -> dict[str, Tensor]:
        assert isinstance(rows, Tensor)
        return {"inputs_embeds": states[rows], "attention_mask": mask[rows]}

    def examples(rows: Indices) -> Examples:
        return Examples(torch.from_numpy(rows), torch.from_numpy(corpus.labels[rows]))

    return Task(
        get_peft_model(upper, adapter_config(model.config.num_hidden_layers, rank, alpha)),
        encode,
        [examples(rows) for rows in deal(corpus, settings, clients)],
        examples(corpus.test),
    )


def deal(corpus: Corpus, settings: Settings, clients: int) -> list[Indices]:
    """Each client's rows: as many for each, or of every class by shares drawn from a Dirichlet distribution.

    Shares are drawn until every client has a few rows: the partitioner of the apps gives up after ten draws, which are
    not enough for ten clients at a concentration of 0.1.
    """
    generator = np.random.default_rng(settings.seed)
    rows = generator.permutation(corpus.train)[: settings.train_examples]
    owners = np.arange(len(rows)) % clients
    while settings.partition == "dirichlet":
        for label in range(len(corpus.class_names)):
            of_class = corpus.labels[rows] == label
            shares = generator.dirichlet([settings.alpha] * clients)
            owners[of_class] = generator.choice(clients, of_class.sum(), p=shares)
        if np.bincount(owners, minlength=clients).min() >= MIN_PARTITION_SIZE:
            break
    return [rows[owners == number] for number in range(clients)]


def entering(lower: Any, encode: Encoder, corpus: Corpus, settings: Settings, kept: Path) -> dict[str, Tensor]:
    """What enters the upper layers, of all documents: `states`, float32 `(n, max_length, hidden)`, and `mask`."""
    source = [settings.model, settings.dataset, settings.max_length, len(corpus.labels), UPPER]
    path = kept / f"entering-{hashlib.sha256(json.dumps(source).encode()).hexdigest()[:12]}.safetensors"
    if not path.exists():
        count, length = len(corpus.labels), settings.max_length
        states = torch.zeros(count, length, lower.config.hidden_size)
        mask = torch.zeros(count, length, dtype=torch.int64)
        for rows in torch.arange(count).split(64):
            inputs = encode(corpus.read(rows.numpy()))
            with torch.no_grad():
                found = lower(**inputs).last_hidden_state
            states[rows, : found.shape[1]] = found
            mask[rows, : found.shape[1]] = inputs["attention_mask"]
        kept.mkdir(parents=True, exist_ok=True)
        save_file({"states": states, "mask": mask}, path)
    return load_file(path)
