"""Tiny real transformers models of every family that rotfed has a spec for, and what tests do with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rotfed.checks import randomize, relative_change
from rotfed.library import bind_spec, load_spec, parse_spec_file
from rotfed.spec import SymmetrySpec
from rotfed.transform import to_work

_TEXT = {
    "vocab_size": 30,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "max_position_embeddings": 20,
}
_IMAGE = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
}
_DEBERTA = {
    **_TEXT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pad_token_id": 0,
}
_DEBERTA_V3 = {**_DEBERTA, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 6}
_MASKED_LM = transformers.AutoModelForMaskedLM
_CLASSIFIER = transformers.AutoModelForSequenceClassification


@dataclass(frozen=True)
class Architecture:
    """One variant of an architecture: its configuration and the task heads to test beside the bare backbone."""

    model_type: str
    values: Mapping[str, Any]
    heads: tuple[Any, ...] = (_CLASSIFIER,)

    def config(self, **changes: Any) -> Any:
        """A transformers configuration of the variant."""
        return transformers.AutoConfig.for_model(self.model_type, **{**self.values, **changes})

    def model(self, head: Any = transformers.AutoModel, seed: int = 0, **changes: Any) -> nn.Module:
        """A model of the variant with random weights, norms and biases."""
        built = head.from_config(self.config(**changes))
        return randomize(built, torch.Generator().manual_seed(seed)).eval()


ARCHITECTURES = {
    "vit": Architecture("vit", _IMAGE, (transformers.AutoModelForImageClassification,)),
    "vit-no-qkv-bias": Architecture(
        "vit", {**_IMAGE, "qkv_bias": False, "pooler_output_size": 7}, (transformers.AutoModelForMaskedImageModeling,)
    ),
    "bert": Architecture("bert", _TEXT, (_CLASSIFIER, _MASKED_LM)),
    "roberta": Architecture("roberta", _TEXT, (_CLASSIFIER, _MASKED_LM)),
    "distilbert": Architecture(
        "distilbert",
        {
            "vocab_size": 30,
            "dim": 12,
            "n_layers": 2,
            "n_heads": 3,
            "hidden_dim": 10,
            "max_position_embeddings": 20,
        },
        (_CLASSIFIER, _MASKED_LM),
    ),
    "electra": Architecture("electra", {**_TEXT, "embedding_size": 8}, (_CLASSIFIER, _MASKED_LM)),
    "electra-no-project": Architecture("electra", {**_TEXT, "embedding_size": 12}),
    "deberta-v2": Architecture("deberta-v2", _DEBERTA, (_CLASSIFIER, _MASKED_LM)),
    "deberta-v2-c2p": Architecture("deberta-v2", {**_DEBERTA, "pos_att_type": ["c2p"]}),
    "deberta-v2-p2c": Architecture("deberta-v2", {**_DEBERTA, "pos_att_type": "p2c"}),
    "deberta-v2-no-pos-att": Architecture("deberta-v2", {**_DEBERTA, "pos_att_type": None}),
    "deberta-v2-conv": Architecture("deberta-v2", {**_DEBERTA_V3, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v2-absolute": Architecture(
        "deberta-v2",
        {**_DEBERTA, "relative_attention": False, "pos_att_type": None, "position_biased_input": True},
    ),
    "deberta-v2-embed-proj": Architecture("deberta-v2", {**_DEBERTA, "embedding_size": 8, "type_vocab_size": 2}),
    "deberta-v3": Architecture("deberta-v2", _DEBERTA_V3, (_CLASSIFIER, _MASKED_LM)),
    "deberta-v3-c2p": Architecture("deberta-v2", {**_DEBERTA_V3, "pos_att_type": ["c2p"]}),
    "gpt2": Architecture(
        "gpt2",
        {"vocab_size": 30, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 20, "pad_token_id": 0},
        (transformers.AutoModelForCausalLM, _CLASSIFIER),
    ),
    "gpt2-n-inner": Architecture(
        "gpt2",
        {
            "vocab_size": 30,
            "n_embd": 12,
            "n_layer": 2,
            "n_head": 3,
            "n_positions": 20,
            "n_inner": 10,
            "scale_attn_by_inverse_layer_idx": True,
        },
        (transformers.AutoModelForCausalLM,),
    ),
}

FAMILIES = ("vit", "bert", "roberta", "distilbert", "electra", "deberta-v2", "deberta-v3", "gpt2")


@cache
def cached_model(name: str) -> nn.Module:
    """The bare backbone of an architecture in float64, built once; tests must not change it."""
    return ARCHITECTURES[name].model().double()


@cache
def cached_spec(name: str) -> SymmetrySpec:
    """The bound spec of an architecture."""
    return load_spec(ARCHITECTURES[name].config())


def backbone(name: str, seed: int = 0) -> tuple[SymmetrySpec, dict[str, Tensor]]:
    """The bound spec of an architecture and float64 parameters of its backbone."""
    if seed == 0:
        return cached_spec(name), copied(cached_model(name).state_dict())
    return cached_spec(name), dict(ARCHITECTURES[name].model(seed=seed).double().state_dict())


_SMALL = """
model_type = ["small"]
layers = "2"
[sizes]
d_model = "5"
heads = "2"
head_dim = "3"
d_ff = "4"
d_unit = "6"
[groups]
qk = { kind = "orthogonal", axis = "head_dim", per = ["layer", "heads"] }
qk_scale = { kind = "scale", per = ["layer", "heads"] }
unit = { kind = "scale", axis = "d_unit", per = ["layer"] }
shared = { kind = "orthogonal", axis = "d_model" }
ff = { kind = "permutation", axis = "d_ff", per = ["layer"] }
[params]
"embed" = "_ shared"
"h.{layer}.q" = "(heads qk*qk_scale) d_model*shared"
"h.{layer}.k" = "(heads qk/qk_scale) d_model*shared"
"h.{layer}.q_bias" = "(heads qk*qk_scale)"
"h.{layer}.up" = "ff unit"
"h.{layer}.down" = "d_unit/unit ff"
"h.{layer}.fused" = "2 [heads qk | 3]"
"""


def small_spec() -> SymmetrySpec:
    """A spec of no real architecture: every kind of group, per head, per layer, shared by layers, and coupled."""
    return bind_spec(parse_spec_file(_SMALL, "small.toml"), "small", "small", {})


def small_params(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random parameters that fit `small_spec`, with a task head outside and a step counter."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    params = {"net.embed": normal(7, 5)}
    for layer in range(2):
        params[f"net.h.{layer}.q"] = normal(6, 5)
        params[f"net.h.{layer}.k"] = normal(6, 5)
        params[f"net.h.{layer}.q_bias"] = normal(6)
        params[f"net.h.{layer}.up"] = normal(4, 6)
        params[f"net.h.{layer}.down"] = normal(6, 4)
        params[f"net.h.{layer}.fused"] = normal(2, 9)
    return {**params, "head.weight": normal(3, 5), "head.steps": torch.tensor(3)}


def copied(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A deep copy of parameters."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def renamed(params: Mapping[str, Tensor], change: Callable[[str], str]) -> dict[str, Tensor]:
    """The same tensors under changed names."""
    return {change(name): tensor for name, tensor in params.items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless both hold the same names, shapes, types and values, to the bit."""
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def norm(params: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all floating-point parameters."""
    return sum(float(to_work(t).square().sum()) for t in params.values() if t.is_floating_point()) ** 0.5


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The Euclidean distance of two models over all floating-point parameters."""
    return norm({name: to_work(one[name]) - to_work(other[name]) for name in one if one[name].is_floating_point()})


def assert_recovers(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """Fail unless `found` is within `tolerance` of `expected`, relative to the norm of `expected`."""
    assert distance(found, expected) <= tolerance * norm(expected)


def outputs(model: nn.Module, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point tensors that `model` computes with `params` in place of its own."""
    with torch.no_grad():
        found = torch.func.functional_call(model, dict(params), kwargs=dict(inputs), tie_weights=False)
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}


def change_of_function(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> float:
    """The largest relative change of any output of `model` between two sets of parameters."""
    return relative_change(outputs(model, before, inputs), outputs(model, after, inputs))
