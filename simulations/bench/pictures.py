"""Pictures of the benchmark, as SVG for pages and PNG for the README."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simulations.bench.cells import ALIGNED, PLAIN
from simulations.bench.picking import cells_of, differences, runs_of
from simulations.bench.statistics import interval
from simulations.plots import STYLES, save

Run = Mapping[str, Any]

LAYER_STYLES = {"queries and keys": STYLES[1], "values and outputs": STYLES[0]}
LINE_STYLES = {"plain": STYLES[0], "aligned": STYLES[1]}
SPLITS, EPOCHS = ("IID", "Dirichlet 1.0", "Dirichlet 0.5", "Dirichlet 0.1"), (1, 5, 20)


def draw(document: Mapping[str, Any], folder: Path) -> None:
    """Draw what the document has figures for."""
    runs, anatomy = document["runs"], document["anatomy"]
    four = [run for run in runs if run["cell"].startswith("vision") and "4 clients" in run["cell"]]
    if cells_of(four, ALIGNED):
        save(_rounds(four), folder, "benchmark-rounds")
        save(_heat(four), folder, "benchmark-gain")
    if anatomy:
        save(_layers(anatomy), folder, "benchmark-layers")
        save(_barriers(anatomy), folder, "benchmark-barriers")


def _rounds(runs: Sequence[Run]) -> Figure:
    """Accuracy by round with 95% bands, a panel a cell."""
    cells = cells_of(runs, ALIGNED)
    columns = min(4, len(cells))
    rows = -(-len(cells) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.6 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    for axis, cell in zip(axes.flat, cells, strict=False):
        for method, style in zip((PLAIN, ALIGNED), STYLES, strict=True):
            by_round = list(zip(*(run["accuracy"] for run in runs_of(runs, cell, method)), strict=True))
            low, high = zip(*(interval(values) for values in by_round), strict=True)
            numbers, middle = range(len(by_round)), [100 * mean(values) for values in by_round]
            axis.plot(numbers, middle, label=method, markersize=4, **style)
            axis.fill_between(numbers, 100 * np.array(low), 100 * np.array(high), color=style["color"], alpha=0.2)
        axis.set_title(cell.removeprefix("vision, ").removesuffix(", 4 clients"), fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy, %")
    axes[0][0].legend(fontsize=8)
    figure.supxlabel("round", fontsize=10)
    return figure


def _heat(runs: Sequence[Run]) -> Figure:
    """The gain over split and local epochs, after the first round and after the last."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    found = {(run["cell"].split(", ")[1], int(run["cell"].split(", ")[2].split()[0])): run["cell"] for run in runs}
    for axis, which, title in zip(axes, (0, 1), ("after round 1", "after the last round"), strict=True):
        table = np.full((len(SPLITS), len(EPOCHS)), np.nan)
        for (split, epochs), cell in found.items():
            if cell in cells_of(runs, ALIGNED) and split in SPLITS and epochs in EPOCHS:
                difference = differences(runs, cell, ALIGNED, PLAIN)[which]
                row, column = SPLITS.index(split), EPOCHS.index(epochs)
                table[row, column] = 100 * difference.mean
                half = 50 * (difference.high - difference.low)
                axis.text(column, row, f"{table[row, column]:+.1f}\n±{half:.1f}", ha="center", va="center", fontsize=9)
        image = axis.imshow(table, cmap="RdBu", vmin=-4, vmax=4, aspect="auto")
        axis.set_xticks(range(len(EPOCHS)), [str(epochs) for epochs in EPOCHS])
        axis.set_yticks(range(len(SPLITS)), SPLITS)
        axis.set_xlabel("local epochs")
        axis.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label=f"{ALIGNED} against {PLAIN}, points")
    return figure


def _layers(anatomy: Sequence[Run]) -> Figure:
    """What alignment leaves of the spread, by layer."""
    found = [result for result in anatomy if "layers" in result]
    cells = list(dict.fromkeys(result["cell"] for result in found))
    figure, axes = plt.subplots(
        1, len(cells), figsize=(3.2 * len(cells), 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, cell in zip(axes[0], cells, strict=True):
        for kind, style in LAYER_STYLES.items():
            values = np.array([result["layers"][kind] for result in found if result["cell"] == cell])
            axis.errorbar(range(values.shape[1]), values.mean(0), values.std(0), label=kind, capsize=3, **style)
        axis.set_title(cell.removeprefix("vision, ").removesuffix(", 4 clients"), fontsize=10)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("spread left, share")
    axes[0][-1].legend(fontsize=8)
    return figure


def _barriers(anatomy: Sequence[Run]) -> Figure:
    """The loss along the line between the first two clients, means over seeds."""
    found = [result for result in anatomy if "barriers" in result]
    cells = list(dict.fromkeys(result["cell"] for result in found))
    figure, axes = plt.subplots(1, len(cells), figsize=(3.2 * len(cells), 2.8), squeeze=False, layout="constrained")
    for axis, cell in zip(axes[0], cells, strict=True):
        for kind, style in LINE_STYLES.items():
            losses = np.array([r["barriers"][kind]["losses"] for r in found if r["cell"] == cell])
            places = np.linspace(0, 1, losses.shape[1])
            axis.plot(places, losses.mean(0), label=kind, markersize=3, **style)
        axis.set_title(cell.removeprefix("vision, ").removesuffix(", 4 clients"), fontsize=10)
        axis.set_xlabel("from one client to the other")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss, nats")
    axes[0][-1].legend(fontsize=8)
    return figure
