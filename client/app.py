"""The Flower ClientApp: train and evaluate the run's transformer on this node's partition."""

import time
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from transformers import PreTrainedModel

from client import fingerprint
from client.data import Examples, load_corpus, local_split, partition_rows
from client.models import Encoder, build_encoder, build_model
from client.settings import ConfigError, Settings, parse_settings
from client.training import evaluate as evaluate_model
from client.training import pick_device, seed_everything
from client.training import train as train_model
from rotfed.flower import to_record, to_state_dict

app = ClientApp()

Metrics = dict[str, int | float | list[int] | list[float]]

IDENTITY = "identity"
"""Key of the reply's ConfigRecord that holds the partition id: node ids differ from run to run."""


@dataclass(frozen=True)
class Node:
    """What a message is answered with: this node's model (with the received weights), data and settings."""

    settings: Settings
    partition_id: int
    server_round: int
    model: PreTrainedModel
    encode: Encoder
    train: Examples
    validation: Examples


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model (or, at a different start, this node's own) and return its weights."""
    started = time.perf_counter()
    node = _prepare(message, context)
    settings = node.settings
    seed_everything(settings.seed, 1, node.server_round, node.partition_id)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    loss = train_model(
        node.model,
        node.encode,
        node.train,
        epochs=settings.local_epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        device=pick_device(),
        generator=generator,
    )
    metrics: Metrics = {
        "num-examples": len(node.train),
        "train-loss": loss,
        "train-seconds": time.perf_counter() - started,
    }
    return _reply(message, node, metrics, to_record(node.model.state_dict()))


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


def _prepare(message: Message, context: Context) -> Node:
    config = message.content["config"]
    assert isinstance(config, ConfigRecord)
    fingerprint.check_fingerprint(config.get(fingerprint.KEY))
    settings = parse_settings(context.run_config)
    partition_id, num_partitions = _partition_of(context)
    server_round = config["server-round"]
    assert isinstance(server_round, int)

    corpus = load_corpus(settings)
    train_rows, validation_rows = local_split(partition_rows(settings, num_partitions, partition_id))
    # Also seeds the node's own initialisation, the same one whenever this partition starts.
    seed_everything(settings.seed, 2, partition_id)
    model = build_model(settings, corpus, pretrained=False)
    own = settings.own_start and server_round == 1 and message.metadata.message_type.startswith("train")
    if not own:
        arrays = message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        model.load_state_dict(to_state_dict(arrays))
    return Node(
        settings,
        partition_id,
        server_round,
        model,
        build_encoder(settings, corpus, model.config),
        corpus.examples(train_rows),
        corpus.examples(validation_rows),
    )


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
