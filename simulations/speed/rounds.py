"""One round of a strategy: how long the server works, in which stages, and what it holds."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from simulations.speed import subjects
from simulations.speed.measure import Peak, staged
from simulations.speed.replies import LazyGrid, StoredRound
from simulations.speed.shapes import WARM_UP, Shape

Run = dict[str, Any]


def compare(shape: Shape, clients: int, methods: Sequence[str], repeats: int, folder: Path) -> list[Run]:
    """Measure the server's seconds in a round by each method in turn, on the same replies, so many times."""
    stored, spec = StoredRound.prepare(folder, shape, clients), subjects.load_spec(shape.config)
    start = stored.start()
    _warm_up(methods, folder.with_name("warm-up"))
    runs = []
    for repeat in range(repeats):
        # In turns from another one each time: no method always comes when the machine is warm, or another's is.
        for number in range(len(methods)):
            method = methods[(repeat + number) % len(methods)]
            found = one_round(subjects.strategy(method, spec), stored, start, clients)
            runs.append({"method": method, "repeat": repeat, **_about(shape, clients, stored), **found})
    return runs


def _warm_up(methods: Sequence[str], folder: Path) -> None:
    """Run a small round by each method: nobody's first call is measured."""
    stored, spec = StoredRound.prepare(folder, WARM_UP, 2), subjects.load_spec(WARM_UP.config)
    for method in methods:
        one_round(subjects.strategy(method, spec), stored, stored.start(), 2)


def alone(shape: Shape, clients: int, method: str, repeats: int, folder: Path) -> list[Run]:
    """Measure peak memory in the first round that this process runs, and seconds in so many after it.

    Of no repeats the first round's seconds are given, which the watch over memory makes a little longer.
    """
    stored, spec = StoredRound(folder), subjects.load_spec(shape.config)
    start = stored.start()
    # Where memory counts, no reply stays in it.
    spilled = repeats == 0
    with Peak() as peak:
        first = one_round(subjects.strategy(method, spec, spilled), stored, start, clients)
    memory = {"resident": peak.resident, "anonymous": peak.anonymous}
    found = [one_round(subjects.strategy(method, spec), stored, start, clients) for _ in range(repeats)] or [first]
    about = {"method": method, **_about(shape, clients, stored), **memory}
    return [{**about, "repeat": repeat, **entry} for repeat, entry in enumerate(found)]


def one_round(strategy: Strategy, stored: StoredRound, start: ArrayRecord, clients: int) -> Run:
    """Run a round and return the server's seconds.

    `seconds` begin when the messages have been sent and end with `aggregate_train`, so that what a strategy does while
    replies arrive counts; `whole` is all of `start`. Both are without the time in which the grid makes replies. Stages
    are those of `seconds`, and `other` is what they leave of it.
    """
    sent: list[_Moment] = []
    ended: list[_Moment] = []
    aggregate: Callable[..., Any] = strategy.aggregate_train
    watched = subjects.STAGES if subjects.aligns(strategy) else {}
    with staged(watched) as stages:

        def now() -> _Moment:
            return _Moment(time.perf_counter() - grid.seconds, dict(stages))

        def aggregate_and_note(*arguments: Any, **keywords: Any) -> Any:
            result = aggregate(*arguments, **keywords)
            ended.append(now())
            return result

        grid = LazyGrid(stored, clients, on_sent=lambda: sent.append(now()))
        # `start` calls it, and may wrap the grid before, so that a strategy can work while replies arrive.
        strategy.aggregate_train = aggregate_and_note  # type: ignore[method-assign]
        random.seed(0)
        began = now()
        result = strategy.start(grid, initial_arrays=start, num_rounds=1)
        whole = now().time - began.time
    if not result.arrays:
        raise RuntimeError(f"{type(strategy).__name__}: expected a model after the round, found none")
    seconds = ended[0].time - sent[0].time
    spent = {stage: ended[0].stages.get(stage, 0.0) - sent[0].stages.get(stage, 0.0) for stage in watched}
    if spent:
        spent["other"] = seconds - sum(spent.values())
    return {"seconds": seconds, "whole": whole, "aligned": ", ".join(subjects.groups_aligned(strategy)), **spent}


class _Moment(NamedTuple):
    """A time without what the grid took of it, and the stages' seconds until then."""

    time: float
    stages: Mapping[str, float]


def _about(shape: Shape, clients: int, stored: StoredRound) -> Run:
    sizes = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "parameters": shape.parameters}
    return {"shape": shape.name, "clients": clients, **sizes, "model_bytes": stored.model_bytes}
