"""One model aligned to another, by rotfed and as published, and models of the size of the apps' own."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simulations.speed import subjects
from simulations.speed.measure import seconds
from simulations.speed.published import BERT, align_as_published
from simulations.speed.shapes import WARM_UP, Shape, fresh, trained

Run = dict[str, Any]
Params = Mapping[str, Tensor]

ROTFED, PUBLISHED = "rotfed", "as published"
TRAINED, UNRELATED = "after local training", "unrelated"


def near(shape: Shape, case: str, repeats: int) -> list[Run]:
    """Measure the seconds in which a model is aligned to another by both in turn, and the distance that each leaves.

    `case` is `TRAINED`, the anchor after a client's training, or `UNRELATED`, another model, which rotfed aligns in the
    groups that the paper has.
    """
    anchor = dict(fresh(shape, seed=0))
    source = dict(trained(shape, seed=0, client=0)) if case == TRAINED else dict(fresh(shape, seed=1))
    methods = _methods(shape, case)
    for run in _methods(WARM_UP, case).values():
        run(dict(fresh(WARM_UP, seed=0)), dict(fresh(WARM_UP, seed=1)))
    about = {"case": case, "shape": shape.name, "parameters": shape.parameters, "before": distance(source, anchor)}
    runs = []
    for repeat in range(repeats):
        # In turns, so that neither is always the second.
        for method in (ROTFED, PUBLISHED)[:: (-1) ** repeat]:
            started = time.perf_counter()
            moved = methods[method](source, anchor)
            left = {"seconds": time.perf_counter() - started, "distance": distance(moved, anchor)}
            runs.append({**about, "method": method, "repeat": repeat, **left})
    return runs


def _methods(shape: Shape, case: str) -> dict[str, Callable[[Params, Params], Params]]:
    """The functions that move a source to an anchor."""
    groups = None if case == TRAINED else subjects.PAPERS_GROUPS
    return {
        ROTFED: partial(subjects.align, spec=subjects.load_spec(shape.config), groups=groups),
        PUBLISHED: partial(align_as_published, names=BERT, layers=shape.layers, heads=shape.heads),
    }


def distance(one: Params, other: Params) -> float:
    """Return the Euclidean distance of two models, summed up in float64."""
    squares = [(one[name].double() - other[name].double()).square().sum() for name in other]
    return float(torch.stack(squares).sum().sqrt())


def small(shape: Shape, models: int, repeats: int) -> list[Run]:
    """Measure the alignment of a pair, and of several models with starts of their own, with the residual stream."""
    own = [dict(fresh(shape, seed)) for seed in range(models)]
    plain, stream = subjects.load_spec(shape.model()), subjects.load_spec(shape.model(), residual=True)
    folded = [subjects.fold_norms(model, stream) for model in own]
    cases = {
        "pair, residual stream": lambda: subjects.align(folded[1], folded[0], stream),
        f"{models} models, layers alone": lambda: subjects.align_all(own, plain),
        f"{models} models, residual stream": lambda: subjects.align_all(folded, stream),
    }
    subjects.align(own[1], own[0], plain)
    about = {"shape": shape.name, "parameters": shape.parameters, "method": ROTFED}
    return [
        {"case": case, **about, "repeat": repeat, "seconds": seconds(run)}
        for repeat in range(repeats)
        for case, run in cases.items()
    ]
