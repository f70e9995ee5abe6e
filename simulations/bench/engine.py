"""One configuration both ways: in this process, and on Flower's simulation engine."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict

import client.app
import server.app
from simulations.bench.cells import Config
from simulations.bench.runs import DEFAULTS
from simulations.engine import Engine
from simulations.grid import InProcessGrid

CONFIG: Config = {
    "dataset": "digits",
    "partition": "dirichlet",
    "alpha": 0.5,
    "num-server-rounds": 2,
    "local-epochs": 5,
    "min-nodes": 3,
    "seed": 10,
}
TIMEOUT = 300.0


def compare() -> dict[str, Any]:
    """The accuracies by round of both, before the first and after each."""
    nodes = int(CONFIG["min-nodes"])
    with Engine() as engine:
        path = engine.home / "compared.json"
        run_id = engine.submit({**CONFIG, "results": str(path)}, nodes=nodes)
        engine.wait([run_id], timeout=TIMEOUT)
        on_engine = _accuracies(path)
    # The engine's workers have one core each, and sums depend on the number of threads.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        config = {**DEFAULTS, **CONFIG, "results": str(path)}
        server.app.main(InProcessGrid(client.app.app, nodes, config), Context(0, 1, {}, RecordDict(), config))
        in_process = _accuracies(path)
    return {"config": dict(CONFIG), "engine": on_engine, "in_process": in_process}


def _accuracies(path: Path) -> list[float]:
    return [entry["accuracy"] for entry in json.loads(path.read_text())["rounds"]]
