"""The apps on Flower's real simulation engine, from the bundle that `flwr run` builds."""

import json

import pytest

from simulations.engine import Engine, engine_processes


@pytest.mark.engine
def test_runs_end_with_their_true_status_and_leave_nothing_behind(tmp_path):
    results_file = tmp_path / "results.json"
    config = {
        "num-server-rounds": 1,
        "local-epochs": 1,
        "min-nodes": 2,
        "start": "parties",
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
        assert engine_processes(home)

    assert completed.status == "finished:completed"
    results = json.loads(results_file.read_text())
    assert results["status"] == "completed" and [entry["round"] for entry in results["rounds"]] == [0, 1]
    assert len(results["start"]["parties"]) == 2 and not results["start"]["skipped"]
    assert len(results["rounds"][1]["alignment"]["clients"]) == 2
    # `flwr run --stream` exits 0 for this one too.
    assert failed.status == "finished:failed"
    assert "run config strategy = 'fedsgd' cannot be used; it must be one of 'fedavg', 'fedprox', 'fedadam'" in log
    assert not engine_processes(home)
    assert not home.exists()


@pytest.mark.engine
def test_leaving_the_block_in_the_middle_of_a_run_leaves_nothing_behind():
    def ray_works():
        return any((home / "ray").rglob("raylet.out")) and len(engine_processes(home)) > 6

    with pytest.raises(KeyboardInterrupt), Engine() as engine:
        home = engine.home
        run_id = engine.submit({"min-nodes": 2, "local-epochs": 1000}, nodes=2)
        engine.follow(run_id, ray_works, timeout=200)
        raise KeyboardInterrupt
    assert not engine_processes(home)
    assert not home.exists()
