"""Losses of models on a file of examples, and alignments that are refined on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rotfed.align import Alignment, AlignOptions, align
from rotfed.barrier import IGNORED_LABEL, Batch, Score, score
from rotfed.checkpoints.folder import Checkpoint
from rotfed.checkpoints.models import batches_of, examples_in, model_with, names_in_memory, read_examples
from rotfed.checkpoints.weights import in_memory
from rotfed.errors import AlignmentError
from rotfed.frames import AlignPair
from rotfed.learned import model_loss, refine
from rotfed.mergers import weighted_mean
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params


@dataclass(frozen=True)
class Learned:
    """The figures of one refined alignment.

    `before` and `after` are losses of the average of the two models, on the `aside` examples that no step has seen;
    `seen` counts the examples that went through the model, `epochs` is that number over the examples of the file.
    """

    steps: int
    before: float
    after: float
    aside: int
    seen: int
    epochs: float


class Measurement:
    """Scores models on examples, and refines alignments on others of the same file.

    Parameters: `first`, the directory whose model takes the parameters; `data`, a safetensors file of examples;
    `steps`, those of a refined alignment at most, 0 for none: all examples then measure. Raises RotfedError for
    examples that the model cannot take, and for too few.
    """

    def __init__(self, first: Checkpoint, data: Path, steps: int, batch_size: int) -> None:
        self.scores: list[tuple[str, Score | None]] = []
        self.learned: list[Learned] = []
        self._first, self._steps = first, steps
        self._model = model_with(first, first.params)
        taught, measured = _split(read_examples(data, self._model), steps)
        self._taught, self._measured = batches_of(taught, batch_size), batches_of(measured, batch_size)

    def add(self, name: str, params: Mapping[str, Tensor] | None) -> None:
        """Score the first directory's model with the given parameters; None stands for another head, without score."""
        found = None
        if params is not None:
            model = model_with(self._first, params)
            found = score(model, dict(model.state_dict()), self._measured)
        self.scores.append((name, found))

    def learned_alignment(self, spec: SymmetrySpec) -> AlignPair:
        """Return a function that aligns a source to an anchor and refines that for the source's share of the mean."""
        table = names_in_memory(self._first, self._model)
        # Without class counts: the models are merged for what is in this one file, so its shares of the classes count.
        loss_in_memory = model_loss(self._model)
        held, stored = self._model.state_dict(), in_memory(self._first.params)
        aside, seen = examples_in(self._measured), 0

        def renamed(params: Params) -> dict[str, Tensor]:
            whole = {**stored, **params}
            return {name: whole[file].to(held[name]) for name, file in table.items()}

        def loss(params: Params, batch: Batch) -> Tensor:
            nonlocal seen
            seen += len(batch["labels"])
            return loss_in_memory(renamed(params), batch)

        def align_pair(source: Params, anchor: Params, share: float) -> Alignment:
            nonlocal seen
            seen = 0
            start = align(source, anchor, spec, AlignOptions(max_sweeps=1))
            found = refine(
                source,
                anchor,
                spec,
                loss,
                self._taught,
                share=share,
                start=start.transform,
                steps=self._steps,
                validation=self._taught[:4],
            )
            before, after = (
                score(self._model, renamed(weighted_mean([anchor, moved], [1 - share, share])), self._measured).loss
                for moved in (start.params, found.alignment.params)
            )
            epochs = seen / (aside + examples_in(self._taught))
            self.learned.append(Learned(found.steps, before, after, aside, seen, epochs))
            return found.alignment

        return align_pair


def _split(examples: dict[str, Tensor], learn: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Divide examples into those to learn on and those to measure on.

    These are four fifths and the rest, in a shuffle that is always the same, or, where nothing is learned, none and
    all.
    """
    count = len(examples["labels"])
    if not learn:
        return {name: tensor[:0] for name, tensor in examples.items()}, examples
    if count < 5:
        raise AlignmentError(f"learn: expected at least 5 examples to learn and measure on, found {count}; add some")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tensor_split([count - count // 5])
    labels = examples["labels"].reshape(count, -1)
    # Where no label counts there is nothing to learn, and the mean over no labels is NaN.
    useful = order[0][(labels[order[0]] != IGNORED_LABEL).any(1)]
    taught, measured = ({name: tensor[rows] for name, tensor in examples.items()} for rows in (useful, order[1]))
    return taught, measured
