"""The ServerApp and ClientApp: settings, data, and whole federations with real messages in one process."""

import gzip
import json
import math
import os
import shutil
import struct
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import client.app
import server.app
from client.data import load_corpus, local_split, partition_rows, read_idx_folder
from client.fingerprint import CodeMismatchError, check_fingerprint, fingerprint
from client.models import build_encoder, build_examples, build_model, build_tokenizer
from client.settings import ConfigError, parse_settings
from client.training import evaluate, seed_everything, train
from rotfed.errors import AlignmentError
from rotfed.flower import to_state_dict
from server.grid import OrderedGrid, RoundFailedError, error_text
from simulations.grid import InProcessGrid

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
DEFAULTS = PYPROJECT["tool"]["flwr"]["app"]["config"]
CPU = torch.device("cpu")


def settings_with(**changes):
    return parse_settings({**DEFAULTS, **{key.replace("_", "-"): value for key, value in changes.items()}})


# ----------------------------------------------------------------------------------------------------------
# Settings


def test_the_defaults_are_valid():
    settings = settings_with()
    assert settings.groups is None and settings.layers is None
    assert settings_with(anchor="generalized_procrustes").anchor == "generalized_procrustes"
    assert (settings.strategy, settings.model, settings.dataset) == ("fedavg", "vit-small", "digits")
    assert settings.align


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "fedsgd"),
        ("anchor", "mean"),
        ("num-server-rounds", 0),
        ("num-server-rounds", 2.0),
        ("min-nodes", True),
        ("strength", 0.0),
        ("strength", 1.5),
        ("alpha", float("nan")),
        ("learning-rate", float("inf")),
        ("reflections", 1),
        ("layers", "3-1"),
        ("layers", "first"),
        ("dataset", " "),
        ("results", "results.json"),
        ("seed", -1),
    ],
)
def test_a_bad_value_is_refused_by_key_and_value(key, value):
    with pytest.raises(ConfigError) as caught:
        parse_settings({**DEFAULTS, key: value})
    assert key in str(caught.value) and repr(value) in str(caught.value)
    assert "must be" in str(caught.value)


