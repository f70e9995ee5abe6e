"""Regressions of `align`: laws that failed for shared groups, chosen layers, little strength and positive scales."""

import itertools
import warnings
from typing import Any

import pytest
import torch

import rotfed
from rotfed import frames
from rotfed.checks import unsettling_transform
from tests.models import assert_recovers, assert_same, backbone, distance, norm, small_params, small_spec


def test_a_group_shared_by_all_layers_and_nothing_else_is_aligned(generator: torch.Generator) -> None:
    spec, theta = small_spec(), small_params(generator)
    full = rotfed.random_transform(spec, generator)
    moved = rotfed.Transform(spec, {"shared": full.elements["shared"]}).apply(theta)
    assert_recovers(rotfed.align(moved, theta, spec, rotfed.AlignOptions(groups=["shared"])).params, theta)


def test_chosen_layers_never_bring_the_others_farther(generator: torch.Generator) -> None:
    # Turn what all layers share, but put one layer back: what helps layer 0 would harm layer 1.
    spec, theta = small_spec(), small_params(generator)
    full = rotfed.random_transform(spec, generator)
    moved = rotfed.Transform(spec, {"shared": full.elements["shared"]}).apply(theta)
    source = {name: theta[name] if name.startswith("net.h.1.") else moved[name] for name in theta}
    alignment = rotfed.align(source, theta, spec, rotfed.AlignOptions(layers=[0]))
    assert alignment.distance_after <= alignment.distance_before


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.1])
def test_more_sweeps_are_never_farther(strength: float, generator: torch.Generator) -> None:
    spec = small_spec()
    for _ in range(20):
        source, anchor = small_params(generator), small_params(generator)
        sequential = rotfed.align(
            source, anchor, spec, rotfed.AlignOptions(strength=strength, max_sweeps=1)
        ).distance_after
        joint = rotfed.align(source, anchor, spec, rotfed.AlignOptions(strength=strength)).distance_after
        assert joint <= sequential * (1 + 1e-12)


def test_scales_without_reflections_are_the_best_positive_ones() -> None:
    spec, theta = backbone("bert")
    source = {name: 3 * t if ".key." in name else t for name, t in theta.items()}
    # Every sign is wrong, so that the best scale of all is negative.
    anchor = {name: -0.2 * t if ".key." in name or ".query." in name else t for name, t in theta.items()}
    best = rotfed.align(source, anchor, spec, rotfed.AlignOptions(groups=["qk_scale"], reflections=False))
    assert bool((best.transform.elements["qk_scale"] > 0).all())
    ones = torch.ones_like(best.transform.elements["qk_scale"])
    for factor in (0.5, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0):
        other = rotfed.Transform(spec, {"qk_scale": factor * ones}).apply(source)
        assert best.distance_after <= distance(other, anchor) + 1e-9


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.2])
def test_the_consensus_is_never_farther_apart_than_the_medoid_or_plain(
    strength: float, generator: torch.Generator
) -> None:
    spec, shares = small_spec(), [0.5, 0.3, 0.2]
    for turned in [False, True] * 4:
        models = [small_params(generator) for _ in shares]
        if turned:
            models = [rotfed.random_transform(spec, generator).apply(model) for model in models]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rotfed.ConvergenceWarning)
            consensus, medoid = (
                frames.spread2(
                    [a.params for a in rule(models, spec, shares, rotfed.AlignOptions(strength=strength))], shares
                )
                for rule in (frames._align_to_consensus, frames._align_to_medoid)
            )
        assert consensus <= min(medoid, frames.spread2(models, shares)) * (1 + 1e-12)


def test_transforms_of_different_precision_compose(generator: torch.Generator) -> None:
    spec, theta = backbone("bert")
    one, two = (rotfed.random_transform(spec, generator, dtype) for dtype in (torch.float32, torch.float64))
    assert_recovers(one.compose(two).apply(theta), one.apply(two.apply(theta)))
    assert_recovers(two.compose(one).apply(theta), two.apply(one.apply(theta)))


