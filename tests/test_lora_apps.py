"""The apps with LoRA: what travels, what is saved, and that it is what was measured."""

import copy
import sys
import warnings
from collections.abc import Iterator
from logging import Handler
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
    ViTModel,
)
from transformers.utils import logging

import client.app
import server.app
from client.adapters import base_config, build_trained
from client.data import load_corpus
from client.models import build_encoder, build_examples
from client.settings import ConfigError, parse_settings
from client.training import evaluate, seed_everything, train
from rotfed.errors import AlignmentError
from server.grid import RoundFailedError
from simulations.bench.runs import DEFAULTS
from simulations.grid import InProcessGrid

CPU = torch.device("cpu")
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LOADERS = {
    "text": AutoModelForSequenceClassification,
    "language": AutoModelForCausalLM,
    "image": AutoModelForImageClassification,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two classes, or authors, told apart by their words."""
    for name, words in (("animals", "the cat and the dog"), ("plants", "roses, oaks; mosses")):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for number in range(30):
            (tmp_path / "texts" / name / f"{number:02}.txt").write_text(f"{words} {number}")
    return tmp_path / "texts"


def pretrained(task: str, folder: Path, **changes: Any) -> str:
    """The folder of a small model that is no classifier yet, as pretrained ones are not."""
    torch.manual_seed(3)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    model: Any
    if task == "text":
        model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=24, **WIDTHS), **changes)
    elif task == "language":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **WIDTHS))
    else:
        model = ViTModel(ViTConfig(image_size=8, patch_size=4, num_channels=1, **WIDTHS), add_pooling_layer=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Recorded(InProcessGrid):
    """Keeps every message and reply."""

    messages: tuple[Any, ...] = ()

    def push_messages(self, messages: Any) -> Any:
        sent = list(messages)
        self.messages += tuple(sent)
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Any) -> Any:
        for reply in super().pull_messages(message_ids):
            self.messages += (copy.deepcopy(reply),)
            yield reply


def config_of(texts: Path, task: str = "text", **changes: Any) -> dict[str, Any]:
    data = {"dataset": "digits", "train-examples": 80} if task == "image" else {"dataset": str(texts)}
    quick = {"num-server-rounds": 2, "local-epochs": 1, "batch-size": 8, "learning-rate": 0.01, "max-length": 16}
    named = {key.replace("_", "-"): value for key, value in changes.items()}
    return {**DEFAULTS, **quick, "task": task, "lora-rank": 2, **data, **named}


def federate(config: dict[str, Any], own: dict[int, dict[str, Any]] | None = None) -> Recorded:
    """Run the ServerApp with two nodes, whose run configs may differ by partition."""
    grid = Recorded(client.app.app, 2, config)
    for partition, changes in (own or {}).items():
        grid.contexts[101 + partition].run_config = {**config, **changes}
    server.app.main(grid, Context(0, 1, {}, RecordDict(), config))
    return grid


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rounds that runs write to their results."""
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(server.app.Recorder, "add_round", lambda self, entry: written.append(dict(entry)))
    return written


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, int]]:
    """Every client's model before and after its training, and how many examples it had."""
    found: list[tuple[Any, Any, int]] = []

    def keep(model: Any, encode: Any, examples: Any, **keywords: Any) -> float:
        before = copy.deepcopy(model)
        loss = train(model, encode, examples, **keywords)
        found.append((before, copy.deepcopy(model), len(examples)))
        return loss

    monkeypatch.setattr(client.app, "train_model", keep)
    return found


def measured(config: dict[str, Any], model: Any) -> tuple[float, float]:
    settings = parse_settings(config)
    corpus = load_corpus(settings)
    encode = build_encoder(settings, corpus, model.config)
    found = evaluate(model, encode, build_examples(settings, corpus, corpus.test), batch_size=8, device=CPU)
    return found.loss, found.accuracy


def loaded(task: str, folder: str, labels: int) -> Any:
    torch.manual_seed(99)  # what the folder lacks is new
    return LOADERS[task].from_pretrained(folder, **({} if task == "language" else {"num_labels": labels}))


