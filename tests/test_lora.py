"""The harness for federated LoRA: parts that equal the whole, kept replies that change nothing, pages that say it."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from client.data import Corpus
from client.settings import parse_settings
from simulations.bench.runs import DEFAULTS, Places
from simulations.lora import cells, language, runs, schedule, text
from simulations.lora.__main__ import write
from simulations.lora.cells import MEAN, METHODS, Cell
from simulations.lora.page import MARKS, page, with_table


def test_the_upper_part_is_the_full_model_by_names_logits_and_gradients() -> None:
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    lower, upper = text.split(model)
    full, upper = (get_peft_model(part, text.adapter_config(4, 2, 8)).eval() for part in (copy.deepcopy(model), upper))
    adapter = {name: torch.randn_like(tensor) for name, tensor in get_peft_model_state_dict(full).items()}
    assert list(get_peft_model_state_dict(upper)) == list(adapter) and len(adapter) == 2 * 2 * 2 + 2
    for part in (full, upper):
        set_peft_model_state_dict(part, adapter)
    inputs = {"input_ids": torch.randint(1, 50, (5, 7)), "attention_mask": torch.ones(5, 7, dtype=torch.int64)}
    inputs["attention_mask"][2:, 4:] = 0
    entering = lower(**inputs).last_hidden_state
    whole = full(**inputs).logits
    rest = upper(inputs_embeds=entering, attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(rest, whole)
    found = []
    for part, logits in ((full, whole), (upper, rest)):
        cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1])).backward()
        found.append({name: p.grad for name, p in part.named_parameters() if p.grad is not None})
    assert len(found[0]) == len(adapter)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("seed", range(5))
def test_documents_are_dealt_once_each_and_unevenly_where_that_is_asked(seed: int) -> None:
    labels = np.arange(1000) % 5
    corpus = Corpus(tuple("abcde"), labels, np.arange(0, 1000, 2), np.arange(1, 1000, 2), lambda rows: [], None)

    def dealt(**changes: Any) -> list[list[int]]:
        settings = parse_settings({**DEFAULTS, "train-examples": 400, "seed": seed, **changes})
        return [rows.tolist() for rows in text.deal(corpus, settings, 10)]

    even, uneven = dealt(), dealt(partition="dirichlet", alpha=0.1)
    for parts in (even, uneven):
        together = [row for part in parts for row in part]
        assert len(together) == 400 == len(set(together)) and not {row % 2 for row in together} & {1}
    assert {len(part) for part in even} == {40} and min(map(len, uneven)) >= 10 < max(map(len, uneven))
    # Half of a client's documents or more are of one class, on average over clients.
    assert np.mean([max(np.bincount(labels[part])) / len(part) for part in uneven]) > 0.5
    assert uneven == dealt(partition="dirichlet", alpha=0.1)


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of a federation of four roles who say little, with a base model that learned little."""
    draw = random.Random(0)
    for genre, roles in (("comedies", 2), ("tragedies", 5)):
        folder = tmp_path / "plays" / genre
        folder.mkdir(parents=True)
        said = ["".join(draw.choices("abcd e", k=400)) for _ in range(roles)]
        lines = [f"**{'ABCDEFGHIJK'[number]}**\n{line}\n" for number, line in enumerate(said)]
        (folder / "play.md").write_text("# Play\n\n" + "\n".join(lines))
    small = {**cells.TASKS["language"], "train-examples": 32, "max-length": 16, "batch-size": 4, "local-epochs": 1}
    monkeypatch.setitem(cells.TASKS, "language", small)  # type: ignore[call-overload]
    monkeypatch.setattr(language, "STEPS", 2)
    monkeypatch.setattr(runs, "CLIENTS", 4)
    cell = Cell("language", "by author", 2)

    def run(method: str, kept: str) -> dict[str, Any]:
        found = runs.run(cell, method, 10, Places({"plays": str(tmp_path)}, tmp_path / kept))
        return {key: found[key] for key in ("loss", "error", "mean_error", "residual_bytes", "examples", "held_out")}

    return run


def test_what_clients_trained_is_kept_and_changes_nothing(federation: Any) -> None:
    methods = ("optimal", "exact", "stack")
    shared = {method: federation(method, "kept") for method in methods}
    for method in methods:
        assert shared[method] == federation(method, f"kept for {method}"), method
        assert shared[method]["examples"] == [8] * 4 and shared[method]["held_out"] == 8
    assert len({tuple(found["loss"]) for found in shared.values()}) == len(methods)
    # Both give the mean of the updates of one and the same first round.
    assert max(shared["exact"]["error"] + shared["stack"]["error"]) < 1e-5 < shared["optimal"]["error"][0]
    assert shared["exact"]["loss"][0] == pytest.approx(shared["stack"]["loss"][0], abs=1e-5)
    assert shared["exact"]["residual_bytes"] > 0 == shared["optimal"]["residual_bytes"]


def made(cell: Cell, method: str, seed: int, **figures: Any) -> dict[str, Any]:
    """A run that was not run."""
    return {
        **{"cell": cell.name, "task": cell.task, "split": cell.split, "rank": cell.rank},
        **{
            "method": method,
            "seed": seed,
            "config": {**cells.TASKS[cell.task], **cell.changes, "seed": seed},
            "code": "0",
        },
        **{"versions": dict.fromkeys(("rotfed", "torch", "transformers", "flwr"), "1"), "hardware": {"cpus": 1}},
        **{"accuracy": [0.5, 0.6], "loss": [1.0, 0.9], "error": [0.1, 0.1], "mean_error": [0.3, 0.2]},
        **{"aggregation_seconds": [0.01] * 2, "training_seconds": [2.0] * 2, "held_out": 445},
        **{"adapter_bytes": 100, "residual_bytes": 0, **figures},
    }


