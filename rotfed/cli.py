"""The command line: what rotfed knows, whether a model is safe to align, and one model made of several."""

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

import rotfed
from rotfed.align import Alignment, align
from rotfed.anchors import Step, align_all, chosen_anchor
from rotfed.barrier import Batch, Params, Score, barrier_of, line, losses_along, score
from rotfed.checkpoints import (
    Checkpoint,
    Common,
    batches_of,
    check_target,
    common_parameters,
    layer_names,
    load_model,
    model_with,
    names_in_memory,
    new_model,
    other_settings,
    quiet_transformers,
    read_checkpoint,
    read_examples,
    stored_parameters,
    weight_files,
    with_tied_head,
    write_checkpoint,
)
from rotfed.checks import check_spec, randomize
from rotfed.errors import AlignmentError, RotfedError, SpecError
from rotfed.learned import model_loss, refine
from rotfed.library import load_spec, read_config, refusing, spec_files, supported_model_types
from rotfed.mergers import mean_by_rows, normalised_weights, shared_rows, weighted_mean
from rotfed.nearest import Nearest, nearest_spec
from rotfed.residual import fold_norms
from rotfed.spec import Resolution, SymmetrySpec
from rotfed.transform import to_work

ANCHORS = ("medoid", "consensus", "progressive", "tree")
LEARNED_ANCHORS = ("progressive", "tree")

