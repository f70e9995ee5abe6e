"""Every call into rotfed that is measured, so that a change of its interface is one edit here."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor

import rotfed
from rotfed.flower import RotFedAvg
from rotfed.flower import to_record as rotfed_to_record
from rotfed.flower.strategy import REPLIES_IN_MEMORY
from rotfed.frames_differ import MIN_GAIN

Params = Mapping[str, Tensor]

PAPERS_GROUPS = ("qk", "qk_scale", "vo", "vo_scale", "d_ff")
"""What the published procedure aligns: rotations, scales and feed-forward units, but no heads."""

FEDAVG, ROTFEDAVG, ALWAYS = "FedAvg", "RotFedAvg", "RotFedAvg, always aligned"

# The functions in which a round spends its time, by stage. A function that another one calls counts with the caller's
# stage unless it is named here itself.
STAGES = {
    "decode": (
        "rotfed.flower.replies:_taken_out",
        "rotfed.flower.strategy:match_params",
        "rotfed.flower.spill:Spill.keep",
    ),
    "test and align": ("rotfed.flower.strategy:align_where_frames_differ", "rotfed.flower.strategy:to_home"),
    "average": (
        "flwr.serverapp.strategy:FedAvg.aggregate_train",
        "rotfed.flower.strategy:_mean_like_flower",
        "rotfed.flower.strategy:buffers_of",
    ),
    "encode": ("rotfed.flower.strategy:to_record",),
}


def load_spec(model: Any, residual: bool = False) -> Any:
    """Return the spec of a model."""
    return rotfed.load_spec(model, residual=residual)


def align(source: Params, anchor: Params, spec: Any, groups: Iterable[str] | None = None) -> Params:
    """Return the source's parameters in the anchor's frame."""
    return rotfed.align(source, anchor, spec, rotfed.AlignOptions(groups=groups)).params


def align_all(models: Sequence[Params], spec: Any) -> list[Params]:
    """Return the parameters of several models in their consensus frame."""
    return [alignment.params for alignment in rotfed.align_all(models, spec, "consensus")]


def fold_norms(params: Params, spec: Any) -> Params:
    """Return the parameters in the form in which the residual stream can be rotated."""
    return rotfed.fold_norms(params, spec)


def to_record(params: Params) -> ArrayRecord:
    """Pack parameters as a server does."""
    return rotfed_to_record(params)


def strategy(method: str, spec: Any, spilled: bool = False) -> Strategy:
    """Return a new strategy by the name that tables give it; none evaluates. `spilled` keeps all replies in a file."""
    if method == FEDAVG:
        return FedAvg(fraction_evaluate=0.0)
    least, in_memory = 0.0 if method == ALWAYS else MIN_GAIN, 0 if spilled else REPLIES_IN_MEMORY
    return RotFedAvg(spec, min_gain=least, replies_in_memory=in_memory, fraction_evaluate=0.0)


def aligns(strategy: Strategy) -> bool:
    """Return whether a strategy is rotfed's."""
    return isinstance(strategy, RotFedAvg)


def groups_aligned(strategy: Strategy) -> list[str]:
    """Return the groups in which the last round moved a model; none of a strategy that does not align."""
    reports: Sequence[Any] = strategy.reports if isinstance(strategy, RotFedAvg) else ()
    return list(reports[-1].groups) if reports else []


def merge_command(models: Sequence[Path], out: Path) -> list[str]:
    """Return the command line that merges model directories."""
    return [*_COMMAND, "merge", *map(str, models), "-o", str(out)]


def idle_command(model: Path) -> list[str]:
    """Return a command line that loads what `merge` loads, and reads no weights."""
    return [*_COMMAND, "check", str(model / "config.json")]


# Not the script beside the interpreter, which may belong to another checkout than the one that is measured.
_COMMAND = [sys.executable, "-c", "from rotfed.cli import app; app()"]
