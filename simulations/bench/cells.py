"""What is compared: a cell is one regime of federated training, under which methods are run with the same seeds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Value = bool | int | float | str
Config = Mapping[str, Value]

PLAIN, ALIGNED = "FedAvg", "RotFedAvg"

METHODS: Mapping[str, Config] = {
    PLAIN: {"align": False},
    ALIGNED: {},
    # Runs all of the alignment and applies none of it: has to equal plain averaging to the bit.
    "control": {"min-gain": 1e9},
    # Every round aligned, and the next one started from that.
    "always": {"min-gain": 0.0, "next-round-from": "aligned"},
    "global": {"anchor": "global", "min-gain": 0.0, "next-round-from": "aligned"},
    "FedProx": {"align": False, "strategy": "fedprox"},
    "FedProx, aligned": {"strategy": "fedprox"},
    "FedAdam": {"align": False, "strategy": "fedadam"},
    "FedAdam, aligned": {"strategy": "fedadam"},
    "merged start": {"start": "parties", "learned": "own"},
}
"""Name -> what it sets in the run config; names as in the report."""

PAIRS = {ALIGNED: PLAIN, "always": PLAIN, "global": PLAIN, "FedProx, aligned": "FedProx", "FedAdam, aligned": "FedAdam"}
"""Aligned -> what it is compared with."""

SPLITS: Mapping[str, Config] = {
    "IID": {"partition": "iid"},
    "Dirichlet 1.0": {"partition": "dirichlet", "alpha": 1.0},
    "Dirichlet 0.5": {"partition": "dirichlet", "alpha": 0.5},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "by author": {"partition": "natural"},
}

# 6,000 images: enough for a model of a client's own to learn, few enough for a round of five epochs in ten seconds.
VISION: Config = {"task": "image", "dataset": "fashion-mnist", "train-examples": 6000, "batch-size": 64}
TEXT: Config = {
    "task": "text",
    "dataset": "bbc",
    "model": "minilm",
    "train-examples": 600,
    "batch-size": 16,
    "max-length": 32,
    "learning-rate": 1e-4,
}
LANGUAGE: Config = {
    "task": "language",
    "dataset": "plays",
    "model": "llama-small",
    "train-examples": 300,
    "batch-size": 32,
    "max-length": 64,
}


@dataclass(frozen=True)
class Cell:
    """One regime: `config` over the app's defaults, so many `clients`, and the `methods` that are run in it.

    `family` is what the report groups cells by. `seeds` says how many there are, from `FIRST_SEED` on: those below were
    looked at when the method's defaults were chosen, so none of them judges it.
    """

    family: str
    split: str
    epochs: int
    rounds: int
    methods: tuple[str, ...] = (PLAIN, ALIGNED)
    clients: int = 4
    participation: float = 1.0
    start: str = "same"
    seeds: int = 5
    base: Config = field(default_factory=lambda: VISION)
    variant: str = ""

    def __post_init__(self) -> None:
        assert PLAIN in self.methods, "everything is compared with plain averaging"

    @property
    def name(self) -> str:
        """What it is called in files and tables."""
        parts = [self.family, self.split, f"{self.epochs} epoch{'s' * (self.epochs > 1)}", f"{self.clients} clients"]
        if self.participation < 1:
            parts.append(f"{self.participation:g} of them a round")
        if self.start != "same":
            parts.append(f"{self.start} start")
        return ", ".join([*parts, self.variant] if self.variant else parts)

    @property
    def config(self) -> dict[str, Value]:
        """Its run config, over the app's defaults."""
        return {
            **self.base,
            **SPLITS[self.split],
            "local-epochs": self.epochs,
            "num-server-rounds": self.rounds,
            "min-nodes": self.clients,
            "fraction-train": self.participation,
            "start": self.start,
        }

    @property
    def cost(self) -> float:
        """About how long the runs of one seed take, in epochs of the small ViT."""
        epoch = {"image": 1.0, "text": 12.0, "language": 5.0}[str(self.base["task"])]
        # The first round is trained once for all methods.
        return epoch * self.epochs * self.participation * (1 + (self.rounds - 1) * len(self.methods))