Residual = Annotated[bool, typer.Option(help="Align the residual stream, too, where the spec knows it.")]
Layers = Annotated[str, typer.Option(help="Numbers of the layers to align, such as 0,1; all by default.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples that the model takes at once.")]
_DATA = "A safetensors file of examples: the arguments of the model's forward pass, and labels."

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_show_locals=False
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Put transformers into one common frame before they are averaged."""
    if version:
        typer.echo(f"rotfed {rotfed.__version__}")
        raise typer.Exit()


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="A transformers model directory, or a config.json.")],
    run: Annotated[bool, typer.Option("--run", help="Load the model and measure that its outputs stay.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random transforms, weights and inputs.")] = 0,
) -> None:
    """Say which spec fits a model, and what it may change.

    Reads the configuration and the headers of the safetensors files, no weights. With --run it also runs the model
    before and after random transforms of every group, with its own weights where the directory has them, else with
    random ones. Exits with 1 and one sentence where rotfed does not support the model; for an unknown architecture it
    also says which spec comes closest.
    """
    console = _console()
    with _refusals():
        stored = stored_parameters(model)
        try:
            spec = load_spec(model)
            resolution = spec.resolve(stored) if stored else None
        except SpecError as refusal:
            _refuse(refusal, nearest_spec(stored) if stored and _unknown(model) else None)
        errors = {}
        weights = "from its headers" if stored else "from its configuration alone"
        if run:
            module, weights = _load_model(model, seed)
            for dtype in (torch.float64, torch.float32):
                errors[dtype] = check_spec(spec, module, dtype, generator=torch.Generator().manual_seed(seed))
            resolution = resolution or spec.resolve(module.state_dict())
        _print_spec(console, spec, resolution, weights)
        console.print(f"residual stream: {_stream_of(model, stored)}")
    for dtype, error in errors.items():
        name = str(dtype).removeprefix("torch.")
        console.print(f"largest relative change of any output under random transforms, {name}: {error:.1e}")
    if run:
        console.print(f"ok: rotfed keeps the function of this {spec.model_type} model")
    elif stored:
        console.print("ok: every parameter has its place; --run measures that the outputs stay")
    else:
        console.print("ok: the configuration is supported; no safetensors file here to compare with, --run builds one")


@app.command()
def specs(
    family: Annotated[str, typer.Argument(help="A family or a model_type, for its groups; all by default.")] = "",
) -> None:
    """List the architectures that rotfed knows, with the groups of each."""
    console = _console()
    quiet_transformers()
    known = spec_files()
    chosen = supported_model_types().get(family, family)
    if chosen and chosen not in known:
        _refuse(SpecError(f"{family}: no such family or model_type; rotfed knows {', '.join(known)}"))
    for name, data in known.items():
        if chosen in ("", name):
            console.print(f"{name}: {', '.join(data['model_type'])}")
            for group, table in data["groups"].items():
                each = f" per {', '.join(table['per'])}" if table.get("per") else ""
                condition = f", when {table['when']}" if "when" in table else ""
                console.print(f"  {group} ({table['kind']}{each}{condition})")
            for kinds, model_types in _streams(data).items():
                console.print(f"  residual stream ({kinds}): {', '.join(model_types)}")
    if not chosen:
        console.print(f"{len(supported_model_types())} model types in {len(known)} families")


@app.command()
def merge(
    models: Annotated[list[Path], typer.Argument(help="Transformers model directories of one architecture.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The model directory to write.")],
    anchor: Annotated[
        str, typer.Option(help=f"The frame to merge in: {', '.join(ANCHORS)}; consensus by default, tree with --learn.")
    ] = "",
    weights: Annotated[str, typer.Option(help="Shares of the models, such as 2,1,1; equal by default.")] = "",
    residual: Residual = True,
    layers: Layers = "",
    data: Annotated[Path | None, typer.Option(help=f"{_DATA} Measures the losses.")] = None,
    learn: Annotated[
        int, typer.Option(min=0, help="Steps at most in which each alignment is refined, on four fifths of --data.")
    ] = 0,
    batch_size: BatchSize = 64,
    force: Annotated[bool, typer.Option("--force", help="Replace a model directory that is there.")] = False,
) -> None:
    """Make one model of several.

    Brings the models into one frame, which changes what none of them computes, takes their weighted mean, and writes
    it as a model directory with the first one's configuration and tokenizer. Prints how far the models are from their
    mean before and after; with --data, also the losses of all models, of the plain mean and of the merged model.
    With --learn these losses are those on the fifth of the examples that nothing was learned on, and every refined
    alignment is printed with what it cost. Exits with 1 and one sentence where the models cannot be merged.
    """
    console = _console()
    with _refusals():
        if len(models) < 2:
            raise AlignmentError(f"models: expected at least two to merge, found {len(models)}")
        anchor = chosen_anchor(anchor or ("tree" if learn else "consensus"), LEARNED_ANCHORS if learn else ANCHORS)
        shares = normalised_weights(len(models), _numbers("weights", weights, float))
        _check_learn(learn, data, layers, shares)
        check_target(out, models, force)
        checkpoints = [read_checkpoint(model) for model in models]
        first = checkpoints[0]
        common = common_parameters(checkpoints)
        _print_differences(console, checkpoints, common)
        chosen = _numbers("layers", layers, int)
        spec, parties, stream = _form(checkpoints, common, residual, chosen)
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

        with _notes(console):
            found = align_all(shared_rows(parties), spec, anchor, shares, step=step, layers=chosen)
        # A transform moves all rows of a table, those beyond the ones that it was found on, too.
        aligned = [
            alignment.transform.apply(party) if common.uneven else alignment.params
            for alignment, party in zip(found, parties, strict=True)
        ]
        merged = first.restored({**first.params, **mean_by_rows(aligned, shares)})
        _print_distances(console, spec, parties, aligned, shares)
        write_checkpoint(out, merged, first.path)
        console.print(f"wrote {out}")
        if data is not None:
            scores.append(("merged", _score(first, merged, batches)))
            _print_scores(console, scores, shares)


@app.command()
def barrier(
    one: Annotated[Path, typer.Argument(help="A transformers model directory, which stays where it is.")],
    other: Annotated[Path, typer.Argument(help="One of the same architecture, which is aligned to it.")],
    data: Annotated[Path, typer.Option(help=_DATA)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder for barrier.json and barrier.png.")],
    points: Annotated[int, typer.Option(help="Points on the line, both ends among them.")] = 11,
    residual: Residual = True,
    layers: Layers = "",
    batch_size: BatchSize = 64,
) -> None:
    """Measure the loss on the line between two models, before and after alignment.

    The barrier is how far the loss rises above the line between its two ends, in nats where it is a cross-entropy.
    Exits with 1 and one sentence where the models cannot be compared.
    """
    console = _console()
    started = time.perf_counter()
    with _refusals():
        figure = _blank_figure()
        places = line(points)
        checkpoints = [read_checkpoint(one), read_checkpoint(other)]
        common = common_parameters(checkpoints)
        if differing := [*common.kept.items(), *common.left_out.items(), *common.uneven.items()]:
            raise AlignmentError(f"{differing[0][0]}: expected alike in both models, found {differing[0][1]}")
        _print_differences(console, checkpoints, common)
        chosen = _numbers("layers", layers, int)
        spec, (anchor, source), stream = _form(checkpoints, common, residual, chosen)
        console.print(stream)
        model = model_with(checkpoints[0], checkpoints[0].params)
        batches = batches_of(read_examples(data, model), batch_size)
        alignment = align(source, anchor, spec, layers=chosen)
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
                "examples": _examples_in(batches),
                "residual": spec.residual is not None,
                "layers": list(spec.select_layers(chosen)),
            },
            "versions": {"rotfed": rotfed.__version__, "torch": torch.__version__},
            "seconds": round(time.perf_counter() - started, 2),
            "distance": {"before": alignment.distance_before, "after": alignment.distance_after},
            "places": places,
            **lines,
        }
        (out / "barrier.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        _draw(figure, out / "barrier.png", places, lines)
        console.print(
            f"barrier: {lines['before']['barrier']:.4f} before alignment, {lines['after']['barrier']:.4f} after (nats)"
        )
        console.print(f"wrote {out / 'barrier.json'} and {out / 'barrier.png'}")


def _console(stderr: bool = False) -> Console:
    """A console that prints names as they are: a bracket in one is no markup, a colon no emoji."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn a RotfedError, or a disk's, into one sentence and exit code 1."""
    quiet_transformers()
    try:
        yield
    except RotfedError as refusal:
        _refuse(refusal)
    except OSError as error:
        _refuse(RotfedError(f"{error.filename or 'disk'}: expected to read and write there, found: {error.strerror}"))
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).partition("\n")[0]
        _refuse(RotfedError(f"GPU: expected to run the model, found: {reason}; set CUDA_VISIBLE_DEVICES= for the CPU"))


