"""The command line, as a user types it."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from rotfed.cli import app
from tests.models import EXAMPLES


def rotfed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: str | Path) -> str:
    """The one sentence with which a command refuses."""
    result = rotfed(*arguments)
    assert result.exit_code == 1 and result.stdout == "", (result.output, result.exception)
    assert result.stderr.startswith("refused: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


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

    monkeypatch.setattr("rotfed.cli.check._load_model", read)
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


@pytest.mark.parametrize("model_type", ["fnet", "mamba"])
def test_a_model_without_attention_is_near_to_nothing(model_type: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 30}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    sentence = refusal("check", tmp_path)
    assert (
        sentence.startswith(f"refused: {model_type}: no spec for this model_type") and "none of them comes" in sentence
    )


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 0},
        {"intermediate_size": 0},
        {"max_position_embeddings": 0},
        {"num_hidden_layers": 0},
        {"hidden_act": "no such"},
        {"architectures": 3},
        {"quantization_config": 3},
        {"model_type": ["bert"]},
        3,
        None,
        [],
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_built_is_refused(values: object, tmp_path: Path) -> None:
    config = EXAMPLES["bert"].config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, **values} if isinstance(values, dict) else values))
    refusal("check", "--run", tmp_path)


def test_weights_that_cannot_be_read_are_refused_and_missing_ones_are_said(tmp_path: Path) -> None:
    model = EXAMPLES["bert"].model("BertForMaskedLM")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def shown(kept: dict[str, torch.Tensor]) -> str:
        save_file(kept, path, metadata={"format": "pt"})
        result = rotfed("check", "--run", tmp_path)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()[0]

    assert shown({n: t for n, t in tensors.items() if not n.startswith("cls.")}).endswith(
        "its own weights, but a fresh cls.predictions.bias and 5 more, which its files lack"
    )
    assert shown({}).endswith("random weights")
    name = "bert.encoder.layer.0.output.dense.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, path)
    assert f"{name}: expected float16" in refusal("check", tmp_path) and "float8_e4m3fn" in refusal("check", tmp_path)
    path.write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    assert "expected a safetensors file" in refusal("check", "--run", tmp_path)
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"damaged")
    assert "expected a model that transformers can load" in refusal("check", "--run", tmp_path)
    assert "File name too long" in refusal("check", "a" * 300)


def test_brackets_in_names_are_printed_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "[b] [red]:smile:"
    EXAMPLES["bert"].model("BertForMaskedLM").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "cls[/b]:smile:": torch.zeros(1)}, folder / "model.safetensors")
    result = rotfed("check", folder)
    assert result.exit_code == 0 and "cls[/b]:smile:" in result.stdout
    (folder / "config.json").unlink()
    assert f"refused: {folder}: expected a transformers model directory" in refusal("check", folder)


def test_the_residual_stream_is_shown(tmp_path: Path) -> None:
    for name, head, shown in [
        ("vit", "ViTForImageClassification", "known (centred_orthogonal; norms folded into the layers that read them)"),
        ("vit", "ViTModel", "left as it is (pooler.dense.bias: no entry"),
        ("gpt2", "GPT2LMHeadModel", "known (permutation)"),
        ("bert", "BertModel", "left as it is (pooler.dense.bias: no entry in specs/bert.toml for this class of model"),
        ("bert", "BertForMaskedLM", "known (permutation)"),
        ("bloom", "BloomForCausalLM", "left as it is (bloom: specs/bloom.toml does not know the residual stream"),
    ]:
        EXAMPLES[name].model(head).save_pretrained(tmp_path / head)
        assert f"residual stream: {shown}" in rotfed("check", tmp_path / head).stdout
    listed = rotfed("specs", "bert").stdout
    assert "residual stream (permutation): bert, roberta, electra, xlm-roberta, camembert" in " ".join(listed.split())
    assert "residual stream (orthogonal; norms folded" in rotfed("specs", "llama").stdout
    assert "residual stream" not in rotfed("specs", "bloom").stdout


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