def test_unknown_and_missing_keys_are_refused():
    with pytest.raises(ConfigError, match="'num-rounds' is unknown"):
        parse_settings({**DEFAULTS, "num-rounds": 3})
    with pytest.raises(ConfigError, match="'alpha' is missing"):
        parse_settings({key: value for key, value in DEFAULTS.items() if key != "alpha"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "text", "dataset": "somewhere"}, "does not fit task"),
        ({"task": "text", "model": "bert-small"}, "holds images"),
        ({"start": "different", "model": "/a/model"}, "is pretrained"),
        ({"start": "parties", "model": "/a/model"}, "is pretrained"),
        ({"start": "parties", "task": "text", "model": "bert-small", "dataset": "somewhere"}, "residual stream"),
        ({"partition": "natural"}, "knows classes only"),
        ({"task": "language", "model": "llama-small"}, "holds images"),
        ({"task": "language", "model": "llama-small", "dataset": "somewhere", "max_length": 1}, "no token to predict"),
        ({"align": False, "aggregation": "exact"}, "aggregation = 'exact' has no effect at align = false"),
        ({"lora_targets": "query"}, "lora-targets = 'query' has no effect at lora-rank = 0"),
        ({"lora_rank": 2, "model": "/a/model", "residual": True}, "residual = True has no effect at lora-rank = 2"),
        (
            {"lora_rank": 2, "model": "/a/model", "next_round_from": "plain"},
            "next-round-from = 'plain' has no effect at lora-rank = 2",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings_with(**changes)


@pytest.mark.parametrize(("text", "layers"), [("", None), ("0, 2-4", (0, 2, 3, 4)), ("7", (7,))])
def test_layers_are_read(text, layers):
    assert settings_with(layers=text).layers == layers


# ----------------------------------------------------------------------------------------------------------
# Data


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_partitions_divide_the_training_rows_and_never_hold_a_test_row(partition):
    settings = settings_with(partition=partition, alpha=0.3)
    corpus = load_corpus(settings)
    rows = np.concatenate([partition_rows(settings, 5, number) for number in range(5)])
    assert sorted(rows) == sorted(corpus.train)
    assert not set(rows) & set(corpus.test)
    assert len(corpus.train) + len(corpus.test) == len(corpus.labels) == 1797


def test_dirichlet_partitions_are_skewed_and_iid_ones_are_not():
    def largest_share(partition):
        settings = settings_with(partition=partition, alpha=0.1)
        labels = load_corpus(settings).labels[partition_rows(settings, 4, 0)]
        return np.bincount(labels, minlength=10).max() / len(labels)

    assert largest_share("iid") < 0.2 < largest_share("dirichlet")


def test_the_seed_decides_the_held_out_split():
    one, same, other = (load_corpus(settings_with(seed=seed)).test.tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_too_many_clients_are_refused():
    with pytest.raises(ConfigError, match="500 clients need at least 10 each"):
        partition_rows(settings_with(), 500, 0)


def test_idx_files_are_read(tmp_path):
    def write(name, header, values):
        content = struct.pack(f">{len(header)}i", *header) + bytes(values)
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))

    write("train-images-idx3", (2051, 3, 2, 2), range(12))
    write("train-labels-idx1", (2049, 3), [0, 1, 0])
    write("t10k-images-idx3", (2051, 1, 2, 2), [9, 8, 7, 6])
    write("t10k-labels-idx1", (2049, 1), [1])
    corpus = read_idx_folder(tmp_path)
    assert corpus.train.tolist() == [0, 1, 2] and corpus.test.tolist() == [3]
    assert corpus.labels.tolist() == [0, 1, 0, 1] and corpus.image_shape == (1, 2)
    assert corpus.read(np.array([3, 1])).tolist() == [[[[9, 8], [7, 6]]], [[[4, 5], [6, 7]]]]


@pytest.fixture
def text_folder(tmp_path):
    """Two classes, told apart by their words; one file is latin-1."""
    folder = tmp_path / "texts"
    for name, words in (("animals", "the cat and the dog"), ("plants", "roses, oaks; mosses")):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            (folder / name / f"{number:02}.txt").write_text(f"{words} {number}")
    (folder / "plants" / "00.txt").write_bytes("fougère".encode("latin-1"))
    return folder


def text_settings(folder, **changes):
    changes = {"max_length": 24, **changes}
    return settings_with(task="text", dataset=str(folder), model="bert-small", **changes)


def test_a_text_folder_is_read(text_folder):
    corpus = load_corpus(text_settings(text_folder))
    assert corpus.class_names == ("animals", "plants") and corpus.image_shape is None
    texts = corpus.read(np.arange(60))
    assert texts[30] == "fougère"
    assert all(("cat" in text) == (label == 0) for text, label in zip(texts, corpus.labels, strict=True))


