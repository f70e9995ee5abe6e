"""One run: FedAvg of adapters and a ClientApp in this process, and what came out as plain data."""

import copy
import hashlib
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

import rotfed
from client.adapters import load_travelled
from client.app import IDENTITY
from client.fingerprint import fingerprint
from client.settings import parse_settings
from client.training import evaluate, pick_device, seed_everything
from client.training import train as train_model
from rotfed.flower import AdapterStrategy, to_record, to_state_dict
from rotfed.flower.adapters import DELTA_KEY, TRAIN
from server.grid import OrderedGrid
from server.results import environment
from simulations.bench.cells import Value
from simulations.bench.runs import DEFAULTS, KeptReplies, Places, changed
from simulations.grid import InProcessGrid
from simulations.lora.cells import ALPHA, CLIENTS, METHODS, Cell
from simulations.lora.language import language_task
from simulations.lora.tasks import Task
from simulations.lora.text import text_task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the adapter that came, or the one factor of it whose turn it is, and answer with it."""
    started = time.perf_counter()
    task, settings = task_of(context.run_config), parse_settings(_settings_of(context.run_config))
    config, partition = message.content.config_records["config"], context.node_config["partition-id"]
    number = config["server-round"]
    assert isinstance(partition, int) and isinstance(number, int)
    received = {name: to_state_dict(record) for name, record in message.content.array_records.items()}
    model = _loaded(task, received["arrays"], received.get(DELTA_KEY, {}))
    rotfed.train_factors(model, str(config.get(TRAIN, "both")))
    seed_everything(settings.seed, 1, number, partition)
    loss = train_model(
        model,
        task.encode,
        task.clients[partition],
        epochs=settings.local_epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        device=pick_device(),
        generator=torch.Generator().manual_seed(torch.initial_seed()),
    )
    metrics: dict[str, Any] = {
        "num-examples": len(task.clients[partition]),
        "train-loss": loss,
        "train-seconds": time.perf_counter() - started,
    }
    content = RecordDict({"metrics": MetricRecord(metrics), IDENTITY: ConfigRecord({"partition-id": partition})})
    content["arrays"] = to_record(get_peft_model_state_dict(model))
    return Message(content, reply_to=message)


class FirstRoundKept:
    """A ClientApp that trains a first round once for all methods with equal training; only there do they get the same.

    Beside the adapter, later rounds depend on the residual, which is not what `KeptReplies` knows a message by.
    """

    def __init__(self, kept: Path) -> None:
        self._kept = KeptReplies(app, kept)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer from what is kept in the first round, train in all others."""
        first = message.content.config_records["config"]["server-round"] == 1
        return (self._kept if first else app)(message, context)


def resolved(cell: Cell, seed: int, places: Places) -> dict[str, Value]:
    """The run config of the cell's clients, with the paths of this machine, and the code that replies are kept for."""
    return {**places.resolve(cell.config(seed)), "kept": str(places.kept), "code": _code()}


@lru_cache(maxsize=1)
def _code() -> str:
    files = [Path(__file__).with_name(f"{name}.py") for name in ("cells", "language", "runs", "tasks", "text")]
    return hashlib.sha256(b"".join([fingerprint().encode(), *(path.read_bytes() for path in files)])).hexdigest()[:12]


def task_of(config: Mapping[str, Value]) -> Task:
    """The federation that a run config describes; the last one asked for stays in memory."""
    return _task(tuple(sorted(config.items())))


@lru_cache(maxsize=1)
def _task(items: tuple[tuple[str, Value], ...]) -> Task:
    config = dict(items)
    settings = parse_settings(_settings_of(config))
    make = {"text": text_task, "language": language_task}[settings.task]
    return make(settings, CLIENTS, int(config["rank"]), ALPHA, Path(str(config["kept"])))


def _settings_of(config: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in config.items() if key in DEFAULTS}


def _loaded(task: Task, adapter: Mapping[str, Tensor], residual: Mapping[str, Tensor]) -> PeftModel:
    """The model with an adapter, and with what the rounds before left for its base weights."""
    model = copy.deepcopy(task.model)
    load_travelled(model, adapter, residual)
    return model


def run(cell: Cell, method: str, seed: int, places: Places) -> dict[str, Any]:
    """One federation from start to end: accuracy, loss and aggregation errors after each round, seconds and bytes."""
    started = time.perf_counter()
    config = resolved(cell, seed, places)
    task = task_of(config)
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    strategy = AdapterStrategy(inner, rotfed.load_adapter_spec(task.model), **METHODS[method])
    measured: list[dict[str, float]] = []

    def measure(number: int, arrays: ArrayRecord) -> None:
        if number:
            model = _loaded(task, to_state_dict(arrays), strategy.base_delta)
            found = evaluate(model, task.encode, task.held_out, batch_size=64, device=pick_device())
            measured.append({"accuracy": found.accuracy, "loss": found.loss})

    seed_everything(seed, 0)
    clients: Any = FirstRoundKept(places.kept / "replies")
    grid = OrderedGrid(InProcessGrid(clients, CLIENTS, config))
    start = get_peft_model_state_dict(task.model)
    result = strategy.start(grid, to_record(start), num_rounds=cell.rounds, evaluate_fn=measure)
    reports = [report.to_dict() for report in strategy.reports]
    if missing := [report["round"] for report in reports if len(report["ranks"]) < CLIENTS]:
        raise RuntimeError(f"{cell.name}, {method}, seed {seed}: replies are missing in rounds {missing}; see the log")
    return {
        "cell": cell.name,
        "task": cell.task,
        "split": cell.split,
        "rank": cell.rank,
        "method": method,
        "seed": seed,
        "config": changed(cell.config(seed)),
        "examples": [len(examples) for examples in task.clients],
        "held_out": len(task.held_out),
        "code": _code(),
        **environment(),
        **{key: [entry[key] for entry in measured] for key in ("accuracy", "loss")},
        **{key: [report[key] for report in reports] for key in ("error", "mean_error")},
        "aggregation_seconds": [report["seconds"] for report in reports],
        # A mean over clients, which train one after another.
        "training_seconds": [
            CLIENTS * float(str(metrics["train-seconds"])) for metrics in result.train_metrics_clientapp.values()
        ],
        "adapter_bytes": sum(tensor.nbytes for tensor in start.values()),
        "residual_bytes": sum(tensor.nbytes for tensor in strategy.base_delta.values()),
        "seconds": time.perf_counter() - started,
    }
