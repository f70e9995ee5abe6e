"""Pictures of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # pictures go to files; no display is needed

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# The same picture is the same file.
plt.rcParams["svg.hashsalt"] = "rotfed"

# Two of Okabe and Ito's colours, told apart under every common colour blindness; marker and dash repeat them.
STYLES = (
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
)
SINGLE_COLOUR = "#555555"


def plot_accuracy(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    single: Mapping[str, float],
    title: str,
) -> None:
    """Accuracy on held-out data per round, one panel a start and one line a method.

    Parameters
    ----------
    path
        The PNG file to write; its folder is made.
    panels
        Panel title -> method -> accuracy in [0, 1] before the first round and after each.
    single
        Panel title -> mean accuracy of the clients' own models in round one, drawn as a dotted line.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, (panel, lines) in zip(axes[0], panels.items(), strict=True):
        for (method, accuracies), style in zip(lines.items(), STYLES, strict=True):
            axis.plot(range(len(accuracies)), accuracies, label=method, linewidth=2, markersize=6, **style)
        if panel in single:
            axis.axhline(single[panel], color=SINGLE_COLOUR, linestyle=":", label="single clients, round 1 (mean)")
        axis.set_title(panel, fontsize=12)
        axis.set_xlabel("round", fontsize=11)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_ylim(0.0, 1.0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy on held-out data", fontsize=11)
    axes[0][-1].legend(loc="lower right", fontsize=10)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a picture as SVG for pages and as PNG for the README, and close it."""
    figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    figure.savefig(folder / f"{name}.png", bbox_inches="tight", dpi=130)
    plt.close(figure)
