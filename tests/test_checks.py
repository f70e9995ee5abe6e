"""The shared property check touches nothing, and takes no bait."""

import pytest
import torch

import rotfed
from rotfed.checks import example_inputs, outputs, randomize, relative_change, unsettling_transform
from tests.models import EXAMPLES, assert_same, cached_spec, copied


def test_the_checked_model_is_not_touched() -> None:
    model = EXAMPLES["bert"].model().train()
    before = copied(model.state_dict())
    rotfed.check_spec(cached_spec("bert"), model)
    assert_same(dict(model.state_dict()), before)
    assert model.training


def test_a_spec_and_a_model_are_expected() -> None:
    for spec, model in [(None, EXAMPLES["bert"].model()), (cached_spec("bert"), 3)]:
        with pytest.raises(rotfed.SpecError, match=r"(spec|model): expected a .*found (NoneType|int)"):
            rotfed.check_spec(spec, model)


def test_a_model_that_computes_nothing_finite_does_not_pass() -> None:
    model = EXAMPLES["vit"].model()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(torch.nan)
    with pytest.raises(rotfed.FunctionChangedError):
        rotfed.check_spec(cached_spec("vit"), model)


def test_relative_change_takes_the_worst_output_and_counts_nan_as_infinite() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([100.0, 0.0])
    assert relative_change({"a": one, "b": two}, {"a": one + torch.tensor([0.0, 0.5]), "b": two + 1}) == 0.25
    assert relative_change({"a": one}, {"a": torch.tensor([1.0, torch.nan])}) == float("inf")


def test_random_weights_leave_no_norm_at_one_and_no_bias_at_zero(generator: torch.Generator) -> None:
    model = randomize(EXAMPLES["bert"].model(), generator)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    assert vectors and all(bool(((p != 0) & (p != 1)).all()) for p in vectors)


def test_a_model_of_unknown_input_is_refused_with_the_remedy(generator: torch.Generator) -> None:
    model = torch.nn.Linear(2, 2)
    model.config = EXAMPLES["bert"].config()
    with pytest.raises(rotfed.SpecError, match="pass example inputs"):
        example_inputs(model, generator)


def test_float64_is_kept_where_a_model_computes_in_float32() -> None:
    model = EXAMPLES["llama"].model().double()
    params = dict(model.state_dict())
    params["layers.0.input_layernorm.weight"] = params["layers.0.input_layernorm.weight"] * (1 + 1e-10)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    change = relative_change(outputs(model, model.state_dict(), inputs), outputs(model, params, inputs))
    assert 1e-12 < change < 1e-8


def test_no_permutation_stays_in_place(generator: torch.Generator) -> None:
    for _ in range(20):
        elements = unsettling_transform(cached_spec("llama"), generator).elements
        for name in ("kv_heads", "q_heads", "d_ff"):
            assert bool((elements[name] != torch.arange(elements[name].shape[-1])).any(-1).all())
