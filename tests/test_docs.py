"""The documentation says what is true: the table of architectures is the measured one, and complete."""

import json
import re
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

from rotfed.examples import examples
from rotfed.flower import RotFedAvg
from rotfed.library import spec_files, supported_model_types
from rotfed.specfile import parse_spec_file
from simulations.architectures import FOLDER, measure, page
from simulations.bench.report import page as benchmark_page
from simulations.bench.report import with_table
from simulations.grid import InProcessGrid
from simulations.lora.page import page as lora_page
from simulations.lora.page import with_table as with_lora_table
from simulations.merging.page import page as merging_page

README = (FOLDER.parent / "README.md").read_text()
RESULTS = json.loads((FOLDER / "architectures.json").read_text())


def test_the_table_is_what_was_measured() -> None:
    assert (FOLDER / "architectures.md").read_text() == page(RESULTS)


def test_the_page_on_merging_is_what_was_measured() -> None:
    results = json.loads((FOLDER / "merging.json").read_text())
    assert {result["part"] for result in results["results"]} == {"vision", "skewed", "language"}
    assert (FOLDER / "merging-results.md").read_text() == merging_page(results)


def test_the_page_on_federated_lora_is_what_was_measured() -> None:
    results = json.loads((FOLDER / "lora.json").read_text())
    assert (FOLDER / "lora-results.md").read_text() == lora_page(results)
    assert with_lora_table(README, results) == README


def test_the_readme_shows_what_merging_measured() -> None:
    results = json.loads((FOLDER / "merging.json").read_text())["results"]
    names = {"rotfed, by weights alone": "rotfed", "rotfed, learned": "rotfed, learned"}
    table = re.search(
        r"\| small ViTs on .*?\n\|---.*?\n(.*?)\n\n", (FOLDER.parent / "README.md").read_text(), re.DOTALL
    )
    assert table
    for line in table[1].splitlines():
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        method = names.get(label.split(":")[0], label)
        for parties, cell in zip((2, 4, 8), cells, strict=True):
            wanted = f"{method}, tree" if parties > 2 and method.startswith("rotfed") else method
            shares = [
                r["share"]
                for r in results
                if r["part"] == "vision" and r["method"] == wanted and len(r["members"]) == parties
            ]
            assert f"{mean(shares):.2f}" == cell, (label, parties)


def test_the_page_and_the_table_of_the_benchmark_are_what_was_measured() -> None:
    document = json.loads((FOLDER / "benchmark.json").read_text())
    assert len(document["runs"]) > 100 and document["anatomy"]
    assert (FOLDER / "benchmark.md").read_text() == benchmark_page(document)
    assert with_table(README, document) == README


def test_every_example_was_measured_and_lies_within_the_tolerance() -> None:
    known = {(example.model_type, example.name, example.family) for example in examples().values()}
    assert {(r["model_type"], r["variant"], r["spec"]) for r in RESULTS["examples"]} == known
    assert all(0 < r["float64"] <= 1e-12 and 0 < r["float32"] <= 1e-5 and r["groups"] for r in RESULTS["examples"])


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_measurement_can_be_repeated(name: str) -> None:
    (stored,) = [result for result in RESULTS["examples"] if result["variant"] == name]
    again = measure(examples()[name])
    assert {key: again[key] for key in stored if "float" not in key} == {
        k: stored[k] for k in stored if "float" not in k
    }
    assert again["float64"] < 100 * stored["float64"]


def test_the_readme_counts_what_is_supported() -> None:
    (counted,) = re.findall(r"(\d+) model types of transformers in (\d+) families", README)
    assert tuple(map(int, counted)) == (len(supported_model_types()), len(spec_files()))


def test_the_readme_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["my-model", "a", "b", "c"]):
        examples()["vit"].model("ViTForImageClassification", seed).save_pretrained(name)
    monkeypatch.setattr(RotFedAvg, "start", lambda *_, initial_arrays, **__: SimpleNamespace(arrays=initial_arrays))
    pasted: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, pasted)
    pasted["main"](None, None)
    assert set(pasted["merged"]) == set(pasted["a"])


def test_the_file_of_the_page_on_new_architectures_parses_and_is_what_rotfed_ships() -> None:
    text = (FOLDER / "new-architecture.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    shown = parse_spec_file(block, "page.toml")
    assert "layers.{layer}.self_attn.q_proj.weight" in shown.params


def test_the_page_on_adapters_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples()["llama"].model("LlamaForCausalLM").save_pretrained("my-llama")
    pasted: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (FOLDER / "lora.md").read_text(), re.DOTALL):
        exec(block, pasted)
    pasted["main"](InProcessGrid(pasted["client"], 3), None)
    last = pasted["strategy"].reports[-1]
    assert len(pasted["strategy"].reports) == 3 and set(last.ranks.values()) == {4} and not last.refused
