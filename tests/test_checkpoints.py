"""Model directories from a notebook's point of view: read tensor by tensor, written shard by shard, merged."""

import itertools
import json
import math
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotfed.barrier import score
from rotfed.checkpoints import (
    MergeOptions,
    Renamed,
    ShardWriter,
    StoredWeights,
    merge_checkpoints,
    merging,
    read_checkpoint,
    write_checkpoint,
)
from rotfed.checkpoints.weights import in_memory, without_data
from rotfed.errors import AlignmentError, SpecError
from rotfed.mergers import mean_by_rows, normalised_weights, shared_rows, weighted_mean
from tests.models import EXAMPLES, assert_same, distance

LLAMA = "LlamaForCausalLM"
DOCS = Path(__file__).parents[1] / "docs" / "merging.md"
GATE = "model.layers.1.mlp.gate_proj.weight"
PLAIN = MergeOptions(anchor="medoid", residual=False)


def llamas(folder: Path, count: int = 2, dtype: torch.dtype = torch.float32) -> list[Path]:
    """Directories of small models with weights of their own, in several shards each."""
    paths = [folder / letter for letter in "abc"[:count]]
    for seed, path in enumerate(paths):
        model = EXAMPLES["llama"].model(LLAMA, seed, tie_word_embeddings=False)
        model.to(dtype).save_pretrained(path, max_shard_size="2KB")
        assert len(list(path.glob("*.safetensors"))) > 2
    return paths


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory, as safetensors itself reads them."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rewrite(path: Path, name: str, change: float) -> None:
    """Multiply one tensor of a sharded directory."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"][name]
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name] * change}, file, metadata={"format": "pt"})


class Watched(Mapping[str, Tensor]):
    """Parameters that count how many of the tensors they gave are still held by somebody."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params
        self.read: list[str] = []
        self.alive = self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.params[name].clone()
        self.read.append(name)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)


# ----------------------------------------------------------------------------------------------------------
# Reading


def test_weights_are_read_when_asked_for_in_their_own_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = llamas(tmp_path, 1, torch.bfloat16)
    expected = stored(path)
    with monkeypatch.context() as patch:
        patch.setattr("rotfed.checkpoints.weights._data", lambda *_: pytest.fail("a tensor was read"))
        found = StoredWeights(path)
        meta = found.meta()
        assert set(found) == set(expected) and len(found) == len(expected)
        assert GATE in found and "gate" not in found
        assert Renamed(found, {"gate": GATE}).meta()["gate"] is meta[GATE]
        assert read_checkpoint(path).types == {name: torch.bfloat16 for name in expected}
    assert all(tensor.is_meta for tensor in meta.values())
    assert {n: (t.shape, t.dtype) for n, t in meta.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
    assert_same(in_memory(found), {name: expected[name].float() for name in found})
    with pytest.raises(KeyError):
        found["gate"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a list of mapped files")
def test_a_tensor_that_is_held_maps_no_file(tmp_path: Path) -> None:
    (path,) = llamas(tmp_path, 1)
    held = StoredWeights(path)[GATE]
    assert held.numel() and str(path) not in Path("/proc/self/maps").read_text()
    # The same question finds the file where a tensor is a view of it.
    view = load_file(next(path.glob("*.safetensors")))
    assert view and str(path) in Path("/proc/self/maps").read_text()


def test_renamed_parameters_read_one_tensor_each(tmp_path: Path) -> None:
    (path,) = llamas(tmp_path, 1)
    source = Watched(stored(path))
    found = Renamed(source, {"gate": GATE, "again": GATE})
    assert list(found) == ["gate", "again"] and GATE not in found and len(found) == 2
    assert torch.equal(found["gate"], source.params[GATE]) and source.read == [GATE]
    # Tied parameters are one tensor, without data and in memory.
    meta, held = Renamed(StoredWeights(path), found.names).meta(), in_memory(found)
    assert meta["gate"] is meta["again"] and meta["gate"].is_meta and held["gate"] is held["again"]
    assert source.read == [GATE, GATE]
    assert without_data({"x": torch.ones(2)})["x"].is_meta


def test_values_that_are_not_finite_are_told_when_they_are_read(tmp_path: Path) -> None:
    one, other = llamas(tmp_path)
    rewrite(other, GATE, math.nan)
    found = read_checkpoint(other).params
    assert bool(found["lm_head.weight"].isfinite().all())
    sentence = f"{GATE}: expected finite values in the model {other}, found NaN or infinity; leave this model out"
    for _ in range(2):
        with pytest.raises(AlignmentError, match=sentence):
            found[GATE]
    with pytest.raises(AlignmentError, match=sentence):
        merge_checkpoints([one, other], tmp_path / "out", PLAIN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    (path,) = llamas(tmp_path, 1)
    found = StoredWeights(path)
    for file in path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SpecError, match=r"model-.*\.safetensors: expected a safetensors file, found .*; download it"):
        found[GATE]
    with pytest.raises(SpecError, match="expected a safetensors file"):
        StoredWeights(path)
    assert not StoredWeights(tmp_path / "none")


# ----------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize("limit", [1, 100, 5_000])
def test_shards_hold_everything_once_and_the_index_says_where(
    limit: int, tmp_path: Path, generator: torch.Generator
) -> None:
    sizes = [3, 20, 1, 7, 5, 5, 5]
    tensors = {f"t{number}": torch.randn(size, 2, generator=generator) for number, size in enumerate(sizes)}
    writer, alive, most = ShardWriter(tmp_path, "model.safetensors", limit), 0, 0

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    for name, tensor in tensors.items():
        copy = tensor.clone()
        alive += 8 * len(copy)
        weakref.finalize(copy, gone, 8 * len(copy))
        writer.add(name, copy)
        del copy
        most = max(most, alive)
    writer.close()
    assert most <= max(limit, 8 * max(sizes)) and alive == 0
    files = {file.name: load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))}
    assert_same(dict(sorted((n, t) for held in files.values() for n, t in held.items())), tensors)
    if limit == 5_000:
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        return
    count = len(files)
    assert count == (7 if limit == 1 else 5)
    assert list(files) == [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    for held in files.values():
        assert len(held) == 1 or sum(8 * len(tensor) for tensor in held.values()) <= limit
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert index["metadata"]["total_size"] == 8 * sum(sizes)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("*.safetensors")} == {tmp_path.stat().st_mode & 0o666}


