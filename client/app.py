"""The Flower ClientApp: train and evaluate the run's transformer, or an adapter, on this node's partition."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor
from torch.nn import Module

from client import adapters, fingerprint
from client.data import Examples, load_corpus, local_split, partition_rows
from client.models import Encoder, build_encoder, build_examples, quiet
from client.settings import ConfigError, Settings, parse_settings
from client.training import evaluate as evaluate_model
from client.training import pick_device, seed_everything
from client.training import train as train_model
from rotfed import SymmetrySpec, load_spec
from rotfed.flower import register_party, to_record, to_state_dict
from rotfed.flower.adapters import DELTA_KEY
from rotfed.flower.party import Descent
from rotfed.frames import AlignPair
from rotfed.learned import Loss, model_loss, refine

app = ClientApp()

Metrics = dict[str, int | float | list[int] | list[float]]

IDENTITY = "identity"
"""Key of the reply's ConfigRecord that holds the partition id: node ids differ from run to run."""

STEPS_TOGETHER = 10
"""Steps of a node in each round of an alignment that all parties train."""

PARTY = "party"
"""Key of the node's state under which its own model is kept, for a start from several parties' models."""


@dataclass(frozen=True)
class Node:
    """What a message is answered with: this node's model (with the received weights), data and settings."""

    settings: Settings
    partition_id: int
    server_round: int
    model: adapters.Model
    encode: Encoder
    train: Examples
    validation: Examples


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model (or, at a different start, this node's own) and return its weights."""
    started = time.perf_counter()
    node = _prepare(message, context)
    # FedProx sends it along.
    proximal_mu = message.content.config_records["config"].get("proximal-mu", 0.0)
    assert isinstance(proximal_mu, float)
    loss = _train(node, proximal_mu)
    metrics: Metrics = {
        "num-examples": len(node.train),
        "train-loss": loss,
        "train-seconds": time.perf_counter() - started,
    }
    return _reply(message, node, metrics, to_record(adapters.travelling(node.model)))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the received model on this node's own validation examples."""
    node = _prepare(message, context)
    measured = evaluate_model(
        node.model, node.encode, node.validation, batch_size=node.settings.batch_size, device=pick_device()
    )
    metrics: Metrics = {
        "num-examples": measured.examples,
        "loss": measured.loss,
        "accuracy": measured.accuracy,
    }
    return _reply(message, node, metrics)


def party_model(context: Context) -> tuple[Mapping[str, Tensor], int]:
    """This node's own model, trained once from its own initialisation, and the number of its examples."""
    if PARTY not in context.state:
        node = _initialise(context, server_round=0)
        _train(node)
        context.state[PARTY] = to_record(node.model.state_dict())
        context.state[f"{PARTY}.metrics"] = MetricRecord({"num-examples": len(node.train)})
    examples = context.state.metric_records[f"{PARTY}.metrics"]["num-examples"]
    assert isinstance(examples, int)
    return to_state_dict(context.state.array_records[PARTY]), examples


def party_spec(context: Context) -> SymmetrySpec:
    """The spec of the run's model, with its residual stream, as the server loads it."""
    return load_spec(_initialise(context, server_round=0).model, residual=True)


def party_refine(context: Context) -> AlignPair:
    """What aligns a model to another on this node's data."""
    node = _initialise(context, server_round=0)
    spec, loss = load_spec(node.model, residual=True), _party_loss(node)
    return lambda source, anchor, share: refine(source, anchor, spec, loss, _batches(node), share=share).alignment


def party_descend(context: Context, server_round: int) -> Descent:
    """What takes this node's steps in one round of an alignment that all parties train."""
    node = _initialise(context, server_round)
    loss = _party_loss(node)
    return lambda alignment: alignment.train(loss, _batches(node), max_steps=STEPS_TOGETHER, decay=False)


def check_and_sign(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod for the messages of a multi-party start: check the server's code, and sign the reply with the partition."""
    fingerprint.check_fingerprint(message.content.config_records["config"].get(fingerprint.KEY))
    reply = call_next(message, context)
    reply.content[IDENTITY] = ConfigRecord({"partition-id": _partition_of(context)[0]})
    return reply


register_party(app, party_model, party_spec, party_refine, party_descend, mods=[check_and_sign])


def _prepare(message: Message, context: Context) -> Node:
    config = message.content["config"]
    assert isinstance(config, ConfigRecord)
    fingerprint.check_fingerprint(config.get(fingerprint.KEY))
    server_round = config["server-round"]
    assert isinstance(server_round, int)
    node = _initialise(context, server_round)
    own = node.settings.own_start and server_round == 1 and message.metadata.message_type.startswith("train")
    if not own:
        adapters.check_base(config, node.model, node.settings)
        sent = {name: to_state_dict(record) for name, record in message.content.array_records.items()}
        adapters.load_travelled(node.model, sent["arrays"], sent.get(DELTA_KEY, {}))
    return node


@quiet()
def _initialise(context: Context, server_round: int) -> Node:
    """This node with its own initialisation, the same one whenever its partition starts."""
    settings = parse_settings(context.run_config)
    partition_id, num_partitions = _partition_of(context)
    corpus = load_corpus(settings)
    rows = partition_rows(settings, num_partitions, partition_id)
    examples, validation = local_split(build_examples(settings, corpus, rows))
    seed_everything(settings.seed, 2, partition_id)
    model = adapters.build_trained(settings, corpus, pretrained=False)
    return Node(
        settings,
        partition_id,
        server_round,
        model,
        build_encoder(settings, corpus, model.config),
        examples,
        validation,
    )


def _train(node: Node, proximal_mu: float = 0.0) -> float:
    """Train a node's model on its own data."""
    settings = node.settings
    return train_model(
        node.model,
        node.encode,
        node.train,
        epochs=settings.local_epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        device=pick_device(),
        generator=_seeded(node),
        proximal_mu=proximal_mu,
    )


def _seeded(node: Node) -> torch.Generator:
    """Seed all generators, and return one for the order of batches, by the node's round and partition."""
    seed_everything(node.settings.seed, 1, node.server_round, node.partition_id)
    return torch.Generator().manual_seed(torch.initial_seed())


def _party_loss(node: Node) -> Loss:
    """The loss of parameters on a node's data; classes count alike however many examples each has."""
    device = pick_device()
    model: Module = node.model
    counts = node.train.class_counts(node.model.config.num_labels or 0)
    loss = model_loss(model.to(device).eval(), counts)
    return lambda params, batch: loss({name: tensor.to(device) for name, tensor in params.items()}, batch)


def _batches(node: Node) -> Iterator[dict[str, Tensor]]:
    """Batches of a node's own examples, in another order whenever all have been used."""
    generator, device = _seeded(node), pick_device()
    while True:
        for rows in torch.randperm(len(node.train), generator=generator).split(node.settings.batch_size):
            batch = node.train.take(rows)
            encoded = {**node.encode(batch.inputs), "labels": batch.labels}
            yield {name: value.to(device) for name, value in encoded.items()}


def _partition_of(context: Context) -> tuple[int, int]:
    found = [context.node_config.get(key) for key in ("partition-id", "num-partitions")]
    match found:
        case [int(partition_id), int(num_partitions)] if 0 <= partition_id < num_partitions:
            return partition_id, num_partitions
    raise ConfigError(
        f"node config partition-id, num-partitions = {found}: expected whole numbers with 0 <= partition-id "
        '< num-partitions; start the SuperNode with --node-config "partition-id=0 num-partitions=3"'
    )


def _reply(message: Message, node: Node, metrics: Metrics, arrays: ArrayRecord | None = None) -> Message:
    content = RecordDict(
        {"metrics": MetricRecord(metrics), IDENTITY: ConfigRecord({"partition-id": node.partition_id})}
    )
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content=content, reply_to=message)
