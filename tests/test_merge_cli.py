"""Merging model directories and measuring what lies between them, as a user types it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rotfed
from rotfed.barrier import score
from rotfed.checkpoints import weights as weights_module
from rotfed.checkpoints.common import _POSITIONS_BY_ROW
from rotfed.checks import example_inputs, outputs, relative_change, with_plain_experts
from rotfed.layout import lay_out
from rotfed.residual import fold_norms
from tests.models import EXAMPLES, assert_same
from tests.test_cli import rotfed as run

# What example and class, changes of its configuration, and what becomes of the residual stream.
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "vit": ("vit", "ViTForImageClassification", {}, "aligned (centred_orthogonal; norms folded"),
    "gpt2 tied": ("gpt2", "GPT2LMHeadModel", {}, "aligned (permutation)"),
    "llama tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}, "aligned (permutation, sign)"),
    "llama": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": False}, "aligned (orthogonal; norms folded"),
    "bert": ("bert", "BertForSequenceClassification", {}, "aligned (permutation)"),
    "bert tied": ("bert", "BertForMaskedLM", {}, "aligned (permutation)"),
    "bert bare": (
        "bert",
        "BertModel",
        {},
        "left as it is (pooler.dense.bias: no entry in specs/bert.toml for",
    ),
    "t5": ("t5", "T5ForConditionalGeneration", {}, "aligned (permutation, sign)"),
    "mixtral": ("mixtral", "MixtralForCausalLM", {}, "aligned (permutation, sign)"),
    "bloom": ("bloom", "BloomForCausalLM", {}, "left as it is (bloom: specs/bloom.toml does not know"),
}

DOCS = Path(__file__).parents[1] / "docs"

# One alignment a model, where the anchor is not what is tested.
QUICK = ("--anchor", "medoid")


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Put changed weights into a directory."""
    save_file(change(weights(directory)), directory / "model.safetensors", metadata={"format": "pt"})


def moved(model: nn.Module, seed: int, residual: bool) -> nn.Module:
    """The same function in a random frame, also of the residual stream where asked for."""
    params = dict(model.state_dict())
    spec = rotfed.load_spec(model, residual=residual)
    if residual:
        params = fold_norms(params, spec)
    transform = rotfed.random_transform(spec, torch.Generator().manual_seed(seed))
    model.load_state_dict(transform.apply(params))
    return model


def copies(folder: Path, case: str, dtype: torch.dtype = torch.float32, count: int = 3) -> list[Path]:
    """Directories of one model in frames of its own, the first as it is."""
    name, head, changes, stream = CASES[case]
    paths = [folder / letter for letter in "abcd"[:count]]
    for seed, path in enumerate(paths):
        model = EXAMPLES[name].model(head, **changes)
        (moved(model, 10 * seed, stream.startswith("aligned")) if seed else model).to(dtype).save_pretrained(path)
    return paths


def parties(folder: Path, name: str, head: str, *changes: dict[str, Any]) -> list[Path]:
    """Directories of models with weights of their own, one for each change of the configuration."""
    paths = [folder / letter for letter in "abcd"[: len(changes)]]
    for seed, (path, change) in enumerate(zip(paths, changes, strict=True)):
        EXAMPLES[name].model(head, seed, **change).save_pretrained(path)
    return paths


def refused(*arguments: str | Path) -> str:
    """The sentence with which a command refuses."""
    result = run(*arguments)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("refused: "), result.stderr
    return result.stderr


def examples_of(model: nn.Module, path: Path, generator: torch.Generator) -> Path:
    """A file of images, with the labels that a model itself gives them, written as the documentation says."""
    pixels = torch.randn(40, 1, 8, 8, generator=generator)
    labels = outputs(model, model.state_dict(), {"pixel_values": pixels})["logits"].argmax(-1)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "merging.md").read_text(), re.DOTALL)
    (lines,) = (block for block in blocks if "save_file" in block)
    given = {"images": pixels, "labels": labels, "processor": lambda images, return_tensors: {"pixel_values": images}}
    exec(lines.replace('"test.safetensors"', repr(str(path))), given)
    return path


