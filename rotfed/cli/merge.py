"""`rotfed merge`: one model made of several."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rotfed.adapters.folders import METHODS, AdapterOptions
from rotfed.checkpoints.merging import ANCHORS, MergeOptions, MergeReport, merge_checkpoints
from rotfed.cli.adapters import all_adapters, merge_folders, refuse_options
from rotfed.cli.console import DATA, BatchSize, Layers, Residual, notes, numbers, open_console, refusals


def merge(
    models: Annotated[list[Path], typer.Argument(help="Transformers model directories of one architecture.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The model directory to write.")],
    anchor: Annotated[
        str, typer.Option(help=f"The frame to merge in: {', '.join(ANCHORS)}; consensus by default, tree with --learn.")
    ] = "",
    weights: Annotated[str, typer.Option(help="Shares of the models, such as 2,1,1; equal by default.")] = "",
    residual: Residual = None,
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

    Brings the models into one frame, which changes none of their outputs, takes their weighted mean, and writes it as
    a model directory with the first one's configuration and tokenizer. Prints how far the models are from their mean
    before and after; with --data, also the losses of all models, of the plain mean and of the merged model. With
    --learn these losses are measured on the fifth of the examples that is kept aside, and every refined alignment is
    printed with its cost. Directories of LoRA adapters make one adapter, which stands for the mean of their updates;
    --aggregation says how, and its error is printed. Exits with 1 and one sentence where the models cannot be merged.
    """
    console = open_console()
    with refusals():
        shares = numbers("weights", weights, float)
        if all_adapters(models):
            others = {
                "anchor": anchor,
                "residual": residual is not None,
                "layers": layers,
                "data": data,
                "learn": learn,
            }
            refuse_options("adapters", others)
            merge_folders(
                console, models, out, AdapterOptions(aggregation or "optimal", rank, over, strength), shares, force
            )
            return
        for_adapters = {"aggregation": aggregation, "rank": rank, "over": over, "strength": strength is not None}
        refuse_options("whole models", for_adapters)
        chosen = numbers("layers", layers, int)
        options = MergeOptions(anchor, shares, residual, chosen, data, learn, batch_size, force)
        with notes(console):
            report = merge_checkpoints(models, out, options)
        _print_report(console, report, out)


def _print_report(console: Console, report: MergeReport, out: Path) -> None:
    for sentence in report.differences:
        console.print(sentence)
    count = len(report.shares)
    console.print(f"{report.spec.model_type}: {count} models by {report.spec.source}, anchor {report.anchor}")
    console.print(report.stream)
    for learned in report.learned:
        console.print(
            f"learned: {learned.steps} steps, loss {learned.before:.4f} before, {learned.after:.4f} after on the "
            f"{learned.aside} examples kept aside; saw {learned.seen} examples, {learned.epochs:.2f} epochs of --data"
        )
    table = Table("layer", "before", "after", title="distance of the models from their mean, averaged over the models")
    for layer, (before, after) in report.distances.items():
        if layer == "all":
            table.add_section()
        table.add_row(layer, f"{before:.4g}", f"{after:.4g}")
    console.print(table)
    console.print(f"wrote {out}")
    if report.scores:
        table = Table(Column("model", overflow="fold"), "loss", "accuracy")
        for name, found in report.scores:
            accuracy = "" if found is None or found.accuracy is None else f"{found.accuracy:.1%}"
            table.add_row(Text(name), "another head" if found is None else f"{found.loss:.4f}", accuracy)
        console.print(table)
    if report.barriers is not None:
        plain, merged = report.barriers
        console.print(
            f"barrier: {plain:.4f} of the plain mean, {merged:.4f} of the merged model (nats above the mean of the "
            "models' own losses)"
        )
