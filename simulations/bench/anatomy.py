"""What clients trained in their first round, averaged in many ways: which groups, layers and anchors bring the gain.

All ways start from the same models, which are those of the runs, so they differ in nothing but the average.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import rotfed
from client.data import load_corpus
from client.fingerprint import KEY, fingerprint
from client.models import build_encoder, build_examples, build_model
from client.settings import parse_settings
from client.training import Evaluation, evaluate, pick_device, seed_everything
from rotfed.barrier import barrier_of, line, losses_along
from rotfed.flower import to_record, to_state_dict
from rotfed.mergers import weighted_mean
from rotfed.tensors import squared_distance
from server.grid import OrderedGrid
from simulations.bench.cells import PLAIN, Cell
from simulations.bench.runs import Places, config_of, grid_of

Params = Mapping[str, Tensor]

QK, VO, FFN = ("qk", "qk_scale"), ("vo", "vo_scale"), ("d_ff",)
ATTENTION = ("heads", *QK, *VO)

WAYS: Mapping[str, Mapping[str, Any]] = {
    "queries and keys": {"groups": QK},
    "values and outputs": {"groups": VO},
    "attention": {"groups": ATTENTION},
    "FFN": {"groups": FFN},
    "attention and FFN": {},
    "first half of the layers": {"layers": (0, 1)},
    "second half of the layers": {"layers": (2, 3)},
    "rotations without scales": {"groups": ("heads", "qk", "vo", "d_ff")},
    "rotation, then scale (sequential)": {"max_sweeps": 1},
    "to the medoid": {"anchor": "medoid"},
    "to the model sent out": {"anchor": "global"},
    "with the residual stream": {"residual": True},
}
"""Name -> options of alignment, beside the anchor and the residual stream; without an anchor to the consensus."""

BARRIER_POINTS = 7


@dataclass(frozen=True, eq=False)
class FirstRound:
    """A first round: the model sent out, the clients' models, their shares, and how good parameters are."""

    model: Any
    start: Params
    models: Sequence[Params]
    shares: Sequence[float]
    measure: Callable[[Params], Evaluation]


def first_round(cell: Cell, seed: int, places: Places) -> FirstRound:
    """The first round of the cell's runs, as the server of the apps starts it."""
    config = places.resolve(config_of(cell, PLAIN, seed))
    settings = parse_settings(config)
    seed_everything(seed, 0)
    corpus = load_corpus(settings)
    model = build_model(settings, corpus)
    encode = build_encoder(settings, corpus, model.config)
    held_out = build_examples(settings, corpus, corpus.test)
    body = build_model(settings, corpus)

    def measure(params: Params) -> Evaluation:
        body.load_state_dict(params)
        return evaluate(body, encode, held_out, batch_size=256, device=pick_device())

    grid = OrderedGrid(grid_of(cell, places, config))
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=cell.clients, min_available_nodes=cell.clients)
    asked = strategy.configure_train(1, to_record(model.state_dict()), ConfigRecord({KEY: fingerprint()}), grid)
    replies = list(grid.send_and_receive(list(asked)))
    counts = [float(str(reply.content.metric_records["metrics"]["num-examples"])) for reply in replies]
    models = [to_state_dict(reply.content.array_records["arrays"]) for reply in replies]
    shares = [count / sum(counts) for count in counts]
    return FirstRound(model, dict(model.state_dict()), models, shares, measure)


def dissect(cell: Cell, seed: int, places: Places) -> list[dict[str, Any]]:
    """Every way of averaging one first round: accuracy, loss, what is left of the spread, and seconds."""
    found = first_round(cell, seed, places)
    singles = [found.measure(model).accuracy for model in found.models]
    common = {"cell": cell.name, "seed": seed, "clients": singles}
    spread = _spread(found.models, found.shares)
    results = [{**common, "way": "plain", **_measured(found, found.models), "spread": 1.0, "seconds": 0.0}]
    for way, options in WAYS.items():
        chosen = dict(options)
        residual = chosen.pop("residual", False)
        spec = rotfed.load_spec(found.model, residual=residual)
        fold = (lambda params, spec=spec: rotfed.fold_norms(params, spec)) if residual else (lambda params: params)
        began = time.process_time()
        models = [fold(model) for model in found.models]
        anchor = chosen.pop("anchor", "consensus")
        how = rotfed.AlignOptions(**chosen)
        aligned = rotfed.align_all(models, spec, anchor, found.shares, reference=fold(found.start), options=how)
        seconds = time.process_time() - began
        moved = [alignment.params for alignment in aligned]
        # Folded models have a spread of their own.
        before = _spread(models, found.shares) if residual else spread
        result = {**common, "way": way, **_measured(found, moved), "spread": _spread(moved, found.shares) / before}
        if way == "attention and FFN":
            result["layers"] = _by_layer(found, moved)
            result["barriers"] = {
                "plain": _barrier(found, found.models),
                "aligned": _barrier(found, moved),
            }
        results.append({**result, "seconds": seconds})
    return results


def _measured(found: FirstRound, models: Sequence[Params]) -> dict[str, float]:
    measured = found.measure(weighted_mean(models, found.shares))
    return {"accuracy": measured.accuracy, "loss": measured.loss}


def _spread(models: Sequence[Params], shares: Sequence[float], within: str = "") -> float:
    """The weighted mean squared distance of models from their mean, over the parameters whose names hold `within`."""
    mean = weighted_mean(models, shares)
    names = [name for name in mean if within in name]
    return sum(share * squared_distance(model, mean, names) for model, share in zip(models, shares, strict=True))


def _by_layer(found: FirstRound, aligned: Sequence[Params]) -> dict[str, list[float]]:
    """What is left of the spread in each layer, of the queries and keys and of the values and outputs."""
    kinds = {"queries and keys": ("q_proj", "k_proj"), "values and outputs": ("v_proj", "o_proj")}
    return {
        kind: [
            sum(_spread(aligned, found.shares, f"layers.{layer}.attention.{name}") for name in names)
            / sum(_spread(found.models, found.shares, f"layers.{layer}.attention.{name}") for name in names)
            for layer in range(4)
        ]
        for kind, names in kinds.items()
    }


def _barrier(found: FirstRound, models: Sequence[Params]) -> dict[str, Any]:
    """The loss along the line between the first two clients' models, in nats."""
    places = line(BARRIER_POINTS)
    losses = losses_along(lambda params: found.measure(params).loss, models[0], models[1], places)
    return {"losses": losses, "barrier": barrier_of(places, losses)}