@pytest.mark.parametrize("case", CASES)
def test_merged_copies_compute_the_original(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    name, head, changes, stream = CASES[case]
    paths = copies(tmp_path, case)
    result = run("merge", *paths, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, result.output
    assert f"residual stream: {stream}" in result.stdout
    for text in (f"3 models by specs/{name}.toml", "layer", "rest", "before", "after", f"wrote {tmp_path / 'out'}"):
        assert text in result.stdout
    first, merged = weights(paths[0]), weights(tmp_path / "out")
    assert {n: (t.shape, t.dtype) for n, t in merged.items()} == {n: (t.shape, t.dtype) for n, t in first.items()}
    loaded, info = getattr(transformers, head).from_pretrained(tmp_path / "out", output_loading_info=True)
    with_plain_experts(loaded)
    assert not any(info.values()), info

    original = EXAMPLES[name].model(head, **changes)
    inputs = example_inputs(original, generator)
    expected = outputs(original, original.state_dict(), inputs)
    assert relative_change(expected, outputs(loaded.eval(), loaded.state_dict(), inputs)) < 1e-3
    others = [getattr(transformers, head).from_pretrained(path).state_dict() for path in paths]
    plain = rotfed.weighted_mean(others)
    assert relative_change(expected, outputs(original, plain, inputs)) > 1e-2


@pytest.mark.parametrize("anchor", ["consensus", "progressive", "tree"])
def test_every_anchor_brings_copies_together(anchor: str, tmp_path: Path) -> None:
    paths = copies(tmp_path, "bert", torch.float64, 4)
    result = run("merge", *paths, "-o", tmp_path / "out", "--anchor", anchor)
    assert result.exit_code == 0, result.output
    before, after = (float(cell) for cell in _row(result.stdout, "all"))
    assert after < 1e-6 < 1 < before


def _row(table: str, name: str) -> list[str]:
    """The cells of a printed table's row after its name."""
    (cells,) = [
        cells
        for cells in ([c.strip() for c in row.split("│")[1:-1]] for row in table.splitlines())
        if cells and cells[0] == name
    ]
    return cells[1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_model_merged_with_itself_stays_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    (path,) = copies(tmp_path, "t5", dtype, 1)
    assert run("merge", path, path, "-o", tmp_path / "out", *QUICK).exit_code == 0
    assert_same(weights(tmp_path / "out"), weights(path))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype, tmp_path: Path, generator: torch.Generator) -> None:
    half, full = (copies(tmp_path / name, "llama", dtype) for name in ("half", "full"))
    for path in full:
        rewrite(path, lambda tensors: {name: tensor.float() for name, tensor in tensors.items()})
    for paths, out in ((half, "out"), (full, "wide")):
        assert run("merge", *paths, "-o", tmp_path / out, *QUICK).exit_code == 0
    merged = weights(tmp_path / "out")
    assert_same(merged, {name: tensor.to(dtype) for name, tensor in weights(tmp_path / "wide").items()})
    model = EXAMPLES["llama"].model("LlamaForCausalLM", tie_word_embeddings=False)
    inputs = example_inputs(model, generator)
    expected = outputs(model, model.state_dict(), inputs)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert relative_change(expected, outputs(loaded.float(), loaded.state_dict(), inputs)) < 0.1


def test_what_the_files_type_cannot_hold_is_not_written(tmp_path: Path) -> None:
    paths = copies(tmp_path, "vit", torch.float16, 2)
    bias = "classifier.bias"
    rewrite(paths[1], lambda tensors: {name: tensor.float() for name, tensor in tensors.items()})
    rewrite(paths[1], lambda tensors: {**tensors, bias: tensors[bias] + 3e5})
    error = refused("merge", *paths, "-o", tmp_path / "out", *QUICK, "--no-residual")
    assert f"{bias}: expected values that torch.float16 can hold, found larger ones" in error
    assert f"save {paths[0]} in a wider type" in error

    def louder(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
        loud = ("layernorm_before.weight", "query.weight")
        return {name: tensor * factor if name.endswith(loud) else tensor for name, tensor in tensors.items()}

    for factor, found in ((700, "larger"), (3e-4 / 700, "smaller")):
        rewrite(paths[0], lambda tensors, f=factor: louder(tensors, f))  # type: ignore[misc]
        error = refused("merge", paths[0], paths[0], "-o", tmp_path / "out", *QUICK)
        assert f"found {found} ones in the form in which models are averaged" in error
    assert not (tmp_path / "out").exists()


def test_shards_are_read_and_the_rest_of_the_directory_comes_along(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertForSequenceClassification", {}, {})
    assert run("merge", one, other, "-o", tmp_path / "whole", *QUICK).exit_code == 0
    for path in (one, other):
        model = transformers.BertForSequenceClassification.from_pretrained(path)
        (path / "model.safetensors").unlink()
        model.save_pretrained(path, max_shard_size="5KB")
        assert len(list(path.glob("*.safetensors"))) > 1 and (path / "model.safetensors.index.json").is_file()
    wanted = ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "preprocessor_config.json", "chat_template.jinja"]
    for name in [*wanted, "trainer_state.json", "training_args.bin", "eval_results.json"]:
        (one / name).write_text("{}")
    assert run("merge", one, other, "-o", tmp_path / "out", *QUICK).exit_code == 0
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", *wanted}


def test_names_of_two_versions_of_transformers_go_together(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "vit", "ViTForImageClassification", {}, {})
    options = [*QUICK, "--no-residual"]
    assert run("merge", one, other, "-o", tmp_path / "same", *options).exit_code == 0
    resolution = lay_out(weights(other), rotfed.load_spec(other))
    assert resolution.naming == "transformers 4"
    names = {present: resolution.prefix + new for new, present in resolution.names.items()}
    rewrite(other, lambda tensors: {names.get(name, name): tensor for name, tensor in tensors.items()})
    assert set(weights(other)) != set(weights(one))
    assert run("merge", one, other, "-o", tmp_path / "out", *options).exit_code == 0
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "same"))


def test_a_head_that_is_tied_to_the_embeddings_moves_with_them_under_any_names(
    tmp_path: Path, generator: torch.Generator
) -> None:
    paths = copies(tmp_path, "gpt2 tied")
    for path in paths:
        # As in the files of GPT-2 itself: those of a bare backbone, in a directory of a model with a head.
        rewrite(path, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    result = run("merge", *paths, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0 and "residual stream: aligned (permutation)" in result.stdout, result.output
    assert set(weights(tmp_path / "out")) == set(weights(paths[0])) and "wte.weight" in weights(tmp_path / "out")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    original = EXAMPLES["gpt2"].model("GPT2LMHeadModel")
    inputs = example_inputs(original, generator)
    expected = outputs(original, original.state_dict(), inputs)
    assert relative_change(expected, outputs(loaded, loaded.state_dict(), inputs)) < 1e-3


def test_another_task_head_leaves_the_first_one_as_it_is(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertForSequenceClassification", {"num_labels": 5}, {"num_labels": 3})
    result = run("merge", one, other, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, result.output
    assert f"kept from {one}, not merged: classifier.bias ((5,), (3,) in {other}), classifier.weight" in result.stdout
    assert "residual stream: left as it is (classifier.bias differs between the models)" in result.stdout
    first, second, merged = weights(one), weights(other), weights(tmp_path / "out")
    assert_same({n: merged[n] for n in merged if "classifier" in n}, {n: first[n] for n in first if "classifier" in n})
    table = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(merged[table], (first[table] + second[table]) / 2)
    backwards = run("merge", other, one, "-o", tmp_path / "back", *QUICK, "--no-residual")
    assert "residual stream: left as it is (--no-residual)" in backwards.stdout

    bare = tmp_path / "bare"
    EXAMPLES["bert"].model().save_pretrained(bare)
    result = run("merge", bare, one, "-o", tmp_path / "backbone", *QUICK)
    assert result.exit_code == 0, result.output
    assert f"left out: classifier.bias ((5,) in {one}), classifier.weight ((5, 12) in {one})" in result.stdout
    assert set(weights(tmp_path / "backbone")) == set(weights(bare))


@pytest.mark.parametrize(
    ("name", "head", "changes", "where", "expected", "found"),
    [
        ("bert", "BertForMaskedLM", {"vocab_size": 31}, "bert.embeddings.word_embeddings.weight", "shape (30, 12)", 31),
        ("bert", "BertModel", {"max_position_embeddings": 29}, "embeddings.position_embeddings.weight", "(20, 12)", 29),
        ("vit", "ViTModel", {"image_size": 16}, "embeddings.position_embeddings", "(1, 5, 12)", "(1, 17, 12)"),
        ("opt", "OPTModel", {"max_position_embeddings": 9}, "decoder.embed_positions.weight", "(22, 12)", 11),
        ("gpt2", "GPT2LMHeadModel", {"n_layer": 1}, "{b}", "layers 2", "found 1"),
        ("llama", "LlamaForCausalLM", {"num_key_value_heads": 4}, "{b}", "kv_heads 2", "found 4"),
        ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}, "{b}", "tie_word_embeddings False", "found True"),
        ("llama", "LlamaForCausalLM", {"attention_bias": True}, "{b}", "the same parameters", "attention_bias True"),
    ],
)
def test_models_that_differ_are_refused_by_name_and_shape(
    name: str, head: str, changes: dict[str, Any], where: str, expected: str, found: object, tmp_path: Path
) -> None:
    one, other = parties(tmp_path, name, head, {}, changes)
    error = refused("merge", one, other, "-o", tmp_path / "out")
    found = f"found ({found}, 12) in {other}" if isinstance(found, int) else found
    assert error.startswith(f"refused: {where.format(b=other)}: expected "), error
    assert f"{expected} as in {one}" in error.replace("parameters as", "parameters as in") and str(found) in error, (
        error
    )
    assert not (tmp_path / "out").exists()


def shorten(path: Path, head: str, positions: int = 20, tokens: int = 30) -> None:
    """Rewrite a directory with the first rows of its tables alone, and a tokenizer for the rest."""
    model = getattr(transformers, head).from_pretrained(path)
    config = model.config
    config.max_position_embeddings, config.vocab_size = positions, tokens
    short = getattr(transformers, head)(config)
    rows = {name: t[: len(short.state_dict()[name])] if t.ndim else t for name, t in model.state_dict().items()}
    short.load_state_dict(rows)
    short.save_pretrained(path)
    write_tokenizer(path, [f"token {row}" for row in range(tokens)])


def write_tokenizer(path: Path, tokens: list[str], listed: bool = False) -> None:
    """The file of a fast tokenizer, whose last token was added and whose others are a table or a list with scores."""
    vocab = [[token, 0.0] for token in tokens[:-1]] if listed else {token: row for row, token in enumerate(tokens[:-1])}
    table = {"model": {"vocab": vocab}, "added_tokens": [{"id": len(tokens) - 1, "content": tokens[-1]}]}
    (path / "tokenizer.json").write_text(json.dumps(table))


@pytest.mark.parametrize("name", sorted(_POSITIONS_BY_ROW))
def test_the_first_rows_of_a_table_mean_the_same_in_a_longer_one(name: str, generator: torch.Generator) -> None:
    long, short = EXAMPLES[name].model(), EXAMPLES[name].model(max_position_embeddings=12, vocab_size=25)
    cut = {n: t[: len(short.state_dict()[n])] if t.ndim else t for n, t in long.state_dict().items()}
    tables = [n for n, t in cut.items() if t.shape != long.state_dict()[n].shape]
    assert len(tables) == 2 and any(n.endswith(("position_embeddings.weight", "wpe.weight")) for n in tables)
    inputs = {"input_ids": torch.randint(2, 25, (3, 9), generator=generator)}
    assert relative_change(outputs(long, long.state_dict(), inputs), outputs(short, cut, inputs)) < 1e-6


@pytest.mark.parametrize("case", ["gpt2 tied", "bert tied"])
def test_a_longer_table_goes_on_where_the_shorter_ends(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    name, head, changes, stream = CASES[case]
    paths = copies(tmp_path, case)
    for path, positions, tokens in zip(paths, (20, 9, 14), (30, 27, 30), strict=True):
        shorten(path, head, positions, tokens)
    result = run("merge", *paths, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0 and f"residual stream: {stream}" in result.stdout, result.output
    assert f"(20, 12), (9, 12) in {paths[1]}" in result.stdout.split("each over the models that have it: ")[1]
    loaded = getattr(transformers, head).from_pretrained(tmp_path / "out").eval()
    original = EXAMPLES[name].model(head, **changes)
    # At every position and for every token the copies are one model: those that only the first one knows, too.
    inputs = {"input_ids": torch.stack([torch.randperm(30, generator=generator)[:20], torch.arange(10, 30)])}
    expected = outputs(original, original.state_dict(), inputs)
    assert relative_change(expected, outputs(loaded, loaded.state_dict(), inputs)) < 1e-3


def test_each_row_is_the_mean_of_the_models_that_have_it(tmp_path: Path) -> None:
    head = "BertForMaskedLM"
    paths = parties(tmp_path, "bert", head, {}, {}, {})
    for path, positions, tokens in zip(paths, (20, 9, 14), (30, 27, 30), strict=True):
        shorten(path, head, positions, tokens)
    options = [*QUICK, "--no-residual", "--weights", "1,2,1"]
    assert run("merge", *paths, "-o", tmp_path / "out", *options).exit_code == 0
    one, two, three, merged = (weights(path) for path in (*paths, tmp_path / "out"))
    table = "bert.embeddings.position_embeddings.weight"
    rows = [one[table][:9] / 4 + two[table] / 2 + three[table][:9] / 4, (one[table][9:14] + three[table][9:]) / 2]
    torch.testing.assert_close(merged[table], torch.cat([*rows, one[table][14:]]))
    for table in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        shared = one[table][:27] / 4 + two[table] / 2 + three[table][:27] / 4
        torch.testing.assert_close(merged[table], torch.cat([shared, (one[table][27:] + three[table][27:]) / 2]))
    assert run("merge", *paths, "-o", tmp_path / "first", *QUICK, "--weights", "0,1,0", "--no-residual").exit_code == 0
    # Rows beyond those of the only model that counts are the equal mean of the models that have them.
    second, table = weights(tmp_path / "first"), "cls.predictions.bias"
    torch.testing.assert_close(second[table], torch.cat([two[table], (one[table][27:] + three[table][27:]) / 2]))

    # What the tokenizers do not vouch for, another order, learning, and a line between the two are refused.
    backwards = refused("merge", *reversed(paths), "-o", tmp_path / "no")
    assert "expected shape (14, 12) as in" in backwards or "expected shape (27, 12) as in" in backwards
    assert "first, which has the longer table" in refused("merge", paths[1], paths[0], "-o", tmp_path / "no")
    save_file({"input_ids": torch.ones(9, 3).long(), "labels": torch.ones(9, 3).long()}, tmp_path / "data.safetensors")
    data = ["--data", tmp_path / "data.safetensors"]
    sentence = (
        "learn: expected tables of one length, found bert.embeddings.position_embeddings.weight (20, 12), (9, 12)"
    )
    assert sentence in refused("merge", *paths, "-o", tmp_path / "no", *data, "--learn", "1")
    assert "expected alike in both models, found (20, 12), (9, 12)" in refused(
        "barrier", *paths[:2], "-o", tmp_path / "no", *data
    )
    tokens = [f"token {row}" for row in range(27)]
    write_tokenizer(paths[1], tokens, listed=True)
    assert run("merge", *paths, "-o", tmp_path / "listed", *options).exit_code == 0
    sentence = f"found (27, 12) in {paths[1]}; merge models of one vocabulary, for no tokenizer.json of each gives all"
    write_tokenizer(paths[1], tokens[:-1])
    assert sentence in refused("merge", *paths, "-o", tmp_path / "no")
    write_tokenizer(paths[1], tokens[::-1])
    assert "expected token 0 'token 0' as in" in refused("merge", *paths, "-o", tmp_path / "no")
    for damaged in ("[]", "[" * 100_000, '{"model": {"vocab": {"a": 1e999}}, "added_tokens": []}'):
        (paths[1] / "tokenizer.json").write_text(damaged)
        assert "tokenizer.json: expected a tokenizer, found" in refused("merge", *paths, "-o", tmp_path / "no")
    for path in paths:
        (path / "tokenizer.json").unlink()
    assert sentence in refused("merge", *paths, "-o", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_tokens_and_labels_have_to_mean_the_same(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertForMaskedLM", {}, {})
    words = [f"w{row}" for row in range(30)]
    command = ("merge", one, other, "-o", tmp_path / "out", *QUICK)
    write_tokenizer(one, words)
    assert run(*command).exit_code == 0
    write_tokenizer(other, words, listed=True)
    assert run(*command, "--force").exit_code == 0
    write_tokenizer(other, [*words[:7], "x", *words[8:]])
    assert f"{other}: expected token 7 'w7' as in {one}, found 'x'; merge" in refused(*command, "--force")

    labels = {"id2label": {0: "cat", 1: "dog"}}, {"id2label": {0: "dog", 1: "cat"}}
    one, other = parties(tmp_path / "labels", "vit", "ViTForImageClassification", *labels)
    assert f"{other}: expected label 'cat' at 0 as in {one}, found it at 1" in refused(
        "merge", one, other, *command[3:], "--force"
    )


def test_the_rows_of_a_classifier_are_no_vocabulary(tmp_path: Path) -> None:
    head = "BertForSequenceClassification"
    changes = [{"vocab_size": rows, "num_labels": rows} for rows in (32, 30)]
    one, other = parties(tmp_path, "bert", head, *changes)
    for path, rows in ((one, 32), (other, 30)):
        write_tokenizer(path, [f"token {row}" for row in range(rows)])
    result = run("merge", one, other, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, result.output
    assert f"kept from {one}, not merged: classifier.bias ((32,), (30,) in {other}), classifier.weight" in result.stdout


def test_a_buffer_of_another_length_does_not_keep_the_stream_from_moving(tmp_path: Path) -> None:
    lengths = [{"max_position_embeddings": length} for length in (24, 16)]
    paths = parties(tmp_path, "roberta", "RobertaForSequenceClassification", *lengths)
    for path, length in zip(paths, (24, 16), strict=True):
        rewrite(path, lambda t, n=length: {**t, "roberta.embeddings.position_ids": torch.arange(n)[None]})  # type: ignore[misc]
    result = run("merge", *paths, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, result.output
    assert "residual stream: aligned (permutation)" in result.stdout
    assert f"kept from {paths[0]}, not merged: roberta.embeddings.position_ids" in result.stdout


def test_settings_that_change_the_function_are_said(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertModel", {}, {"hidden_act": "relu", "hidden_dropout_prob": 0.3})
    result = run("merge", one, other, "-o", tmp_path / "out", *QUICK)
    assert result.exit_code == 0
    assert f"note: {other} has hidden_act 'relu' instead of 'gelu'; the configuration of {one} is used" in result.stdout


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertModel", {}, {})
    out = tmp_path / "out"
    assert "expected at least two to merge, found 1" in refused("merge", one, "-o", out)
    assert "expected a model directory or a config.json, found nothing" in refused(
        "merge", one, tmp_path / "x", "-o", out
    )
    name = "encoder.layer.0.output.dense.weight"
    rewrite(other, lambda tensors: {**tensors, name: tensors[name] * torch.nan})
    assert f"{name}: expected finite values in the model {other}, found NaN" in refused("merge", one, other, "-o", out)
    rewrite(other, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    assert f"{name}: expected by specs/bert.toml, not found" in refused("merge", one, other, "-o", out)
    (other / "model.safetensors").write_bytes(b"damaged")
    assert f"{other / 'model.safetensors'}: expected a safetensors file" in refused("merge", one, other, "-o", out)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "index.json: expected an index of safetensors files, found" in refused("merge", one, other, "-o", out)
    (other / "model.safetensors.index.json").unlink()
    assert f"{other}: expected a model directory with safetensors files, found none" in refused(
        "merge", other, one, "-o", out
    )
    (other / "config.json").unlink()
    assert f"{other}: expected a transformers model directory" in refused("merge", other, one, "-o", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_directory_that_is_there_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertModel", {}, {})
    out = tmp_path / "deep" / "out"
    assert run("merge", one, other, "-o", out, *QUICK).exit_code == 0
    merged = weights(out)
    (out / "vocab.txt").write_text("of the old model")
    assert f"{out}: expected no such directory, or an empty one" in refused("merge", one, other, "-o", out)
    assert run("merge", one, other, "-o", out, *QUICK, "--weights", "3,1", "--force").exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert not torch.equal(weights(out)["pooler.dense.bias"], merged["pooler.dense.bias"])
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert "found one of the models" in refused("merge", one, other, "-o", other, "--force")
    (out / "checkpoint-1").mkdir()
    assert "found checkpoint-1 in it" in refused("merge", one, other, "-o", out, "--force")
    (out / "checkpoint-1").rmdir()
    (out / "notes.csv").write_text("not of the model")
    assert "expected a model directory to replace, found notes.csv in it" in refused(
        "merge", one, other, "-o", out, "--force"
    )
    assert (out / "notes.csv").exists()
    assert "found one of the models" in refused("merge", one, other, "-o", one / "sub")
    assert "expected a model directory to replace" in refused("merge", one, other, "-o", tmp_path, "--force")
    assert "found a file" in refused("merge", one, other, "-o", out / "config.json", "--force")
    assert "found the one to work in" in refused("merge", one, other, "-o", "")


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = parties(tmp_path, "bert", "BertModel", {}, {})
    assert run("merge", one, other, "-o", tmp_path / "out", *QUICK).exit_code == 0
    merged = weights(tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    def stuck(path: Path, target: Path, rename: Any = Path.rename) -> Path:
        if path.suffix == ".new":
            raise OSError("no space left on device")
        return rename(path, target)

    for owner, name, broken in ((weights_module, "save_file", full), (Path, "rename", stuck)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            for target in ("out", "new", "deep/er"):
                error = refused("merge", one, other, "-o", tmp_path / target, *QUICK, "--weights", "3,1", "--force")
                assert f"{tmp_path / target}: expected to write a model there, found: no space left" in error
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]
        assert_same(weights(tmp_path / "out"), merged)


def test_weights_and_layers_are_respected(tmp_path: Path) -> None:
    one, other = parties(tmp_path, "bert", "BertForSequenceClassification", {}, {})
    first, second = weights(one), weights(other)
    options = [*QUICK, "--no-residual", "--weights", "3,1"]
    assert run("merge", one, other, "-o", tmp_path / "out", *options).exit_code == 0
    assert run("merge", one, other, "-o", tmp_path / "half", *options, "--layers", "0").exit_code == 0
    merged, half = weights(tmp_path / "out"), weights(tmp_path / "half")
    plain = {name: 0.75 * first[name] + 0.25 * second[name] for name in first}
    later = {name for name in first if ".layer.1." in name}
    for name in ("classifier.weight", "bert.pooler.dense.bias", "bert.embeddings.LayerNorm.weight"):
        torch.testing.assert_close(merged[name], plain[name])
    for name in later:
        torch.testing.assert_close(half[name], plain[name])
    assert max(float((merged[name] - plain[name]).abs().max()) for name in later) > 1e-2
    assert_same({n: half[n] for n in half if n not in later}, {n: merged[n] for n in merged if n not in later})
    for wrong, sentence in [
        (["--weights", "1,2,3"], "weights: expected 2, one a model, found 3"),
        (["--weights", "1,x"], "weights: expected numbers with commas between, such as 2,1, found '1,x'"),
        (["--layers", "7"], "layers: [7] not in the model"),
        (["--anchor", "global"], "anchor: expected one of medoid, consensus, progressive, tree, found 'global'"),
    ]:
        assert sentence in refused("merge", one, other, "-o", tmp_path / "no", *wrong)


def test_losses_are_measured_on_examples(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = copies(Path(), "vit")
    model = EXAMPLES["vit"].model("ViTForImageClassification")
    data = examples_of(model, tmp_path / "data.safetensors", generator)
    result = run("merge", *paths, "-o", tmp_path / "out", *QUICK, "--data", data, "--batch-size", "7")
    assert result.exit_code == 0, result.output
    own = _row(result.stdout, str(paths[0]))
    assert own[1] == "100.0%"
    assert float(_row(result.stdout, "merged")[0]) == pytest.approx(float(own[0]), abs=1e-3)
    assert float(_row(result.stdout, "plain mean")[0]) > float(own[0]) + 0.01
    assert "0.0000 of the merged model" in result.stdout.replace("-0.0000", "0.0000")

    changed = tmp_path / "changed.safetensors"
    arguments = f"expected in {changed} are the arguments of ViTForImageClassification: pixel_values"
    for change, sentence in [
        (lambda t: {"pixel_values": t["pixel_values"]}, f"labels: expected in {changed}, found pixel_values"),
        (lambda t: {"images": t["pixel_values"], "labels": t["labels"]}, f"images: {arguments}"),
        (lambda t: {**t, "labels": t["labels"][:3].clone()}, "at least one, found labels 3, pixel_values 40"),
        (lambda t: {**t, "pixel_values": t["pixel_values"] / 0}, "pixel_values: expected finite real numbers in"),
        (lambda t: {**t, "pixel_values": t["pixel_values"] * 1j}, "found torch.complex64; take these examples out"),
        (lambda t: {**t, "labels": t["labels"] + 90}, "found labels (40,), pixel_values (40, 1, 8, 8): Target 9"),
    ]:
        save_file(change(load_file(data)), changed)
        assert sentence in refused("merge", *paths, "-o", tmp_path / "no", "--data", changed)
    assert "expected a safetensors file of examples" in refused(
        "merge", *paths, "-o", tmp_path / "no", "--data", tmp_path / "x"
    )
    bare = copies(tmp_path / "more", "bert bare")
    assert "labels: expected among the arguments of BertModel" in refused(
        "merge", *bare, "-o", tmp_path / "no", "--data", data
    )
    assert not (tmp_path / "no").exists()


def test_learning_lowers_the_loss_on_examples_kept_aside(tmp_path: Path, generator: torch.Generator) -> None:
    one, other, third = parties(tmp_path, "vit", "ViTForImageClassification", {}, {}, {})
    data = examples_of(EXAMPLES["vit"].model("ViTForImageClassification"), tmp_path / "data.safetensors", generator)
    common = ["merge", one, other, third, "--data", data, "--batch-size", "8"]
    found = {}
    learn = ["--learn", "60"]
    for out, options in (("nearest", ["--anchor", "tree"]), ("learned", learn), ("again", learn)):
        result = run(*common, "-o", tmp_path / out, *options)
        assert result.exit_code == 0 and "anchor tree" in result.stdout, result.output
        loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / out)
        found[out] = score(loaded.eval(), loaded.state_dict(), [load_file(data)]).loss
    assert found["learned"] < 0.9 * found["nearest"]
    assert_same(weights(tmp_path / "again"), weights(tmp_path / "learned"))
    steps = re.findall(
        r"learned: (\d+) steps, loss ([\d.]+) before, ([\d.]+) after on the 8 examples kept aside; "
        r"saw (\d+) examples, ([\d.]+) epochs of --data\n",
        result.stdout,
    )
    assert len(steps) == 2
    for taken, before, after, seen, epochs in steps:
        # Each step sees 8 examples, and so does each batch of the looks at the loss, which are four batches long.
        assert 45 <= int(taken) <= 60 and 8 * int(taken) < int(seen) <= 8 * (int(taken) + 12)
        assert float(epochs) == pytest.approx(int(seen) / 40, abs=0.01) and before != after
    # What was printed for the last alignment is what the model that was written has.
    assert f"│ merged │ {steps[-1][2]}" in re.sub(" +", " ", result.stdout)


def test_examples_without_labels_teach_nothing(tmp_path: Path, generator: torch.Generator) -> None:
    one, other = parties(tmp_path, "vit", "ViTForImageClassification", {}, {})
    data = examples_of(EXAMPLES["vit"].model("ViTForImageClassification"), tmp_path / "data.safetensors", generator)
    some = load_file(data)
    save_file({**some, "labels": torch.where(torch.arange(40) % 3 == 0, -100, some["labels"])}, data)
    learn = ["--learn", "2", "--batch-size", "1", "--data", data]
    result = run("merge", one, other, "-o", tmp_path / "out", *learn)
    assert result.exit_code == 0 and "learned: 2 steps" in result.stdout, result.output


def test_nothing_is_written_where_the_last_measurement_fails(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = parties(tmp_path, "vit", "ViTForImageClassification", {}, {})
    data = examples_of(EXAMPLES["vit"].model("ViTForImageClassification"), tmp_path / "data.safetensors", generator)
    calls = iter([score] * 3)

    def full(*arguments: Any) -> Any:
        try:
            return next(calls)(*arguments)
        except StopIteration:
            raise torch.OutOfMemoryError("no memory left") from None

    monkeypatch.setattr("rotfed.checkpoints.measuring.score", full)
    assert "no memory left" in refused("merge", one, other, "-o", tmp_path / "out", *QUICK, "--data", data)
    assert not (tmp_path / "out").exists()


def test_learning_that_cannot_be_is_refused(tmp_path: Path, generator: torch.Generator) -> None:
    one, other = parties(tmp_path, "vit", "ViTForImageClassification", {}, {})
    data = examples_of(EXAMPLES["vit"].model("ViTForImageClassification"), tmp_path / "data.safetensors", generator)
    learn = ["merge", one, other, "-o", tmp_path / "no", "--learn", "3"]
    assert "learn: expected examples to learn from, found none; add --data FILE" in refused(*learn)
    for wrong, sentence in [
        (["--anchor", "medoid"], "anchor: expected one of progressive, tree, found 'medoid'"),
        (["--layers", "0"], "learn: expected all layers, found --layers 0"),
        (["--weights", "1,0"], "learn: expected models that all count, found a weight of zero"),
    ]:
        assert sentence in refused(*learn, "--data", data, *wrong)
    good = load_file(data)
    # The one label that is no class is among those to learn on.
    for odd, sentence in [
        ({name: tensor[:4].clone() for name, tensor in good.items()}, "learn: expected at least 5 examples"),
        ({**good, "labels": torch.where(torch.arange(40) == 0, 90, good["labels"])}, "ViTForImageClassification: exp"),
    ]:
        save_file(odd, data)
        assert sentence in refused(*learn, "--data", data, "--batch-size", "8")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("case", ["vit", "gpt2 tied", "llama tied", "llama", "bert tied", "t5", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_learning_finds_the_parameters_in_memory(
    case: str, dtype: torch.dtype, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = copies(Path(), case, dtype, 2)
    data = tmp_path / "data.safetensors"
    model = getattr(transformers, CASES[case][1]).from_pretrained(paths[0], dtype=torch.float32).eval()
    tokens = torch.randint(2, 25, (10, 6), generator=generator)
    if case == "vit":
        examples_of(model, data, generator)
    else:
        save_file({"input_ids": tokens, "labels": tokens.clone()}, data)
    arguments = ["merge", *paths, "-o", tmp_path / "out", "--learn", "2", "--data", data]
    if case == "mixtral":
        assert "experts.gate_up_proj: expected in" in refused(*arguments)
        return
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    merged = getattr(transformers, CASES[case][1]).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    losses = [score(m, m.state_dict(), [load_file(data)]).loss for m in (model, merged)]
    # Copies are in one frame from the start, and learning led them nowhere else.
    assert losses[1] < losses[0] + (1e-3 if dtype == torch.float64 else 1e-2)
    (printed,) = re.findall(r"learned: 2 steps, loss ([\d.]+) before", result.stdout)
    assert float(printed) == pytest.approx(float(_row(result.stdout, str(paths[0]))[0]), abs=0.02)


def test_the_barrier_between_copies_goes_away(tmp_path: Path, generator: torch.Generator) -> None:
    one, other, _ = copies(tmp_path, "vit")
    data = examples_of(EXAMPLES["vit"].model("ViTForImageClassification"), tmp_path / "data.safetensors", generator)
    out = tmp_path / "results"
    result = run("barrier", one, other, "--data", data, "-o", out, "--points", "5")
    assert result.exit_code == 0, result.output
    found = json.loads((out / "barrier.json").read_text())
    assert found["config"]["points"] == 5 and found["config"]["examples"] == 40 and found["config"]["residual"]
    assert found["places"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    before, after = found["before"], found["after"]
    assert before["barrier"] > 0.01 and after["barrier"] == pytest.approx(0, abs=1e-4)
    assert before["losses"][0] == pytest.approx(after["losses"][0], abs=1e-5)
    assert before["losses"][-1] == pytest.approx(after["losses"][-1], abs=1e-5)
    assert found["distance"]["after"] < 1e-3 < found["distance"]["before"]
    assert f"barrier: {before['barrier']:.4f} before alignment, {after['barrier']:.4f} after" in result.stdout
    assert (out / "barrier.png").read_bytes().startswith(b"\x89PNG")
    half = run("barrier", one, other, "--data", data, "-o", out, "--points", "3", "--no-residual")
    assert half.exit_code == 0 and json.loads((out / "barrier.json").read_text())["after"]["barrier"] > 0.001


def test_a_barrier_takes_like_models_and_matplotlib(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = parties(tmp_path, "vit", "ViTForImageClassification", {}, {"num_labels": 7})
    data = examples_of(EXAMPLES["vit"].model("ViTForImageClassification"), tmp_path / "data.safetensors", generator)
    common = ["--data", data, "-o", tmp_path / "out"]
    assert "classifier.bias: expected alike in both models, found (2,), (7,)" in refused("barrier", one, other, *common)
    assert "points: expected at least 3" in refused("barrier", one, one, *common, "--points", "2")
    (tmp_path / "shown" / "barrier.png").mkdir(parents=True)
    assert "barrier.png: expected" in refused("barrier", one, one, *common[:2], "-o", tmp_path / "shown")
    assert not (tmp_path / "shown" / "barrier.json").exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'rotfed[plots]'" in refused("barrier", one, one, *common)
    assert not (tmp_path / "out").exists()