@pytest.mark.parametrize(
    ("task", "labels", "changes"),
    [
        ("text", 2, {}),
        ("text", 2, {"align": False, "lora_targets": "query, value", "strategy": "fedprox"}),
        ("text", 2, {"aggregation": "rotation", "evaluate_clients": True, "strategy": "fedadam"}),
        ("language", 0, {"lora_targets": "q_proj,embed_tokens"}),
        ("image", 10, {"fraction_evaluate": 1.0}),
    ],
)
def test_adapters_alone_are_trained_sent_and_saved(
    tmp_path: Path,
    texts: Path,
    rounds: list[dict[str, Any]],
    trained: list[tuple[Any, Any, int]],
    caplog: pytest.LogCaptureFixture,
    task: str,
    labels: int,
    changes: dict[str, Any],
) -> None:
    base, saved = pretrained(task, tmp_path / "base"), tmp_path / "adapter"
    config = config_of(texts, task, model=base, save_model=str(saved), **changes)
    grid = federate(config)
    assert caplog.messages[-1] == f"Saved an adapter, of {base}, in {saved}"
    sent = {name for message in grid.messages for arrays in message.content.array_records.values() for name in arrays}
    assert sent and all(".lora_" in name or ".classifier." in name for name in sent)
    assert any(".classifier." in name for name in sent) == (task != "language")
    for before, after, _ in trained:
        start = dict(before.named_parameters())
        moved = {name for name, value in after.named_parameters() if not torch.equal(value, start[name])}
        assert moved and all("lora_" in name or "classifier.modules_to_save" in name for name in moved)
    losses = [entry["loss"] for entry in rounds]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert set(load_file(saved / "adapter_model.safetensors")) == sent
    model = PeftModel.from_pretrained(loaded(task, base, labels), saved)
    assert measured(config, model) == (pytest.approx(losses[2], rel=1e-5), rounds[2]["accuracy"])
    told = AutoConfig.from_pretrained(saved / "model_config.json")
    model = LOADERS[task].from_pretrained(saved, config=told)
    assert measured(config, model) == (pytest.approx(losses[2], rel=1e-5), rounds[2]["accuracy"])
    assert task == "language" or told.id2label == dict(enumerate(load_corpus(parse_settings(config)).class_names))
    assert task == "image" or (saved / "tokenizer_config.json").exists()
    if config["align"]:
        report = rounds[2]["alignment"]
        assert report["aggregation"] == (config["aggregation"] or "optimal") and set(report["ranks"].values()) == {2}
        assert 0 < report["error"] <= report["mean_error"] or config["aggregation"]


@pytest.mark.parametrize("aggregation", ["exact", "exact-mean", "stack"])
def test_a_saved_whole_model_has_the_mean_of_what_clients_computed(
    tmp_path: Path, texts: Path, rounds: list[dict[str, Any]], trained: list[tuple[Any, Any, int]], aggregation: str
) -> None:
    saved = tmp_path / "whole"
    config = config_of(
        texts,
        model=pretrained("text", tmp_path / "base"),
        aggregation=aggregation,
        fraction_evaluate=1.0,
        save_model=str(saved),
    )
    grid = federate(config)
    model = loaded("text", str(saved), 2)
    assert measured(config, model) == (pytest.approx(rounds[2]["loss"], rel=1e-5), rounds[2]["accuracy"])
    # The last round's clients trained on the first one's residual.
    clients = [after.merge_and_unload().state_dict() for _, after, _ in trained[2:]]
    weights = torch.tensor([float(examples) for _, _, examples in trained[2:]])
    for name, value in model.state_dict().items():
        mean = sum(share * each[name] for share, each in zip(weights / weights.sum(), clients, strict=True))
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    # Nodes measure the model that the server measures.
    assert {m.metadata.message_type for m in grid.messages if "base-delta" in m.content} == {"train", "evaluate"}


def test_what_a_checkpoint_lacks_is_trained_and_saved_as_a_whole(
    tmp_path: Path, texts: Path, rounds: list[dict[str, Any]]
) -> None:
    base, saved = pretrained("text", tmp_path / "base", add_pooling_layer=False), tmp_path / "adapter"
    config = config_of(texts, model=base, save_model=str(saved))
    federate(config)
    assert "base_model.model.bert.pooler.dense.weight" in load_file(saved / "adapter_model.safetensors")
    told = AutoConfig.from_pretrained(saved / "model_config.json")
    for model in (
        PeftModel.from_pretrained(loaded("text", base, 2), saved),
        AutoModelForSequenceClassification.from_pretrained(saved, config=told),
    ):
        assert measured(config, model) == (pytest.approx(rounds[2]["loss"], rel=1e-5), rounds[2]["accuracy"])


