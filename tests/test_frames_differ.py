"""Alignment where frames differ, and nowhere else."""

import math

import pytest
import torch
from torch import Tensor

import rotfed
from rotfed.align import Pair
from rotfed.errors import AlignmentError
from rotfed.frames import follow
from rotfed.frames_differ import align_where_frames_differ, check_min_gain, gains_over_noise
from rotfed.mergers import MeanOf
from rotfed.spec import SymmetrySpec
from rotfed.transform import Transform, identity_transform
from tests.models import backbone

Params = dict[str, Tensor]


def noisy(params: Params, seed: int, size: float = 1e-3) -> Params:
    # The first numbers of neighbouring small seeds are alike.
    generator = torch.Generator().manual_seed(seed + 0x9E3779B9)
    return {n: t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in params.items()}


def turned(spec: SymmetrySpec, params: Params, *names: str) -> Params:
    elements = rotfed.random_transform(spec, torch.Generator().manual_seed(1)).elements
    return Transform(spec, {name: elements[name] for name in names}).apply(params)


def centre_of(
    models: list[Params], weights: list[float], anchor: str, reference: rotfed.Anchor
) -> Params | rotfed.Anchor:
    """The model to align to under "global", else the plain mean of the models."""
    return reference if anchor == "global" else dict(MeanOf(models, weights, wide=True))


@pytest.mark.parametrize("name", ["vit", "llama-biases-wide-heads", "gpt2", "bert"])
def test_the_gain_on_noise_is_one(name: str) -> None:
    spec, params = backbone(name)
    # Units that lie closer together than the noise is strong would change places by it.
    groups = [n for n, group in spec.groups.items() if group.kind.dimension(group.size) > 0]
    anchor = rotfed.Anchor(params, spec)
    pairs = [Pair(noisy(params, seed), anchor, rotfed.AlignOptions(groups=groups)) for seed in range(24)]
    gains = gains_over_noise(pairs, [pair.solved() for pair in pairs], [1 / 24] * 24)
    assert set(gains) == set(spec.components(groups))
    for component, gain in gains.items():
        assert 0.75 < gain.over_noise < 1.25, (component, gain)
        assert 0 < gain.share < 0.3 and not gain.far


@pytest.mark.parametrize("anchor", ["global", "medoid", "consensus"])
def test_where_frames_differ_the_result_is_that_of_align_all(anchor: str) -> None:
    spec, params = backbone("vit")
    models = [turned(spec, noisy(params, 0), "qk"), noisy(params, 1), noisy(params, 2)]
    reference = rotfed.Anchor(params, spec)
    centre = centre_of(models, [1, 1, 1], anchor, reference)
    found = align_where_frames_differ(models, spec, anchor, [1, 1, 1], centre, 1.5)
    attention = next(component for component in spec.components(spec.groups) if "qk" in component)
    assert found.gain > 5 and found.groups == attention and found.far
    options = rotfed.AlignOptions(groups=attention)
    expected = rotfed.align_all(models, spec, anchor, [1, 1, 1], reference, options=options)
    followed = found.alignments
    if anchor != "global":
        followed = follow(models, followed, [1 / 3] * 3, spec, reference, options)
    # Towards the global model each is judged by itself, and the two that only carry noise stay as they came.
    judged = range(1) if anchor == "global" else range(3)
    for index in judged:
        torch.testing.assert_close(followed[index].params, expected[index].params, rtol=0, atol=0)
    if anchor == "global":
        assert all(found.alignments[i].params[n] is t for i in (1, 2) for n, t in models[i].items())


@pytest.mark.parametrize("anchor", ["global", "medoid", "consensus"])
def test_where_only_noise_differs_the_very_models_come_back(anchor: str) -> None:
    spec, params = backbone("vit")
    models = [noisy(params, seed, 1e-4) for seed in range(3)]
    reference = rotfed.Anchor(params, spec)
    centre = centre_of(models, [1, 2, 3], anchor, reference)
    found = align_where_frames_differ(models, spec, anchor, [1, 2, 3], centre, 1.5)
    assert found.groups == () and 0.5 < found.gain < 1.5 and not found.far
    for model, alignment in zip(models, found.alignments, strict=True):
        assert all(alignment.params[name] is tensor for name, tensor in model.items())
        assert alignment.distance_before == alignment.distance_after > 0
    always = align_where_frames_differ(models, spec, anchor, [1, 2, 3], centre, 0)
    assert set(always.groups) == set(spec.groups)
    # The medoid is at no distance from itself.
    assert sum(a.distance_after < a.distance_before for a in always.alignments) >= 2


def test_one_model_that_stands_at_the_anchor_gains_nothing() -> None:
    spec, params = backbone("bert")
    found = align_where_frames_differ([params], spec, "global", [1], rotfed.Anchor(params, spec), 0.5)
    assert found.gain == 0 and found.groups == ()


def test_units_that_changed_places_are_no_noise() -> None:
    spec, params = backbone("vit")
    elements = identity_transform(spec).elements["d_ff"].clone()
    elements[0, :2] = elements[0, :2].flip(0)
    swapped = Transform(spec, {"d_ff": elements}).apply(params)
    reference = rotfed.Anchor(params, spec)
    found = align_where_frames_differ([swapped], spec, "global", [1], reference, 1.5)
    assert found.groups == ("d_ff",) and found.gain == math.inf and found.far
    torch.testing.assert_close(found.alignments[0].params, dict(params), rtol=0, atol=0)
    never = align_where_frames_differ([swapped], spec, "global", [1], reference, math.inf)
    assert never.groups == () and never.alignments[0].params["layernorm.weight"] is swapped["layernorm.weight"]


@pytest.mark.parametrize("value", [-0.1, math.nan, "1", True, None])
def test_a_bad_min_gain_is_refused(value: object) -> None:
    with pytest.raises(AlignmentError, match=r"min_gain: expected a number from 0 on"):
        check_min_gain(value)  # type: ignore[arg-type]