def test_every_option_finds_with_a_reused_anchor_what_it_finds_with_a_fresh_one(generator: torch.Generator) -> None:
    spec, theta = backbone("bert")
    # Heads that differ by a turn of their values alone: which groups turn decides how near they are to each other.
    for name, tensor in theta.items():
        if ".attention.self." in name:
            tensor.copy_(tensor[:4].repeat(3, *[1] * (tensor.ndim - 1)))
        elif "attention.output.dense.weight" in name:
            tensor.copy_(tensor[:, :4].repeat(1, 3))
    turn = rotfed.random_transform(spec, generator).elements
    theta = rotfed.Transform(spec, {"vo": turn["vo"]}).apply(theta)
    theta = {n: t + 0.01 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in theta.items()}
    order = torch.tensor([1, 2, 0]).expand(2, 3)
    source = rotfed.Transform(spec, {"heads": order}).apply(theta)
    options: list[dict[str, Any]] = [
        {"groups": groups, "layers": layers}
        for size in range(5)
        for groups in itertools.combinations(("heads", "qk", "vo", "vo_scale"), size)
        for layers in (None, [1])
    ]
    fresh = [rotfed.align(source, theta, spec, rotfed.AlignOptions(**option)).distance_after for option in options]
    for turned_round in (False, True):
        anchor = rotfed.Anchor(theta, spec)
        places = list(range(len(options)))[:: -1 if turned_round else 1]
        assert {
            i: rotfed.align(source, anchor, spec, rotfed.AlignOptions(**options[i])).distance_after for i in places
        } == dict(enumerate(fresh))
    assert fresh[-2] <= 1e-6 * norm(theta)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_type_cannot_hold_is_refused_by_transforms_and_not_chosen(dtype: torch.dtype) -> None:
    spec, theta = backbone("bert")
    largest = torch.finfo(dtype).max
    source = {n: (t.sign() * largest / 100 if ".query." in n else t).to(dtype) for n, t in theta.items()}
    query = "encoder.layer.0.attention.self.query.weight"
    scale = torch.full((2, 3, 1), 500.0, dtype=torch.float64)
    thousandfold = rotfed.Transform(spec, {"qk_scale": scale})
    with pytest.raises(rotfed.TransformError, match=f"{query}: expected values that {dtype}.*after qk_scale; apply"):
        thousandfold.apply(source)
    anchor = thousandfold.apply({n: t.double() for n, t in source.items()})
    alignment = rotfed.align(source, anchor, spec, rotfed.AlignOptions(groups=["qk_scale", "d_ff"]))
    assert all(bool(tensor.isfinite().all()) for tensor in alignment.params.values())
    assert_same(alignment.transform.apply(source), alignment.params)
    assert_same(alignment.params, source)
    assert_recovers(rotfed.align({n: t.double() for n, t in source.items()}, anchor, spec).params, anchor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_shrinks_below_the_type_is_refused_by_transforms_and_not_chosen(dtype: torch.dtype) -> None:
    spec, theta = backbone("bert")
    value = "encoder.layer.0.attention.self.value.weight"
    small = 10 * torch.finfo(dtype).tiny
    source = {n: (t * small if ".self.value." in n else t).to(dtype) for n, t in theta.items()}
    down = rotfed.Transform(spec, {"vo_scale": torch.full((2, 3, 1), 2e-3, dtype=torch.float64)})
    with pytest.raises(rotfed.TransformError, match=f"{value}: expected values that {dtype}.*smaller ones after vo_sc"):
        down.apply(source)
    assert down.inverse().apply(source)
    if dtype == torch.float16:
        anchor = down.apply({n: t.double() for n, t in source.items()})
        assert_same(rotfed.align(source, anchor, spec, rotfed.AlignOptions(groups=["vo_scale"])).params, source)
        wide = rotfed.align(
            {n: t.float() for n, t in source.items()}, anchor, spec, rotfed.AlignOptions(groups=["vo_scale"])
        )
        assert_recovers(wide.params, anchor)


def test_parameters_that_are_tiny_already_are_moved(generator: torch.Generator) -> None:
    # A key's bias has no gradient: after training it is what rounding left.
    spec, theta = backbone("bert")
    source = {n: (t * 1e-6 if n.endswith("key.bias") else t).half() for n, t in theta.items()}
    moved = rotfed.Transform(spec, {"qk": rotfed.random_transform(spec, generator).elements["qk"]}).apply(source)
    alignment = rotfed.align(moved, source, spec)
    assert alignment.distance_after < 0.01 * alignment.distance_before


def test_values_whose_squares_overflow_are_refused_by_name() -> None:
    spec, theta = backbone("bert")
    name = "encoder.layer.0.attention.self.value.weight"
    huge = {**theta, name: 1e160 * theta[name]}
    for source, anchor, role in ((huge, theta, "source"), (theta, huge, "anchor")):
        with pytest.raises(rotfed.AlignmentError, match=rf"{name}: expected values up to 1e\+70 in the {role}, found"):
            rotfed.align(source, anchor, spec)
    for size in (1e-300, 1e-160, 1e60):
        alignment = rotfed.align({n: size * t for n, t in theta.items()}, theta, spec)
        assert alignment.distance_after <= alignment.distance_before


def test_the_least_strength_is_the_identity(generator: torch.Generator) -> None:
    spec, theta = backbone("bert")
    moved = rotfed.random_transform(spec, generator).apply(theta)
    kept = rotfed.align(moved, theta, spec, rotfed.AlignOptions(strength=1e-320))
    assert kept.identity_permutations == 1.0
    assert_recovers(kept.params, moved, 1e-12)


def test_the_share_of_identities_counts_the_permutations_that_were_asked_for(generator: torch.Generator) -> None:
    # One layer of this model has no experts, and an encoder alone none of the decoder's permutations.
    for name, keep in (("bert", ""), ("qwen2_moe-dense-first", ""), ("t5", "encoder."), ("mpnet", "")):
        spec, theta = backbone(name)
        theta = {n: t for n, t in theta.items() if not n.startswith("decoder.") or not keep}
        moved = unsettling_transform(spec, generator).apply(theta)
        assert rotfed.align(moved, theta, spec).identity_permutations == 0.0
        assert rotfed.align(moved, theta, spec, rotfed.AlignOptions(layers=[0])).identity_permutations == 0.0
        assert rotfed.align(moved, theta, spec, rotfed.AlignOptions(layers=[])).identity_permutations == 1.0
        for rule, reference in (("medoid", theta), ("medoid", None), ("progressive", None)):
            kept, other = rotfed.align_all(
                [theta, moved], spec, rule, [0.6, 0.4], reference, options=rotfed.AlignOptions(layers=[0])
            )
            assert (kept.identity_permutations, other.identity_permutations) == (1.0, 0.0)


def test_a_tensor_without_values_is_refused_by_name() -> None:
    spec, theta = backbone("bert")
    name = "embeddings.LayerNorm.weight"
    with pytest.raises(rotfed.SpecError, match=name):
        rotfed.align({**theta, name: theta[name].to("meta")}, theta, spec)
