"""Which head is which: pairings against brute force, certificates, and what is coupled to what."""

import itertools
import sys

import pytest
import torch

import rotfed
from rotfed import matching
from tests.models import EXAMPLES, assert_recovers, backbone, distance, norm


def independent_pair(name: str) -> tuple[rotfed.SymmetrySpec, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    spec, theta = backbone(name)
    return spec, backbone(name, seed=1)[1], theta


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-no-shared-keys"])
def test_heads_are_paired_as_brute_force_pairs_them(name: str) -> None:
    spec, source, anchor = independent_pair(name)
    heads = next(group for group in spec.groups.values() if group.base_name in ("heads", "kv_heads"))
    best = [float("inf")] * spec.num_layers
    for order in itertools.permutations(range(heads.size)):
        element = torch.tensor(order).expand(heads.batch[0], heads.size)
        moved = rotfed.Transform(spec, {heads.name: element}).apply(source)
        for layer in range(spec.num_layers):
            found = rotfed.align(moved, anchor, spec, rotfed.AlignOptions(groups=["qk", "vo"], layers=[layer])).params
            inside = {n: t for n, t in found.items() if f".{layer}." in n}
            best[layer] = min(best[layer], distance(inside, anchor))
    aligned = rotfed.align(source, anchor, spec, rotfed.AlignOptions(groups=[heads.name, "qk", "vo"]))
    for layer in range(spec.num_layers):
        inside = {n: t for n, t in aligned.params.items() if f".{layer}." in n}
        assert distance(inside, anchor) == pytest.approx(best[layer], rel=1e-9)


def test_near_models_keep_their_heads_by_the_certificate(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, theta = backbone("bert")
    near = {n: t + 0.01 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in theta.items()}
    anchor = rotfed.Anchor(theta, spec)
    expected = rotfed.align(near, theta, spec)
    rotfed.align(near, anchor, spec)

    def asked(*_: object) -> torch.Tensor:
        raise AssertionError("units were paired, or distances between the anchor's units found again")

    for name in ("pair_turning", "pair_plain"):
        monkeypatch.setattr(sys.modules["rotfed.align"], name, asked)
    for name in ("turned_distances", "_orbits_apart2"):
        monkeypatch.setattr(matching, name, asked)
    again = rotfed.align(near, anchor, spec)
    assert again.identity_permutations == expected.identity_permutations == 1.0
    assert again.distance_after == expected.distance_after < expected.distance_before


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "t5", "albert"])
def test_a_moved_model_that_was_trained_on_is_still_recognised(name: str, generator: torch.Generator) -> None:
    spec, theta = backbone(name)
    moved = rotfed.random_transform(spec, generator).apply(theta)
    noise = 0.02 * norm(theta) / sum(t.numel() for t in theta.values()) ** 0.5
    trained = {n: t + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in moved.items()}
    assert_recovers(rotfed.align(trained, theta, spec).params, theta, 0.2)


def test_layers_that_share_a_table_or_weights_share_their_elements() -> None:
    t5, albert = (rotfed.load_spec(EXAMPLES[name].config()) for name in ("t5", "albert"))
    assert t5.groups["encoder.heads"].batch == () and t5.groups["decoder.heads"].batch == ()
    assert t5.groups["encoder.qk"].batch[0] == t5.layers["encoder"]
    assert t5.groups["decoder.cross_heads"].layered
    assert albert.num_layers < EXAMPLES["albert"].config().num_hidden_layers


def test_a_group_is_chosen_in_every_stack_or_in_one(generator: torch.Generator) -> None:
    spec, theta = backbone("t5")
    assert spec.select_groups(["qk"]) == ("encoder.qk", "decoder.qk")
    assert spec.select_groups(["decoder.qk"]) == ("decoder.qk",)
    moved = rotfed.random_transform(spec, generator).apply(theta)
    changed = rotfed.align(moved, theta, spec, rotfed.AlignOptions(groups=["decoder.vo"])).params
    assert {n for n in theta if changed[n] is not moved[n] and not torch.equal(changed[n], moved[n])} == {
        f"decoder.block.{layer}.layer.0.SelfAttention.{part}.weight" for layer in range(2) for part in "vo"
    }
