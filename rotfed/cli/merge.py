"""`rotfed merge`: one model made of several."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from rotfed.adapters.folders import METHODS, AdapterOptions
from rotfed.align import Alignment, AlignOptions, align
from rotfed.barrier import IGNORED_LABEL, Batch, Score, score
from rotfed.checkpoints import (
    Checkpoint,
    Common,
    batches_of,
    check_target,
    common_parameters,
    layer_names,
    model_with,
    names_in_memory,
    read_checkpoint,
    read_examples,
    write_checkpoint,
)
from rotfed.cli.adapters import all_adapters, merge_folders, refuse_options
from rotfed.cli.console import DATA, BatchSize, Layers, Residual, notes, numbers, open_console, refusals
from rotfed.cli.form import common_form, examples_in, print_differences
from rotfed.errors import AlignmentError
from rotfed.frames import AlignPair, align_all, chosen_anchor
from rotfed.learned import model_loss, refine
from rotfed.mergers import mean_by_rows, normalised_weights, shared_rows, weighted_mean
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params, squared_distance

ANCHORS = ("medoid", "consensus", "progressive", "tree")
LEARNED_ANCHORS = ("progressive", "tree")


def merge(
    models: Annotated[list[Path], typer.Argument(help="Transformers model directories of one architecture.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The model directory to write.")],
    anchor: Annotated[
        str, typer.Option(help=f"The frame to merge in: {', '.join(ANCHORS)}; consensus by default, tree with --learn.")
    ] = "",
    weights: Annotated[str, typer.Option(help="Shares of the models, such as 2,1,1; equal by default.")] = "",
    residual: Residual = True,
    layers: Layers = "",
    data: Annotated[Path | None, typer.Option(help=f"{DATA} Measures the losses.")] = None,
    learn: Annotated[
        int, typer.Option(min=0, help="Steps at most in which each alignment is refined, on four fifths of --data.")
    ] = 0,
    batch_size: BatchSize = 64,
    aggregation: Annotated[
        str, typer.Option(help=f"How to merge LoRA adapters: {', '.join(METHODS)}; optimal by default.")
    ] = "",
    rank: Annotated[int | None, typer.Option(min=1, help="The rank of an adapter merged by 'optimal'.")] = None,
    over: Annotated[str, typer.Option(help="The factors that 'rotation' goes by: A, B, or both by default.")] = "",
    strength: Annotated[
        float | None, typer.Option(help="How far 'rotation' turns, from 0 to 1, which is the default.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model directory that is there.")] = False,
) -> None:
    """Make one model of several.

    Brings the models into one frame, which changes what none of them computes, takes their weighted mean, and writes
    it as a model directory with the first one's configuration and tokenizer. Prints how far the models are from their
    mean before and after; with --data, also the losses of all models, of the plain mean and of the merged model.
    With --learn these losses are those on the fifth of the examples that nothing was learned on, and every refined
    alignment is printed with what it cost. Directories of LoRA adapters make one adapter, that stands for the mean of
    their updates; --aggregation says how, and its error is printed. Exits with 1 and one sentence where the models
    cannot be merged.
    """
    console = open_console()
    with refusals():
        if len(models) < 2:
            raise AlignmentError(f"models: expected at least two to merge, found {len(models)}")
        shares = numbers("weights", weights, float)
        if all_adapters(models):
            others = {"anchor": anchor, "no-residual": not residual, "layers": layers, "data": data, "learn": learn}
            refuse_options("adapters", others)
            options = AdapterOptions(aggregation or "optimal", rank, over, strength)
            merge_folders(console, models, out, options, shares, force)
            return
        for_adapters = {"aggregation": aggregation, "rank": rank, "over": over, "strength": strength is not None}
        refuse_options("whole models", for_adapters)
        anchor = chosen_anchor(anchor or ("tree" if learn else "consensus"), LEARNED_ANCHORS if learn else ANCHORS)
        shares = normalised_weights(len(models), shares)
        _check_learn(learn, data, layers, shares)
        check_target(out, models, force)
        checkpoints = [read_checkpoint(model) for model in models]
        first = checkpoints[0]
        common = common_parameters(checkpoints)
        print_differences(console, checkpoints, common)
        chosen = numbers("layers", layers, int)
        spec, parties, stream = common_form(checkpoints, common, residual, chosen)
        console.print(f"{spec.model_type}: {len(models)} models by {spec.source}, anchor {anchor}")
        console.print(stream)
        if learn and common.uneven:
            name, shapes = next(iter(common.uneven.items()))
            raise AlignmentError(f"learn: expected tables of one length, found {name} {shapes}; merge without --learn")
        step, scores, batches = None, [], []
        if data is not None:
            model = model_with(first, first.params)
            taught, examples = _split(read_examples(data, model), learn)
            batches = batches_of(examples, batch_size)
            scores = _score_parties(checkpoints, common, shares, batches)
            if learn:
                step = _learned_step(console, first, model, spec, batches_of(taught, batch_size), batches, learn)

        with notes(console):
            found = align_all(
                shared_rows(parties), spec, anchor, shares, align_pair=step, options=AlignOptions(layers=chosen)
            )
        # A transform moves all rows of a table, those beyond the ones that it was found on, too.
        aligned = [
            alignment.transform.apply(party) if common.uneven else alignment.params
            for alignment, party in zip(found, parties, strict=True)
        ]
        merged = first.restored({**first.params, **mean_by_rows(aligned, shares)})
        _print_distances(console, spec, parties, aligned, shares)
        if data is not None:
            scores.append(("merged", _score(first, merged, batches)))
        write_checkpoint(out, merged, first.path)
        console.print(f"wrote {out}")
        if data is not None:
            _print_scores(console, scores, shares)


def _check_learn(steps: int, data: Path | None, layers: str, shares: Sequence[float]) -> None:
    """Raise AlignmentError for options that do not go with learning, where there is any."""
    if steps and data is None:
        raise AlignmentError("learn: expected examples to learn from, found none; add --data FILE")
    if steps and layers:
        raise AlignmentError(f"learn: expected all layers, found --layers {layers}; leave one of the two out")
    if steps and not min(shares):
        raise AlignmentError("learn: expected models that all count, found a weight of zero; leave that model out")


def _split(examples: dict[str, Tensor], learn: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Examples to learn on and to measure on: four fifths and the rest, shuffled and always alike, or none and all."""
    if not learn:
        return {}, examples
    count = len(examples["labels"])
    if count < 5:
        raise AlignmentError(f"learn: expected at least 5 examples to learn and measure on, found {count}; add some")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tensor_split([count - count // 5])
    labels = examples["labels"].reshape(count, -1)
    # Where no label counts there is nothing to learn, and the mean over no labels is NaN.
    useful = order[0][(labels[order[0]] != IGNORED_LABEL).any(1)]
    taught, measured = ({name: tensor[rows] for name, tensor in examples.items()} for rows in (useful, order[1]))
    return taught, measured


def _learned_step(
    console: Console,
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    spec: SymmetrySpec,
    taught: Sequence[Batch],
    measured: Sequence[Batch],
    steps: int,
) -> AlignPair:
    """An alignment refined on batches, of models whose parameters are named as a directory's files name them."""
    table = names_in_memory(checkpoint, model)
    # Without class counts: the models are merged for what is in this one file, so its shares of the classes count.
    loss_in_memory = model_loss(model)
    held = model.state_dict()
    aside = examples_in(measured)
    seen = 0

    def in_memory(params: Params) -> dict[str, Tensor]:
        whole = {**checkpoint.params, **params}
        return {name: whole[file].to(held[name]) for name, file in table.items()}

    def loss(params: Params, batch: Batch) -> Tensor:
        nonlocal seen
        seen += len(batch["labels"])
        return loss_in_memory(in_memory(params), batch)

    def step(source: Params, anchor: Params, share: float) -> Alignment:
        nonlocal seen
        seen = 0
        start = align(source, anchor, spec, AlignOptions(max_sweeps=1))
        found = refine(
            source, anchor, spec, loss, taught, share=share, start=start.transform, steps=steps, validation=taught[:4]
        )
        before, after = (
            score(model, in_memory(weighted_mean([anchor, moved], [1 - share, share])), measured).loss
            for moved in (start.params, found.alignment.params)
        )
        console.print(
            f"learned: {found.steps} steps, loss {before:.4f} before, {after:.4f} after on the {aside} examples kept "
            f"aside; saw {seen} examples, {seen / (aside + examples_in(taught)):.2f} epochs of --data"
        )
        return found.alignment

    return step


def _score(checkpoint: Checkpoint, params: Mapping[str, Tensor], batches: Sequence[Batch]) -> Score:
    """Measure a directory's model, with the given parameters, on examples."""
    model = model_with(checkpoint, params)
    return score(model, dict(model.state_dict()), batches)


def _score_parties(
    checkpoints: Sequence[Checkpoint], common: Common, shares: Sequence[float], batches: Sequence[Batch]
) -> list[tuple[str, Score | None]]:
    """The scores of every model, where its head is the first one's, and of the plain mean."""
    first = checkpoints[0]
    scores: list[tuple[str, Score | None]] = []
    for checkpoint in checkpoints:
        alike = checkpoint is first or not (common.kept or common.left_out)
        scored = _score(checkpoint, checkpoint.params, batches) if alike else None
        scores.append((str(checkpoint.path), scored))
    plain = first.restored({**first.params, **mean_by_rows(common.models, shares)})
    return [*scores, ("plain mean", _score(first, plain, batches))]


def _print_distances(
    console: Console,
    spec: SymmetrySpec,
    before: Sequence[Mapping[str, Tensor]],
    after: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
) -> None:
    before, after = shared_rows(before), shared_rows(after)
    means = [(models, weighted_mean(models, shares)) for models in (before, after)]
    table = Table("layer", "before", "after", title="distance of the models from their mean, averaged over the models")
    for layer, names in layer_names(spec, before[0]).items():
        table.add_row(layer, *(f"{_mean_distance(models, mean, names):.4g}" for models, mean in means))
    table.add_section()
    every = list(before[0])
    table.add_row("all", *(f"{_mean_distance(models, mean, every):.4g}" for models, mean in means))
    console.print(table)


def _mean_distance(models: Sequence[Mapping[str, Tensor]], mean: Mapping[str, Tensor], names: Sequence[str]) -> float:
    """The Euclidean distance from `mean` over some floating-point parameters, averaged over the models."""
    return sum(math.sqrt(squared_distance(model, mean, names)) for model in models) / len(models)


def _print_scores(console: Console, scores: Sequence[tuple[str, Score | None]], shares: Sequence[float]) -> None:
    table = Table(Column("model", overflow="fold"), "loss", "accuracy")
    for name, found in scores:
        accuracy = "" if found is None or found.accuracy is None else f"{found.accuracy:.1%}"
        table.add_row(Text(name), "another head" if found is None else f"{found.loss:.4f}", accuracy)
    console.print(table)
    *parties, (_, plain), (_, merged) = scores
    losses = [found.loss for _, found in parties if found is not None]
    if plain and merged and len(losses) == len(parties):
        level = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        console.print(
            f"barrier: {plain.loss - level:.4f} of the plain mean, {merged.loss - level:.4f} of the merged model "
            "(nats above the mean of the models' own losses)"
        )