def test_transformers_loads_the_shards_of_a_merged_model(tmp_path: Path) -> None:
    paths = llamas(tmp_path, dtype=torch.bfloat16)
    merge_checkpoints(paths, tmp_path / "whole")
    merge_checkpoints(paths, tmp_path / "out", MergeOptions(shard_size=3_000))
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    assert_same(dict(sorted(loaded.state_dict().items())), dict(sorted(whole.items())))
    assert set(StoredWeights(tmp_path / "out")) == set(whole)
    # Shards of an older model that is replaced do not stay behind.
    merge_checkpoints(paths, tmp_path / "out", MergeOptions(force=True))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_end_in_the_middle_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    (path,) = llamas(tmp_path, 1)
    write_checkpoint(tmp_path / "there", StoredWeights(path).items(), path)
    before = stored(tmp_path / "there")
    shards = []

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from itertools.islice(StoredWeights(path).items(), 9)
        shards.extend(tmp_path.glob(".*/*.safetensors.*"))
        raise error

    for out in ("there", "new", "deep/er"):
        with pytest.raises(error):
            write_checkpoint(tmp_path / out, broken(), path, shard_size=1_000)
    assert len(shards) > 3
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a", "there"]
    assert_same(stored(tmp_path / "there"), before)


# ----------------------------------------------------------------------------------------------------------
# Merging


def test_a_notebook_merges_and_reads_the_figures(tmp_path: Path) -> None:
    paths = llamas(tmp_path, 3)
    options = MergeOptions(anchor="medoid", weights=[2, 1, 1])
    report = merge_checkpoints([str(path) for path in paths], str(tmp_path / "out"), options)
    assert report.anchor == "medoid" and list(report.shares) == [0.5, 0.25, 0.25]
    assert report.spec.residual is not None and report.stream.startswith("residual stream: aligned (orthogonal; norms")
    assert not (report.kept or report.left_out or report.uneven or report.differences or report.scores)
    assert report.barriers is None
    assert list(report.distances) == ["0", "1", "rest", "all"]
    for moment in (0, 1):
        parts = [report.distances[layer][moment] for layer in ("0", "1", "rest")]
        assert max(parts) < report.distances["all"][moment] < sum(parts)
    assert report.distances["all"][1] < 0.9 * report.distances["all"][0]


def test_the_call_in_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llamas(Path(), 3)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (lines,) = (block for block in blocks if "merge_checkpoints" in block)
    given: dict[str, float] = {}
    exec(lines, given)
    assert given["after"] < given["before"] and Path("merged/config.json").is_file()


def test_distances_are_those_of_the_models_from_their_mean(tmp_path: Path) -> None:
    paths = llamas(tmp_path, 3)
    report = merge_checkpoints(paths, tmp_path / "out", PLAIN)
    models = [stored(path) for path in paths]
    mean = weighted_mean(models)
    for layer, inside in (("1", ".layers.1."), ("all", "")):
        chosen = [{n: t for n, t in model.items() if inside in n} for model in (*models, mean)]
        expected = sum(distance(model, chosen[-1]) for model in chosen[:-1]) / 3
        assert report.distances[layer][0] == pytest.approx(expected, rel=1e-6)
    itself = merge_checkpoints([paths[0]] * 3, tmp_path / "same", PLAIN)
    assert set(itself.distances.values()) == {(0.0, 0.0)}


