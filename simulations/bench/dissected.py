"""What first rounds show that were taken apart: sections of `docs/benchmark.md`."""

from collections.abc import Sequence
from statistics import mean

import numpy as np

from simulations.bench.picking import Run
from simulations.bench.statistics import Difference, paired
from simulations.markdown import table_row


def ways(anatomy: Sequence[Run]) -> list[str]:
    """What each group, layer and anchor gives by itself."""
    lines = [
        "## Which groups, layers and anchors do it",
        "",
        "Averages of the same first rounds, always aligned; points of accuracy against the plain average. Spread: what "
        "is left of the clients' mean squared distance from their mean.",
    ]
    cells = list(dict.fromkeys(result["cell"] for result in anatomy))
    names = list(dict.fromkeys(result["way"] for result in anatomy))
    lines += [
        "",
        table_row(["aligned", *(_short(cell) for cell in cells), "all cells", "loss, all cells", "spread", "seconds"]),
    ]
    lines.append(table_row(["---"] * (len(cells) + 5)))
    for way in names:
        found = [result for result in anatomy if result["way"] == way]
        per_cell = [[r for r in found if r["cell"] == cell] for cell in cells]
        if way == "plain":
            shown = [f"{mean(r['accuracy'] for r in rs):.1%}" for rs in per_cell]
            lines.append(table_row(["nothing", *shown, "", "", "1.000", ""]))
            continue
        shown = [_against_plain(anatomy, rs).text() for rs in per_cell]
        loss = _against_plain(anatomy, found, "loss").text(1.0, 3)
        spread = f"{mean(r['spread'] for r in found):.3f}"
        seconds = f"{mean(r['seconds'] for r in found):.2f}"
        lines.append(table_row([way, *shown, _against_plain(anatomy, found).text(), loss, spread, seconds]))
    early, late, joint, sequential, unscaled = (
        [result for result in anatomy if result["way"] == way]
        for way in (
            "first half of the layers",
            "second half of the layers",
            "attention and FFN",
            "rotation, then scale (sequential)",
            "rotations without scales",
        )
    )
    halves = _between(early, late)
    turns = _between(joint, sequential)
    scales = _between(joint, unscaled)
    return [
        *lines,
        "",
        f"Layers: the first half against the second, {halves.text()} points ({halves.verdict}). Joint optimum of "
        f"rotation and scale against the sequential one: {turns.text(digits=2)} points ({turns.verdict}); scales at "
        f"all: {scales.text(digits=2)} points ({scales.verdict}).",
    ]


def distance(anatomy: Sequence[Run]) -> list[str]:
    """Over the ways of one first round: does the one with less spread have less loss."""
    correlations = []
    for cell, seed in dict.fromkeys((result["cell"], result["seed"]) for result in anatomy):
        # The residual stream is measured on folded models, whose spread is another one.
        ways = [r for r in anatomy if (r["cell"], r["seed"]) == (cell, seed) and r["way"] != "with the residual stream"]
        spreads, losses = [r["spread"] for r in ways], [r["loss"] for r in ways]
        correlations.append(float(np.corrcoef(spreads, losses)[0, 1]))
    one = paired(correlations, [0.0] * len(correlations))
    return [
        "## Does a smaller distance mean a better merge",
        "",
        f"Within a first round, over the ways above but the residual stream, the correlation of what is left of the "
        f"spread with the merged model's loss is {one.text(1.0, 2)} over {one.seeds} rounds"
        + (": less spread, less loss." if one.low > 0 else ": not shown." if one.high > 0 else ": the reverse."),
    ]


def barriers(anatomy: Sequence[Run]) -> list[str]:
    """The loss between two clients, before and after."""
    found = [result for result in anatomy if "barriers" in result]
    lines = [
        "## The barrier between two clients",
        "",
        table_row(["cell", "rounds", "plain, nats", "aligned, nats", "difference", "shown"]),
        table_row(["---"] * 6),
    ]
    for cell in dict.fromkeys(result["cell"] for result in found):
        both = [result["barriers"] for result in found if result["cell"] == cell]
        plain, aligned = ([b[key]["barrier"] for b in both] for key in ("plain", "aligned"))
        change = paired(aligned, plain)
        verdict = {"gain": "higher", "loss": "lower"}.get(change.verdict, change.verdict)
        lines.append(
            table_row(
                [cell, str(change.seeds), f"{mean(plain):.3f}", f"{mean(aligned):.3f}", change.text(1.0, 3), verdict]
            )
        )
    return [
        *lines,
        "",
        "Linear mode connectivity of the first two clients after round 1, all brought to the consensus.",
        "",
        "![What is left of the spread, layer by layer](benchmark-layers.svg)",
        "",
        "![The loss between two clients](benchmark-barriers.svg)",
    ]


def _against_plain(anatomy: Sequence[Run], found: Sequence[Run], figure: str = "accuracy") -> Difference:
    plain = {(r["cell"], r["seed"]): r[figure] for r in anatomy if r["way"] == "plain"}
    return paired([r[figure] for r in found], [plain[r["cell"], r["seed"]] for r in found])


def _between(ones: Sequence[Run], others: Sequence[Run]) -> Difference:
    return paired([r["accuracy"] for r in ones], [r["accuracy"] for r in others])


def _short(cell: str) -> str:
    return cell.removeprefix("vision, ")