NEWS, ROLES = (next(cell for cell in cells.CELLS if cell.task == task) for task in ("text", "language"))


def test_the_page_says_better_only_where_the_interval_leaves_zero_out(tmp_path: Path) -> None:
    lines = [made(cell, MEAN, seed) for cell in (NEWS, ROLES) for seed in (10, 11, 12)]
    for seed, bit in ((10, 0.0), (11, 0.001), (12, -0.001)):
        lines.append(made(NEWS, "optimal", seed, accuracy=[0.6 + bit, 0.6 + bit]))
        lines.append(made(ROLES, "optimal", seed, loss=[0.9 + bit, 1.0 + bit]))
    write(tmp_path / "lora.json", lines)
    document = json.loads((tmp_path / "lora.json").read_text())
    said = (tmp_path / "lora-results.md").read_text()
    assert said == page(document) and (tmp_path / "lora.svg").exists()
    (news, roles) = (row.split(" | ") for row in said.splitlines() if row.startswith("| optimal | 0.10"))
    assert news[2:] == ["60.0, 60.0", "+10.0 (+9.8 to +10.2)", "no difference shown: +0.0 (-0.2 to +0.2) |"]
    assert roles[3:] == ["-0.1000 (-0.1025 to -0.0975)", "+0.1000 (+0.0975 to +0.1025) |"]
    # Better in both after the first round; at the end not shown in the one, worse in the other.
    assert "| optimal | 2 | 0 | 0 | 0 | 1 | 1 |" in said
    assert f"{NEWS.name} (seeds 10, 11, 12, 13, 14)" in said


def test_the_page_says_where_optimal_is_not_the_best_of_its_rank(tmp_path: Path) -> None:
    names = ("optimal", MEAN, *cells.ROTATIONS)
    errors = ((0.1, 0.3, 0.2, 0.2, 0.4), (0.25, 0.3, 0.2, 0.4, 0.4))
    write(
        tmp_path / "lora.json",
        [
            made(NEWS, name, seed, error=[error, 0.0, 0.0])
            for seed, found in zip((10, 11), errors, strict=True)
            for name, error in zip(names, found, strict=True)
        ],
    )
    said = (tmp_path / "lora-results.md").read_text()
    assert "on news: 0.17 (optimal), 0.30 (mean of factors), 0.20 (rotation), 0.30 (rotation, by A), 0.40 (Fed" in said
    assert "Optimal is above another of them in 1 of 2 first rounds." in said


def test_cells_of_one_seed_count_as_one_pair_and_a_variant_says_what_it_changes(tmp_path: Path) -> None:
    other = next(cell for cell in cells.CELLS if cell.task == "text" and not cell.variant and cell != NEWS)
    gentle = next(cell for cell in cells.CELLS if cell.variant == "gentle")
    lines = []
    for cell, better in ((NEWS, 0.1), (other, 0.3), (gentle, 0.0)):
        for seed, bit in ((10, 0.01), (11, -0.01), *([(12, 0.5)] if cell == NEWS else [])):
            lines.append(made(cell, MEAN, seed, accuracy=[0.5] * 3, error=[0.1] * 3))
            lines.append(made(cell, "optimal", seed, accuracy=[0.5 + better + bit] * 3, error=[0.1] * 3))
    write(tmp_path / "lora.json", lines)
    said = (tmp_path / "lora-results.md").read_text()
    together = said.split("### All splits and ranks")[1].split("###")[0]
    readme = with_table("\n".join(MARKS), json.loads((tmp_path / "lora.json").read_text()))
    assert "| optimal | 0.10 | 70.0% | +20.0 (+7.3 to +32.7) | 70.0% | +20.0 (+7.3 to +32.7) |" in readme
    # Of two seeds that both cells have, 19 and 21 points: Student's t of one degree of freedom is 12.7.
    assert "Seeds 10, 11.\n" in together and "+20.0 (+7.3 to +32.7)" in together
    assert "With `learning-rate` 0.003. Seeds 10, 11.\n" in said.split(gentle.name.split(", ", 1)[1])[1]


def test_a_run_that_was_written_down_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(cell: Cell, method: str, seed: int, places: Places) -> dict[str, Any]:
        if method == "exact" and len(asked) < len(METHODS):
            raise KeyboardInterrupt
        asked.append(method)
        return made(cell, method, seed)

    monkeypatch.setattr(schedule, "run", run)
    places = Places({}, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        schedule.run_unit(NEWS, 10, places, tmp_path)
    assert asked == list(METHODS)[: len(asked)] and not list(schedule.read_all([NEWS], tmp_path))
    asked += ["interrupted"] * len(METHODS)
    schedule.run_unit(NEWS, 10, places, tmp_path)
    assert sorted(asked) == sorted([*METHODS, *["interrupted"] * len(METHODS)])
    assert [found["method"] for found in schedule.read_all([NEWS], tmp_path)] == list(METHODS)
