"""The command line, as a user types it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from rotfed.cli import app
from tests.models import EXAMPLES


def rotfed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_check_of_a_directory_and_of_its_configuration(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    example.model(example.classes[1]).save_pretrained(tmp_path)
    for path, read, weights in [
        (tmp_path, "from its headers", "its own weights"),
        (tmp_path / "config.json", "from its configuration alone", "random weights"),
    ]:
        result = rotfed("check", path)
        assert result.exit_code == 0, result.output
        for text in (
            f"specs/{name}.toml",
            read,
            "ok: ",
            "--run",
            "orthogonal",
            "head_dim, 4 long",
            "2 layer x 3 heads",
        ):
            assert text in result.stdout
        result = rotfed("check", "--run", path)
        assert result.exit_code == 0, result.output
        assert weights in result.stdout and "float64: " in result.stdout and "float32: " in result.stdout
        assert f"ok: rotfed keeps the function of this {name} model" in result.stdout


def test_check_reads_no_weights_unless_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EXAMPLES["bert"].model().save_pretrained(tmp_path)

    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("rotfed.cli._load_model", read)
    monkeypatch.setattr("safetensors.safe_open.get_tensor", read, raising=False)
    assert rotfed("check", tmp_path).exit_code == 0
    assert isinstance(rotfed("check", "--run", tmp_path).exception, AssertionError)


def test_refusals_are_one_sentence_and_exit_with_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("refused: mamba: no spec for this model_type") and result.stderr.count("\n") == 1
    assert rotfed("check", tmp_path / "gone").exit_code == 1


def test_an_unknown_architecture_is_told_what_comes_closest(tmp_path: Path) -> None:
    EXAMPLES["bert"].model("AutoModelForMaskedLM").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["bert.encoder.layer.0.attention.self.gate.weight"] = torch.zeros(3, 12)
    del tensors["bert.encoder.layer.0.output.dense.bias"], tensors["bert.encoder.layer.1.output.dense.bias"]
    save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gated-bert"}))
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0].startswith("refused: gated-bert: no spec for this model_type")
    assert lines[1].startswith("closest: specs/bert.toml (bert, ")
    wanted = lines[lines.index("a new file needs an axis string for:") :]
    assert '  "bert.encoder.layer.*.attention.self.gate.weight", shape (3, 12)' in wanted
    assert '  "cls.predictions.bias", shape (30,)' in wanted
    lacking = wanted[wanted.index("not found here of specs/bert.toml:") :]
    assert "  encoder.layer.*.output.dense.bias" in lacking
    assert lines[-1] == "see docs/new-architecture.md for how to write the file"


def test_specs_lists_every_type_with_its_groups() -> None:
    result = rotfed("specs")
    assert result.exit_code == 0
    for text in ("bert: bert, roberta", "qk (rope_planes per layer, kv_heads, planes)", "model types in"):
        assert text in result.stdout
    for name in ("llama", "mistral"):
        one = rotfed("specs", name)
        assert one.exit_code == 0 and one.stdout.startswith("llama: llama, mistral") and "roberta" not in one.stdout
    unknown = rotfed("specs", "mamba")
    assert unknown.exit_code == 1 and unknown.stderr.startswith("refused: mamba: no such family or model_type")


def test_a_checkpoint_with_a_parameter_of_its_own_is_refused(tmp_path: Path) -> None:
    EXAMPLES["bert"].model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = "encoder.layer.0.attention.self.q_norm.weight"
    save_file({**tensors, extra: tensors["embeddings.LayerNorm.weight"].clone()}, tmp_path / "model.safetensors")
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1
    assert f"refused: {extra}: no entry in specs/bert.toml" in result.stderr


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    EXAMPLES["bert"].model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1 and "expected a safetensors file" in result.stderr


def test_version() -> None:
    assert rotfed("--version").stdout.startswith("rotfed 0.")
