"""What several tests do with the small models of `rotfed.examples`, and a spec of no real architecture."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from rotfed.checks import outputs, relative_change
from rotfed.examples import examples
from rotfed.library import bind_spec, load_spec
from rotfed.spec import SymmetrySpec
from rotfed.specfile import parse_spec_file
from rotfed.tensors import to_work

EXAMPLES = examples()

# One of each kind of layout, for what is too slow or too much alike to be tried on all.
FAMILIES = ("vit", "bert", "distilbert", "electra", "deberta-v2", "deberta-v3", "gpt2", "llama-biases-wide-heads")


@cache
def cached_model(name: str) -> nn.Module:
    """The bare backbone of an example in float64, built once; tests must not change it."""
    return EXAMPLES[name].model().double()


@cache
def cached_spec(name: str) -> SymmetrySpec:
    """The bound spec of an example."""
    return load_spec(EXAMPLES[name].config())


def backbone(name: str, seed: int = 0) -> tuple[SymmetrySpec, dict[str, Tensor]]:
    """The bound spec of an example and float64 parameters of its backbone."""
    if seed == 0:
        return cached_spec(name), copied(cached_model(name).state_dict())
    return cached_spec(name), dict(EXAMPLES[name].model(seed=seed).double().state_dict())


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


def change_of_function(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> float:
    """The largest relative change of any output of `model` between two sets of parameters."""
    return relative_change(outputs(model, before, inputs), outputs(model, after, inputs))