def test_means_and_distances_do_not_depend_on_the_portions(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(rows: int) -> dict[str, Tensor]:
        table = torch.randn(rows, 3, generator=generator)
        return {"table": table, "norm": torch.randn(5, generator=generator), "steps": torch.tensor(rows)}

    models, shares = [model(9), model(4), model(7)], normalised_weights(3, [2, 1, 1])
    (tmp_path / "a").mkdir()
    save_file(models[0], tmp_path / "a" / "model.safetensors")
    common = merging.Common([], {}, {}, {})
    expected = mean_by_rows(models, shares)
    rows = shared_rows(models)
    spread = [distance(one, weighted_mean(rows, shares)) for one in rows]
    for portion in (1, 5, 12, 1_000):
        monkeypatch.setattr(merging, "_PORTION", portion)
        first = merging.Checkpoint(tmp_path / "a", None, None, StoredWeights(tmp_path / "a"))  # type: ignore[arg-type]
        passing = [(name, [model[name] for model in models]) for name in models[0]]
        assert_same(dict(merging._means(first, common, passing, shares)), expected)
        distances = merging._Distances({"rest": list(models[0])}, shares)
        for name, tensors in passing:
            distances.add(name, tensors, tensors)
        assert distances.by_layer()["all"] == pytest.approx([sum(spread) / 3] * 2, rel=1e-6)


def test_means_hold_one_parameter_at_a_time(tmp_path: Path) -> None:
    paths = llamas(tmp_path)
    first = read_checkpoint(paths[0])
    models = [Watched(stored(path)) for path in paths]
    passing = ((name, [model[name] for model in models]) for name in first.params)
    means = merging._means(first, merging.Common([], {}, {}, {}), passing, [0.5, 0.5])
    write_checkpoint(tmp_path / "out", means, paths[0], shard_size=1)
    assert [len(model.read) for model in models] == [len(first.params)] * 2
    assert max(model.most for model in models) <= 2 and not any(model.alive for model in models)


def test_a_merge_is_measured_and_learned_in_one_call(tmp_path: Path, generator: torch.Generator) -> None:
    paths = llamas(tmp_path)
    data = tmp_path / "data.safetensors"
    tokens = torch.randint(2, 25, (10, 6), generator=generator)
    save_file({"input_ids": tokens, "labels": tokens.clone()}, data)
    report = merge_checkpoints(paths, tmp_path / "out", MergeOptions(data=data, learn=2))
    assert report.anchor == "tree" and len(report.learned) == 1
    assert report.learned[0].aside == 2 and report.learned[0].seen >= 16
    assert [name for name, _ in report.scores] == [*map(str, paths), "plain mean", "merged"]
    losses = [found.loss for _, found in report.scores if found is not None]
    assert report.barriers == pytest.approx([loss - sum(losses[:2]) / 2 for loss in losses[2:]])
    assert report.learned[0].after == pytest.approx(losses[3], abs=1e-5)
    whole = merge_checkpoints(paths, tmp_path / "measured", MergeOptions(anchor="medoid", data=str(data)))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "measured").eval()
    merged = whole.scores[-1][1]
    assert merged is not None
    assert score(loaded, loaded.state_dict(), [load_file(data)]).loss == pytest.approx(merged.loss, abs=1e-5)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    paths = llamas(tmp_path)
    for options, sentence in [
        ({"anchor": "global"}, "anchor: expected one of medoid, consensus, progressive, tree, found 'global'"),
        ({"learn": 3}, "learn: expected examples to learn from, found none"),
        ({"learn": 3, "data": "x", "layers": [0, 1]}, "learn: expected all layers, found --layers 0,1"),
        ({"learn": 3, "data": "x", "weights": [1, 0]}, "learn: expected models that all count, found a weight of zero"),
        ({"learn": 3, "data": "x", "anchor": "medoid"}, "anchor: expected one of progressive, tree, found 'medoid'"),
    ]:
        with pytest.raises(AlignmentError, match=sentence):
            MergeOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(AlignmentError, match="models: expected at least two to merge, found 1"):
        merge_checkpoints(paths[:1], tmp_path / "out")
    with pytest.raises(AlignmentError, match="weights: expected 2, one a model, found 3"):
        merge_checkpoints(paths, tmp_path / "out", MergeOptions(weights=[1, 1, 1]))
    assert not (tmp_path / "out").exists()
