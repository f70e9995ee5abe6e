"""Everything that is measured: sections, and the pieces of each, every one a process of its own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from simulations.speed import merging, pairs
from simulations.speed.replies import StoredRound
from simulations.speed.rounds import alone, compare
from simulations.speed.shapes import (
    BERT_MEDIUM,
    BERT_MINI,
    MINILM,
    ROBERTA,
    ROBERTA_LARGE,
    TINY_LLAMA,
    VIT,
    Shape,
)
from simulations.speed.subjects import ALWAYS, FEDAVG, ROTFEDAVG

Run = dict[str, Any]

SECTIONS = ("near", "round", "memory", "small", "merge", "scaling")
ROUNDS = {"8 clients, RoBERTa-base": (ROBERTA, 8), "4 clients, MiniLM": (MINILM, 4)}
MEMORY = {
    "8 clients, RoBERTa-base": (ROBERTA, 8),
    "16 clients, MiniLM": (MINILM, 16),
    "64 clients, MiniLM": (MINILM, 64),
}
MODELS = 4
MERGE_LIMIT = 1800.0


@dataclass(frozen=True)
class Effort:
    """How much is measured: so many repeats of what is timed, at so many points of each axis."""

    name: str
    repeats: int
    axes: Mapping[str, tuple[int, ...]]
    parameters: tuple[Shape, ...]
    merges: tuple[str, ...]
    scaled: bool = False


QUICK = Effort(
    "quick",
    repeats=2,
    axes={"layers": (2, 4), "clients": (2, 4), "width": (64, 128), "heads": (2, 4)},
    parameters=(BERT_MINI, MINILM),
    merges=(merging.SAME_START, merging.UNRELATED),
    scaled=True,
)
DEFAULT = Effort(
    "default",
    repeats=3,
    axes={"layers": (2, 6, 24), "clients": (2, 8, 64), "width": (256, 768, 1536), "heads": (4, 16)},
    parameters=(BERT_MINI, MINILM, ROBERTA),
    merges=(merging.SAME_START,),
)
FULL = Effort(
    "full",
    repeats=5,
    axes={
        "layers": (2, 4, 8, 16, 24),
        "clients": (2, 4, 8, 16, 32, 64),
        "width": (256, 512, 768, 1024, 1536),
        "heads": (4, 6, 8, 12, 16),
    },
    parameters=(BERT_MINI, MINILM, BERT_MEDIUM, ROBERTA, ROBERTA_LARGE),
    merges=(merging.SAME_START, merging.UNRELATED),
)


@dataclass(frozen=True)
class Piece:
    """Work for one process. `do` and `prepare` can be pickled; what is prepared is made by another process before."""

    section: str
    name: str
    do: Callable[[], list[Run]]
    prepare: Callable[[], object] | None = None
    labels: Mapping[str, Any] | None = None


def pieces(effort: Effort, folder: Path) -> list[Piece]:
    """Return what an effort measures; replies and models are written under `folder`."""
    return [*_near(effort), *_rounds(effort, folder), *_small(effort), *_merges(effort, folder)]


def _near(effort: Effort) -> Iterator[Piece]:
    for case in (pairs.TRAINED, pairs.UNRELATED):
        yield Piece("near", case, partial(pairs.near, _sized(ROBERTA, effort), case, effort.repeats))


def _rounds(effort: Effort, folder: Path) -> Iterator[Piece]:
    for case, (shape, clients) in ROUNDS.items():
        sized = _sized(shape, effort)
        place = _place(folder, sized)
        do = partial(compare, sized, clients, (FEDAVG, ROTFEDAVG, ALWAYS), effort.repeats, place)
        yield Piece("round", case, do, partial(StoredRound.prepare, place, sized, clients), {"case": case})
    for case, (shape, clients) in MEMORY.items():
        yield from _alone("memory", case, _sized(shape, effort), clients, 0, folder, (FEDAVG, ROTFEDAVG, ALWAYS))
    for axis, case, shape, clients in _points(effort):
        for piece in _alone("scaling", case, shape, clients, effort.repeats, folder, (FEDAVG, ALWAYS)):
            yield replace(piece, labels={**(piece.labels or {}), "axis": axis})


def _alone(
    section: str, case: str, shape: Shape, clients: int, repeats: int, folder: Path, methods: tuple[str, ...]
) -> Iterator[Piece]:
    place = _place(folder, shape)
    for method in methods:
        do = partial(alone, shape, clients, method, repeats, place)
        prepare = partial(StoredRound.prepare, place, shape, clients)
        yield Piece(section, f"{case}, {method}", do, prepare, {"case": case})


def _points(effort: Effort) -> Iterator[tuple[str, str, Shape, int]]:
    """Give an axis, the name of a point on it, and the model and number of clients there."""
    base = Shape("", "bert", layers=4, width=512, heads=8, d_ff=2048)
    small = replace(base, layers=6, width=384, heads=12, d_ff=1536)
    if effort.scaled:
        base = small = replace(base, layers=2, width=128, heads=4, d_ff=256)
    for axis, values in effort.axes.items():
        for value in values:
            name, shape, clients = f"{value} {axis}" if axis != "width" else f"width {value}", base, 4
            if axis == "layers":
                shape = replace(base, layers=value)
            elif axis == "clients":
                shape, clients = small, value
            elif axis == "width":
                shape = replace(base, layers=2, width=value, heads=value // min(64, value // 2), d_ff=4 * value)
            else:
                # 768 is a multiple of all of them.
                shape = replace(base, width=base.width if effort.scaled else 768, heads=value)
            yield axis, name, replace(shape, name="encoder"), clients
    for shape in effort.parameters:
        yield "parameters", shape.name, _sized(shape, effort), 2


def _small(effort: Effort) -> Iterator[Piece]:
    yield Piece("small", VIT.name, partial(pairs.small, VIT, MODELS, effort.repeats))


def _merges(effort: Effort, folder: Path) -> Iterator[Piece]:
    shape = _sized(TINY_LLAMA, effort)
    place = folder / "merge"
    for case in effort.merges:
        yield Piece("merge", case, partial(merging.merge, shape, case, 1, place, MERGE_LIMIT))


def _sized(shape: Shape, effort: Effort) -> Shape:
    """The shape, or one as small as a quick look takes."""
    if not effort.scaled:
        return shape
    size: dict[str, Any] = {
        "width": 128,
        "d_ff": 256,
        "heads": 4,
        "vocabulary": 1000,
        "kv_heads": min(2, shape.kv_heads),
    }
    return replace(shape, name=f"{shape.name}, scaled down", layers=min(2, shape.layers), **size)


def _place(folder: Path, shape: Shape) -> Path:
    """The folder of the replies of clients with models of this shape."""
    sizes = (shape.layers, shape.width, shape.heads, shape.d_ff, shape.vocabulary)
    return folder / f"{shape.family}-{'-'.join(map(str, sizes))}"
