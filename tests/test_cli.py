"""The command line, as a user types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rotfed.cli import app
from tests.models import ARCHITECTURES


def rotfed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_check_of_a_directory_and_of_its_configuration(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    architecture.model(architecture.heads[0]).save_pretrained(tmp_path)
    for path, weights in [(tmp_path, "its own weights"), (tmp_path / "config.json", "random weights")]:
        result = rotfed("check", path)
        assert result.exit_code == 0, result.output
        for text in (f"specs/{name}.toml", weights, "orthogonal", "head_dim, 4 long", "2 layer x 3 heads", "float64: "):
            assert text in result.stdout
        assert f"ok: rotfed keeps the function of this {name} model" in result.stdout


def test_refusals_are_one_sentence_and_exit_with_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("refused: llama: no spec for this model_type") and result.stderr.count("\n") == 1
    assert rotfed("check", tmp_path / "gone").exit_code == 1


def test_a_checkpoint_with_a_parameter_of_its_own_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    ARCHITECTURES["bert"].model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = "encoder.layer.0.attention.self.q_norm.weight"
    save_file({**tensors, extra: tensors["embeddings.LayerNorm.weight"].clone()}, tmp_path / "model.safetensors")
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1
    assert f"refused: {extra}: no entry in specs/bert.toml" in result.stderr


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    ARCHITECTURES["bert"].model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    result = rotfed("check", tmp_path)
    assert result.exit_code == 1 and "expected a safetensors file" in result.stderr


def test_version() -> None:
    assert rotfed("--version").stdout.startswith("rotfed 0.")