FIRST_SEED = 10

# Rounds that each number of local epochs gets.
_ROUNDS = {1: 5, 5: 3, 20: 2}
_SPLITS = ("IID", "Dirichlet 1.0", "Dirichlet 0.5", "Dirichlet 0.1")
_ADAPTIVE = ("FedProx", "FedProx, aligned", "FedAdam", "FedAdam, aligned")


def _vision(split: str, epochs: int, *more: str, clients: int = 4, participation: float = 1.0, seeds: int = 5) -> Cell:
    return Cell("vision", split, epochs, _ROUNDS[epochs], (PLAIN, ALIGNED, *more), clients, participation, seeds=seeds)


def _sized(width: int, heads: int) -> Cell:
    base = {**VISION, "model": f"vit-{width}-{heads}"}
    return Cell("size", "Dirichlet 0.5", 10, 1, base=base, variant=f"width {width}, {heads} heads")


FULL: tuple[Cell, ...] = (
    _vision("Dirichlet 0.5", 5, "control", "always", "global", *_ADAPTIVE),
    # Long training on few and uneven data is where the gain is expected, so that it is shown over more seeds.
    _vision("Dirichlet 0.5", 20, "always", seeds=10),
    replace(_vision("Dirichlet 0.1", 20, seeds=10), rounds=1),
    _vision("IID", 5),
    _vision("Dirichlet 0.1", 5),
    *(_vision(split, 1) for split in ("IID", "Dirichlet 0.5", "Dirichlet 0.1")),
    Cell("text", "Dirichlet 0.1", 1, 2, base=TEXT),
    *(_sized(width, heads) for width, heads in ((64, 2), (64, 4), (64, 8), (128, 4))),
    *(_vision(split, 20, clients=16, participation=0.25) for split in ("Dirichlet 0.5", "Dirichlet 0.1")),
    Cell("own starts", "Dirichlet 0.5", 5, 3, (PLAIN, ALIGNED, "merged start"), start="different", seeds=3),
    Cell("language", "by author", 5, 2, base=LANGUAGE),
    replace(_vision("IID", 20), rounds=1),
    *(_vision(split, 5, clients=16) for split in ("IID", "Dirichlet 0.1")),
    *(_vision("Dirichlet 1.0", epochs) for epochs in (1, 5, 20)),
    Cell("text", "IID", 1, 2, base=TEXT),
    _vision("Dirichlet 0.5", 5, clients=16),
    _vision("IID", 20, clients=16, participation=0.25),
    *(_vision(split, 1, clients=16) for split in _SPLITS),
    *(_vision(split, 20, clients=16) for split in _SPLITS),
    *(_vision(split, 5, clients=16, participation=0.25) for split in _SPLITS),
    *(_sized(width, heads) for width, heads in ((128, 2), (128, 8), (256, 8))),
    *(Cell("text", split, 5, 3, base=TEXT) for split in ("IID", "Dirichlet 0.5", "Dirichlet 0.1")),
    *(Cell("language", "by author", epochs, 3, base=LANGUAGE, clients=16) for epochs in (1, 5)),
)
"""All of it, what decides most first; `docs/benchmark.md` says which were run."""

SMALL: tuple[Cell, ...] = tuple(
    Cell("vision", split, epochs, rounds, seeds=3)
    for split, epochs, rounds in (("Dirichlet 0.5", 5, 2), ("Dirichlet 0.1", 20, 1), ("IID", 5, 2), ("IID", 1, 3))
)
"""A look at each kind of regime, in half an hour."""

ANATOMY = {_vision(split, epochs).name: 5 for split, epochs in (("IID", 5), ("Dirichlet 0.5", 20))}
"""The cells whose first rounds are taken apart, and with how many seeds."""
