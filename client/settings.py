"""The run config as one validated value.

Flower's run config is a flat mapping of int, float, bool and str (no lists, so lists are comma-separated
strings). It is read and checked once, at the edge of both apps; everything behind it takes plain arguments.
Defaults live in one place, `[tool.flwr.app.config]` in pyproject.toml.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flwr.app.user_config import UserConfigValue

from rotfed.adapters import METHODS
from rotfed.errors import RotfedError

STRATEGIES = ("fedavg", "fedprox", "fedadam")
ANCHORS = ("global", "medoid", "consensus", "generalized_procrustes")
PARTITIONS = ("iid", "dirichlet", "natural")
STARTS = ("same", "different", "parties")
ROUND_STARTS = ("auto", "plain", "aligned")
LEARNED = ("none", "own", "together")
AGGREGATIONS = ("", *METHODS)
AS_TRAINED = ("rotation", "mean")
"""The aggregations that leave each client's adapter the update that it is."""
BUILT_IN_MODELS = {"image": "vit-small", "text": "bert-small", "language": "llama-small"}
"""One a task."""


class ConfigError(RotfedError):
    """A run config value that cannot be used; the message names the key, the value and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """One run, as configured; field `num_server_rounds` is the key `num-server-rounds`, and so on.

    Attributes
    ----------
    num_server_rounds, strategy, proximal_mu, server_learning_rate
        Rounds, and Flower's strategy that aggregates them; `proximal_mu` is FedProx's, `server_learning_rate` is
        FedAdam's.
    align, anchor, groups, layers, reflections, strength, min_gain, next_round_from, residual
        Whether replies are aligned first, and how (see `rotfed.flower.AlignedStrategy`): `groups` and `layers` are None
        for all of them; `residual` rotates the residual stream, too.
    lora_rank, lora_alpha, lora_targets, aggregation
        With a rank above 0 the pretrained model stays as it is, and what is trained and sent is a LoRA adapter of that
        rank, with what the model has beside its backbone (a classifier's head) and what the checkpoint lacks, as a
        whole. `lora_targets` names the modules that are adapted, None for all linear layers; `aggregation` is one of
        `rotfed.aggregate_adapters`' methods, empty for rotfed's choice. Of the keys above, `align`, `reflections`
        and `strength` hold for adapters, too; those that are rotated go to what was sent out, whatever `anchor` says.
    task, dataset, train_examples, input_column, label_column, model, max_length
        What is learned: classes of images ("image") or texts ("text"), or what token comes next in a text
        ("language"). `dataset` is "digits", "fashion-mnist", a folder with a subfolder of .txt files for each class,
        of texts, or author, for language, or a Hugging Face name, whose columns are found by their types unless named
        (an author's column as `label_column`); `train_examples` is how many of its training examples are dealt out, 0
        for all; `model` is built in ("vit-small", "bert-small", "llama-small"), a transformers folder or a hub id;
        `max_length` counts tokens (bytes for the built-in models): a class is told by the first so many of a text,
        language is read in windows of so many.
    partition, alpha, start, learned
        How data is split over clients: evenly ("iid"), by shares of each class or author drawn with `alpha`
        ("dirichlet"), or by whole authors ("natural", for language only). And whether clients start from one
        initialisation ("same"), train the first round from their own ("different"), or first train models of their
        own, which are merged into the start ("parties"): by the weights alone ("none"), each on its party's own data
        in turn ("own"), or each on the data of all parties ("together").
    local_epochs, batch_size, learning_rate
        Local training.
    fraction_train, fraction_evaluate, min_nodes
        Sampling, as in Flower's FedAvg; a round waits for `min_nodes` nodes.
    evaluate_clients
        Measure every client's own model on the held-out split as well (costs one evaluation a client).
    seed
        Decides initialisation, splits, partitions, sampling and batch order.
    results, save_model
        Absolute paths of the results file and of the folder for the final model; empty for neither.
    """

    num_server_rounds: int
    strategy: str
    proximal_mu: float
    server_learning_rate: float
    align: bool
    anchor: str
    groups: tuple[str, ...] | None
    layers: tuple[int, ...] | None
    reflections: bool
    strength: float
    min_gain: float
    next_round_from: str
    residual: bool
    lora_rank: int
    lora_alpha: int
    lora_targets: tuple[str, ...] | None
    aggregation: str
    task: str
    dataset: str
    train_examples: int
    input_column: str
    label_column: str
    model: str
    max_length: int
    partition: str
    alpha: float
    start: str
    learned: str
    local_epochs: int
    batch_size: int
    learning_rate: float
    fraction_train: float
    fraction_evaluate: float
    min_nodes: int
    evaluate_clients: bool
    seed: int
    results: str
    save_model: str

    @property
    def built_in(self) -> bool:
        """Whether the model is built by the app rather than read from a folder or the hub."""
        return self.model in BUILT_IN_MODELS.values()

    @property
    def reads_text(self) -> bool:
        """Whether inputs are texts rather than images."""
        return self.task != "image"

    @property
    def own_start(self) -> bool:
        """Whether each client begins the first round from its own initialisation."""
        return self.start == "different"


def parse_settings(run_config: Mapping[str, UserConfigValue]) -> Settings:
    """Read and check a run config.

    Raises
    ------
    ConfigError
        One sentence that names the key, the value found and the values allowed.
    """
    parsers = _parsers()
    unknown = sorted(set(run_config) - set(parsers))
    if unknown:
        raise ConfigError(f"run config key {unknown[0]!r} is unknown; the known keys are {', '.join(sorted(parsers))}")
    missing = sorted(set(parsers) - set(run_config))
    if missing:
        raise ConfigError(f"run config key {missing[0]!r} is missing; add it to [tool.flwr.app.config]")
    values = {_field(key): parse(key, run_config[key]) for key, parse in parsers.items()}
    settings = Settings(**values)
    _check_together(settings, run_config)
    return settings


def _check_together(settings: Settings, run_config: Mapping[str, UserConfigValue]) -> None:
    if settings.lora_rank and settings.built_in:
        raise ConfigError(
            f"run config lora-rank = {settings.lora_rank} adapts a pretrained model, and model = {settings.model!r} is "
            "a new one; use a transformers folder or a hub id, or lora-rank = 0"
        )
    expected = BUILT_IN_MODELS[settings.task]
    if settings.built_in and settings.model != expected:
        raise ConfigError(
            f"run config model = {settings.model!r} does not fit task = {settings.task!r}; "
            f"use {expected!r}, a transformers folder or a hub id"
        )
    if settings.reads_text and settings.dataset in ("digits", "fashion-mnist"):
        raise ConfigError(
            f"run config dataset = {settings.dataset!r} holds images, which task = {settings.task!r} cannot read; "
            "give a folder with one subfolder of .txt files per class or author, or a Hugging Face data set name"
        )
    if settings.task == "language" and settings.max_length < 2:
        raise ConfigError("run config max-length = 1 leaves no token to predict; task = 'language' needs at least 2")
    if settings.partition == "natural" and settings.task != "language":
        raise ConfigError(
            f"run config partition = 'natural' gives clients whole authors, and task = {settings.task!r} knows classes "
            "only; use 'dirichlet', with a small alpha for clients that know few classes"
        )
    if settings.start != "same" and not settings.built_in:
        raise ConfigError(
            f"run config start = {settings.start!r} needs a built-in model to initialise, and model = "
            f"{settings.model!r} is pretrained; use start = 'same'"
        )
    if settings.lora_rank and settings.align and settings.evaluate_clients and settings.aggregation not in AS_TRAINED:
        raise ConfigError(
            f"run config evaluate-clients = true needs each client's own adapter, and aggregation = "
            f"{settings.aggregation!r} puts one in place of all; use 'rotation' or 'mean', or evaluate-clients = false"
        )
    if settings.start == "parties" and settings.task == "text":
        raise ConfigError(
            "run config start = 'parties' needs a model whose residual stream can rotate, and 'bert-small' is none; "
            "use task = 'image' or 'language', or start = 'different'"
        )
    # The keys of which a value itself tells that it is set; whether anchor, min-gain or lora-alpha are, it does not.
    rank = settings.lora_rank
    for key, idle, cause in (
        ("aggregation", not settings.align, "align = false"),
        ("aggregation", not rank, "lora-rank = 0"),
        ("lora-targets", not rank, "lora-rank = 0"),
        ("groups", rank, f"lora-rank = {rank}"),
        ("layers", rank, f"lora-rank = {rank}"),
        ("residual", rank, f"lora-rank = {rank}"),
        ("next-round-from", rank, f"lora-rank = {rank}"),
    ):
        if idle and run_config[key] not in ("", False, "auto"):
            raise ConfigError(f"run config {key} = {run_config[key]!r} has no effect at {cause}; leave it out")


# ----------------------------------------------------------------------------------------------------------
# One parser a key

_Parser = Callable[[str, UserConfigValue], Any]


def _parsers() -> dict[str, _Parser]:
    parsers: dict[str, _Parser] = {
        "num-server-rounds": _integer(1),
        "strategy": _choice(STRATEGIES),
        "proximal-mu": _number(0.0),
        "server-learning-rate": _number(0.0, open_low=True),
        "align": _boolean,
        "anchor": _choice(ANCHORS),
        "groups": _names,
        "layers": _layers,
        "reflections": _boolean,
        "strength": _number(0.0, 1.0, open_low=True),
        "min-gain": _number(0.0),
        "next-round-from": _choice(ROUND_STARTS),
        "residual": _boolean,
        "lora-rank": _integer(0),
        "lora-alpha": _integer(1),
        "lora-targets": _names,
        "aggregation": _choice(AGGREGATIONS),
        "task": _choice(tuple(BUILT_IN_MODELS)),
        "dataset": _text,
        "train-examples": _integer(0),
        "input-column": _optional_text,
        "label-column": _optional_text,
        "model": _text,
        "max-length": _integer(1),
        "partition": _choice(PARTITIONS),
        "alpha": _number(0.0, open_low=True),
        "start": _choice(STARTS),
        "learned": _choice(LEARNED),
        "local-epochs": _integer(1),
        "batch-size": _integer(1),
        "learning-rate": _number(0.0, open_low=True),
        "fraction-train": _number(0.0, 1.0, open_low=True),
        "fraction-evaluate": _number(0.0, 1.0),
        "min-nodes": _integer(1),
        "evaluate-clients": _boolean,
        "seed": _integer(0),
        "results": _absolute_path,
        "save-model": _absolute_path,
    }
    assert {_field(key) for key in parsers} == {field.name for field in fields(Settings)}
    return parsers


def _field(key: str) -> str:
    return key.replace("-", "_")


def _refuse(key: str, value: UserConfigValue, allowed: str) -> ConfigError:
    return ConfigError(f"run config {key} = {value!r} cannot be used; it must be {allowed}")


def _choice(allowed: tuple[str, ...]) -> _Parser:
    def parse(key: str, value: UserConfigValue) -> str:
        if value not in allowed:
            raise _refuse(key, value, "one of " + ", ".join(map(repr, allowed)))
        return str(value)

    return parse


def _integer(low: int) -> _Parser:
    def parse(key: str, value: UserConfigValue) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _refuse(key, value, f"a whole number of at least {low}")
        return value

    return parse


def _number(low: float, high: float = float("inf"), *, open_low: bool = False) -> _Parser:
    interval = f"above {low:g}" if open_low else f"at least {low:g}"
    if high != float("inf"):
        interval += f" and at most {high:g}"

    def parse(key: str, value: UserConfigValue) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Written so that NaN, which compares false with everything, is refused.
        if not number or not (low <= float(value) <= high) or (open_low and float(value) == low):
            raise _refuse(key, value, f"a number {interval}")
        if float(value) == float("inf"):
            raise _refuse(key, value, f"a finite number {interval}")
        return float(value)

    return parse


def _boolean(key: str, value: UserConfigValue) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "true or false")
    return value


def _text(key: str, value: UserConfigValue) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _refuse(key, value, "a string that is not empty")
    return value.strip()


def _optional_text(key: str, value: UserConfigValue) -> str:
    if not isinstance(value, str):
        raise _refuse(key, value, "a string, or empty")
    return value.strip()


def _absolute_path(key: str, value: UserConfigValue) -> str:
    # The ServerApp's working directory is the SuperLink's, so a relative path would land anywhere.
    if not isinstance(value, str) or (value and not Path(value).is_absolute()):
        raise _refuse(key, value, "an absolute path, or empty for none")
    return value


def _names(key: str, value: UserConfigValue) -> tuple[str, ...] | None:
    if not isinstance(value, str):
        raise _refuse(key, value, 'names separated by commas such as "qk,vo", or empty for all')
    return tuple(part.strip() for part in value.split(",") if part.strip()) or None


def _layers(key: str, value: UserConfigValue) -> tuple[int, ...] | None:
    allowed = 'layer numbers such as "0,1" or "0-3", or empty for all'
    if not isinstance(value, str):
        raise _refuse(key, value, allowed)
    layers: set[int] = set()
    for part in filter(None, (part.strip() for part in value.split(","))):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
            raise _refuse(key, value, allowed)
        layers.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(layers)) or None
