"""Pictures of seconds and memory, out of the JSON alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from simulations.plots import STYLES, save
from simulations.speed.asked import pick
from simulations.speed.subjects import ALWAYS, FEDAVG, STAGES

AXES = ("parameters", "clients", "layers", "width", "heads")
LINES = {FEDAVG: STYLES[0], ALWAYS: STYLES[1]}
# Okabe and Ito's colours, and a hatch for whom they do not tell apart.
BARS = {
    "decode": ("#0072B2", ""),
    "test and align": ("#D55E00", "//"),
    "average": ("#009E73", ".."),
    "encode": ("#E69F00", "\\\\"),
    "other": ("#999999", ""),
}


def draw(document: Mapping[str, Any], folder: Path) -> None:
    """Draw what the document has figures for."""
    frame = pd.DataFrame(document["runs"])
    if not (rows := pick(frame, section="scaling")).empty:
        save(_scaling(rows, pick(frame, section="merge")), folder, "speed-scaling")
    rows = pick(frame, section="round")
    if not rows.empty and set(STAGES) <= set(rows):
        save(_stages(rows), folder, "speed-stages")


def _scaling(rows: pd.DataFrame, merges: pd.DataFrame) -> Figure:
    """Seconds, and below them peak memory in models, along each axis; beside parameters also those of merges."""
    axes_of = [axis for axis in AXES if not pick(rows, axis=axis).empty]
    figure, axes = plt.subplots(
        2, len(axes_of), figsize=(2.9 * len(axes_of), 5.2), squeeze=False, sharey="row", layout="constrained"
    )
    for column, axis in enumerate(axes_of):
        for method, style in LINES.items():
            found = pick(rows, axis=axis, method=method)
            if found.empty:
                continue
            seconds = found.groupby(axis)["seconds"].agg(["median", "min", "max"])
            places = seconds.index.to_numpy(float)
            axes[0][column].plot(places, seconds["median"], label=method, markersize=4, **style)
            axes[0][column].fill_between(places, seconds["min"], seconds["max"], color=style["color"], alpha=0.2)
            held = (found["anonymous"] / found["model_bytes"]).groupby(found[axis]).median()
            axes[1][column].plot(held.index.to_numpy(float), held, markersize=4, **style)
        values = sorted(pick(rows, axis=axis)[axis].unique())
        if axis == "parameters" and not merges.empty:
            values += sorted(merges[axis].unique())
            seconds, held = merges["seconds"], merges["anonymous"] / merges["model_bytes"]
            axes[0][column].plot(merges[axis], seconds, "D", color="black", markersize=4, label="rotfed merge, on disk")
            axes[1][column].plot(merges[axis], held, "D", color="black", markersize=4)
        axes[1][column].set_xlabel(axis)
        for row in axes:
            row[column].set_xscale("log")
            row[column].set_yscale("log")
            row[column].set_xticks(values, [_short(value) for value in values], fontsize=8)
            row[column].set_xticks([], minor=True)
            row[column].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            row[column].yaxis.set_major_formatter(FormatStrFormatter("%g"))
            row[column].yaxis.set_minor_formatter(NullFormatter())
            row[column].grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds of the server")
    axes[1][0].set_ylabel("peak memory, models")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=8)
    return figure


def _short(value: float) -> str:
    """A whole number for an axis."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "B"), (1e6, "M")) if value >= unit), (1, ""))
    return f"{value / unit:.1f}{name}" if name == "B" else f"{value / unit:.0f}{name}"


def _stages(rows: pd.DataFrame) -> Figure:
    """The seconds of a round by stage, a bar a case and method; FedAvg's are one piece."""
    groups = list(rows.groupby(["case", "method"], sort=False))
    figure, axis = plt.subplots(figsize=(8, 0.5 + 0.45 * len(groups)), layout="constrained")
    for place, (_, one) in enumerate(groups):
        left = 0.0
        whole = one["method"].iloc[0] == FEDAVG
        for stage, (colour, hatch) in BARS.items():
            width = one["seconds"].median() if whole and stage == "average" else 0.0 if whole else one[stage].median()
            label = stage if place == len(groups) - 1 else None
            axis.barh(place, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
            left += width
    axis.set_yticks(range(len(groups)), [f"{case}: {method}" for (case, method), _ in groups], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds of the server")
    axis.legend(fontsize=8)
    return figure
