"""The loss along the line between two models: what an average of the two would cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotfed.errors import AlignmentError, SpecError
from rotfed.mergers import weighted_mean
from rotfed.tensors import Params

Batch = Mapping[str, Tensor]

IGNORED_LABEL = -100
"""What transformers leaves out of a loss."""


@dataclass(frozen=True)
class Score:
    """How a model does on labelled examples: the mean loss, and the share of right classes where labels are classes."""

    loss: float
    accuracy: float | None


def run(model: nn.Module, params: Params, batch: Batch) -> Any:
    """What `model` gives for a batch with `params` in place of its own. Raises SpecError for one it cannot take."""
    if not isinstance(batch, Mapping):
        raise SpecError(
            f"batch: expected a mapping from the arguments of {type(model).__name__} to tensors, found "
            f"{type(batch).__name__}; name them, as in {{'input_ids': ..., 'labels': ...}}"
        )
    try:
        # A state dict holds tied weights under each of their names, so nothing is left for torch to tie.
        return torch.func.functional_call(model, dict(params), kwargs=dict(batch), tie_weights=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise SpecError(
            f"{type(model).__name__}: expected batches that it can take, found {shapes}: {reason}"
        ) from error


def score(model: nn.Module, params: Params, batches: Sequence[Batch]) -> Score:
    """Run `model` with `params` in place of its own on batches of its keyword arguments, `labels` among them.

    The loss is the model's own, and each batch counts by the number of its labels. Raises SpecError for batches that
    the model cannot take.
    """
    total, counted, right, classes = 0.0, 0, 0, 0
    for batch in batches:
        with torch.no_grad():
            output = run(model, params, batch)
        labels = batch["labels"]
        whole = not labels.is_floating_point()
        count = int((labels != IGNORED_LABEL).sum()) if whole else labels.numel()
        if count:
            total += count * float(output.loss)
            counted += count
        logits = output.get("logits")
        if whole and labels.ndim == 1 and isinstance(logits, Tensor) and logits.ndim == 2 and logits.shape[1] > 1:
            right += int((logits.argmax(-1) == labels).sum())
            classes += count
    if not counted:
        raise SpecError(f"labels: expected some other than {IGNORED_LABEL}, found none; there is nothing to measure")
    return Score(total / counted, right / classes if classes else None)


def line(points: int) -> list[float]:
    """The places on the line at which to look, from 0 to 1 in equal steps."""
    if points < 3:
        raise AlignmentError(f"points: expected at least 3, both ends and a point between, found {points}")
    return [point / (points - 1) for point in range(points)]


def losses_along(loss: Callable[[Params], float], one: Params, other: Params, places: Sequence[float]) -> list[float]:
    """The loss of (1 - t) one + t other at each place t.

    Raises AlignmentError for models that differ in shapes, and for a loss that is not finite.
    """
    losses = [loss(weighted_mean([one, other], [1 - place, place])) for place in places]
    for place, found in zip(places, losses, strict=True):
        if not math.isfinite(found):
            raise AlignmentError(f"loss: expected a finite number at {place:g} of the line, found {found}; check data")
    return losses


def barrier_of(places: Sequence[float], losses: Sequence[float]) -> float:
    """max over t of loss(t) - [(1 - t) loss(0) + t loss(1)], in the loss's unit; never below zero.

    Linear mode connectivity as in Frankle et al. (arXiv 1912.05671) and Entezari et al. (arXiv 2110.06296, eq. 1).
    """
    start, end = losses[0], losses[-1]
    return max(found - ((1 - place) * start + place * end) for place, found in zip(places, losses, strict=True))
