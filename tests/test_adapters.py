"""Adapters by PEFT's names, in PEFT's own models: what is read, aggregated and loaded back."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rotfed.adapters import (
    METHODS,
    add_base_delta,
    aggregate_adapters,
    fit_adapter,
    load_adapter_spec,
    train_factors,
)
from rotfed.adapters.client import delta_record
from rotfed.errors import AlignmentError, SpecError

TOKENS = torch.arange(24).reshape(2, 12)
SHARES = [0.5, 0.3, 0.2]


class Mixed(nn.Module):
    """An embedding, a convolution, linear layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.conv = nn.Conv2d(1, 6, (3, 2))
        self.one = nn.Linear(10, 10)
        self.two = nn.Linear(10, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.conv(self.embed(input_ids)[:, None])
        return self.head(self.two(self.one(x.mean(-1)).tanh()).tanh())


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            **settings,
        )
    )


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (llama, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "rslora": (llama, {"target_modules": ["q_proj", "o_proj"], "use_rslora": True, "lora_alpha": 5}),
    "dora": (llama, {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj"],
            "alpha_pattern": {"v_proj": 3},
            "rank_pattern": {"0.self_attn.v_proj": 2},
        },
    ),
    "head and bias": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "bias": "none"},
    ),
    "mixed": (mixed, {"target_modules": ["embed", "conv", "one", "two"], "modules_to_save": ["head"]}),
    "biases": (mixed, {"target_modules": ["one"], "bias": "all", "lora_bias": True}),
    "dora of all kinds": (mixed, {"target_modules": ["embed", "conv", "one"], "use_dora": True}),
}


