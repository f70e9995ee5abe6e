"""What must hold whatever the models: no distance rises, copies in frames of their own merge to the same function."""

import pytest
import torch

import rotfed
from tests.models import FAMILIES, assert_recovers, backbone, distance, norm


@pytest.mark.parametrize("name", FAMILIES)
def test_distance_never_rises_over_random_pairs(name: str, generator: torch.Generator) -> None:
    spec, theta = backbone(name)
    choices = [None, ["qk"], ["vo", "vo_scale"], ["d_ff"], [group for group in spec.groups if "heads" not in group]]
    fell = 0
    for pair in range(60):
        source, anchor = (
            {n: t + torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in theta.items()}
            for _ in range(2)
        )
        options = rotfed.AlignOptions(
            groups=choices[pair % len(choices)],
            layers=[pair % 2] if pair % 3 == 0 else None,
            reflections=pair % 2 == 1,
            strength=(1.0, 0.5, 0.01)[pair % 3],
        )
        alignment = rotfed.align(source, anchor, spec, options)
        assert alignment.distance_after <= alignment.distance_before
        # The distances are those of the parameters themselves, not of moments alone.
        for told, params in ((alignment.distance_before, source), (alignment.distance_after, alignment.params)):
            assert distance(params, anchor) == pytest.approx(told, rel=1e-9)
        fell += alignment.distance_after < alignment.distance_before
    assert fell > 45


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("bert", {"embeddings.position_ids": torch.arange(20)[None]}),
        ("roberta", {"embeddings.token_type_ids": torch.zeros(1, 20, dtype=torch.long)}),
        ("distilbert", {"embeddings.position_ids": torch.arange(20)[None]}),
        (
            "gpt2",
            {
                "h.0.attn.bias": torch.ones(1, 1, 20, 20, dtype=torch.bool).tril(),
                "h.1.attn.masked_bias": torch.tensor(-1e4),
            },
        ),
    ],
)
def test_buffers_that_older_checkpoints_carry_are_known(
    name: str, buffers: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    spec, theta = backbone(name)
    theta = {**theta, **buffers}
    moved = rotfed.random_transform(spec, generator).apply(theta)
    assert all(moved[buffer] is buffers[buffer] for buffer in buffers)
    assert_recovers(rotfed.align(moved, theta, spec).params, theta)


@pytest.mark.parametrize("anchor", ["medoid", "consensus"])
@pytest.mark.parametrize("name", FAMILIES)
def test_copies_in_frames_of_their_own_merge_to_the_same_function(
    name: str, anchor: str, generator: torch.Generator
) -> None:
    spec, theta = backbone(name)
    copies = [rotfed.random_transform(spec, generator).apply(theta) for _ in range(3)]
    merged = rotfed.merge(copies, spec, anchor=anchor)
    assert_recovers(rotfed.align(merged, theta, spec).params, theta)
    for alignment in rotfed.align_all(copies, spec, anchor, reference=theta):
        assert_recovers(alignment.params, theta)
    plain = rotfed.weighted_mean(copies)
    assert rotfed.align(plain, theta, spec).distance_after > 0.1 * norm(theta)
