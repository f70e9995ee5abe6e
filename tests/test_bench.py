"""The benchmark: what it keeps may not change a result, and what it says has to follow from the figures."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_1samp

import client.app
from server.grid import RoundFailedError
from server.results import write_json
from simulations.bench import runs
from simulations.bench.__main__ import main
from simulations.bench.anatomy import WAYS, dissect
from simulations.bench.cells import ANATOMY, FIRST_SEED, FULL, METHODS, PAIRS, SMALL, Cell
from simulations.bench.report import MARKS, page, readme_table, with_table
from simulations.bench.runs import Places, run
from simulations.bench.schedule import path_of
from simulations.bench.statistics import paired

DIGITS = {"dataset": "digits", "train-examples": 300, "batch-size": 32}


def cell(**changes: Any) -> Cell:
    small = Cell("vision", "Dirichlet 0.5", 2, 2, ("FedAvg", "RotFedAvg", "control"), 4, base=DIGITS)
    return replace(small, **changes)


def places(folder: Path) -> Places:
    return Places({}, folder)


def test_names_tell_cells_apart_and_every_method_is_known() -> None:
    for cells in (FULL, SMALL):
        assert len({cell.name for cell in cells}) == len(cells)
        assert {method for cell in cells for method in cell.methods} <= set(METHODS)
    assert {*PAIRS, *PAIRS.values()} <= set(METHODS) and set(ANATOMY) <= {cell.name for cell in FULL}


def test_what_is_kept_is_not_trained_again_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    train = client.app.train_model

    def count(*arguments: Any, **keywords: Any) -> float:
        trained.append(1)
        return train(*arguments, **keywords)

    monkeypatch.setattr(client.app, "train_model", count)
    sampled = cell(participation=0.5, clients=8)
    first = run(sampled, "FedAvg", 0, places(tmp_path))
    assert len(trained) == 8  # half of eight clients, in two rounds
    again = run(sampled, "FedAvg", 0, places(tmp_path))
    assert len(trained) == 8
    # Rounds run on from the plain average: nothing new to train.
    aligned = run(sampled, "RotFedAvg", 0, places(tmp_path))
    control = run(sampled, "control", 0, places(tmp_path))
    assert len(trained) == 8
    assert first["accuracy"] == again["accuracy"] == control["accuracy"] and first["loss"] == control["loss"]
    run(replace(sampled, rounds=1), "always", 0, places(tmp_path))
    assert len(trained) == 8
    assert len(aligned["gain"]) == 2 and all(gain > 0 for gain in aligned["gain"])
    assert control["groups"] == [[], []]
    other = run(sampled, "FedAvg", 2, places(tmp_path))
    assert len(trained) == 16 and other["accuracy"] != first["accuracy"]
    # Nor is what other code trained taken for what this one would.
    monkeypatch.setattr("server.app.fingerprint", lambda: "other")
    monkeypatch.setattr("client.fingerprint.fingerprint", lambda: "other")
    run(sampled, "FedAvg", 0, places(tmp_path))
    assert len(trained) == 24


def test_a_run_in_which_one_client_fails_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = client.app.train_model

    def fail_once(*arguments: Any, **keywords: Any) -> float:
        monkeypatch.setattr(client.app, "train_model", train)
        raise FloatingPointError("training loss is nan")

    monkeypatch.setattr(client.app, "train_model", fail_once)
    with pytest.raises(RoundFailedError, match=r"a client failed: .*training loss is nan"):
        run(cell(epochs=1, rounds=1), "FedAvg", 0, places(tmp_path))


def test_half_a_kept_reply_is_trained_again_and_processes_keep_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = cell(epochs=1, rounds=1)
    written, save = set(), runs.save_file

    def note(tensors: Any, filename: Path, metadata: Any) -> None:
        written.add(filename.name)
        save(tensors, filename, metadata)

    monkeypatch.setattr(runs, "save_file", note)
    first = run(short, "FedAvg", 0, places(tmp_path))
    monkeypatch.setattr("os.getpid", lambda: 1)
    for count, kept in enumerate(sorted((tmp_path / "replies").iterdir())):
        kept.write_bytes(kept.read_bytes()[: 100 * count])
    assert run(short, "FedAvg", 0, places(tmp_path))["accuracy"] == first["accuracy"]
    assert len(written) == 2 * 4


def test_a_model_of_another_size_is_made_from_its_name(tmp_path: Path) -> None:
    sized = cell(base={**DIGITS, "dataset": "digits", "model": "vit-32-2"}, rounds=1, methods=("FedAvg",))
    made = run(sized, "FedAvg", 3, places(tmp_path))
    assert made["config"]["model"] == "vit-32-2" and (tmp_path / "vit-32-2-3" / "config.json").exists()


def test_a_model_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model": "vit-32-2", "seed": 3}
    with monkeypatch.context() as patched:
        patched.setattr("transformers.ViTForImageClassification.save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            places(tmp_path).resolve(config)
    folder = Path(str(places(tmp_path).resolve(config)["model"]))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


def interrupted(self: Any, folder: Path) -> None:
    """What a kill leaves of a saved model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    raise KeyboardInterrupt


