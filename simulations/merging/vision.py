"""Two, four and eight parties whose data are alike: small ViTs on 15,000 images of Fashion-MNIST each."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rotfed
from rotfed.learned import model_loss, refine
from simulations.merging.methods import DATA_FREE, LEARNED, data_free
from simulations.merging.parties import Images, Params, Party, accuracy, new_vit, train_parties

ROWS = 15_000
Merger = Callable[[Sequence[Params]], dict[str, Tensor]]


def rows_of(images: Images, seed: int, parties: int) -> list[Tensor]:
    """15,000 images each: four parties share none, the next four share out the same images otherwise."""
    found: list[Tensor] = []
    for deal in range(-(-parties // 4)):
        order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(seed + 1000 * deal))
        found += order.split(ROWS)
    return found[:parties]


def run(images: Images, seed: int, kept: Path) -> Iterator[dict[str, Any]]:
    """Every result of one seed: a method, the parties that it merged, and how accurate the merged model is."""
    model = new_vit(0)
    parties = train_parties(images, seed, rows_of(images, seed, 8), kept)
    for members in [*itertools.combinations(range(4), 2), tuple(range(4)), tuple(range(8))]:
        chosen = [parties[member] for member in members]
        for method, merger in _methods(images, model, chosen):
            yield _result(images, model, seed, members, chosen, method, merger)


def _methods(images: Images, model: Any, parties: Sequence[Party]) -> Iterator[tuple[str, Merger]]:
    for name, method in data_free(model).items():
        yield name, method.merge
    # Of two models, all orders are one; of eight, the consensus takes longest.
    orders = {2: ["progressive"], 4: ["progressive", "tree", "consensus"], 8: ["progressive", "tree"]}[len(parties)]
    for order in orders:
        if len(parties) > 2:
            yield f"{DATA_FREE}, {order}", partial(data_free(model)[DATA_FREE].merge, anchor=order)
        if order != "consensus":
            yield f"{LEARNED}, {order}" if len(parties) > 2 else LEARNED, _learned(images, model, parties, order)


def _learned(images: Images, model: Any, parties: Sequence[Party], order: str) -> Merger:
    """Merge in turn, each source moved by the first party in it, on that party's own data."""
    spec = rotfed.load_spec(model, residual=True)
    loss = model_loss(model)
    teachers = iter(_teachers(len(parties), order == "tree"))

    def align_pair(source: Any, anchor: Any, share: float) -> rotfed.Alignment:
        rows = parties[next(teachers)].rows
        return refine(source, anchor, spec, loss, images.batches(rows, seed=0), share=share).alignment

    return lambda models: rotfed.merge(models, spec, anchor=order, align_pair=align_pair)


def _teachers(count: int, tree: bool) -> list[int]:
    """The first member of the source in each step of a merge, in the order of `rotfed.align_all`."""
    if not tree:
        return list(range(1, count))
    return [first for width in _doubling(count) for first in range(width, count, 2 * width)]


def _doubling(count: int) -> Iterator[int]:
    width = 1
    while width < count:
        yield width
        width *= 2


def _result(
    images: Images,
    model: Any,
    seed: int,
    members: Sequence[int],
    parties: Sequence[Party],
    method: str,
    merger: Merger,
) -> dict[str, Any]:
    start = time.process_time()
    merged = merger([party.params for party in parties])
    seconds = time.process_time() - start
    found = accuracy(model, merged, images)
    mean = sum(party.accuracy for party in parties) / len(parties)
    return {
        "part": "vision",
        "seed": seed,
        "members": list(members),
        "method": method,
        "parties": [party.accuracy for party in parties],
        "accuracy": found,
        "share": found / mean,
        "cpu_seconds": seconds,
        # Of one party's local training, the mean over the steps of the merge.
        "cost": seconds / (len(parties) - 1) / (sum(party.seconds for party in parties) / len(parties)),
    }
