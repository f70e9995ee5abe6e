"""Four parties that know different classes: Fashion-MNIST split by Dirichlet(0.5), small ViTs, Flower from end to end.

The parties' models are merged by a `MultiPartyStart`: each party learns in turn on its own data, or all train one
alignment together. Beside it stand what they can do without merging: federate from the best party's model, or
fine-tune it on pooled images. Labelled data are `LABELLED` images a party: all that it was trained on, or some of them.
What was chosen on the test set says so: it bounds its method from above.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import rotfed
from rotfed.flower import MultiPartyStart, register_party, to_record, to_state_dict
from rotfed.flower.party import Descent
from rotfed.frames import AlignPair
from rotfed.learned import Loss, model_loss, refine
from simulations.grid import InProcessGrid
from simulations.merging.methods import LEARNED, data_free
from simulations.merging.parties import Images, Params, Party, accuracy, new_vit, train, train_parties

PARTIES, ALPHA = 4, 0.5
LABELLED = {None: 120, 256: 60, 64: 60}
"""Labelled images a party, None for all of its own; and its steps in each round of an alignment trained together."""

ROUNDS, LEARNING_RATE = 10, 0.12
FEDERATED_ROUNDS, FEDERATED_STEPS = 5, (60, 150)
TUNED = "fine-tuning the best party's model on pooled images (rate and length chosen on the test set)"
FINE_TUNING = [(rate, steps) for rate in (1e-4, 3e-4, 1e-3) for steps in (60, 300)]


def rows_of(images: Images, seed: int) -> list[Tensor]:
    """The rows of each party: every class is dealt out in shares drawn from Dirichlet(0.5)."""
    generator = np.random.default_rng(seed)
    dealt: list[list[Tensor]] = [[] for _ in range(PARTIES)]
    for label in range(10):
        rows = torch.as_tensor(generator.permutation(np.flatnonzero(images.labels.numpy() == label)))
        shares = generator.dirichlet([ALPHA] * PARTIES)
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for own, part in zip(dealt, rows.tensor_split(cuts.tolist()), strict=True):
            own.append(part)
    order = torch.Generator().manual_seed(seed)
    return [(rows := torch.cat(own))[torch.randperm(len(rows), generator=order)] for own in dealt]


class CountingGrid(InProcessGrid):
    """A grid that counts the bytes of the arrays that travel, in both directions."""

    bytes = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count what goes out."""
        sent = list(messages)
        self.bytes += sum(map(_bytes, sent))
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Count what comes back."""
        for reply in super().pull_messages(message_ids):
            self.bytes += 0 if reply.has_error() else _bytes(reply)
            yield reply


def run(images: Images, seed: int, kept: Path) -> Iterator[dict[str, Any]]:
    """Every result of one seed: a method, the labelled images that it had, its accuracy, and what travelled."""
    model = new_vit(0)
    spec = rotfed.load_spec(model, residual=True)
    parties = train_parties(images, seed, rows_of(images, seed), kept)
    weights = [len(party.rows) for party in parties]
    best = max(parties, key=lambda party: party.accuracy)
    common = {"part": "skewed", "seed": seed, "parties": [party.accuracy for party in parties], "rows": weights}

    def result(method: str, params: Params, labelled: int | None = None, **more: Any) -> dict[str, Any]:
        return {**common, "method": method, "labelled": labelled, "accuracy": accuracy(model, params, images), **more}

    for name, method in data_free(model).items():
        yield result(name, method.merge([party.params for party in parties], weights=weights))
    merged = best.params
    for labelled in reversed(LABELLED):
        for learned in ("own", "together"):
            grid = _grid(images, parties, spec, labelled)
            start, began = MultiPartyStart(spec, learned=learned, rounds=ROUNDS), time.process_time()
            merged = to_state_dict(start.run(grid))
            seconds = time.process_time() - began
            yield result(f"{LEARNED}, {learned}", merged, labelled, bytes=grid.bytes, cpu_seconds=seconds)
        pooled = torch.cat([party.rows[:labelled] for party in parties])
        tuned = [(_fine_tuned(images, best.params, pooled, *options), options) for options in FINE_TUNING]
        found = max((accuracy(model, params, images), options, params) for params, options in tuned)
        yield result(TUNED, found[2], labelled, chosen=found[1], bytes=len(pooled) * images.pixels[0].numel())
    # The last merge is of parties that trained together on all of their data.
    for start_name, start_params in (("the best party", best.params), ("the merged model", merged)):
        for steps in FEDERATED_STEPS:
            yield {
                **common,
                "method": f"FedAvg from {start_name}",
                "steps": steps,
                **_federated(images, parties, spec, start_params, steps),
            }


def _grid(
    images: Images, parties: Sequence[Party], spec: rotfed.SymmetrySpec, labelled: int | None, steps: int = 0
) -> CountingGrid:
    """The parties as nodes of a Flower federation, with so many labelled images each."""
    app = ClientApp()
    rows = [party.rows[:labelled] for party in parties]

    def partition(context: Context) -> int:
        number = context.node_config["partition-id"]
        assert isinstance(number, int)
        return number

    def loss(number: int) -> Loss:
        return model_loss(new_vit(0), images.counts(rows[number]))

    def own_model(context: Context) -> tuple[Params, int]:
        party = parties[partition(context)]
        return party.params, len(party.rows)

    def own_refine(context: Context) -> AlignPair:
        number = partition(context)
        return lambda source, anchor, share: (
            refine(source, anchor, spec, loss(number), images.batches(rows[number], seed=0), share=share).alignment
        )

    def own_descend(context: Context, server_round: int) -> Descent:
        number = partition(context)
        rate = LEARNING_RATE * (1 - (server_round - 1) / ROUNDS)
        batches = images.batches(rows[number], seed=server_round)
        return lambda alignment: alignment.train(loss(number), batches, rate, LABELLED[labelled], decay=False)

    @app.train()
    def train_own(message: Message, context: Context) -> Message:
        model, number = new_vit(0), partition(context)
        model.load_state_dict(to_state_dict(message.content.array_records["arrays"]))
        server_round = message.content.config_records["config"]["server-round"]
        assert isinstance(server_round, int)
        train(model, images, rows[number], seed=server_round, steps=steps)
        examples = MetricRecord({"num-examples": len(rows[number])})
        return Message(RecordDict({"arrays": to_record(model.state_dict()), "metrics": examples}), reply_to=message)

    register_party(app, own_model, spec, own_refine, own_descend)
    return CountingGrid(app, len(parties))


def _federated(
    images: Images, parties: Sequence[Party], spec: rotfed.SymmetrySpec, start: Params, steps: int
) -> dict[str, Any]:
    """Ordinary rounds from a model: the accuracy before the first and after each, and the bytes of one."""
    model = new_vit(0)
    grid = _grid(images, parties, spec, None, steps)
    rounds: list[float] = []

    def measure(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        rounds.append(accuracy(model, to_state_dict(arrays), images))
        return MetricRecord({"accuracy": rounds[-1]})

    FedAvg(fraction_evaluate=0.0).start(grid, to_record(start), num_rounds=FEDERATED_ROUNDS, evaluate_fn=measure)
    return {"rounds": rounds, "bytes": grid.bytes / FEDERATED_ROUNDS}


def _fine_tuned(images: Images, start: Params, rows: Tensor, rate: float, steps: int) -> Params:
    """A model trained on with the pooled images of all parties."""
    model = new_vit(0)
    model.load_state_dict(start)
    train(model, images, rows, seed=0, steps=steps, rate=rate)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _bytes(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