def test_a_first_round_is_taken_apart_from_the_models_of_the_runs(tmp_path: Path) -> None:
    run(cell(), "FedAvg", 0, places(tmp_path))
    kept = len(list((tmp_path / "replies").iterdir()))
    ways = dissect(cell(), 0, places(tmp_path))
    assert len(list((tmp_path / "replies").iterdir())) == kept
    assert [result["way"] for result in ways] == ["plain", *WAYS]
    whole = next(result for result in ways if result["way"] == "attention and FFN")
    assert whole["spread"] < 1 and all(0 < share < 1.01 for kind in whole["layers"].values() for share in kind)
    assert ways[0]["accuracy"] == run(cell(), "FedAvg", 0, places(tmp_path))["accuracy"][1]


def test_intervals_are_those_of_the_paired_t_test() -> None:
    ones, others = [0.5, 0.61, 0.7, 0.58], [0.48, 0.6, 0.73, 0.5]
    found = paired(ones, others)
    expected = ttest_1samp([a - b for a, b in zip(ones, others, strict=True)], 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.verdict == "no difference shown" and found.worst == pytest.approx(-0.03)
    assert paired([0.5, 0.6], [0.5, 0.6]).verdict == "equal" and paired([0.5, 0.6], [0.5, 0.6]).text() == "0 (equal)"
    assert paired([2.0, 2.1, 2.2], [1.0, 1.0, 1.0]).verdict == "gain"
    assert paired([0.0, 0.1, 0.2], [1.0, 1.0, 1.0]).verdict == "loss"
    with pytest.raises(ValueError, match="two seeds at least"):
        paired([1.0], [0.0])


def document(harm: float) -> Mapping[str, Any]:
    """A document with one cell whose aligned accuracies lie `harm` below the plain ones."""
    results = []
    for seed in range(3):
        plain = [0.1, 0.5 + 0.01 * seed, 0.6]
        results.append({"cell": "vision, IID, 1 epoch, 4 clients", "method": "FedAvg", "seed": seed, "accuracy": plain})
        aligned = {"gain": [2.0, 0.5], "groups": [["qk"], []], "aligning_seconds": [1.0, 0.1]}
        results.append(
            {
                **results[-1],
                **aligned,
                "method": "RotFedAvg",
                "accuracy": [a - harm for a in plain],
                "training_seconds": [9.0, 9.0],
            }
        )
    for result in results:
        result["loss"] = result["accuracy"]
    docs = Path(__file__).parents[1] / "docs" / "benchmark.json"
    return {"environment": json.loads(docs.read_text())["environment"], "runs": results, "anatomy": []}


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 6])
def test_a_report_can_be_written_at_any_time(kept: int, tmp_path: Path) -> None:
    ended = document(0.0)["runs"][:kept]
    (known,) = [cell for cell in FULL if cell.name == "vision, IID, 1 epoch, 4 clients"]
    for entry in ended:
        seed = entry["seed"] + FIRST_SEED
        write_json(path_of(tmp_path / "runs", known, entry["method"], seed), {**entry, "seed": seed, "code": ""})
    main(full=True, jobs=0, results=tmp_path, docs=tmp_path)
    written = json.loads((tmp_path / "benchmark.json").read_text())["runs"]
    # A method of which there is one seed has no difference to show.
    assert len(written) == {0: 0, 1: 0, 3: 2, 4: 4, 6: 6}[kept]
    assert ("Does it ever harm" in (tmp_path / "benchmark.md").read_text()) == (kept > 3)


def test_an_infinite_gain_is_shown() -> None:
    found = document(0.0)
    for entry in found["runs"]:
        entry["cell"] = "size, Dirichlet 0.5, 10 epochs, 4 clients, width 64, 2 heads"
    found["runs"][1]["gain"] = [None, 0.5]
    assert "| inf |" in page(found)


def test_a_cell_that_falls_below_the_tolerance_is_named() -> None:
    assert "| vision, IID, 1 epoch, 4 clients | 3 | 51.0% | 0 (equal) | 0 (equal) | 2 |" in readme_table(document(0.0))
    assert "No interval at the end reaches below -0.3 points." in readme_table(document(0.002))
    assert "reaches below -0.3 points in: vision, IID, 1 epoch, 4 clients." in readme_table(document(0.004))
    assert "| loss |" in page(document(0.004)) and "Frames were found to differ" in page(document(0.004))


def test_the_table_goes_between_its_marks() -> None:
    readme = f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n"
    renewed = with_table(readme, document(0.0))
    assert renewed.startswith("before\n") and renewed.endswith("\nafter\n") and "old" not in renewed
    assert with_table(renewed, document(0.0)) == renewed
    with pytest.raises(ValueError, match="put them back"):
        with_table("no marks", document(0.0))