@contextlib.contextmanager
def _notes(console: Console) -> Iterator[None]:
    """Print warnings as lines of their own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        console.print(f"note: {warning.message}")


_Number = TypeVar("_Number", int, float)


def _numbers(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number] | None:
    """The numbers of an option such as 2,1,1; None for an empty one."""
    try:
        return [kind(part) for part in text.split(",")] if text else None
    except ValueError as error:
        raise AlignmentError(f"{option}: expected numbers with commas between, such as 2,1, found {text!r}") from error


def _form(
    checkpoints: Sequence[Checkpoint], common: Common, residual: bool, layers: Sequence[int] | None
) -> tuple[SymmetrySpec, list[dict[str, Tensor]], str]:
    """The spec to align by, the models in the form that it takes, and what that means for the residual stream."""
    first = checkpoints[0]
    refused = ""
    if not residual:
        refused = "--no-residual"
    elif len(first.spec.select_layers(layers)) < first.spec.num_layers:
        refused = "--layers leaves out some of the layers that share it"
    elif common.kept:
        refused = f"{next(iter(common.kept))} differs between the models"
    if not refused:
        try:
            spec = load_spec(first.path, residual=True)
            models = [fold_norms(with_tied_head(model, spec, first.path), spec) for model in common.models]
        except SpecError as refusal:
            refused = str(refusal)
        else:
            return spec, models, f"residual stream: aligned ({_stream(spec)})"
    return first.spec, common.models, f"residual stream: left as it is ({refused})"


def _stream(spec: SymmetrySpec) -> str:
    """What a spec with the residual stream does to it."""
    assert spec.residual is not None
    kinds = ", ".join(group.kind_name for group in spec.groups.values() if group.name.startswith("residual"))
    return kinds + ("; norms folded into the layers that read them" if spec.residual.folded else "")


def _stream_of(model: Path, stored: Mapping[str, Tensor]) -> str:
    """What load_spec(model, residual=True) would do to the residual stream, or why it stays as it is."""
    try:
        spec = load_spec(model, residual=True)
        if stored:
            spec.resolve(with_tied_head(stored, spec, model), folded=False)
    except SpecError as refusal:
        return f"left as it is ({refusal})"
    return f"known ({_stream(spec)})"


def _streams(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """The model types of a spec file that know the residual stream, by what is done to it."""
    found: dict[str, list[str]] = {}
    for model_type in data["model_type"] if "residual" in data else []:
        kinds = []
        for tied in (False, True):
            with contextlib.suppress(SpecError):
                config = {"model_type": model_type, "tie_word_embeddings": tied}
                kinds.append(_stream(load_spec(config, residual=True)))
        if kinds:
            found.setdefault("; with a tied head: ".join(dict.fromkeys(kinds)), []).append(model_type)
    return found


def _in_files(checkpoint: Checkpoint, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that a directory's files hold; those that are tied to others are left out."""
    return {name: params[name] for name in checkpoint.types}


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
    taught, measured = ({name: tensor[rows] for name, tensor in examples.items()} for rows in order)
    return taught, measured


