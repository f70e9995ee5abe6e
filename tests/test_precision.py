"""Models in float32 and half precision: aligned as well as their types hold, and never worse than as they came."""

import pytest
import torch
from torch import Tensor

import rotfed
from rotfed.checks import example_inputs, outputs, relative_change
from tests.models import EXAMPLES, FAMILIES, backbone, cached_model, cached_spec, distance, norm

TYPES = (torch.float32, torch.bfloat16, torch.float16)

# A copy in float32 comes back to a few times its own rounding, which is also that of the products.
EXACT = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def in_type(params: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in params.items()}


def typed(name: str, dtype: torch.dtype) -> tuple[rotfed.SymmetrySpec, dict[str, Tensor]]:
    spec, theta = backbone(name)
    return spec, in_type(theta, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_copy_is_recovered(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    spec, theta = typed(name, dtype)
    # Scales far from one would leave more of the rounding to compare with than of the model.
    moved = rotfed.random_transform(spec, generator, reflections=False).apply(theta)
    alignment = rotfed.align(moved, theta, spec)
    assert {n: t.dtype for n, t in alignment.params.items()} == {n: t.dtype for n, t in theta.items()}
    assert distance(moved, theta) > 0.1 * norm(theta)
    assert distance(alignment.params, theta) <= EXACT[dtype] * norm(theta)
    assert alignment.distance_after == pytest.approx(distance(alignment.params, theta), rel=1e-4, abs=1e-12)
    again = alignment.transform.apply(moved)
    assert all(torch.equal(again[n], t) for n, t in alignment.params.items())


@pytest.mark.parametrize("dtype", [torch.float64, *TYPES])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_aligned_to_itself_is_the_very_same_tensors(name: str, dtype: torch.dtype) -> None:
    spec, theta = typed(name, dtype)
    some = tuple(spec.groups)[::2]
    options = [rotfed.AlignOptions(), rotfed.AlignOptions(groups=some), rotfed.AlignOptions(layers=[1])]
    options += [rotfed.AlignOptions(groups=some, layers=[0]), rotfed.AlignOptions(reflections=False, strength=0.3)]
    twin = {n: t.clone() for n, t in theta.items()}
    for option in options:
        for anchor in (theta, twin):
            kept = rotfed.align(theta, anchor, spec, option)
            assert all(kept.params[n] is t for n, t in theta.items()), option
            assert (kept.distance_before, kept.distance_after, kept.identity_permutations) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_distance_of_the_result_never_rises(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    spec, theta = backbone(name)
    fell = tried = 0
    for size in (1.0, 1e-1, 1e-3, 1e-5, 1e-6, 2e-7):
        for option in (rotfed.AlignOptions(), rotfed.AlignOptions(strength=0.5, reflections=False)):
            source, anchor = (
                in_type({n: t + size * torch.randn(t.shape, generator=generator) for n, t in theta.items()}, dtype)
                for _ in range(2)
            )
            alignment = rotfed.align(source, anchor, spec, option)
            before, after = distance(source, anchor), distance(alignment.params, anchor)
            assert after <= before and alignment.distance_after <= alignment.distance_before
            assert alignment.distance_before == pytest.approx(before, rel=1e-5)
            # Moments do not know what the result loses when it is rounded: some 1e-7 of the norm.
            assert alignment.distance_after == pytest.approx(after, rel=1e-4 + 1e-7 / size)
            fell, tried = fell + (after < before), tried + 1
    assert fell >= tried // 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_function_stays_to_the_rounding_of_the_type(
    name: str, dtype: torch.dtype, tolerance: float, generator: torch.Generator
) -> None:
    spec, model = cached_spec(name), cached_model(name)
    source = in_type(dict(EXAMPLES[name].model(seed=1).state_dict()), dtype)
    anchor = in_type(dict(model.state_dict()), dtype)
    alignment = rotfed.align(source, anchor, spec)
    assert alignment.distance_after < 0.99 * alignment.distance_before
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in example_inputs(model, generator).items()}
    # Run in float64, so that what is seen is what the weights lost alone.
    before, after = (
        outputs(model, {n: t.double() if t.is_floating_point() else t for n, t in params.items()}, inputs)
        for params in (source, alignment.params)
    )
    assert relative_change(before, after) <= tolerance


@pytest.mark.parametrize("name", ["bert", "llama-biases-wide-heads", "vit"])
def test_float32_finds_what_float64_finds(name: str) -> None:
    spec, anchor = backbone(name)
    _, source = backbone(name, seed=1)
    wide = rotfed.align(source, anchor, spec)
    single = rotfed.align(in_type(source, torch.float32), in_type(anchor, torch.float32), spec)
    # Sweeps over coupled groups end earlier in float32: at a relative change of 1e-4.
    assert single.distance_after == pytest.approx(wide.distance_after, rel=1e-3)


@pytest.mark.parametrize("name", ["bert", "vit", "llama-biases-wide-heads"])
def test_the_consensus_of_copies_recovers_one_frame(name: str, generator: torch.Generator) -> None:
    spec, theta = typed(name, torch.float32)
    copies = [rotfed.random_transform(spec, generator, reflections=False).apply(theta) for _ in range(3)]
    for alignment in rotfed.align_all(copies, spec, "consensus", reference=theta):
        assert distance(alignment.params, theta) <= EXACT[torch.float32] * norm(theta)
