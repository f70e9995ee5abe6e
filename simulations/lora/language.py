"""A small Llama that learns to speak as roles of Shakespeare's plays do, a role a client.

Its base model learned from the comedies, histories, problem plays and romances; the roles are of the tragedies and the
Roman plays. Both read characters, and both read what a role says without what others say between.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from client.data import Examples, Inputs
from client.settings import Settings
from client.training import seed_everything
from simulations.lora.tasks import Task
from simulations.merging.language import batches, new_llama
from simulations.merging.parties import descend
from simulations.plays import read_roles

NEW_TO_THE_BASE = ("tragedies", "roman")
STEPS, LEARNING_RATE = 1500, 2e-3
HELD_OUT = 0.2


@lru_cache(maxsize=1)
def read_plays(folder: Path) -> tuple[Tensor, dict[str, Tensor], int]:
    """Characters as numbers, int64: what the base model reads, what each role new to it says; and how many differ."""
    said = {
        f"{file.parent.name}/{file.stem}/{role}": "".join(scenes.values())
        for file in sorted(folder.glob("plays/*/*.md"))
        for role, scenes in read_roles(file.read_text(encoding="utf-8")).items()
    }
    index = {character: number for number, character in enumerate(sorted(set("".join(said.values()))))}
    new = {name: text for name, text in said.items() if name.startswith(NEW_TO_THE_BASE)}
    known = "".join(text for name, text in said.items() if name not in new)
    numbers = {name: torch.tensor([index[c] for c in text]) for name, text in new.items()}
    return torch.tensor([index[c] for c in known]), numbers, len(index)


def language_task(settings: Settings, clients: int, rank: int, alpha: int, kept: Path) -> Task:
    """As many roles as clients, drawn by the seed of those that say enough; the last fifth of each is held out."""
    known, new, characters = read_plays(Path(settings.dataset))
    per_client = settings.train_examples // clients
    length, step = settings.max_length, settings.max_length - 1
    enough = length + step * (round(per_client / (1 - HELD_OUT)) - 1)
    long = sorted(name for name, text in new.items() if len(text) >= enough)
    drawn = np.random.default_rng(settings.seed).permutation(len(long))[:clients]
    chosen = [new[long[number]][:enough].unfold(0, length, step) for number in drawn]
    model = new_llama(0, characters)
    path = kept / f"llama-{len(known)}-{STEPS}.safetensors"
    if not path.exists():
        descend(model, lambda batch: model(**batch).loss, batches(known, 0), STEPS, LEARNING_RATE)
        kept.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    seed_everything(settings.seed, 0)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    held_out = torch.cat([cut[per_client:] for cut in chosen])

    def encode(inputs: Inputs) -> dict[str, Tensor]:
        assert isinstance(inputs, Tensor)
        return {"input_ids": inputs}

    return Task(
        get_peft_model(model, config),
        encode,
        [Examples(cut[:per_client], cut[:per_client]) for cut in chosen],
        Examples(held_out, held_out),
    )