def adapted(case: str, rank: int = 4, seed: int = 1, dtype: torch.dtype = torch.float64) -> PeftModel:
    """A model with an adapter that is not at its start: every parameter of it was moved at random."""
    build, settings = CASES[case]
    config = LoraConfig(**{"r": rank, "lora_alpha": 6, **settings})
    model = get_peft_model(build().to(dtype), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += (0.3 * noise).to(parameter.dtype)
    return model.eval()


def state(model: PeftModel) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        # PEFT takes lora_B's bias for a factor that lost a dimension.
        warnings.filterwarnings("ignore", message="(?s).*lora_B.bias")
        found: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def alone(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A PeftModel's own state dict without the base weights."""
    return {name: tensor for name, tensor in params.items() if "base_layer" not in name}


def answers(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(input_ids=TOKENS)
    return found if isinstance(found, Tensor) else found.logits


def updates(model: PeftModel) -> dict[str, Tensor]:
    """The updates that PEFT itself would add to the base weights."""
    return {
        name: module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def loaded(case: str, params: Mapping[str, Tensor], rank: int = 4) -> PeftModel:
    """PEFT's model with an aggregated adapter; fails where PEFT finds a key missing or unexpected."""
    model = adapted(case, rank, seed=99)
    found = set_peft_model_state_dict(model, dict(params))
    assert not found.unexpected_keys
    assert not [key for key in found.missing_keys if "lora_" in key or "modules_to_save" in key]
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_peft_loads_the_result_and_computes_the_mean_of_updates_as_the_error_says(case: str, method: str) -> None:
    clients = [adapted(case, seed=seed) for seed in range(3)]
    spec = load_adapter_spec(clients[0])
    found = aggregate_adapters([state(client) for client in clients], spec, method, SHARES, anchor=state(clients[0]))
    assert len(repr(found)) < 200
    model = loaded(case, found.params)
    if found.base_delta:
        add_base_delta(model, delta_record(found.base_delta))
    base = dict(adapted(case).named_parameters())
    errors: list[Tensor] = []
    norms: list[Tensor] = []
    own = [updates(client) for client in clients]
    for name, update in updates(model).items():
        target = torch.stack([share * u[name] for share, u in zip(SHARES, own, strict=True)]).sum(0)
        weight = next(f"{name}.{inner}weight" for inner in ("base_layer.", "") if f"{name}.{inner}weight" in base)
        moved = update + dict(model.named_parameters())[weight].detach() - base[weight].detach()
        error, norm = (moved - target).norm(), target.norm()
        key = name if name in found.errors else f"base_model.model.{name}"
        assert float(error / norm) == pytest.approx(found.errors[key], rel=1e-5, abs=2e-7)
        errors.append(error)
        norms.append(norm)
    assert found.error <= found.mean_error + 1e-12 or method == "rotation"
    if method in ("exact", "exact-mean", "stack"):
        assert found.error < 1e-7
    total = float(torch.stack(errors).norm() / torch.stack(norms).norm())
    assert total == pytest.approx(found.error, rel=1e-5, abs=2e-7)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_merged_and_unloaded_answers_as_the_adapter_does(case: str, method: str) -> None:
    clients = [state(adapted(case, seed=seed)) for seed in range(3)]
    model = adapted(case)
    found = aggregate_adapters(clients, load_adapter_spec(model), method, SHARES)
    set_peft_model_state_dict(model, found.params)
    if found.base_delta:
        add_base_delta(model, delta_record(found.base_delta))
    expected = answers(model)
    torch.testing.assert_close(answers(copy.deepcopy(model).merge_and_unload()), expected, rtol=1e-6, atol=1e-6)


def trained(seed: int, rank: int = 4, steps: int = 15) -> PeftModel:
    """An adapter that learned something: to go on from a token to one of this client's own."""
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    tokens = torch.randint(40, (16, 12), generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=(tokens + seed) % 40).loss.backward()
        optimizer.step()
    return model.eval()


def test_of_trained_adapters_optimal_is_nearest_and_starts_the_next_round_where_the_last_one_did() -> None:
    start = trained(1, steps=0)
    clients = [trained(seed) for seed in (1, 2, 3)]
    spec, before = load_adapter_spec(start), state(start)
    found = {m: aggregate_adapters([state(c) for c in clients], spec, m, SHARES, before) for m in METHODS}
    for name, best in found["optimal"].errors.items():
        for method in ("mean", "rotation"):
            assert best <= found[method].errors[name] + 1e-9
        assert best > 0.01
    assert found["optimal"].error < 0.9 * found["mean"].error
    for name, tensor in before.items():
        if "lora_A" in name:
            moved = [float((params[name] - tensor).norm()) for params in (state(clients[0]), found["optimal"].params)]
            assert moved[1] < 1.5 * moved[0]


def test_everything_that_is_no_factor_is_averaged_plainly() -> None:
    for case, words in {
        "dora": ("magnitude",),
        "head and bias": ("lm_head",),
        "biases": ("bias",),
        "mixed": ("head.weight",),
    }.items():
        clients = [state(adapted(case, seed=seed)) for seed in range(3)]
        spec = load_adapter_spec(adapted(case))
        found = aggregate_adapters(clients, spec, "optimal", SHARES).params
        plain = spec.plain(clients[0])
        assert all(any(word in name for name in plain) for word in words)
        for name in plain:
            mean = sum(share * client[name] for share, client in zip(SHARES, clients, strict=True))
            torch.testing.assert_close(found[name], mean)


def test_ranks_and_scales_may_differ_between_clients() -> None:
    for rslora in (False, True):
        settings = {"target_modules": ["q_proj", "v_proj"], "use_rslora": rslora}
        CASES["ranks"] = (llama, settings)
        clients = [adapted("ranks", rank, seed=rank) for rank in (2, 4, 8)]
        spec = load_adapter_spec(clients[2])
        found = aggregate_adapters([state(client) for client in clients], spec, "optimal", SHARES)
        for name, update in updates(loaded("ranks", found.params, 8)).items():
            target = torch.stack([s * updates(c)[name] for s, c in zip(SHARES, clients, strict=True)]).sum(0)
            singular = torch.linalg.svdvals(target)
            torch.testing.assert_close((update - target).norm(), singular[8:].norm(), rtol=1e-5, atol=1e-9)
        for client in clients:
            fitted = fit_adapter(found.params, state(client), spec)
            assert {n: t.shape for n, t in fitted.items()} == {n: t.shape for n, t in state(client).items()}
            own = copy.deepcopy(client)
            set_peft_model_state_dict(own, fitted)
            rank = client.peft_config["default"].r
            for name, update in updates(own).items():
                whole = updates(loaded("ranks", found.params, 8))[name]
                best = torch.linalg.svdvals(whole)[rank:].norm()
                torch.testing.assert_close((update - whole).norm(), best, rtol=1e-5, atol=1e-9)
        del CASES["ranks"]


def test_clients_of_lower_ranks_do_not_shrink_what_the_anchor_has_beyond_them() -> None:
    before = state(adapted("plain", 8))
    untrained = {name: 0 * tensor if "lora_B" in name else tensor for name, tensor in before.items()}
    spec = load_adapter_spec(adapted("plain", 8))
    clients = [fit_adapter(untrained, state(adapted("plain", rank)), spec) for rank in (2, 4)]
    for method in METHODS:
        found = aggregate_adapters(clients, spec, method, anchor=untrained)
        for name, tensor in found.params.items():
            torch.testing.assert_close(tensor, untrained[name])


def test_an_alpha_that_goes_with_the_rank_is_said() -> None:
    small, large = adapted("plain", 2), adapted("plain", 4)
    spec = load_adapter_spec(large, alphas={2: 4})
    (module, *_) = spec.resolve(state(small))
    assert spec.scale(module, 2) == 2.0 and spec.scale(module, 4) == 1.5

    with pytest.raises(SpecError, match="alphas: expected ranks as whole numbers, found '2'"):
        load_adapter_spec(large, alphas={"2": 4})  # type: ignore[dict-item]


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_that_changes_the_base_weights_has_one_rank_everywhere(start: str) -> None:
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": start}
    CASES["start"] = (llama, {**settings, "rank_pattern": {"v_proj": 3}})
    clients = [adapted("start", seed=seed, dtype=torch.float32) for seed in range(3)]
    spec = load_adapter_spec(clients[0])
    aggregate_adapters([state(client) for client in clients], spec)
    CASES["start"] = (llama, settings)
    small = state(adapted("start", 2, dtype=torch.float32))
    del CASES["start"]
    for rank, models in ((None, [state(clients[0]), small]), ("sum", [state(client) for client in clients]), (2, [])):
        with pytest.raises(SpecError, match=f"expected rank 4, found .*'{start}' starts with other base weights"):
            aggregate_adapters(models or [state(clients[0])], spec, rank=rank)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="starts with other base weights"):
        fit_adapter(state(clients[0]), small, spec)


def test_patterns_count_from_the_base_model_whatever_its_modules_are_called() -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["one", "two"], alpha_pattern={"^module.one": 3})
    model = get_peft_model(nn.ModuleDict({"module": mixed()}), config)
    spec = load_adapter_spec(model)
    scales = {module.name: spec.scale(module, 4) for module in spec.resolve(state(model))}
    layers = {name: module.scaling["default"] for name, module in model.named_modules() if name in scales}
    assert scales == layers and set(scales.values()) == {0.75, 2.0}


def test_a_client_of_a_higher_rank_keeps_its_own_a_where_the_update_has_nothing() -> None:
    large, small = adapted("plain", 8), adapted("plain", 2)
    fitted = fit_adapter(state(small), state(large), load_adapter_spec(large))
    set_peft_model_state_dict(large, fitted)
    for name, update in updates(large).items():
        torch.testing.assert_close(update, updates(small)[name])
    assert all(int(torch.linalg.matrix_rank(t)) == 8 for name, t in fitted.items() if "lora_A" in name)


def test_names_with_the_adapter_in_the_middle_give_the_same() -> None:
    clients = [adapted("dora of all kinds", seed=seed) for seed in range(2)]
    spec = load_adapter_spec(clients[0])
    short = aggregate_adapters([state(client) for client in clients], spec).params
    long = aggregate_adapters([alone(client.state_dict()) for client in clients], spec).params
    for name, tensor in long.items():
        brief = name.replace(".default", "")
        if "magnitude" in name:
            brief = brief.removesuffix(".weight")
        if brief in short:
            torch.testing.assert_close(tensor, short[brief])
    assert sum("lora_" in name for name in long) == sum("lora_" in name for name in short)


def test_a_whole_model_is_no_adapter_but_adapted_embeddings_come_with_their_base_weights() -> None:
    model = adapted("plain")
    spec = load_adapter_spec(model)
    with pytest.raises(SpecError, match=r"base_layer.weight: .*of 6 adapted modules.*; send what get_peft_model_state"):
        spec.resolve(model.state_dict())
    with pytest.raises(SpecError, match=r"expected lora_A and lora_B .*, found none; send what get_peft_model"):
        aggregate_adapters([llama().state_dict()] * 2, spec)
    embedded = get_peft_model(llama(), LoraConfig(target_modules=["embed_tokens", "q_proj", "lm_head"]))
    params = get_peft_model_state_dict(embedded, save_embedding_layers=True)
    assert sum("base_layer" in name for name in params) == 2
    assert len(load_adapter_spec(embedded).resolve(params)) == 4


def test_half_precision_comes_back_in_its_type_and_is_rounded_once() -> None:
    clients = [{n: t.bfloat16() for n, t in state(adapted("dora", seed=s)).items()} for s in range(3)]
    spec = load_adapter_spec(adapted("dora"))
    for method in ("mean", "rotation", "optimal"):
        found = aggregate_adapters(clients, spec, method, SHARES).params
        wide = aggregate_adapters([{n: t.double() for n, t in c.items()} for c in clients], spec, method, SHARES).params
        for name, tensor in found.items():
            assert tensor.dtype == torch.bfloat16
            torch.testing.assert_close(tensor, wide[name].bfloat16(), rtol=1e-2, atol=1e-3)


def test_weights_that_an_embedding_shares_with_the_head_stay_one_update() -> None:
    CASES["tied"] = (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["embed_tokens", "q_proj", "lm_head"], "ensure_weight_tying": True},
    )
    clients = [adapted("tied", seed=seed) for seed in range(3)]
    found = aggregate_adapters([state(client) for client in clients], load_adapter_spec(clients[0]), "optimal", SHARES)
    after = updates(loaded("tied", found.params))
    embed, head = (next(u for n, u in after.items() if word in n) for word in ("embed_tokens", "lm_head"))
    torch.testing.assert_close(embed, head)
    del CASES["tied"]


def test_a_layer_that_two_names_share_stays_one_and_gets_its_residual_once() -> None:
    clients = [adapted("mixed", seed=seed) for seed in range(3)]
    for client in clients:
        client.base_model.model.two = client.base_model.model.one
    # The model's own state_dict names both, get_peft_model_state_dict one of them.
    states = [alone(client.state_dict()) for client in clients]
    found = aggregate_adapters(states, load_adapter_spec(clients[0]), "exact", SHARES)
    for name in [name for name in found.params if ".one." in name]:
        torch.testing.assert_close(found.params[name], found.params[name.replace("one", "two")], rtol=0, atol=0)
    layer = clients[0].base_model.model.one
    before = layer.base_layer.weight.detach().clone()
    add_base_delta(clients[0], delta_record(found.base_delta))
    rest = found.base_delta["base_model.model.one"]
    other = adapted("mixed")
    add_base_delta(other, found.base_delta)
    torch.testing.assert_close(other.base_model.model.one.base_layer.weight, layer.base_layer.weight, rtol=0, atol=0)
    torch.testing.assert_close(layer.base_layer.weight.detach() - before, rest.B @ rest.A, rtol=1e-5, atol=1e-6)


def test_frozen_factors_are_told_apart_by_what_starts_at_zero() -> None:
    model = adapted("mixed")
    for which in ("B", "A", "both"):
        train_factors(model, which)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" in name}
        starts_at_zero = {n for n in trained if "lora_B" in n or "lora_embedding_A" in n}
        assert bool(starts_at_zero) == (which != "A") and bool(trained - starts_at_zero) == (which != "B")
        assert model.base_model.model.head.modules_to_save["default"].weight.requires_grad
    with pytest.raises(AlignmentError, match="rotfed-train: expected one of both, A, B"):
        train_factors(model, "C")


def test_a_residual_is_added_once_and_never_to_what_it_would_break() -> None:
    model = adapted("plain")
    clients = [state(adapted("plain", seed=seed)) for seed in range(2)]
    found = aggregate_adapters(clients, load_adapter_spec(model), "exact")
    record = delta_record(found.base_delta)
    add_base_delta(model, record)
    with pytest.raises(AlignmentError, match="one that has one already"):
        add_base_delta(model, record)
    tied = get_peft_model(llama(tie_word_embeddings=True), LoraConfig(target_modules=["q_proj"]))
    one = {
        "base_model.model.model.embed_tokens.delta_B": torch.ones(40, 1),
        "base_model.model.model.embed_tokens.delta_A": torch.ones(1, 16),
    }
    with pytest.raises(AlignmentError, match="tied to another"):
        add_base_delta(tied, one)
    again = get_peft_model(model.unload(), LoraConfig(**CASES["plain"][1]))
    with pytest.raises(AlignmentError, match="one that has one already"):
        add_base_delta(again, record)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        quantised = adapted("plain", dtype=torch.float32)
        for parameter in quantised.parameters():
            parameter.requires_grad_(False).data = parameter.data.to(dtype)
        with pytest.raises(AlignmentError, match="expected a floating-point base weight"):
            add_base_delta(quantised, record)
    B, A = list(record)[:2]
    for odd, message in [
        ({B: record[B]}, "expected delta_B and delta_A of a module"),
        ({A: record[A]}, "expected delta_B and delta_A of a module"),
        ({B: record[B], A: record[A][:1]}, "expected two factors of a change"),
        ({B: record[B] * torch.nan, A: record[A]}, "NaN"),
        ({B: record[B].numpy(), A: record[A]}, "expected a dense torch.Tensor, found ndarray"),
    ]:
        fresh = adapted("plain")
        with pytest.raises(AlignmentError, match=message):
            add_base_delta(fresh, odd)
        torch.testing.assert_close(fresh.state_dict(), adapted("plain").state_dict(), rtol=0, atol=0)
    with pytest.raises(AlignmentError, match="expected a floating-point base weight of shape"):
        add_base_delta(adapted("mixed"), {n.replace("model.embed_tokens", "embed"): t for n, t in one.items()})
    with pytest.raises(AlignmentError, match="no such module"):
        add_base_delta(adapted("plain"), {n.replace("embed", "other"): t for n, t in one.items()})


def test_what_float32_rounds_away_is_no_component_of_a_residual() -> None:
    clients = [state(adapted("plain", 2, seed, torch.float32)) for seed in range(3)]
    found = aggregate_adapters(clients, load_adapter_spec(adapted("plain", 2)), "exact", SHARES)
    assert {factors.rank for factors in found.base_delta.values()} == {4}
    half = aggregate_adapters(
        [{n: t.bfloat16() for n, t in c.items()} for c in clients],
        load_adapter_spec(adapted("plain", 2)),
        "exact",
        SHARES,
    )
    assert min(factors.rank for factors in half.base_delta.values()) > 4 and half.error < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected 'LORA', found 'IA3'"),
        ({"peft_type": "LOHA"}, "found 'LOHA'"),
        ({"peft_type": "PREFIX_TUNING"}, "found 'PREFIX_TUNING'"),
        ({"use_qalora": True}, "use_qalora: expected unset"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters: expected unset"),
        ({"lora_alpha": 0}, "lora_alpha: expected a positive number, found 0"),
        ({"alpha_pattern": {"q_proj": -1}}, "q_proj: expected a positive number"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern: expected values by a module's name or pattern"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: expected values by a module's name or pattern"),
    ],
)
def test_other_methods_are_refused_by_their_configuration(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_adapter_spec({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **settings})


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    start = {"m.lora_A.weight": torch.ones(2, 5), "m.lora_B.weight": torch.ones(6, 2)}
    spelled = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in {**start, **spelled}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (changed(m__lora_B__weight=None), "m.lora_A.weight: expected lora_B beside it"),
        (changed(m__lora_A__weight=None), "m.lora_B.weight: expected lora_A beside it"),
        (changed(m__lora_B__weight=torch.ones(6, 3)), r"m.lora_B.weight: expected 2 columns.*grouped"),
        (changed(m__lora_A__bias=torch.ones(2)), "m.lora_A.bias: expected a parameter of a LoRA adapter"),
        (changed(m__lora_E=torch.ones(2, 1)), "m.lora_E: expected a parameter of a LoRA adapter"),
        (changed(m__hada_w1_a=torch.ones(2, 1)), "m.hada_w1_a: expected a parameter of a LoRA adapter"),
        (changed(m__ia3_l=torch.ones(2, 1)), "m.ia3_l"),
        (changed(prompt_embeddings=torch.ones(2, 1)), "prompt_embeddings"),
        (
            changed(m__lora_A__weight=torch.ones(2, 5, dtype=torch.int8)),
            "dense floating-point factor, found torch.int8",
        ),
        (changed(n__lora_A__other__weight=torch.ones(2, 5)), "expected one adapter, found 'other'"),
        ({"head.weight": torch.ones(2)}, "expected lora_A and lora_B among the parameters, found none"),
        (changed(m__lora_A__weight=torch.tensor(1.0)), r"m.lora_B.weight: .*found shapes \(6, 2\) and \(\)"),
        (changed(m__lora_A__weight=torch.ones(2, 5).to(torch.float8_e4m3fn)), "factor, found torch.float8_e4m3fn"),
        (
            {"m.lora_embedding_A": torch.ones(2, 5, 3), "m.lora_embedding_B": torch.ones(6, 2, 1)},
            "factors that are no plain product",
        ),
    ],
)
def test_what_is_no_plain_product_is_refused_by_name(params: dict[str, Tensor], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_adapter_spec({"peft_type": "LORA", "r": 2, "lora_alpha": 2}).resolve(params)


def test_adapters_that_do_not_fit_each_other_are_refused() -> None:
    spec = load_adapter_spec({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    for other, message in [
        (changed(m__lora_B__weight=torch.ones(7, 2)), r"m: expected an update of shape \(6, 5\), found \(7, 5\)"),
        (changed(bias=torch.ones(2)), "bias: expected in every adapter"),
        (changed(m__lora_B__weight=torch.full((6, 2), torch.nan)), "NaN"),
    ]:
        with pytest.raises(AlignmentError, match=message):
            aggregate_adapters([changed(), other], spec)
    for anchor, message in [
        (changed(m__lora_B__weight=torch.full((6, 2), torch.nan)), "finite values in the anchor"),
        (changed(m__lora_A__weight=torch.ones(2, 5, device="meta")), "anchor, found a meta tensor"),
        (changed(head=torch.ones(2, dtype=torch.complex64)), "head: expected a dense tensor of real numbers"),
        (changed(head=torch.ones(2, 2).to_sparse()), "head: expected a dense tensor of real numbers"),
    ]:
        models = [{**changed(), "head": anchor["head"]} if "head" in anchor else changed()]
        with pytest.raises(AlignmentError, match=message):
            aggregate_adapters(models, spec, anchor=anchor)
    for nothing, found in (([], "none"), (changed(), "one without a list")):
        with pytest.raises(AlignmentError, match=f"adapters: expected a list of at least one .*, found {found};"):
            aggregate_adapters(nothing, spec)  # type: ignore[arg-type]
    larger = {"m.lora_A.weight": torch.ones(3, 7), "m.lora_B.weight": torch.ones(6, 3)}
    with pytest.raises(AlignmentError, match=r"m: expected an update of shape \(6, 7\), found \(6, 5\) in the server"):
        fit_adapter(changed(), larger, spec)
    with pytest.raises(AlignmentError, match="finite values in the server's adapter"):
        fit_adapter(changed(m__lora_B__weight=torch.full((6, 2), torch.nan)), changed(), spec)
    for keywords, message in [
        ({"rank": 1.5}, "rank: expected a positive one with 'optimal' only, found 1.5"),
        ({"rank": "all"}, "rank: expected a positive one with 'optimal' only, found 'all'"),
        ({"rank": 5}, "rank: expected at most 4, the sum of the adapters' ranks, found 5"),
        ({"method": "best"}, "method: expected one of mean"),
        ({"strength": 2.0}, "strength: expected a number from 0 to 1"),
        ({"method": "mean", "rank": 1}, "rank: expected a positive one with 'optimal' only"),
    ]:
        with pytest.raises(AlignmentError, match=message):
            aggregate_adapters([changed(), changed()], spec, **keywords)  # type: ignore[arg-type]