def test_a_text_folder_with_an_empty_class_is_refused(text_folder):
    (text_folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.txt file in 'empty'"):
        load_corpus(text_settings(text_folder))


def test_a_text_folder_with_an_empty_file_or_one_class_is_refused(text_folder):
    (text_folder / "plants" / "07.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"nothing in 'plants/07\.txt'"):
        load_corpus(text_settings(text_folder))
    shutil.rmtree(text_folder / "plants")
    with pytest.raises(ConfigError, match="has 1 subfolders"):
        load_corpus(language_settings(text_folder))


def write_author(folder, name, text, files=6):
    (folder / name).mkdir(parents=True)
    for number in range(files):
        (folder / name / f"{number}.txt").write_text(f"{text} {number}\n" * 12)


@pytest.fixture
def author_folder(tmp_path):
    """Seven authors of six texts each, of words of their own."""
    folder = tmp_path / "authors"
    for number, word in enumerate(("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")):
        write_author(folder, word, f"{word} {'so it is' if number % 2 else 'is it so'}")
    return folder


def language_settings(folder, **changes):
    changes = {"max_length": 16, **changes}
    return settings_with(task="language", dataset=str(folder), model="llama-small", **changes)


@pytest.mark.parametrize("clients", [1, 3, 6, 7])
def test_a_natural_partition_gives_every_client_whole_authors(author_folder, clients):
    settings = language_settings(author_folder, partition="natural")
    corpus = load_corpus(settings)
    rows = [partition_rows(settings, clients, number) for number in range(clients)]
    assert sorted(np.concatenate(rows)) == sorted(corpus.train)
    authors = [set(corpus.labels[own].tolist()) for own in rows]
    assert sum(map(len, authors)) == 7 and set.union(*authors) == set(range(7))
    assert max(map(len, authors)) - min(map(len, authors)) <= 1


def test_more_clients_than_authors_are_refused(author_folder):
    with pytest.raises(ConfigError, match=r"training texts of 7 authors, .* each of 8 clients one"):
        partition_rows(language_settings(author_folder, partition="natural"), 8, 0)


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_authors_can_be_mixed(author_folder, partition):
    settings = language_settings(author_folder, partition=partition)
    rows = [partition_rows(settings, 2, number) for number in range(2)]
    assert sorted(np.concatenate(rows)) == sorted(load_corpus(settings).train)


def test_windows_hold_every_token_once_as_one_to_predict(author_folder):
    settings = language_settings(author_folder)
    corpus = load_corpus(settings)
    examples = build_examples(settings, corpus, corpus.test)
    tokenizer = build_tokenizer(settings)
    whole = tokenizer.eos_token.join(corpus.read(corpus.test))
    text = tokenizer.decode(torch.cat([examples.inputs[0, :1], examples.labels[:, 1:].flatten()]))
    assert whole.startswith(text) and len(whole) - len(text) < 16
    train, validation = local_split(examples)
    assert len(train) + len(validation) == len(examples) and abs(len(validation) - len(examples) / 10) < 1


def test_texts_shorter_than_two_windows_are_refused(author_folder):
    settings = language_settings(author_folder, max_length=4096)
    corpus = load_corpus(settings)
    with pytest.raises(ConfigError, match=r"texts of \d+ tokens .* at least 8191, two windows of max-length = 4096"):
        build_examples(settings, corpus, corpus.test)


@pytest.fixture
def table_folder(tmp_path, monkeypatch):
    """A folder that `datasets` opens by itself, as it would a hub name."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "table"
    folder.mkdir()
    table = {
        "first": [f"text {number}" for number in range(50)],
        "second": [f"other {number}" for number in range(50)],
        "label": ["up" if number % 2 else "down" for number in range(50)],
    }
    datasets.Dataset.from_dict(table).to_parquet(folder / "train.parquet")
    return folder


def test_ambiguous_columns_are_refused_and_named_columns_are_used(table_folder, monkeypatch):
    # A text task would read the folder itself as classes of files, so name it as a hub data set is named.
    monkeypatch.chdir(table_folder.parent)
    settings = text_settings("x")
    with pytest.raises(ConfigError, match="2 columns that could be the input; set run config input-column"):
        client.data._hub(str(table_folder), settings)
    corpus = client.data._hub(str(table_folder), replace(settings, input_column="second"))
    assert corpus.class_names == ("down", "up")
    assert corpus.read(np.array([0, 3])) == ["other 0", "other 3"]
    assert corpus.labels[:4].tolist() == [0, 1, 0, 1]


def test_authors_may_stand_in_a_column_of_a_table(table_folder, monkeypatch):
    monkeypatch.chdir(table_folder.parent)
    settings = language_settings("x", label_column="second")
    corpus = client.data._hub(str(table_folder), settings)
    assert len(corpus.class_names) == 50 and corpus.read(np.array([3])) == ["text 3"]


def test_an_unknown_data_set_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset = .*nothing-here.* could not be loaded"):
        load_corpus(settings_with(dataset=str(tmp_path / "nothing-here")))


# ----------------------------------------------------------------------------------------------------------
# Models and training


def test_an_image_encoder_scales_resizes_and_repeats_channels():
    settings = settings_with()
    corpus = load_corpus(settings)
    config = build_model(settings, corpus).config
    white = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)
    torch.testing.assert_close(build_encoder(settings, corpus, config)(white)["pixel_values"], torch.ones(2, 1, 8, 8))
    config.image_size, config.num_channels = 12, 3
    encoded = build_encoder(settings, corpus, config)(white)["pixel_values"]
    torch.testing.assert_close(encoded, torch.ones(2, 3, 12, 12))


def test_training_learns_and_repeats_to_the_bit():
    settings = settings_with()
    corpus = load_corpus(settings)
    examples = corpus.examples(corpus.train[:200])

    def trained():
        seed_everything(3)
        model = build_model(settings, corpus)
        encode = build_encoder(settings, corpus, model.config)
        train(
            model,
            encode,
            examples,
            epochs=15,
            batch_size=16,
            learning_rate=1e-3,
            device=CPU,
            generator=torch.Generator().manual_seed(3),
        )
        return model, evaluate(model, encode, examples, batch_size=64, device=CPU)

    (one, measured), (two, _) = trained(), trained()
    assert measured.accuracy > 0.6 and measured.examples == 200
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_a_diverging_training_is_reported_rather_than_sent():
    settings = settings_with()
    corpus = load_corpus(settings)
    model = build_model(settings, corpus)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="lower learning-rate"):
        train(
            model,
            build_encoder(settings, corpus, model.config),
            corpus.examples(corpus.train[:16]),
            epochs=1,
            batch_size=16,
            learning_rate=1e-3,
            device=CPU,
            generator=torch.Generator(),
        )


def test_a_model_that_knows_nothing_loses_the_logarithm_of_its_vocabulary(author_folder):
    settings = language_settings(author_folder)
    corpus = load_corpus(settings)
    model, examples = build_model(settings, corpus), build_examples(settings, corpus, corpus.test)
    assert sum(p.numel() for p in model.parameters()) == 107_200
    with torch.no_grad():
        model.lm_head.weight.zero_()
    measured = evaluate(model, build_encoder(settings, corpus, model.config), examples, batch_size=7, device=CPU)
    assert measured.loss == pytest.approx(math.log(259)) and measured.examples == len(examples)
    assert measured.accuracy == 0


def test_a_language_model_is_measured_by_the_mean_over_tokens_as_transformers_measures_it(author_folder):
    settings = language_settings(author_folder)
    corpus = load_corpus(settings)
    model, examples = build_model(settings, corpus), build_examples(settings, corpus, corpus.test)
    measured = evaluate(model, build_encoder(settings, corpus, model.config), examples, batch_size=7, device=CPU)
    with torch.no_grad():
        output = model(input_ids=examples.inputs, labels=examples.labels)
    assert measured.loss == pytest.approx(output.loss.item(), rel=1e-5)
    right = output.logits[:, :-1].argmax(-1) == examples.inputs[:, 1:]
    assert measured.accuracy == pytest.approx(right.float().mean().item())


def test_a_folder_of_bert_becomes_causal_and_windows_must_fit_its_positions(author_folder, tmp_path):
    saved = str(tmp_path / "model")
    text = text_settings(author_folder, max_length=16)
    build_model(text, load_corpus(text)).save_pretrained(saved)
    build_tokenizer(text).save_pretrained(saved)
    settings = replace(language_settings(author_folder), model=saved)
    corpus = load_corpus(settings)
    model = build_model(settings, corpus)
    tokens = build_examples(settings, corpus, corpus.test).inputs[:1]
    other = tokens.clone()
    other[:, -1] += 1
    with torch.no_grad():
        one, two = (model(input_ids=ids).logits[:, :-1] for ids in (tokens, other))
    torch.testing.assert_close(one, two)
    with pytest.raises(ConfigError, match=r"max-length = 17 is more than .* takes; use at most 16"):
        build_encoder(replace(settings, max_length=17), corpus, model.config)


# ----------------------------------------------------------------------------------------------------------
# Whole federations


class LocalGrid(InProcessGrid):
    """The ClientApp in this process; node 100 + i holds partition i, and replies come backwards."""

    def __init__(self, run_config, nodes):
        super().__init__(client.app.app, nodes, run_config, first_node=100)

    backwards = True

    def push_messages(self, messages):
        pushed = list(super().push_messages(messages))
        return pushed[::-1] if self.backwards else pushed


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """Flower's runtime tells a process whose messages it makes; the in-process server is node 1 of run 0."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 0)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 0)


def federate(path, nodes=2, **changes):
    """Run the ServerApp over LocalGrid and return its results file."""
    quick = {"num_server_rounds": 1, "local_epochs": 1, "min_nodes": nodes, "results": str(path)}
    run_config = {**DEFAULTS, **{key.replace("_", "-"): value for key, value in {**quick, **changes}.items()}}
    server.app.main(LocalGrid(run_config, nodes), Context(0, 1, {}, RecordDict(), run_config))
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("strategy", "align"), [("fedavg", False), ("fedavg", True), ("fedprox", True), ("fedadam", True)]
)
def test_a_federation_learns_digits_and_writes_its_results(tmp_path, strategy, align):
    results = federate(
        tmp_path / "results.json",
        strategy=strategy,
        align=align,
        num_server_rounds=2,
        local_epochs=5,
        batch_size=16,
        fraction_evaluate=1.0,
        evaluate_clients=True,
    )
    assert results["status"] == "completed" and results["config"]["strategy"] == strategy
    before, first, second = results["rounds"]
    assert [entry["round"] for entry in results["rounds"]] == [0, 1, 2]
    assert before["accuracy"] < 0.3 < second["accuracy"]
    # FedAdam's first steps are short.
    assert second["accuracy"] > 0.5 or strategy == "fedadam"
    assert len(first["train"]["client-accuracies"]) == 2
    assert ("alignment" in first) == align


@pytest.mark.parametrize(
    ("nodes", "changes"),
    [(3, {"start": "different", "num_server_rounds": 2}), (2, {"start": "parties", "learned": "together"})],
)
def test_runs_repeat_to_the_bit_in_whatever_order_clients_finish(tmp_path, monkeypatch, nodes, changes):
    monkeypatch.setattr(client.app, "STEPS_TOGETHER", 1)

    def rounds(name):
        results = federate(tmp_path / name, nodes=nodes, **changes)
        return [(entry["loss"], entry["accuracy"]) for entry in results["rounds"]]

    one = rounds("one.json")
    monkeypatch.setattr(LocalGrid, "backwards", False)
    assert rounds("two.json") == one


def test_parties_train_models_of_their_own_once_and_the_rounds_start_from_what_these_make(tmp_path, monkeypatch):
    trained = []

    def count(model, *arguments, **keywords):
        trained.append(model.state_dict()["classifier.weight"].clone())
        return train(model, *arguments, **keywords)

    monkeypatch.setattr(client.app, "train_model", count)
    results = federate(tmp_path / "results.json", start="parties", local_epochs=4, batch_size=16)
    own, first_round = trained[:2], trained[2:]
    assert len(first_round) == 2
    assert not torch.equal(own[0], own[1]) and torch.equal(first_round[0], first_round[1])
    assert not results["start"]["skipped"] and not results["start"]["data_free"]
    assert len(results["start"]["parties"]) == 2
    before, after = results["rounds"]
    # Models averaged as they are would do no better than chance.
    assert 0.2 < before["accuracy"] < after["accuracy"]


def test_a_party_that_fails_is_named_and_the_run_goes_on_from_the_others(tmp_path, monkeypatch):
    def fails_once(node, proximal_mu=0.0):
        if (node.partition_id, node.server_round) == (1, 0):
            raise RuntimeError("out of memory")
        return 0.0

    monkeypatch.setattr(client.app, "_train", fails_once)
    results = federate(tmp_path / "results.json", nodes=3, start="parties", learned="none")
    assert len(results["start"]["parties"]) == 2 and list(results["start"]["skipped"]) == ["101"]
    assert "out of memory" in results["start"]["skipped"]["101"]
    assert len(results["rounds"][1]["alignment"]["clients"]) == 3


def test_a_start_whose_parties_all_fail_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(server.app, "fingerprint", lambda: "0.0.9+000000000000")
    with pytest.raises(AlignmentError, match=r"(?s)found 0; .*node 100: .*CodeMismatchError.*expected rotfed 0\.0\.9"):
        federate(tmp_path / "results.json", start="parties")


def test_at_a_different_start_clients_ignore_the_first_model_only(monkeypatch):
    """Without training, the reply is what the client started from."""
    monkeypatch.setattr(client.app, "train_model", lambda *arguments, **keywords: 0.0)

    def starts(server_round):
        run_config = {**DEFAULTS, "start": "different"}
        grid = LocalGrid(run_config, 2)
        settings = parse_settings(run_config)
        sent = build_model(settings, load_corpus(settings)).state_dict()
        content = RecordDict(
            {
                "arrays": ArrayRecord(sent),
                "config": ConfigRecord({"server-round": server_round, client.fingerprint.KEY: fingerprint()}),
            }
        )
        messages = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
        replies = OrderedGrid(grid).send_and_receive(messages)
        # The grid inside returns them backwards.
        assert [reply.content[client.app.IDENTITY]["partition-id"] for reply in replies] == [0, 1]
        return sent, *(to_state_dict(reply.content["arrays"]) for reply in replies)

    name = "classifier.weight"
    sent, one, two = (params[name] for params in starts(1))
    assert not torch.equal(sent, one) and not torch.equal(sent, two) and not torch.equal(one, two)
    sent, one, two = (params[name] for params in starts(2))
    assert torch.equal(sent, one) and torch.equal(sent, two)


def test_a_text_federation_saves_a_model_that_the_next_one_starts_from(tmp_path, text_folder, caplog):
    text = {"task": "text", "dataset": str(text_folder), "max_length": 24}
    saved = tmp_path / "model"
    first = federate(
        tmp_path / "first.json", **text, model="bert-small", local_epochs=12, batch_size=8, save_model=str(saved)
    )
    assert first["rounds"][1]["accuracy"] > 0.8
    assert caplog.messages[-1] == f"Saved a whole model, of bert-small, in {saved}"
    second = federate(tmp_path / "second.json", **text, model=str(saved))
    assert second["rounds"][0]["accuracy"] == first["rounds"][1]["accuracy"]
    assert second["data"]["classes"] == ["animals", "plants"]


def test_a_model_that_cannot_be_saved_is_not_there_in_part(tmp_path, monkeypatch, author_folder):
    def full(settings):
        raise OSError("no space left")

    monkeypatch.setattr(server.app, "build_tokenizer", full)
    saved = tmp_path / "new" / "model"
    with pytest.raises(OSError, match="no space left"):
        federate(tmp_path / "results.json", **LANGUAGE, dataset=str(author_folder), save_model=str(saved))
    assert not any(saved.iterdir())


LANGUAGE = {"task": "language", "model": "llama-small", "max_length": 16, "partition": "natural"}


@pytest.mark.parametrize("align", [False, True])
def test_a_language_federation_learns_and_saves_a_model_that_the_next_one_starts_from(tmp_path, author_folder, align):
    language = {**LANGUAGE, "dataset": str(author_folder), "nodes": 3, "align": align}
    saved = str(tmp_path / "model")
    first = federate(
        tmp_path / "first.json",
        **language,
        num_server_rounds=2,
        local_epochs=2,
        fraction_evaluate=1.0,
        save_model=saved,
    )
    losses = [entry["loss"] for entry in first["rounds"]]
    assert losses[0] == pytest.approx(math.log(259), rel=0.02) and losses[2] < losses[1] < 0.8 * losses[0]
    if align:
        alignment = first["rounds"][1]["alignment"]
        assert len(alignment["clients"]) == 3 and not alignment["refused"]
        assert alignment["distance_after"] < alignment["distance_before"]
    second = federate(tmp_path / "second.json", **{**language, "model": saved})
    assert second["rounds"][0]["loss"] == pytest.approx(losses[2])


@pytest.mark.parametrize(
    "changes",
    [{"start": "different"}, *({"start": "parties", "learned": learned} for learned in ("none", "own", "together"))],
)
def test_language_models_start_apart_as_well(tmp_path, monkeypatch, author_folder, changes):
    monkeypatch.setattr(client.app, "STEPS_TOGETHER", 1)
    results = federate(tmp_path / "results.json", **LANGUAGE, dataset=str(author_folder), **changes)
    before, after = results["rounds"]
    assert after["loss"] < 5.3
    if changes["start"] == "parties":
        assert len(results["start"]["parties"]) == 2 and not results["start"]["skipped"]
        assert before["loss"] < 5.3


def test_a_run_whose_clients_run_other_code_fails_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(server.app, "fingerprint", lambda: "0.0.9+000000000000")
    with pytest.raises(RoundFailedError, match=r"expected rotfed 0\.0\.9"):
        federate(tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["status"] == "failed" and "all 2 clients failed" in results["error"]


def test_bad_settings_fail_before_a_message_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalGrid, "push_messages", lambda *arguments: pytest.fail("sent"))
    (tmp_path / "older.txt").write_text("a result")
    mkdir = os.mkdir

    # Modes keep nobody out where tests run as root.
    def locked(path, *rest, **keywords):
        if Path(path).parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *rest, **keywords)

    monkeypatch.setattr(os, "mkdir", locked)
    for changes, message in (
        ({"model": "/nowhere/model"}, "could not be loaded"),
        ({"groups": "nonsense"}, "nonsense"),
        ({"layers": "40"}, "40"),
        ({"save_model": str(tmp_path)}, "expected no such folder, or an empty one, found older.txt in it; remove it"),
        ({"save_model": str(tmp_path / "older.txt")}, "can be no folder"),
        ({"save_model": str(tmp_path / "locked")}, r"can be no folder \(.*locked"),
    ):
        with pytest.raises(ValueError, match=message):
            federate(tmp_path / "results.json", **changes)


def test_fedprox_keeps_clients_near_the_model_that_they_got():
    settings = settings_with()
    corpus = load_corpus(settings)

    def drift(proximal_mu):
        seed_everything(0)
        model = build_model(settings, corpus)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        encode = build_encoder(settings, corpus, model.config)
        options = {"epochs": 3, "batch_size": 32, "learning_rate": 1e-3, "device": CPU}
        generator = torch.Generator().manual_seed(0)
        train(
            model, encode, corpus.examples(corpus.train[:300]), **options, generator=generator, proximal_mu=proximal_mu
        )
        return sum(float((tensor - start[name]).square().sum()) for name, tensor in model.state_dict().items())

    assert drift(10.0) < 0.5 * drift(0.0)


def test_the_fingerprint_is_checked():
    check_fingerprint(fingerprint())
    with pytest.raises(CodeMismatchError, match="expected rotfed None"):
        check_fingerprint(None)


def test_a_client_error_is_told_by_its_last_line():
    assert error_text("<class 'X'>:<'\nTraceback\n  File\nConfigError: no such data'>") == ("ConfigError: no such data")
    assert error_text("") == "nothing"
