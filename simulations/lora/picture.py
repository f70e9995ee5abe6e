"""The picture of results: `docs/lora.svg`, drawn from `docs/lora.json` alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from simulations.lora.cells import MEAN, METHODS
from simulations.lora.page import FIGURES

RANK, COLUMNS = 4, 3

# Okabe and Ito's colours, told apart under every common colour blindness; the marker repeats them.
STYLES = {
    MEAN: ("#D55E00", "s"),
    "rotation": ("#E69F00", "^"),
    "optimal": ("#0072B2", "o"),
    "exact": ("#000000", "D"),
    "FFA-LoRA (A frozen)": ("#009E73", "v"),
    "RoLoRA (in turns)": ("#CC79A7", "X"),
}


def draw(document: Mapping[str, Any], path: Path) -> None:
    """For each cell of the lower rank, accuracy or loss after each round, and below it the aggregation error.

    Lines are means over seeds, bands one standard error either way.
    """
    runs = [run for run in document["runs"] if run["rank"] == RANK]
    cells = list(dict.fromkeys(run["cell"] for run in runs))
    rows = -(-len(cells) // COLUMNS)
    figure = Figure(figsize=(3.6 * COLUMNS, 5 * rows))
    axes = figure.subplots(2 * rows, COLUMNS, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        pair = axes[2 * row : 2 * row + 2, column]
        found = [run for run in runs if run["cell"] == cell]
        shown = FIGURES[found[0]["task"]][0]
        for key, axis in zip((shown, "error"), pair, strict=True):
            axis.set_axis_on()
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            for method in METHODS:
                values = [run[key] for run in found if run["method"] == method]
                if values and method in STYLES:
                    _line(axis, method, values)
            if key == "accuracy":
                axis.yaxis.set_major_formatter(PercentFormatter(1.0, 0))
            axis.set_ylabel({"error": "aggregation error"}.get(key, key))
            axis.grid(alpha=0.3)
        pair[0].set_title(cell.replace(f", rank {RANK}", ""), fontsize=11)
        pair[1].set_xlabel("round")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=COLUMNS, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    # Without a date, and with names of its parts that do not change: the same results make the same file.
    with rc_context({"svg.hashsalt": "rotfed"}):
        figure.savefig(path, metadata={"Date": None})


def _line(axis: Any, method: str, values: Sequence[Sequence[float]]) -> None:
    rounds, table = np.arange(1, len(values[0]) + 1), np.asarray(values)
    colour, marker = STYLES[method]
    middle = table.mean(0)
    axis.plot(rounds, middle, label=method, color=colour, marker=marker, linewidth=1.6, markersize=5)
    if len(table) > 1:
        half = table.std(0, ddof=1) / len(table) ** 0.5
        axis.fill_between(rounds, middle - half, middle + half, color=colour, alpha=0.12, linewidth=0)
