"""Regressions of `align`: laws that failed for shared groups, chosen layers, little strength and positive scales."""

import warnings

import pytest
import torch

import rotfed
from rotfed import anchors
from tests.models import assert_recovers, backbone, distance, small_params, small_spec


def test_a_group_shared_by_all_layers_and_nothing_else_is_aligned(generator: torch.Generator) -> None:
    spec, theta = small_spec(), small_params(generator)
    full = rotfed.random_transform(spec, generator)
    moved = rotfed.Transform(spec, {"shared": full.elements["shared"]}).apply(theta)
    assert_recovers(rotfed.align(moved, theta, spec, groups=["shared"]).params, theta)


def test_chosen_layers_never_bring_the_others_farther(generator: torch.Generator) -> None:
    # Turn what all layers share, but put one layer back: what helps layer 0 would harm layer 1.
    spec, theta = small_spec(), small_params(generator)
    full = rotfed.random_transform(spec, generator)
    moved = rotfed.Transform(spec, {"shared": full.elements["shared"]}).apply(theta)
    source = {name: theta[name] if name.startswith("net.h.1.") else moved[name] for name in theta}
    alignment = rotfed.align(source, theta, spec, layers=[0])
    assert alignment.distance_after <= alignment.distance_before


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.1])
def test_more_sweeps_are_never_farther(strength: float, generator: torch.Generator) -> None:
    spec = small_spec()
    for _ in range(20):
        source, anchor = small_params(generator), small_params(generator)
        sequential = rotfed.align(source, anchor, spec, strength=strength, max_sweeps=1).distance_after
        joint = rotfed.align(source, anchor, spec, strength=strength).distance_after
        assert joint <= sequential * (1 + 1e-12)


def test_proper_scales_are_the_best_positive_ones() -> None:
    spec, theta = backbone("bert")
    source = {name: 3 * t if ".key." in name else t for name, t in theta.items()}
    # Every sign is wrong, so that the best scale of all is negative.
    anchor = {name: -0.2 * t if ".key." in name or ".query." in name else t for name, t in theta.items()}
    best = rotfed.align(source, anchor, spec, groups=["qk_scale"], proper=True)
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
                anchors._spread([a.params for a in rule(models, spec, shares, {"strength": strength})], shares)
                for rule in (anchors._align_to_consensus, anchors._align_to_medoid)
            )
        assert consensus <= min(medoid, anchors._spread(models, shares)) * (1 + 1e-12)


def test_transforms_of_different_precision_compose(generator: torch.Generator) -> None:
    spec, theta = backbone("bert")
    one, two = (rotfed.random_transform(spec, generator, dtype) for dtype in (torch.float32, torch.float64))
    assert_recovers(one.compose(two).apply(theta), one.apply(two.apply(theta)))
    assert_recovers(two.compose(one).apply(theta), two.apply(one.apply(theta)))


def test_a_tensor_without_values_is_refused_by_name() -> None:
    spec, theta = backbone("bert")
    name = "embeddings.LayerNorm.weight"
    with pytest.raises(rotfed.AlignmentError, match=name):
        rotfed.align({**theta, name: theta[name].to("meta")}, theta, spec)
