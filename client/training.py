"""Local training and evaluation; they change the model that they are given and draw on seeds of the caller."""

import math
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy

from client.data import Examples
from client.models import Encoder

MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy and share of correct labels in [0, 1] over all predictions of `examples` examples.

    A classifier makes one prediction an example, a causal language model one a token.
    """

    loss: float
    accuracy: float
    examples: int


def pick_device() -> torch.device:
    """CUDA when a device is visible to this process, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_everything(*entropy: int) -> None:
    """Seed Python's, numpy's and torch's global generators from several numbers: (seed, round, client)."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(
    model: Module,
    encode: Encoder,
    examples: Examples,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    device: torch.device,
    generator: torch.Generator,
    proximal_mu: float = 0.0,
) -> float:
    """Train what is not frozen of `model`, in place, with AdamW, and return the mean loss of the last epoch.

    Parameters
    ----------
    proximal_mu
        Weight of half the squared distance from where training began, FedProx's pull (arXiv 1812.06127, eq. 2).
    device
        On CUDA the forward pass runs under bfloat16 autocast; weights and optimizer stay float32.
    generator
        On the CPU; decides the order of the batches. Dropout draws from torch's global generator.

    Raises
    ------
    FloatingPointError
        When the loss is no longer finite: the weights are then useless to everybody.
    """
    model.to(device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    began = [parameter.detach().clone() for parameter in trained] if proximal_mu else []
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        order = torch.randperm(len(examples), generator=generator)
        for rows in order.split(batch_size):
            logits, labels = _forward(model, encode, examples.take(rows), device)
            loss = cross_entropy(logits, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for parameter, start in zip(trained, began, strict=False):
                # What a model holds and does not use has none, and stays where it began.
                if parameter.grad is not None:
                    parameter.grad += proximal_mu * (parameter.detach() - start)
            torch.nn.utils.clip_grad_norm_(trained, MAX_GRADIENT_NORM)
            optimizer.step()
            total += loss.item() * len(rows)
        if not math.isfinite(total):
            raise FloatingPointError(
                f"training loss is {total / len(examples)}: expected a finite number; lower learning-rate "
                f"(now {learning_rate:g})"
            )
    model.eval()
    return total / len(examples)


@torch.inference_mode()
def evaluate(
    model: Module, encode: Encoder, examples: Examples, *, batch_size: int, device: torch.device
) -> Evaluation:
    """Measure `model` on `examples`; it is moved to `device` and left in evaluation mode."""
    model.to(device).eval()
    loss, correct, predictions = 0.0, 0, 0
    for rows in torch.arange(len(examples)).split(batch_size):
        logits, labels = _forward(model, encode, examples.take(rows), device)
        loss += cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(-1) == labels).sum())
        predictions += len(labels)
    return Evaluation(loss / predictions, correct / predictions, len(examples))


def _forward(model: Module, encode: Encoder, batch: Examples, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits, float32 (predictions, classes), and labels, int64 (predictions,), on `device`."""
    inputs = {name: value.to(device) for name, value in encode(batch.inputs).items()}
    with _precision(device):
        logits = model(**inputs).logits
    labels = batch.labels.to(device)
    if labels.ndim == 2:
        # What stands at a token's place predicts the next one.
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return logits.float(), labels


def _precision(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()
