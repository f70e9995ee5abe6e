"""`rotfed merge` and `rotfed check` on adapters' directories, loaded back by PEFT."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotfed import aggregate_adapters, load_adapter_spec
from tests.models import EXAMPLES
from tests.test_adapters import SHARES, answers, llama, updates
from tests.test_cli import rotfed

PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def run(*arguments: str | Path | int) -> tuple[int, str]:
    result = rotfed(*map(str, arguments))
    return result.exit_code, result.output


def write(path: Path, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> PeftModel:
    model = get_peft_model(llama(), LoraConfig(**{**PLAIN, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(path)
    file = path / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return model


def reconfigure(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def mean(models: list[PeftModel], shares: list[float]) -> Mapping[str, Tensor]:
    return {
        n: torch.stack([s * updates(m)[n] for s, m in zip(shares, models, strict=True)]).sum(0)
        for n in updates(models[0])
    }


@pytest.mark.parametrize("method", ["optimal", "rotation", "mean", "stack"])
@pytest.mark.parametrize(
    "changes",
    [
        [{}, {}, {}],
        [{"r": 4}, {"r": 2, "lora_alpha": 5}, {"r": 3, "use_rslora": True}],
        [{"rank_pattern": {"1.self_attn.v_proj": 2}, "alpha_pattern": {"q_proj": 3}}, {}, {}],
        [{"use_dora": True, "modules_to_save": ["lm_head"]}] * 3,
    ],
    ids=["alike", "ranks and scales", "patterns", "dora and a head"],
)
def test_merged_adapters_load_in_peft_and_are_the_mean_as_the_error_says(
    method: str, changes: list[dict[str, Any]], tmp_path: Path
) -> None:
    models = [write(tmp_path / str(seed), seed, **change) for seed, change in enumerate(changes)]
    folders, out = [tmp_path / str(seed) for seed in range(3)], tmp_path / "out"
    code, output = run("merge", *folders, "-o", out, "--aggregation", method, "--weights", "0.5,0.3,0.2")
    assert code == 0, output
    merged = PeftModel.from_pretrained(llama(), str(out))
    target = mean(models, SHARES)
    errors = torch.stack([(update - target[name]).norm() for name, update in updates(merged).items()])
    error = float(errors.norm() / torch.stack([t.norm() for t in target.values()]).norm())
    (printed,) = re.findall(r"aggregation error (\S+) \(", output)
    assert error == pytest.approx(float(printed), rel=1e-2, abs=1e-5)
    assert (error < 1e-5) == (method == "stack")
    expected = answers(merged.eval())
    torch.testing.assert_close(answers(merged.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_a_rank_of_its_own_is_the_best_of_that_rank(tmp_path: Path) -> None:
    models = [write(tmp_path / name, seed) for seed, name in enumerate("ab")]
    for rank in (2, 6):
        code, output = run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / str(rank), "--rank", rank)
        assert code == 0, output
        merged = PeftModel.from_pretrained(llama(), str(tmp_path / str(rank)))
        assert merged.peft_config["default"].r == rank
        for name, target in mean(models, [0.5, 0.5]).items():
            best = torch.linalg.svdvals(target)[rank:].norm()
            torch.testing.assert_close((updates(merged)[name] - target).norm(), best, rtol=1e-3, atol=1e-5)


def test_a_rotation_goes_by_the_factor_and_as_far_as_it_is_told(tmp_path: Path) -> None:
    params = [get_peft_model_state_dict(write(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    spec = load_adapter_spec(tmp_path / "a")
    ways: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--over", "A"], "rotation", {"over": "A"}),
        (["--over", "B", "--strength", "0.5"], "rotation", {"over": "B", "strength": 0.5}),
        (["--strength", "0"], "mean", {}),
    ]
    found = []
    for number, (given, method, options) in enumerate(ways):
        out = tmp_path / str(number)
        code, output = run("merge", tmp_path / "a", tmp_path / "b", "-o", out, "--aggregation", "rotation", *given)
        assert code == 0, output
        found.append(load_file(out / "adapter_model.safetensors"))
        expected = aggregate_adapters(params, spec, method, agree=True, **options).params
        torch.testing.assert_close(found[-1], expected)
    name = next(name for name in found[0] if "lora_A" in name)
    assert not found[0][name].allclose(found[1][name]) and not found[1][name].allclose(found[2][name])


def test_types_and_tokenizer_are_the_first_ones(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write(tmp_path / name, seed, torch.bfloat16)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    code, output = run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert code == 0, output
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]
    assert run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")[0] == 1
    assert run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--force")[0] == 0


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"base_model_name_or_path": "another"}, [], "base_model_name_or_path .* found 'another'; .* write one"),
        ({"use_dora": True}, [], "expected use_dora False as in .*, found True; train both alike"),
        (
            {"target_modules": ["q_proj"]},
            [],
            r"expected target_modules \['q_proj', 'v_proj'\] .*; merge adapters of the same",
        ),
        ({"init_lora_weights": "pissa"}, [], "expected init_lora_weights True .* found 'pissa'; .*, or convert"),
        ({"init_lora_weights": "corda"}, [], "expected init_lora_weights that leaves the base weights as they are"),
        ({"peft_type": "LOHA"}, [], "peft_type: expected 'LORA', found 'LOHA'"),
        ({}, ["--aggregation", "exact"], "aggregation: expected one of optimal, rotation, mean, stack"),
        ({}, ["--rank", "999"], "rank: expected at most 8, the sum of the adapters' ranks, found 999"),
        ({}, ["--aggregation", "mean", "--rank", "2"], "rank: expected unset for 'mean'"),
        ({}, ["--over", "A"], "over: expected unset for 'optimal', found A; only 'rotation' takes one"),
        ({}, ["--aggregation", "mean", "--strength", "0"], "strength: expected unset for 'mean'"),
        ({}, ["--aggregation", "rotation", "--over", "C"], "over: expected one of both, A, B, found 'C'"),
        ({}, ["--aggregation", "rotation", "--strength", "2"], "strength: expected a number from 0 to 1, found 2"),
        ({}, ["--anchor", "medoid"], "--anchor: expected none for adapters"),
        ({}, ["--learn", "3"], "--learn: expected none for adapters"),
        ({}, ["--no-residual"], "--residual: expected none for adapters"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    changes: dict[str, Any], options: list[str], message: str, tmp_path: Path
) -> None:
    for seed, name in enumerate("ab"):
        write(tmp_path / name, seed)
    reconfigure(tmp_path / "b", **changes)
    code, output = run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", *options)
    assert code == 1 and re.search(message, output), output
    assert not (tmp_path / "out").exists()


def test_adapters_on_base_weights_that_their_start_changed_keep_rank_and_scale(tmp_path: Path) -> None:
    models = [write(tmp_path / name, seed, init_lora_weights="pissa") for seed, name in enumerate("ab")]
    folders = [tmp_path / "a", tmp_path / "b"]
    code, output = run("merge", *folders, "-o", tmp_path / "out")
    assert code == 0, output
    merged = PeftModel.from_pretrained(llama(), str(tmp_path / "out"))
    for name, tensor in merged.named_parameters():
        if "base_layer" in name:
            torch.testing.assert_close(tensor, dict(models[0].named_parameters())[name])
    for options in (["--rank", "2"], ["--aggregation", "stack"]):
        code, output = run("merge", *folders, "-o", tmp_path / "other", *options)
        assert code == 1 and "'pissa' starts with other base weights at every rank" in output, output
    write(tmp_path / "b", 1, init_lora_weights="pissa", r=2)
    code, output = run("merge", *folders, "-o", tmp_path / "other")
    assert code == 1 and re.search("b: expected r 4 as in .*, found 2; a start by 'pissa' changes the", output), output
    assert "LoRA adapter of an unnamed model, started by 'pissa'" in run("check", tmp_path / "a")[1]


def test_adapters_and_whole_models_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "a", 0)
    EXAMPLES["vit"].model().save_pretrained(tmp_path / "whole")
    for order in (("a", "whole"), ("whole", "a")):
        code, output = run("merge", *(tmp_path / name for name in order), "-o", tmp_path / "out")
        assert code == 1 and "a: expected a whole model as" in output.replace(str(tmp_path) + "/", ""), output
    code, output = run("merge", tmp_path / "a", tmp_path / "none", "-o", tmp_path / "out")
    assert code == 1 and "none: expected an adapter as" in output, output
    code, output = run("merge", tmp_path / "whole", tmp_path / "whole", "-o", tmp_path / "out", "--rank", 2)
    assert code == 1 and "--rank: expected none for whole models" in output
    code, output = run("barrier", tmp_path / "a", tmp_path / "a", "--data", tmp_path, "-o", tmp_path / "out")
    assert code == 1 and "rotfed merges adapters with adapters" in output


def test_check_says_what_an_adapter_holds(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, use_rslora=True, modules_to_save=["lm_head"], rank_pattern={"q_proj": 2})
    code, output = run("check", tmp_path / "a")
    assert code == 0, output
    assert "rsLoRA adapter of" in output and "4 modules, rank 2 (2), 4 (2), scale 4, 5.657" in output
    assert "averaged as they are: base_model.model.lm_head.weight" in output
    assert run("check", tmp_path / "a" / "adapter_config.json") == (0, output)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    code, output = run("check", tmp_path / "a")
    assert code == 1 and "expected adapter_model.safetensors, found none" in output
    reconfigure(tmp_path / "a", peft_type="PREFIX_TUNING")
    code, output = run("check", tmp_path / "a")
    assert code == 1 and "peft_type: expected 'LORA', found 'PREFIX_TUNING'" in output
    code, output = run("check", "--run", tmp_path / "a")
    assert code == 1 and "--run: expected none for an adapter" in output
