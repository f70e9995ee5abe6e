"""The Flower ServerApp: average the clients' transformers or adapters, aligned or not, and measure every round."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor

import rotfed
from client import adapters
from client.data import Corpus, load_corpus
from client.fingerprint import KEY as FINGERPRINT_KEY
from client.fingerprint import fingerprint
from client.models import build_encoder, build_examples, build_tokenizer
from client.settings import Settings, parse_settings
from client.training import Evaluation, evaluate, pick_device, seed_everything
from rotfed.align import AlignOptions
from rotfed.flower import AdapterStrategy, AlignedStrategy, MultiPartyStart, to_record, to_state_dict
from rotfed.flower.replies import Reader, Received
from server.grid import OrderedGrid, partition
from server.results import Recorder, environment, make_empty, whole_or_nothing

app = ServerApp()

TrainMetrics = Callable[[list[RecordDict], str], MetricRecord]
Measure = Callable[[ArrayRecord, Mapping[str, Tensor]], Evaluation]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation; anything wrong with its config is raised before a message is sent."""
    settings = parse_settings(context.run_config)
    if settings.save_model:
        make_empty(settings.save_model)
    recorder = Recorder(
        Path(settings.results) if settings.results else None,
        {
            "config": dict(context.run_config),
            "seed": settings.seed,
            "code": fingerprint(),
            **environment(),
        },
    )
    try:
        _run(grid, settings, recorder)
    except BaseException as error:
        recorder.finish("failed", f"{type(error).__name__}: {error}")
        raise
    recorder.finish("completed")


def _run(grid: Grid, settings: Settings, recorder: Recorder) -> None:
    # Python's generator too: Flower's sampling of nodes draws from it.
    seed_everything(settings.seed, 0)
    corpus = load_corpus(settings)
    model = adapters.build_trained(settings, corpus)
    base = adapters.base_config(model)
    measure = _measurement(model, settings, corpus)
    recorder.update(
        model={"parameters": sum(p.numel() for p in model.parameters())},
        data={"train": len(corpus.train), "test": len(corpus.test), "classes": list(corpus.class_names)},
    )

    last_train_metrics = MetricRecord()

    def train_metrics(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        nonlocal last_train_metrics
        last_train_metrics = aggregate_metricrecords(replies, weighted_by)
        if settings.evaluate_clients:
            accuracies = [measure(_arrays(reply), {}).accuracy for reply in replies]
            last_train_metrics["client-accuracies"] = accuracies
        return last_train_metrics

    strategy = build_strategy(settings, model, train_metrics)

    def evaluate_round(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        measured = measure(arrays, _base_delta(strategy))
        entry: dict[str, Any] = {"round": server_round, "loss": measured.loss, "accuracy": measured.accuracy}
        if server_round > 0:
            entry["train"] = dict(last_train_metrics)
            if isinstance(strategy, AlignedStrategy | AdapterStrategy) and strategy.reports:
                entry["alignment"] = strategy.reports[-1].to_dict()
        recorder.add_round(entry)
        return MetricRecord({"loss": measured.loss, "accuracy": measured.accuracy})

    def config() -> ConfigRecord:
        return ConfigRecord({FINGERPRINT_KEY: fingerprint(), **base})

    arrays = to_record(adapters.travelling(model))
    if settings.start == "parties":
        learned = None if settings.learned == "none" else settings.learned
        spec = rotfed.load_spec(model, residual=True)
        start = MultiPartyStart(spec, learned=learned, min_available_nodes=settings.min_nodes)
        arrays = start.run(OrderedGrid(grid), config=config())
        assert start.report is not None
        recorder.update(start=start.report.to_dict())
    result = strategy.start(
        grid=OrderedGrid(grid, streams=isinstance(strategy, AlignedByPartition)),
        initial_arrays=arrays,
        num_rounds=settings.num_server_rounds,
        train_config=config(),
        evaluate_config=config(),
        evaluate_fn=evaluate_round,
    )
    if settings.save_model:
        left = _base_delta(strategy)
        adapters.load_travelled(model, to_state_dict(result.arrays), left)
        with whole_or_nothing(settings.save_model) as folder:
            kind = adapters.save(model, folder, left)
            if settings.reads_text:
                build_tokenizer(settings).save_pretrained(folder)
        log(INFO, "Saved %s, of %s, in %s", kind, settings.model, settings.save_model)


class AlignedByPartition(AlignedStrategy):
    """An aligned strategy that sums in the order of partitions, in whatever order clients finish."""

    def receive(self, server_round: int, replies: Iterable[Message], read: Reader) -> Received:
        """Sort the replies, as `OrderedGrid` does for other strategies."""
        received = super().receive(server_round, replies, read)
        return replace(received, usable=tuple(sorted(received.usable, key=lambda entry: partition(entry.reply))))


def build_strategy(settings: Settings, model: adapters.Model, train_metrics: TrainMetrics) -> Strategy:
    """The strategy configured, around it alignment by the spec of `model`; SpecError when there is none that fits."""
    fedavg: dict[str, Any] = {
        "fraction_train": settings.fraction_train,
        "fraction_evaluate": settings.fraction_evaluate,
        "min_train_nodes": max(1, round(settings.fraction_train * settings.min_nodes)),
        "min_evaluate_nodes": max(1, round(settings.fraction_evaluate * settings.min_nodes)),
        "min_available_nodes": settings.min_nodes,
        "train_metrics_aggr_fn": train_metrics,
    }
    inner: Strategy
    if settings.strategy == "fedprox":
        inner = FedProx(**fedavg, proximal_mu=settings.proximal_mu)
    elif settings.strategy == "fedadam":
        inner = FedAdam(**fedavg, eta=settings.server_learning_rate)
    else:
        inner = FedAvg(**fedavg)
    if not settings.align:
        return inner
    if settings.lora_rank:
        return AdapterStrategy(
            inner,
            rotfed.load_adapter_spec(model),
            aggregation=settings.aggregation or None,
            reflections=settings.reflections,
            strength=settings.strength,
        )
    spec = rotfed.load_spec(model, residual=settings.residual)
    options = AlignOptions(settings.groups, settings.layers, settings.reflections, settings.strength)
    return AlignedByPartition(inner, spec, settings.anchor, options, settings.min_gain, settings.next_round_from)


def _measurement(model: adapters.Model, settings: Settings, corpus: Corpus) -> Measure:
    """What was aggregated, and left for the base weights -> how well it does on the held-out split, in `model`."""
    encode = build_encoder(settings, corpus, model.config)
    held_out = build_examples(settings, corpus, corpus.test)
    device = pick_device()

    def measure(arrays: ArrayRecord, left: Mapping[str, Tensor]) -> Evaluation:
        # The base weights stay as they were loaded, since what every round leaves for them is the sum so far.
        body = copy.deepcopy(model) if left else model
        # What a strategy sees of a reply may lack integer buffers, which no training changes.
        adapters.load_travelled(body, {**adapters.travelling(body), **to_state_dict(arrays)}, left)
        return evaluate(body, encode, held_out, batch_size=settings.batch_size, device=device)

    return measure


def _arrays(reply: RecordDict) -> ArrayRecord:
    return next(iter(reply.array_records.values()))


def _base_delta(strategy: Strategy) -> dict[str, Tensor]:
    return strategy.base_delta if isinstance(strategy, AdapterStrategy) else {}
