"""`rotfed barrier`: the loss on the line between two models, as JSON and as a picture."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import rotfed
from rotfed.align import AlignOptions, align
from rotfed.barrier import barrier_of, line, losses_along, score
from rotfed.checkpoints.common import common_parameters, differences
from rotfed.checkpoints.folder import Checkpoint, read_checkpoint
from rotfed.checkpoints.form import common_form
from rotfed.checkpoints.models import batches_of, examples_in, model_with, read_examples
from rotfed.checkpoints.weights import in_memory
from rotfed.cli.console import DATA, BatchSize, Layers, Residual, numbers, open_console, refusals
from rotfed.errors import AlignmentError, RotfedError


def barrier(
    one: Annotated[Path, typer.Argument(help="A transformers model directory, which stays where it is.")],
    other: Annotated[Path, typer.Argument(help="One of the same architecture, which is aligned to it.")],
    data: Annotated[Path, typer.Option(help=DATA)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder for barrier.json and barrier.png.")],
    points: Annotated[int, typer.Option(help="Points on the line, both ends among them.")] = 11,
    residual: Residual = None,
    layers: Layers = "",
    batch_size: BatchSize = 64,
) -> None:
    """Measure the loss on the line between two models, before and after alignment.

    The barrier is how far the loss rises above the line between its two ends, in nats where it is a cross-entropy.
    Exits with 1 and one sentence where the models cannot be compared.
    """
    console = open_console()
    started = time.perf_counter()
    with refusals():
        figure = _blank_figure()
        places = line(points)
        checkpoints = [read_checkpoint(one), read_checkpoint(other)]
        common = common_parameters(checkpoints)
        if differing := [*common.kept.items(), *common.left_out.items(), *common.uneven.items()]:
            raise AlignmentError(f"{differing[0][0]}: expected alike in both models, found {differing[0][1]}")
        for sentence in differences(checkpoints, common):
            console.print(sentence)
        chosen = numbers("layers", layers, int)
        form = common_form(checkpoints, common, residual, chosen)
        anchor, source = (in_memory(params) for params in form.models)
        console.print(form.stream)
        model = model_with(checkpoints[0], checkpoints[0].params)
        batches = batches_of(read_examples(data, model), batch_size)
        alignment = align(source, anchor, form.spec, AlignOptions(layers=chosen))
        lines = {}
        for when, ends in (("before", common.models), ("after", [anchor, alignment.params])):
            # Their names in memory, where each is one tensor that the model computes with.
            start, end = (model_with(checkpoints[0], _in_files(checkpoints[0], params)).state_dict() for params in ends)
            losses = losses_along(lambda params: score(model, params, batches).loss, start, end, places)
            lines[when] = {"barrier": barrier_of(places, losses), "losses": losses}
        out.mkdir(parents=True, exist_ok=True)
        result = {
            "config": {
                "one": str(one),
                "other": str(other),
                "data": str(data),
                "points": points,
                "examples": examples_in(batches),
                "residual": form.spec.residual is not None,
                "layers": list(form.spec.select_layers(chosen)),
            },
            "versions": {"rotfed": rotfed.__version__, "torch": torch.__version__},
            "seconds": round(time.perf_counter() - started, 2),
            "distance": {"before": alignment.distance_before, "after": alignment.distance_after},
            "places": places,
            **lines,
        }
        # The picture, which can fail in more ways, comes first.
        _draw(figure, out / "barrier.png", places, lines)
        (out / "barrier.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        console.print(
            f"barrier: {lines['before']['barrier']:.4f} before alignment, {lines['after']['barrier']:.4f} after (nats)"
        )
        console.print(f"wrote {out / 'barrier.json'} and {out / 'barrier.png'}")


def _in_files(checkpoint: Checkpoint, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that a directory's files hold; those that are tied to others are left out."""
    return {name: params[name] for name in checkpoint.types}


def _blank_figure() -> Any:
    """An empty picture. Raises RotfedError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RotfedError(
            "matplotlib: expected for the picture of the barrier, not installed; pip install 'rotfed[plots]'"
        ) from error
    return Figure(figsize=(5.0, 3.6), layout="constrained")


def _draw(figure: Any, path: Path, places: Sequence[float], lines: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the losses along the line before and after alignment, in two of Okabe and Ito's colours."""
    axes = figure.add_subplot()
    for (when, found), colour, style in zip(lines.items(), ("#D55E00", "#0072B2"), ("s--", "o-"), strict=True):
        label = f"{when} alignment: barrier {found['barrier']:.3f}"
        axes.plot(places, found["losses"], style, color=colour, label=label)
    axes.set_xlabel("t, in (1 - t) one + t other")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center")
    figure.savefig(path, dpi=150)
