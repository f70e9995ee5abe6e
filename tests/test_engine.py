"""The apps on Flower's real simulation engine, from the bundle that `flwr run` builds."""

import json

import pytest

from simulations.engine import Engine, processes_with


@pytest.mark.engine
def test_runs_end_with_their_true_status_and_leave_nothing_behind(tmp_path):
    results_file = tmp_path / "results.json"
    config = {
        "num-server-rounds": 1,
        "local-epochs": 1,
        "min-nodes": 2,
        "start": "different",
        "results": str(results_file),
    }

    def done():
        return results_file.exists() and json.loads(results_file.read_text())["status"] != "running"

    with Engine() as engine:
        home = engine.home
        good = engine.submit(config, nodes=2)
        engine.follow(good, done, timeout=200)
        bad = engine.submit({**config, "results": "", "strategy": "fedsgd"}, nodes=2)
        completed, failed = engine.wait([good, bad], timeout=200)
        log = engine.log(bad)
        assert processes_with(f"FLWR_HOME={home / 'flwr'}")

    assert completed.status == "finished:completed"
    results = json.loads(results_file.read_text())
    assert results["status"] == "completed" and [entry["round"] for entry in results["rounds"]] == [0, 1]
    assert len(results["rounds"][1]["alignment"]["clients"]) == 2
    # `flwr run --stream` exits 0 for this one too.
    assert failed.status == "finished:failed"
    assert "run config strategy = 'fedsgd' cannot be used; it must be one of 'rotfed', 'fedavg'" in log
    assert not processes_with(f"FLWR_HOME={home / 'flwr'}")
    assert not home.exists()
