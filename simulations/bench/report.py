"""`docs/benchmark.md` and the README's table, written from `docs/benchmark.json` alone."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from simulations.bench.cells import ALIGNED, FIRST_SEED, FULL, PAIRS, PLAIN
from simulations.bench.dissected import barriers, distance, ways
from simulations.bench.picking import (
    TOLERANCE,
    Document,
    Run,
    below,
    by_round,
    cells_of,
    differences,
    lower,
    nats,
    one_of,
    runs_of,
    starts_alike,
)
from simulations.bench.statistics import Difference, paired
from simulations.markdown import between, table_row

MARKS = ("<!-- benchmark: written by simulations.bench -->", "<!-- end of benchmark -->")


def page(document: Document) -> str:
    """The page of results: a table and a sentence for each question."""
    runs, anatomy = document["runs"], document["anatomy"]
    environment = document["environment"]
    versions = environment["versions"]
    lines = [
        "# When alignment beats plain averaging, measured",
        "",
        f"By `make bench-full` with rotfed {versions['rotfed']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']} and flwr {versions['flwr']} on {environment['hardware']['cpus']} CPU cores; every "
        "run is in [benchmark.json](benchmark.json). Differences are paired by seed: means over seeds, with 95% "
        'intervals (Student\'s t). An interval that holds zero reads "no difference shown". Seeds start at '
        f"{FIRST_SEED}: those below were looked at when defaults were chosen.",
        "",
        "Vision: the apps' small ViT (139,000 parameters) from scratch on 6,000 images of Fashion-MNIST, measured on "
        "all 10,000 test images. Text: all-MiniLM-L6-v2 on 600 documents of BBC News. Language: a small Llama on "
        "Shakespeare's plays, whole roles to each client. AdamW, rate 0.001 (text: 0.0001). RotFedAvg is as it comes: "
        "consensus, and no change where frames do not differ.",
    ]
    for section in (_regimes, _harm, _methods, _own_starts, _sizes, _cost):
        lines += ["", *section(runs)] if section(runs) else []
    for dissected in (ways, distance, barriers):
        lines += ["", *dissected(anatomy)] if anatomy else []
    if missing := [cell.name for cell in FULL if cell.name not in cells_of(runs, PLAIN)]:
        lines += ["", "## Not run", "", "`make bench-full` goes on with: " + "; ".join(missing) + "."]
    if "engine" in document:
        lines += ["", *_engine(document["engine"])]
    return "\n".join(lines) + "\n"


def readme_table(document: Document) -> str:
    """What the README shows: the cells in which clients start alike, from one model."""
    runs = [run for run in document["runs"] if starts_alike(run)]
    rows = []
    for cell in cells_of(runs, ALIGNED):
        first, last = differences(runs, cell, ALIGNED, PLAIN)
        loss, _ = differences(runs, cell, ALIGNED, PLAIN, "loss")
        plain = runs_of(runs, cell, PLAIN)
        firsts, lasts = (f"{mean(run['accuracy'][at] for run in plain):.1%}" for at in (1, -1))
        rounds = str(len(plain[0]["accuracy"]) - 1)
        rows.append(table_row([cell, str(first.seeds), firsts, first.text(), nats(loss), rounds, lasts, last.text()]))
    named = [cell for cell in cells_of(runs, ALIGNED) if below(runs, cell)]
    heads = ["task, split, local epochs, clients", "seeds", "FedAvg, round 1", "RotFedAvg: points", "nats of loss"]
    return "\n".join(
        [
            table_row([*heads, "rounds", "FedAvg at the end", "RotFedAvg: points"]),
            table_row(["---"] * 8),
            *rows,
            "",
            "Differences with 95% intervals, paired by seed. " + " ".join(_long_and_uneven(runs)),
            (
                f"The interval at the end reaches below {100 * TOLERANCE:.1f} points in: {'; '.join(named)}."
                if named
                else f"No interval at the end reaches below {100 * TOLERANCE:.1f} points."
            ),
        ]
    )


def with_table(readme: str, document: Document) -> str:
    """The README with its table renewed. Raises ValueError where the marks around it are missing."""
    return between(readme, MARKS, readme_table(document))


# ----------------------------------------------------------------------------------------------------------
# Sections


def _regimes(runs: Sequence[Run]) -> list[str]:
    same = [run for run in runs if starts_alike(run)]
    heads = ["cell", "seeds", "FedAvg by round", "RotFedAvg by round", "difference, round 1", "shown"]
    lines = [
        "## How much, by regime",
        "",
        table_row([*heads, "in loss, nats", "shown", "at the end", "shown"]),
        table_row(["---"] * 10),
    ]
    verdicts: dict[str, list[str]] = {}
    for cell in cells_of(same, ALIGNED):
        first, last = differences(same, cell, ALIGNED, PLAIN)
        loss, _ = differences(same, cell, ALIGNED, PLAIN, "loss")
        verdicts.setdefault(f"{first.verdict} in round 1", []).append(cell)
        verdicts.setdefault(f"{last.verdict} at the end", []).append(cell)
        both = [by_round(runs_of(same, cell, method)) for method in (PLAIN, ALIGNED)]
        shown = [first.text(), first.verdict, nats(loss), lower(loss), last.text(), last.verdict]
        lines.append(table_row([cell, str(first.seeds), *both, *shown]))
    total = len(cells_of(same, ALIGNED))
    said = "; ".join(f"{len(cells)} of {total}: {verdict}" for verdict, cells in verdicts.items())
    return [
        *lines,
        "",
        f"Accuracy in cells whose clients all start from one model: {said}.",
        "",
        *_long_and_uneven(same),
        "",
        "![Accuracy by round](benchmark-rounds.svg)",
        "",
        "![Points gained, by split and local epochs](benchmark-gain.svg)",
    ]


def _long_and_uneven(runs: Sequence[Run]) -> list[str]:
    """The cells in which the gain is expected, taken together."""
    aligned = [run for run in runs if run["method"] == ALIGNED and _is_long_and_uneven(run["cell"])]
    if len(aligned) < 2:
        return []
    plain = [one_of(runs, run["cell"], PLAIN, run["seed"]) for run in aligned]
    points = paired([run["accuracy"][1] for run in aligned], [run["accuracy"][1] for run in plain])
    loss = paired([run["loss"][1] for run in aligned], [run["loss"][1] for run in plain])
    return [
        f"Long training on uneven data (Dirichlet 0.5 and 0.1, 10 local epochs or more), {points.seeds} runs together, "
        f"after round 1: {points.text()} points ({points.verdict}), {nats(loss)} nats of loss ({lower(loss)})."
    ]


def _is_long_and_uneven(cell: str) -> bool:
    _, split, epochs, *_ = cell.split(", ")
    return split in ("Dirichlet 0.5", "Dirichlet 0.1") and int(epochs.split()[0]) >= 10


def _harm(runs: Sequence[Run]) -> list[str]:
    same = [run for run in runs if starts_alike(run)]
    if not (cells := cells_of(same, ALIGNED)):
        return []
    ends = {cell: differences(same, cell, ALIGNED, PLAIN)[1] for cell in cells}
    worst = min(ends, key=lambda cell: ends[cell].mean)
    unlucky = min(ends, key=lambda cell: ends[cell].worst)
    named = [cell for cell in cells if below(same, cell)]
    lines = [
        "## Does it ever harm",
        "",
        f"The worst cell at the end is {worst}: {ends[worst].text()} points, {ends[worst].verdict}. The worst single "
        f"seed of all, {100 * ends[unlucky].worst:+.1f} points, is one of {unlucky}. "
        + (
            f"The interval reaches below {100 * TOLERANCE:.1f} points in {len(named)} of {len(cells)} cells: "
            + "; ".join(f"{cell} ({ends[cell].text()})" for cell in named)
            + "."
            if named
            else f"No interval reaches below {100 * TOLERANCE:.1f} points."
        ),
    ]
    rounds = [
        (gain, bool(groups))
        for run in same
        if run["method"] == ALIGNED
        for gain, groups in zip(run["gain"], run["groups"], strict=True)
    ]
    by_number: dict[int, list[bool]] = {}
    for run in same:
        if run["method"] == ALIGNED:
            for number, groups in enumerate(run["groups"], start=1):
                by_number.setdefault(number, []).append(bool(groups))
    shares = ", ".join(f"{mean(moved):.0%} of round {number}" for number, moved in by_number.items())
    lines += ["", f"Frames were found to differ, and models aligned, in {shares} ({len(rounds)} rounds in all)."]
    if controls := runs_of(runs, None, "control"):
        equal = all(
            run["accuracy"] == one_of(runs, run["cell"], PLAIN, run["seed"])["accuracy"]
            and run["loss"] == one_of(runs, run["cell"], PLAIN, run["seed"])["loss"]
            for run in controls
        )
        lines += [
            "",
            f"The control computes every alignment and applies none: its accuracies and losses are "
            f"{'equal to' if equal else 'NOT equal to'} plain averaging's to the bit in all {len(controls)} runs.",
        ]
    return lines


def _methods(runs: Sequence[Run]) -> list[str]:
    rows = []
    for method, plain in PAIRS.items():
        if method == ALIGNED:
            continue
        for cell in cells_of(runs, method):
            first, last = differences(runs, cell, method, plain)
            at_end = mean(run["accuracy"][-1] for run in runs_of(runs, cell, plain))
            rows.append(table_row([cell, method, plain, f"{at_end:.1%}", first.text(), last.text(), last.verdict]))
    if not rows:
        return []
    return [
        "## Other strategies, and without the no-harm rule",
        "",
        'Each against itself without alignment. "always" aligns every round to the consensus, "global" every round to '
        "the model sent out.",
        "",
        table_row(["cell", "method", "against", "which ends at", "difference, round 1", "at the end", "shown"]),
        table_row(["---"] * 7),
        *rows,
        *_carried(runs),
    ]


def _carried(runs: Sequence[Run]) -> list[str]:
    """Whether rounds should go on from the aligned average."""
    found = {cell: differences(runs, cell, "always", ALIGNED)[1] for cell in cells_of(runs, "always")}
    if not found:
        return []
    said = "; ".join(f"{cell}: {difference.text()} ({difference.verdict})" for cell, difference in found.items())
    return [
        "",
        f'Rounds that go on from the aligned average ("always") against RotFedAvg, at the end: {said}. After the first '
        "round both deliver the same model. "
        + (
            'Going on from it is a gain in some of these; `next_round_from="aligned"` does so.'
            if any(difference.verdict == "gain" for difference in found.values())
            else "The better model is not shown to be the better start, so RotFedAvg delivers the aligned average and "
            "goes on from the plain one, which leaves the rounds as they are without alignment."
        ),
    ]


def _own_starts(runs: Sequence[Run]) -> list[str]:
    own = [run for run in runs if run["cell"].startswith("own starts")]
    if not own:
        return []
    lines = [
        "## Clients that start from models of their own",
        "",
        table_row(["cell", "method", "seeds", "accuracy by round", "against FedAvg at the end", "shown"]),
        table_row(["---"] * 6),
    ]
    for cell in cells_of(own, PLAIN):
        for method in dict.fromkeys(run["method"] for run in own):
            found = runs_of(own, cell, method)
            last = "" if method == PLAIN else differences(own, cell, method, PLAIN)[1]
            shown = last.verdict if isinstance(last, Difference) else ""
            text = last.text() if isinstance(last, Difference) else ""
            lines.append(table_row([cell, method, str(len(found)), by_round(found, start=True), text, shown]))
    return [
        *lines,
        "",
        '"merged start": the clients first train models of their own, which are merged by learned alignment '
        "([multi-party.md](multi-party.md)); by round, from the start on. It trains one round more than the others.",
    ]


def _sizes(runs: Sequence[Run]) -> list[str]:
    sized = [run for run in runs if run["cell"].startswith("size")]
    cells = cells_of(sized, ALIGNED)
    if not cells:
        return []
    lines = [
        "## Do more width or more heads raise the gain",
        "",
        table_row(["model", "seeds", "FedAvg", "difference, round 1", "gain over noise", "shown"]),
        table_row(["---"] * 6),
    ]
    for cell in cells:
        first, _ = differences(sized, cell, ALIGNED, PLAIN)
        plain = mean(run["accuracy"][1] for run in runs_of(sized, cell, PLAIN))
        gains = [run["gain"][0] for run in runs_of(sized, cell, ALIGNED)]
        # JSON has no infinity, which the gain is where units changed places.
        gain = math.inf if None in gains else mean(gains)
        variant = _size_of(cell)
        lines.append(table_row([variant, str(first.seeds), f"{plain:.1%}", first.text(), f"{gain:.2f}", first.verdict]))
    usual = next((cell for cell in cells if _size_of(cell) == "width 64, 4 heads"), cells[0])
    said = [
        f"{_size_of(cell)}, {gained.text()} ({gained.verdict})"
        for cell in cells
        if cell != usual and (gained := _more_gained(sized, cell, usual))
    ]
    return [
        *lines,
        "",
        f"All: {cells[0].split(', width')[0]}. Points gained beyond {_size_of(usual)}, the apps' own, paired by seed: "
        + "; ".join(said)
        + ".",
    ]


def _size_of(cell: str) -> str:
    return cell.split("clients, ")[1]


def _more_gained(runs: Sequence[Run], one: str, other: str) -> Difference:
    """By how much more alignment gains in one cell than in another, after round 1."""
    gains = [
        [
            run["accuracy"][1] - one_of(runs, cell, PLAIN, run["seed"])["accuracy"][1]
            for run in runs_of(runs, cell, ALIGNED)
        ]
        for cell in (one, other)
    ]
    shared = min(map(len, gains))
    return paired(*(gained[:shared] for gained in gains))


def _cost(runs: Sequence[Run]) -> list[str]:
    lines = [
        "## What it costs a round",
        "",
        table_row(
            ["cell", "training of all clients", "alignment where frames differ", "the test where they do not", "share"]
        ),
        table_row(["---"] * 5),
    ]
    for cell in cells_of(runs, ALIGNED):
        found = runs_of(runs, cell, ALIGNED)
        training = mean(seconds for run in found for seconds in run["training_seconds"])
        pairs = [(s, bool(g)) for run in found for s, g in zip(run["aligning_seconds"], run["groups"], strict=True)]
        moved, still = ([s for s, m in pairs if m is flag] for flag in (True, False))
        all_ = mean(s for s, _ in pairs)
        lines.append(
            table_row(
                [
                    cell,
                    f"{training:.1f} s",
                    f"{mean(moved):.2f} s" if moved else "",
                    f"{mean(still):.2f} s" if still else "",
                    f"{all_ / training:.1%}",
                ]
            )
        )
    return [*lines, "", "Seconds on one core, means over rounds and seeds; the share is that of all rounds."]


def _engine(check: Mapping[str, Any]) -> list[str]:
    equal = check["engine"] == check["in_process"]
    apart = max(abs(a - b) for a, b in zip(check["engine"], check["in_process"], strict=True))
    return [
        "## In one process, and on Flower's engine",
        "",
        f"All runs above call the apps in one process. One configuration (digits, {check['config']['min-nodes']} "
        f"clients, {check['config']['num-server-rounds']} rounds) was also run on Flower's simulation engine: its "
        "accuracies by round are " + ("equal to the bit." if equal else f"apart by {100 * apart:.2f} points at most."),
    ]