def test_a_head_is_told_from_a_backbone_that_its_model_does_not_name(
    tmp_path: Path, texts: Path, rounds: list[dict[str, Any]]
) -> None:
    vision = {**WIDTHS, "image_size": 8, "patch_size": 4, "num_channels": 1}
    SiglipModel(SiglipConfig(vision_config=vision, text_config={**WIDTHS, "vocab_size": 9})).save_pretrained(tmp_path)
    # Beside what is adapted it has an attention that a classifier does not use, and to which nothing pulls.
    saved = tmp_path / "adapter"
    federate(config_of(texts, "image", model=str(tmp_path), strategy="fedprox", proximal_mu=0.1, save_model=str(saved)))
    assert rounds[2]["loss"] < rounds[0]["loss"]
    kept = load_file(saved / "adapter_model.safetensors")
    assert {name for name in kept if ".lora_" not in name} == {
        f"base_model.model.classifier.{name}" for name in ("weight", "bias")
    }


def test_a_decoder_of_texts_needs_a_token_to_pad_with(
    tmp_path: Path, texts: Path, rounds: list[dict[str, Any]]
) -> None:
    base, saved = pretrained("language", tmp_path / "base"), tmp_path / "adapter"
    assert AutoConfig.from_pretrained(base).pad_token_id is None
    config = config_of(texts, model=base, save_model=str(saved))
    federate(config)
    told = AutoConfig.from_pretrained(saved / "model_config.json")
    model = AutoModelForSequenceClassification.from_pretrained(saved, config=told)
    assert measured(config, model) == (pytest.approx(rounds[2]["loss"], rel=1e-5), rounds[2]["accuracy"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(base)
    with pytest.raises(ConfigError, match="expected a tokenizer with a padding token, found none"):
        federate(config_of(texts, model=base))


def test_a_folder_with_an_adapter_beside_its_model_is_refused(tmp_path: Path, texts: Path) -> None:
    base = pretrained("text", tmp_path / "base")
    get_peft_model(loaded("text", base, 2), LoraConfig(target_modules=["query"])).save_pretrained(base)
    for rank in (0, 2):
        with pytest.raises(ConfigError, match=r"holds an adapter beside its weights: expected one model; merge it"):
            federate(config_of(texts, model=base, lora_rank=rank))


def changed(base: str, folder: Path, name: str) -> str:
    """A copy of a model of texts with another tensor of a name, or without it."""
    pretrained("text", folder)
    params = load_file(Path(base) / "model.safetensors")
    tensor = params.pop(name)
    if name.startswith("encoder"):
        params[name] = tensor + 0.01
    save_file(params, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_node_with_another_base_model_is_refused(tmp_path: Path, texts: Path, rounds: list[dict[str, Any]]) -> None:
    base = pretrained("text", tmp_path / "base")
    other = changed(base, tmp_path / "other", "encoder.layer.1.output.dense.bias")
    config = config_of(texts, model=base, num_server_rounds=1)
    federate(config, {1: {"model": other}})
    assert list(rounds[1]["alignment"]["ranks"]) in ([101], ["101"])
    message = r"all 2 clients failed; the first said: .*run config model = .*other weights here than at the server"
    with pytest.raises(RoundFailedError, match=message):
        federate(config, {key: {"model": other} for key in range(2)})


def test_the_digest_tells_base_weights_and_nothing_else(tmp_path: Path, texts: Path) -> None:
    base = pretrained("text", tmp_path / "base", add_pooling_layer=False)
    twin = pretrained("text", tmp_path / "twin", add_pooling_layer=False)

    def digest(model: str, seed: int) -> dict[str, str]:
        settings = parse_settings(config_of(texts, model=model))
        seed_everything(seed)
        return base_config(build_trained(settings, load_corpus(settings)))

    assert digest(base, 1) == digest(base, 2) == digest(twin, 3)
    assert digest(changed(base, tmp_path / "other", "encoder.layer.0.output.dense.bias"), 1) != digest(base, 1)
    settings = parse_settings(config_of(texts, model=base))
    model = build_trained(settings, load_corpus(settings))
    found = set()
    for mean in (0.0, 0.1):
        # As a batch norm has its statistics.
        model.base_model.register_buffer("running_mean", torch.tensor([mean]))
        found.add(str(base_config(model)))
    assert len(found) == 2


def test_a_checkpoint_that_lacks_more_than_whole_modules_is_refused(tmp_path: Path, texts: Path) -> None:
    base = pretrained("image", tmp_path / "base")
    params = load_file(Path(base) / "model.safetensors")
    del params["embeddings.cls_token"]
    save_file(params, Path(base) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights for vit.embeddings.cls_token, which no adapter can hold"):
        federate(config_of(texts, "image", model=base))


@pytest.fixture
def talkative() -> Iterator[list[str]]:
    """What transformers logs as it does by default, which other tests silence."""
    said: list[str] = []
    handler = Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    logging.add_handler(handler)
    yield said
    logging.remove_handler(handler)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def test_nodes_are_quiet_as_they_load_and_leave_transformers_as_it_was(
    tmp_path: Path, texts: Path, talkative: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(texts, model=pretrained("text", tmp_path / "base"))
    context = InProcessGrid(client.app.app, 1, config).contexts[101]
    size = {"n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2Model(GPT2Config(vocab_size=259, bos_token_id=0, eos_token_id=1, **size)).save_pretrained(
        tmp_path / "transposed"
    )
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "transposed")
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (config["model"], str(tmp_path / "transposed")):
            context.run_config = {**config, "model": model}
            client.app._initialise(context, 1)
    assert not talkative and not capsys.readouterr().err
    context.run_config = {**config, "model": "/nowhere"}
    with pytest.raises(ConfigError, match="no such folder"):
        client.app._initialise(context, 1)
    assert logging.get_verbosity() == logging.WARNING and logging.is_progress_bar_enabled()
    loaded("text", str(config["model"]), 2)
    assert any("LOAD REPORT" in text for text in talkative) and "Loading weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert-small"}, ConfigError, "lora-rank = 2 adapts a pretrained model, and model = 'bert-small'"),
        ({"model": "vit-small"}, ConfigError, "lora-rank = 2 adapts a pretrained model, and model = 'vit-small'"),
        ({"model": "/nowhere"}, ConfigError, "no such folder.* transformers' AutoModelForSequenceClassification$"),
        (
            {"lora_targets": "query,valeu"},
            ConfigError,
            r"'query,valeu' does not fit model .* \(no module to adapt is named valeu\)",
        ),
        (
            {"lora_targets": "q_proj"},
            ConfigError,
            "lora-targets = 'q_proj' does not fit model .* such as 'query,key,value,dense', or",
        ),
        ({"evaluate_clients": True}, ConfigError, "needs each client's own adapter"),
        ({"aggregation": "average"}, ConfigError, "must be one of '', 'mean'"),
        ({"lora_rank": 0, "aggregation": "exact"}, ConfigError, "aggregation = 'exact' has no effect at lora-rank = 0"),
        ({"strategy": "fedadam", "aggregation": "exact"}, AlignmentError, "makes up for a mean"),
        ({"groups": "vo"}, ConfigError, "groups = 'vo' has no effect at lora-rank = 2; leave it out"),
        ({"layers": "0"}, ConfigError, "layers = '0' has no effect at lora-rank = 2; leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_message_is_sent(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, error: Any, message: str
) -> None:
    monkeypatch.setattr(InProcessGrid, "push_messages", lambda *_: pytest.fail("sent"))
    base = pretrained("text", tmp_path / "base")
    with pytest.raises(error, match=message):
        federate(config_of(texts, **{"model": base, **changes}))


def test_peft_is_asked_for_where_adapters_are(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = pretrained("text", tmp_path / "base")
    monkeypatch.setitem(sys.modules, "peft", None)
    federate(config_of(texts, model=base, lora_rank=0, num_server_rounds=1))
    with pytest.raises(ConfigError, match=r"peft: not installed, .* pip install 'rotfed\[simulation\]'"):
        federate(config_of(texts, model=base))
