"""What is compared: a cell is a task, a split and a rank, under which all methods are run with the same seeds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simulations.bench.cells import SPLITS, Config, Value
from simulations.bench.runs import DEFAULTS

MEAN = "mean of factors"

METHODS: Mapping[str, Mapping[str, Any]] = {
    MEAN: {"aggregation": "mean"},
    "rotation": {"aggregation": "rotation"},
    "rotation, by A": {"aggregation": "rotation", "over": "A"},
    "FedRot-LoRA": {"aggregation": "rotation", "over": "alternate", "reflections": False, "strength": 0.5},
    "optimal": {"aggregation": "optimal"},
    "exact": {"aggregation": "exact"},
    "stack": {"aggregation": "stack"},
    "FFA-LoRA (A frozen)": {"train": "B"},
    "RoLoRA (in turns)": {"train": "alternate"},
}
"""Name, as in the tables -> keywords of AdapterStrategy; all are compared with the first."""

ROTATIONS = tuple(name for name, options in METHODS.items() if options.get("aggregation") == "rotation")

CLIENTS, ROUNDS, ALPHA = 10, 3, 16

# Local training is rough on purpose: between gentle clients methods differ less. The rate is the best of 0.003, 0.01
# and 0.03 for the mean of factors on seed 0 (rank 4, Dirichlet 0.5; roles), whose aggregation error is 0.4 to 0.6 there
# after the first round; at 0.003 it is about half of that, and the task is learned more slowly.
TASKS: Mapping[str, Config] = {
    "text": {
        "task": "text",
        "dataset": "bbc",
        "model": "minilm",
        "train-examples": 800,
        "max-length": 32,
        "batch-size": 16,
        "local-epochs": 1,
        "learning-rate": 1e-2,
    },
    "language": {
        "task": "language",
        "dataset": "plays",
        "model": "llama-small",
        "train-examples": 1600,
        "max-length": 64,
        "batch-size": 16,
        "local-epochs": 2,
        "learning-rate": 1e-2,
    },
}

FIRST_SEED = 10
"""Those below were looked at when rates and steps were chosen, so none of them judges a method."""


@dataclass(frozen=True)
class Cell:
    """One task, split and rank, with the methods that are run in it and how many seeds, from `FIRST_SEED` on.

    `variant` says what `changes` of the task's config make of it.
    """

    task: str
    split: str
    rank: int
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: int = 5
    rounds: int = ROUNDS
    variant: str = ""
    changes: Config = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in files and tables."""
        name = f"{self.task}, {self.split}, rank {self.rank}"
        return f"{name}, {self.variant}" if self.variant else name

    def config(self, seed: int) -> dict[str, Value]:
        """What its clients are told, as the apps' run config with the adapter's rank beside it."""
        return {
            **DEFAULTS,
            **TASKS[self.task],
            **SPLITS[self.split],
            **self.changes,
            "seed": seed,
            "rank": self.rank,
        }


CELLS: tuple[Cell, ...] = (
    Cell("text", "Dirichlet 0.5", 4),
    Cell("language", "by author", 4, (MEAN, "rotation", "optimal", "exact")),
    Cell("text", "Dirichlet 0.1", 4),
    Cell("text", "IID", 4),
    *(Cell("text", split, 16) for split in ("Dirichlet 0.5", "Dirichlet 0.1", "IID")),
    Cell("text", "Dirichlet 0.5", 4, variant="gentle", changes={"learning-rate": 3e-3}),
    Cell(
        "text",
        "Dirichlet 0.5",
        4,
        (MEAN, "FedRot-LoRA", "optimal", "exact", "FFA-LoRA (A frozen)"),
        rounds=10,
        variant="long",
    ),
)
"""All of it, what decides most first."""
