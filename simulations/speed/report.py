"""The page `speed.md` and its pictures, written from `speed.json` alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from simulations.markdown import table_row
from simulations.speed.asked import exponent, figures, number, pick, ratios, spread, time
from simulations.speed.pictures import draw
from simulations.speed.sections import SECTIONS
from simulations.speed.subjects import ALWAYS, FEDAVG, STAGES

Document = Mapping[str, Any]

AXES = {
    "layers": "layers (width 512, 4 clients)",
    "clients": "clients (6 layers, width 384)",
    "width": "width (2 layers, heads of 64, 4 clients)",
    "heads": "heads (4 layers, width 768, 4 clients)",
    "parameters": "parameters (models as they are known, 2 clients)",
}


def write(document: Document, folder: Path) -> Path:
    """Write the JSON, the page out of it, and the pictures; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    # A run a line, so that a change of one shows as such.
    text = json.dumps(document, separators=(",", ":")).replace('{"section"', '\n{"section"') + "\n"
    (folder / "speed.json").write_text(text)
    draw(document, folder)
    path = folder / "speed.md"
    path.write_text(page(document))
    return path


def page(document: Document) -> str:
    """Return the page: what was asked and found, then a table for each section that was measured."""
    frame = pd.DataFrame(document["runs"])
    lines = ["# Seconds and memory, measured", "", *_introduction(document)]
    lines += ["", "## What was asked", "", *_asked(frame)]
    sections = {
        "near": _near,
        "round": _rounds,
        "memory": _memory,
        "small": _small,
        "merge": _merges,
        "scaling": _scaling,
    }
    assert set(sections) == set(SECTIONS)
    for section, tables in sections.items():
        rows = pick(frame, section=section)
        if not rows.empty:
            lines += ["", *tables(rows)]
    if document["failed"]:
        lines += ["", "## Failed", "", *(f"- {name}: {reason}" for name, reason in document["failed"].items())]
    return "\n".join(lines) + "\n"


def _introduction(document: Document) -> list[str]:
    versions, hardware = document["environment"]["versions"], document["environment"]["hardware"]
    option = {"quick": " ARGS=--quick", "default": "", "full": " ARGS=--full"}[document["effort"]]
    lines = [
        f"By `make speed{option}` with rotfed {document['code']}, torch {versions['torch']}, flwr {versions['flwr']} "
        f"and numpy {versions['numpy']} on {hardware['cpus']} CPU cores, torch with {document['threads']} threads; "
        "every run is in [speed.json](speed.json). Figures are medians, with the lowest and the highest of "
        f"{document['repeats']} repeats. Ratios are taken repeat by repeat, of runs that followed each other.",
        "",
        'Weights are drawn at random. "After local training" moves each tensor by 3% of its norm, half of it (squared) '
        'of rank 8 and half of it noise; "unrelated" draws other weights. "As published" is Algorithm 1 of arXiv '
        "2502.00264, written plainly (`simulations/speed/published.py`).",
    ]
    if document["effort"] == "quick":
        lines += ["", "**Models were scaled down (`--quick`): these figures only show that everything runs.**"]
    return lines


def _asked(frame: pd.DataFrame) -> Iterator[str]:
    yield table_row(["figure", "asked", "found", "met"])
    yield table_row(["---"] * 4)
    for figure in figures(frame):
        yield table_row([figure.name, figure.asked, figure.found, figure.met])


def _near(rows: pd.DataFrame) -> Iterator[str]:
    yield "## One model aligned to another"
    yield ""
    yield (
        "Seconds of `rotfed.align` and of the published procedure in turn, and the distance that they leave. Unrelated "
        "models are aligned in the paper's groups by both; after local training rotfed also looks for the heads."
    )
    yield from _table(rows, {"distance left": lambda one: f"{one['distance'].median():.4f}"})


def _rounds(rows: pd.DataFrame) -> Iterator[str]:
    yield "## The server's part of a round"
    yield ""
    yield (
        "Seconds from when the messages have been sent until `aggregate_train` has ended, without the time in which "
        "clients answer: what a strategy does while replies arrive counts. `whole` is all of `strategy.start`, without "
        "the same. The default aligns where frames differ; the last column says what it aligned."
    )
    yield from _table(
        rows,
        {
            "/ FedAvg": lambda one: _ratio(rows, one),
            "whole": lambda one: spread(list(one["whole"]), time),
            "aligned": lambda one: ", ".join(sorted(set(one["aligned"]))) or "nothing",
        },
    )
    shown = [stage for stage in (*STAGES, "other") if stage in rows]
    stages = rows.dropna(subset=shown) if shown else rows[:0]
    if not stages.empty:
        yield ""
        yield "The share of each stage, of medians:"
        yield from _table(
            stages,
            {stage: lambda one, stage=stage: f"{one[stage].median() / one['seconds'].median():.0%}" for stage in shown},
            timed=False,
        )


