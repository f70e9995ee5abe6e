"""The measurements of speed: their baseline is right, and what they say follows from the figures. None is timed."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from rich.console import Console
from safetensors import safe_open
from torch.testing import assert_close

import rotfed
from rotfed.flower import to_state_dict
from simulations.architectures import FOLDER
from simulations.speed import asked, merging, pairs, subjects
from simulations.speed.measure import Peak
from simulations.speed.published import BERT, align_as_published, best_scale
from simulations.speed.replies import LazyGrid, StoredRound
from simulations.speed.report import page, write
from simulations.speed.rounds import alone, compare
from simulations.speed.run import kept, labelled, run_all
from simulations.speed.sections import DEFAULT, FULL, QUICK, SECTIONS, Piece, pieces
from simulations.speed.shapes import MINILM, ROBERTA, TINY_LLAMA, VIT, WARM_UP, Shape, fresh, trained

ENVIRONMENT = {"versions": {"torch": "2", "flwr": "1", "numpy": "2"}, "hardware": {"cpus": 2}}
SMALL = Shape("small", "bert", layers=2, width=32, heads=4, d_ff=48, vocabulary=20)


def test_the_published_procedure_finds_a_known_permutation_rotation_and_scale(generator: torch.Generator) -> None:
    spec = rotfed.load_spec(SMALL.config)
    anchor = dict(fresh(SMALL, seed=0))
    elements = rotfed.random_transform(spec, generator).elements
    # It does not look for the heads.
    in_place = {"heads": torch.arange(SMALL.heads).expand(SMALL.layers, -1)}
    source = rotfed.Transform(spec, {**elements, **in_place}).apply(anchor)
    assert pairs.distance(source, anchor) > 1
    before = {name: tensor.clone() for name, tensor in source.items()}
    found = align_as_published(source, anchor, BERT, SMALL.layers, SMALL.heads)
    assert list(found) == list(anchor)
    for name, tensor in anchor.items():
        assert_close(found[name], tensor, atol=2e-6, rtol=1e-4)
        assert torch.equal(source[name], before[name])


def test_the_scale_is_the_best_of_all(generator: torch.Generator) -> None:
    one, two, target_one, target_two = torch.randn(4, 3, 5, generator=generator)

    def value(scale: float) -> float:
        return float((scale * one - target_one).square().sum() + (two / scale - target_two).square().sum())

    found = best_scale(one, two, target_one, target_two)
    others = [sign * scale for sign in (-1, 1) for scale in torch.linspace(0.05, 5, 500).tolist()]
    assert all(value(found) <= value(other) + 1e-6 for other in others)


def test_models_have_the_sizes_that_are_asked_about() -> None:
    assert VIT.parameters == 139_018
    assert [round(shape.parameters / 1e6) for shape in (MINILM, ROBERTA, TINY_LLAMA)] == [23, 125, 1100]


def test_training_moves_every_tensor_by_a_share_of_its_norm() -> None:
    before, after = dict(fresh(SMALL, seed=3)), dict(trained(SMALL, seed=3, client=1))
    for name, tensor in before.items():
        moved = float((after[name] - tensor).norm() / tensor.norm())
        assert 0.015 < moved < 0.05, name
    assert_close(dict(trained(SMALL, seed=3, client=1)), after, atol=0, rtol=0)


def test_the_grid_makes_a_reply_when_it_is_pulled_and_no_sooner(tmp_path: Path) -> None:
    stored = StoredRound.prepare(tmp_path, SMALL, 3)
    grid = LazyGrid(stored, 3)
    strategy = subjects.strategy(subjects.FEDAVG, None)
    sent = list(strategy.configure_train(1, stored.start(), ConfigRecord(), grid))
    waiting = set(grid.push_messages(sent))
    replies: list[Message] = []
    for count in range(1, 4):
        replies += grid.pull_messages(waiting)
        assert len(replies) == count
    assert list(grid.pull_messages(waiting)) == []
    assert {reply.metadata.reply_to_message_id for reply in replies} == waiting
    for reply in replies:
        client = reply.metadata.src_node_id - min(grid.get_node_ids())
        expected = dict(trained(SMALL, seed=0, client=client))
        assert_close(to_state_dict(reply.content["arrays"]), expected, atol=0, rtol=0)


def test_a_round_has_stages_that_make_up_its_seconds(tmp_path: Path) -> None:
    methods = (subjects.FEDAVG, subjects.ROTFEDAVG, subjects.ALWAYS)
    runs = compare(SMALL, 2, methods, 2, tmp_path / "replies")
    assert len(runs) == 2 * len(methods)
    for run in runs:
        assert 0 < run["seconds"] <= run["whole"]
        if run["method"] == subjects.FEDAVG:
            assert not run["aligned"] and "decode" not in run
        else:
            assert all(run[stage] > 0 for stage in subjects.STAGES)
            assert run["other"] > -1e-6 and sum(run[stage] for stage in subjects.STAGES) <= run["seconds"]
    assert {run["aligned"] for run in runs if run["method"] == subjects.ALWAYS} != {""}


def test_peak_memory_is_what_was_held_and_let_go() -> None:
    with Peak() as peak:
        held = torch.ones(20_000_000)
        del held
    assert 79e6 < peak.resident < 100e6
    # It is looked at every few milliseconds, in which this may be gone again.
    assert peak.anonymous <= peak.resident + 1e6


def test_a_folder_of_shards_is_one_that_rotfed_reads(tmp_path: Path) -> None:
    shape = Shape("small llama", "llama", layers=2, width=16, heads=4, d_ff=12, vocabulary=20, kv_heads=2)
    folder = merging.write_folder(tmp_path / "model", shape, fresh(shape, seed=0))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(shape.sizes()) and len(set(index["weight_map"].values())) >= 4
    for name, tensor in fresh(shape, seed=0):
        with safe_open(folder / index["weight_map"][name], framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensor.to(torch.bfloat16))
    assert rotfed.load_spec(folder, residual=True).num_layers == 2


def small_document(folder: Path, effort: str = "quick") -> dict[str, Any]:
    """A document with runs of all sections, as small as they can be."""
    first, second = ((case, runs) for case, runs in asked.ROUNDS.items())
    methods = (subjects.FEDAVG, subjects.ROTFEDAVG, subjects.ALWAYS)
    nothing = Piece("", "", list)

    def section(name: str, found: list[dict[str, Any]], **labels: Any) -> list[dict[str, Any]]:
        return labelled(Piece(name, "", nothing.do, labels=labels), found)

    runs = [run for case in (pairs.TRAINED, pairs.UNRELATED) for run in section("near", pairs.near(SMALL, case, 2))]
    for case, _ in (first, second):
        runs += section("round", compare(SMALL, 2, methods, 2, folder / "replies"), case=case)
    for case in asked.MEMORY:
        for method in methods:
            found = alone(SMALL, 2, method, 0, folder / "replies")
            runs += section("memory", found, case=case)
    for shape in (SMALL, WARM_UP):
        for method in (subjects.FEDAVG, subjects.ALWAYS):
            StoredRound.prepare(folder / shape.name, shape, 2)
            found = alone(shape, 2, method, 1, folder / shape.name)
            runs += section("scaling", found, case=f"{shape.layers} layers", axis="layers")
    times = {"method": "rotfed", "repeat": 0, "parameters": 139_018, "seconds": 0.3}
    runs += section("small", [{"case": "pair, residual stream", **times}])
    held = {"anonymous": 3_000, "resident": 4_000, "model_bytes": 2_000}
    runs += section("merge", [{"case": merging.SAME_START, **times, **held}])
    settings = {"effort": effort, "threads": 1, "repeats": 2, "code": "0"}
    return {"environment": ENVIRONMENT, **settings, "failed": {}, "runs": runs}


def test_the_page_is_written_from_the_json_alone(tmp_path: Path) -> None:
    document = small_document(tmp_path)
    path = write(document, tmp_path / "out")
    read = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert read == document
    assert path.read_text() == page(read)
    for picture in ("speed-scaling", "speed-stages"):
        assert (tmp_path / "out" / f"{picture}.svg").exists() and (tmp_path / "out" / f"{picture}.png").exists()
    text = path.read_text()
    assert "| at most 1.5 | 1.50 | yes |" in text  # 3,000 bytes of a model of 2,000
    assert "| at most 0.4 s | 0.300 s | yes |" in text
    assert "| at most 600 s | not measured |  |" in text


@pytest.mark.skipif(not (FOLDER / "speed.json").exists(), reason="nothing was measured yet")
def test_the_page_in_docs_is_what_was_measured() -> None:
    assert (FOLDER / "speed.md").read_text() == page(json.loads((FOLDER / "speed.json").read_text()))


def test_a_figure_is_met_by_its_median() -> None:
    assert asked.Figure("", "", 1.0, [0.5, 0.9, 3.0], asked.number).met == "yes"
    assert asked.Figure("", "", 1.0, [0.5, 1.1, 3.0], asked.number).met == "**no**"
    assert asked.Figure("", "", 1.0, [], asked.number).found == "not measured"


def test_pieces_have_names_of_their_own_and_every_section_has_some(tmp_path: Path) -> None:
    for effort in (QUICK, DEFAULT, FULL):
        found = pieces(effort, tmp_path)
        assert len({(piece.section, piece.name) for piece in found}) == len(found)
        assert {piece.section for piece in found} == set(SECTIONS)
        # They go to other processes.
        assert [pickle.loads(pickle.dumps(piece)).name for piece in found] == [piece.name for piece in found]


def find_one() -> list[dict[str, Any]]:
    return [{"case": "one", "seconds": 1 / 3}]


def fail() -> list[dict[str, Any]]:
    raise ValueError("no such thing")


def test_what_was_measured_is_kept_and_a_failure_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.speed.run._in_new_process", lambda do, threads: do())
    settings, console = {"code": "1"}, Console(quiet=True)
    good, bad = Piece("near", "good", find_one), Piece("near", "bad", fail)
    failed = run_all([bad, good], settings, 1, tmp_path, tmp_path / "scratch", console)
    assert failed == {"near, bad": "failed: ValueError: no such thing"}
    assert kept(good, settings, tmp_path) == [{"section": "near", "case": "one", "seconds": 0.333333}]
    assert kept(bad, settings, tmp_path) is None and kept(good, {"code": "2"}, tmp_path) is None