def _learned_step(
    console: Console,
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    spec: SymmetrySpec,
    taught: Sequence[Batch],
    measured: Sequence[Batch],
    steps: int,
) -> Step:
    """An alignment refined on batches, of models whose parameters are named as a directory's files name them."""
    table = names_in_memory(checkpoint, model)
    # Without class counts: the models are merged for what is in this one file, so its shares of the classes count.
    loss_in_memory = model_loss(model)
    held = model.state_dict()
    aside = _examples_in(measured)
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
        start = align(source, anchor, spec, max_sweeps=1)
        found = refine(
            source, anchor, spec, loss, taught, share=share, start=start.transform, steps=steps, validation=taught[:4]
        )
        before, after = (
            score(model, in_memory(weighted_mean([anchor, moved], [1 - share, share])), measured).loss
            for moved in (start.params, found.alignment.params)
        )
        console.print(
            f"learned: {found.steps} steps, loss {before:.4f} before, {after:.4f} after on the {aside} examples kept "
            f"aside; saw {seen} examples, {seen / (aside + _examples_in(taught)):.2f} epochs of --data"
        )
        return found.alignment

    return step


def _examples_in(batches: Sequence[Batch]) -> int:
    return sum(len(batch["labels"]) for batch in batches)


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


def _print_differences(console: Console, checkpoints: Sequence[Checkpoint], common: Common) -> None:
    first, *others = checkpoints
    for other in others:
        if settings := other_settings(first, other):
            console.print(f"note: {other.path} has {'; '.join(settings)}; the configuration of {first.path} is used")
    for title, names in [
        (f"kept from {first.path}, not merged", common.kept),
        ("left out", common.left_out),
        ("merged row by row, each over the models that have it", common.uneven),
    ]:
        if names:
            console.print(f"{title}: {', '.join(f'{name} ({what})' for name, what in names.items())}")


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
    distances = [
        math.sqrt(
            sum(
                float((to_work(model[name]) - to_work(mean[name])).square().sum())
                for name in names
                if model[name].is_floating_point()
            )
        )
        for model in models
    ]
    return sum(distances) / len(distances)


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


def _refuse(refusal: RotfedError, nearest: Nearest | None = None) -> None:
    """Print one sentence on the error stream, what comes closest below it, and exit with 1."""
    console = _console(stderr=True)
    console.print(f"refused: {refusal}")
    if nearest is not None:
        total = len(nearest.matched) + len(nearest.unmatched)
        console.print(
            f"closest: specs/{nearest.family}.toml ({', '.join(nearest.model_types)}) has "
            f"{len(nearest.matched)} of the model's {total} kinds of parameter, by name"
        )
        for title, lines in [
            ("a new file needs an axis string for", [f'"{n}", shape {s}' for n, s in nearest.unmatched.items()]),
            (f"not found here of specs/{nearest.family}.toml", list(nearest.lacking)),
        ]:
            if lines:
                console.print("\n  ".join([f"{title}:", *lines]))
        console.print("see docs/new-architecture.md for how to write the file")
    raise typer.Exit(1)


def _unknown(model: Path) -> bool:
    return read_config(model).get("model_type") not in list(supported_model_types())


def _print_spec(console: Console, spec: SymmetrySpec, resolution: Resolution | None, weights: str) -> None:
    fits = ""
    if resolution is not None:
        prefix = f"prefix {resolution.prefix!r}" if resolution.prefix else "no prefix"
        naming = "" if resolution.naming == "current" else f", names of {resolution.naming}"
        fits = f" fits {len(resolution.names)} parameters ({prefix}{naming})"
    console.print(f"{spec.model_type}: {spec.source}{fits}, {weights}")
    table = Table("group", "kind", "acts on", "elements")
    for group in spec.groups.values():
        counts = " x ".join(f"{count} {index}" for index, count in zip(group.per, group.batch, strict=True))
        vectors = f"{group.axis}, {group.size} long" if group.axis else "everything as one"
        table.add_row(group.name, group.kind_name, vectors, counts or "1")
    console.print(table)
    if resolution is not None and resolution.left_alone:
        console.print(f"task head, left alone: {', '.join(resolution.left_alone)}")


def _load_model(path: Path, seed: int) -> tuple[torch.nn.Module, str]:
    """The model of a directory with its weights, or a random one of its configuration, and which of the two it is."""
    if path.is_dir() and (weight_files(path) or any(path.glob("pytorch_model*.bin"))):
        module, fresh = load_model(path)
        if not fresh:
            return module, "its own weights"
        if not {name for name, _ in module.named_parameters()} <= set(fresh):
            more = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
            return module, f"its own weights, but a fresh {fresh[0]}{more}, which its files lack"
    with refusing(f"{path}: expected a model that transformers can build"):
        return randomize(new_model(path), torch.Generator().manual_seed(seed)), "random weights"