def _memory(rows: pd.DataFrame) -> Iterator[str]:
    yield "## Peak memory of a round"
    yield ""
    yield (
        "Above what the process held before the round, which is the model that is sent out among other things. Each in "
        "a process of its own, and each reply made when the server pulls it. *Anonymous* memory is what no file backs; "
        "it is what the limits above are for. *Resident* memory, which `ru_maxrss` reports, counts pages of mapped "
        "files, too, which the kernel takes back when others need them."
    )
    yield from _table(rows, _held(("anonymous", "resident")), timed=False)


def _small(rows: pd.DataFrame) -> Iterator[str]:
    yield "## Models of the size of the apps' own"
    yield ""
    yield (
        f"ViTs of {rows['parameters'].iloc[0]:,.0f} parameters with starts of their own: a pair by `align`, and "
        "several by `align_all` with the consensus, after `fold_norms` where the residual stream is aligned."
    )
    yield from _table(rows, {})


def _merges(rows: pd.DataFrame) -> Iterator[str]:
    billions = rows["parameters"].iloc[0] / 1e9
    yield "## Folders merged from disk to disk"
    yield ""
    yield (
        f"`rotfed merge` of two folders of {billions:.2f}B parameters in bfloat16, a file for each layer, in a process "
        "of its own with its defaults. Memory is the process's peak above that of `rotfed check` on the configuration, "
        "which imports the same and reads no weights; *anonymous* and *resident* as above."
    )
    yield from _table(rows, _held(("anonymous", "resident")))


def _scaling(rows: pd.DataFrame) -> Iterator[str]:
    yield "## How cost grows"
    yield ""
    yield (
        "Rounds as above, aligned whether frames differ or not, with encoders of a small vocabulary but for the last "
        "table. An exponent is the slope of log seconds over the log of the axis."
    )
    yield ""
    yield "![Seconds and peak memory along each axis](speed-scaling.svg)"
    yield ""
    yield table_row(["axis", *(f"exponent, {method}" for method in (FEDAVG, ALWAYS))])
    yield table_row(["---"] * 3)
    for axis, title in AXES.items():
        if not pick(rows, axis=axis).empty:
            slopes = (exponent(rows, axis, method) for method in (FEDAVG, ALWAYS))
            yield table_row([title, *("" if slope is None else number(slope) for slope in slopes)])
    for axis in AXES:
        found = pick(rows, axis=axis)
        if not found.empty:
            ordered = found.sort_values(axis, kind="stable")
            millions = {"parameters": lambda one: f"{one['parameters'].iloc[0] / 1e6:.1f}M"}
            yield from _table(ordered, {**millions, **_held(("anonymous", "resident"))})


def _held(kinds: Sequence[str]) -> dict[str, Any]:
    """Columns of memory, in megabytes and in models."""

    def cell(one: pd.DataFrame, kind: str) -> str:
        held, models = one[kind].median(), (one[kind] / one["model_bytes"]).median()
        return f"{held / 1e6:,.0f} MB, {models:.2f} models"

    return {kind: lambda one, kind=kind: cell(one, kind) for kind in kinds}


def _ratio(rows: pd.DataFrame, one: pd.DataFrame) -> str:
    """The ratio to FedAvg of the runs of one method in one case."""
    case, method = one["case"].iloc[0], one["method"].iloc[0]
    found = [] if method == FEDAVG else ratios(rows, one["section"].iloc[0], case, method, FEDAVG)
    return spread(found, number) if found else ""


def _table(rows: pd.DataFrame, columns: Mapping[str, Any], timed: bool = True) -> Iterator[str]:
    """Give the lines of a table, a row for each case and method; `columns` make a cell out of the runs of one."""
    seconds = {"seconds": lambda one: spread(list(one["seconds"]), time)} if timed else {}
    cells = {**seconds, **columns}
    yield ""
    yield table_row(["case", "method", *cells])
    yield table_row(["---"] * (2 + len(cells)))
    for (case, method), one in rows.groupby(["case", "method"], sort=False):
        yield table_row([case, method, *(cell(one) for cell in cells.values())])
