"""Alignment options, anchors and mergers, on types and values that users bring."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rotfed
from rotfed import frames
from rotfed.mergers import weighted_mean
from tests.models import EXAMPLES, assert_recovers, assert_same, backbone, distance, norm, small_params, small_spec

Params = dict[str, Tensor]


def noisy(params: Params, size: float, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in params.items()}


def turned(spec: rotfed.SymmetrySpec, params: Params, seed: int) -> Params:
    return rotfed.random_transform(spec, torch.Generator().manual_seed(seed)).apply(params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_comes_back_in_its_type_and_never_farther(dtype: torch.dtype) -> None:
    spec, theta = backbone("bert")
    theta = {n: t.to(dtype) for n, t in theta.items()}
    far = turned(spec, theta, 1)
    alignment = rotfed.align(far, theta, spec)
    assert {n: (t.dtype, t.shape) for n, t in alignment.params.items()} == {
        n: (t.dtype, t.shape) for n, t in theta.items()
    }
    assert distance(alignment.params, theta) < 0.05 * distance(far, theta)
    for seed in range(5):
        near = {n: (t.float() + 1e-4 * torch.randn_like(t.float())).to(dtype) for n, t in theta.items()}
        alignment = rotfed.align(near, theta, spec)
        assert alignment.distance_after <= alignment.distance_before, seed


def test_nothing_is_mutated_and_odd_layouts_are_taken() -> None:
    spec, theta = backbone("vit")
    source = turned(spec, theta, 2)
    name = "layers.0.attention.q_proj.weight"
    source[name] = source[name].t().contiguous().t()  # not contiguous
    source = {n: t.requires_grad_() for n, t in source.items()}
    before, anchor = copy.deepcopy(source), copy.deepcopy(theta)
    alignment = rotfed.align(source, theta, spec)
    rotfed.merge([source, theta], spec)
    assert_same(source, before)
    assert_same(theta, anchor)
    assert_recovers(alignment.params, theta)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("role", ["source", "anchor"])
def test_values_that_are_not_finite_are_refused(value: float, role: str) -> None:
    spec, theta = backbone("vit")
    bad = {**theta, "layernorm.bias": theta["layernorm.bias"] * value}
    models = {"source": theta, "anchor": theta, role: bad}
    with pytest.raises(rotfed.AlignmentError, match=f"layernorm.bias: expected finite values in the {role}"):
        rotfed.align(models["source"], models["anchor"], spec)


@pytest.mark.parametrize("options", [{"strength": 0}, {"strength": 1.1}, {"strength": float("nan")}, {"max_sweeps": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    spec, theta = backbone("vit")
    with pytest.raises(rotfed.AlignmentError, match="expected"):
        rotfed.align(theta, theta, spec, rotfed.AlignOptions(**options))


def test_only_the_chosen_groups_and_layers_move() -> None:
    spec, theta = backbone("vit")
    source = turned(spec, theta, 3)
    moved = rotfed.align(source, theta, spec, rotfed.AlignOptions(groups=["vo"], layers=[1])).params
    changed = {n for n in source if not torch.equal(source[n], moved[n])}
    assert changed == {f"layers.1.attention.{p}" for p in ("v_proj.weight", "v_proj.bias", "o_proj.weight")}
    same = rotfed.align(source, theta, spec, rotfed.AlignOptions(layers=[]))
    assert_same(same.params, source)


def test_alignment_without_reflections_holds_none() -> None:
    spec, theta = backbone("vit")
    transform = rotfed.align(turned(spec, theta, 4), theta, spec, rotfed.AlignOptions(reflections=False)).transform
    for name in ("qk", "vo"):
        determinants = torch.linalg.det(transform.elements[name])
        torch.testing.assert_close(determinants, torch.ones_like(determinants))
    assert bool((transform.elements["qk_scale"] > 0).all())


def test_the_joint_optimum_is_nearer_than_the_sequential_one() -> None:
    spec, theta = backbone("vit")
    gains = []
    for seed in range(5):
        source = turned(spec, noisy(theta, 0.3, seed), seed)
        joint, sequential = (
            rotfed.align(source, theta, spec, rotfed.AlignOptions(max_sweeps=n)).distance_after for n in (20, 1)
        )
        assert joint <= sequential + 1e-12
        gains.append(sequential - joint)
    assert max(gains) > 1e-4


def test_less_strength_moves_less() -> None:
    spec, theta = backbone("vit")
    source = turned(spec, theta, 5)
    moves = [
        distance(rotfed.align(source, theta, spec, rotfed.AlignOptions(strength=s)).params, source)
        for s in (1.0, 0.3, 1e-6)
    ]
    assert moves == sorted(moves, reverse=True) and moves[-1] < 1e-3 * norm(theta)


def test_the_medoid_is_the_nearest_to_the_weighted_mean() -> None:
    models = [{"x": torch.tensor([value])} for value in (0.0, 1.0, 5.0)]
    assert rotfed.medoid(models) == 1
    assert rotfed.medoid(models, [0.0, 0.1, 5.0]) == 2


def test_weights_are_respected_and_checked() -> None:
    spec, theta = backbone("vit")
    other = turned(spec, noisy(theta, 0.1, 1), 1)
    assert_recovers(rotfed.merge([theta, other], spec, weights=[1, 0], anchor=theta), theta, 1e-12)
    for weights, error in [
        ([1], "expected 2"),
        ([0, 0], "not all zero"),
        ([1, -1], "non-negative"),
        ([1, torch.nan], "finite"),
    ]:
        with pytest.raises(rotfed.AlignmentError, match=error):
            rotfed.merge([theta, other], spec, weights=weights)


def test_consensus_is_closer_together_than_the_medoid_and_both_than_plain() -> None:
    spec, theta = backbone("vit")
    models = [turned(spec, noisy(theta, 0.3, seed), seed) for seed in range(5)]

    def spread(members: list[Params]) -> float:
        mean = weighted_mean(members)
        return sum(distance(member, mean) ** 2 for member in members)

    options = rotfed.AlignOptions(groups=["qk", "vo", "d_ff"])  # scales change norms, and with them the measure
    plain = spread(models)
    medoid, consensus = (
        spread([a.params for a in rotfed.align_all(models, spec, anchor, options=options)])
        for anchor in ("medoid", "consensus")
    )
    assert consensus < medoid < plain


def test_generalized_procrustes_is_the_consensus() -> None:
    spec, theta = backbone("vit")
    models = [turned(spec, noisy(theta, 0.3, seed), seed) for seed in range(3)]
    assert_same(rotfed.merge(models, spec, anchor="generalized_procrustes"), rotfed.merge(models, spec))


def test_a_consensus_that_does_not_settle_warns() -> None:
    spec, theta = backbone("vit")
    models = [turned(spec, noisy(theta, 1.0, seed), seed) for seed in range(4)]
    with pytest.warns(rotfed.ConvergenceWarning, match="the spread still fell"):
        frames._align_to_consensus(models, spec, [0.25] * 4, rotfed.AlignOptions(), tolerance=0.0, max_renewals=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rotfed.align_all(models, spec, "consensus")


def test_models_that_differ_are_refused() -> None:
    spec, theta = backbone("vit")
    with pytest.raises(rotfed.AlignmentError, match="expected at least one"):
        rotfed.merge([], spec)
    with pytest.raises(rotfed.AlignmentError, match=r"layernorm.bias: expected in every model"):
        rotfed.merge([theta, {n: t for n, t in theta.items() if n != "layernorm.bias"}], spec)
    with pytest.raises(rotfed.AlignmentError, match=r"embeddings.position_embeddings: expected shape"):
        rotfed.merge([theta, {**theta, "embeddings.position_embeddings": torch.ones(1, 9, 12)}], spec)
    with pytest.raises(rotfed.AlignmentError, match="anchor: expected one of"):
        rotfed.align_all([theta], spec, "mean")
    with pytest.raises(rotfed.AlignmentError, match=r"pass reference=.*merge.*anchor="):
        rotfed.merge([theta], spec, anchor="global")
    with pytest.raises(rotfed.AlignmentError, match=r"align_pair: expected an Alignment.*found NoneType"):
        rotfed.align_all([theta, theta], spec, "tree", align_pair=lambda *_: None)


def test_models_come_as_any_iterable_of_mappings_and_as_nothing_else() -> None:
    spec, theta = backbone("vit")
    assert_same(weighted_mean(model for model in (theta, theta)), theta)
    assert_same(rotfed.merge((model for model in (theta, theta)), spec), theta)
    module = torch.nn.Linear(2, 2)
    meta = {name: tensor.to("meta") for name, tensor in theta.items()}
    for models, error in [
        (theta, "models: expected a list of mappings.*found dict"),
        (None, "models: expected a list of mappings.*found NoneType"),
        ("ab", "models: expected a list of mappings.*found str"),
        ([theta, module], "found Linear; pass its state_dict"),
        ([theta, meta], "expected a dense tensor of real numbers, found a meta tensor"),
        ([{"w": torch.zeros(2, dtype=torch.complex64)}], "w: expected .* real numbers, found torch.complex64"),
    ]:
        for use in (lambda m: rotfed.merge(m, spec), lambda m: rotfed.align_all(m, spec), weighted_mean, rotfed.medoid):
            with pytest.raises(rotfed.RotfedError, match=error):
                use(models)
    for anchor in (None, module, [theta]):
        with pytest.raises(rotfed.SpecError, match="expected a mapping from name to tensor"):
            rotfed.merge([theta, theta], spec, anchor=anchor)
    for wrong in (None, module):
        for use in (lambda s: rotfed.merge([theta], s), lambda s: rotfed.align_all([theta], s)):
            with pytest.raises(rotfed.SpecError, match="spec: expected a SymmetrySpec"):
                use(wrong)


def test_means_keep_types() -> None:
    models = [
        {"w": torch.tensor([1.0, 2.0]).bfloat16(), "n": torch.tensor(3), "f": torch.tensor([True, False])},
        {"w": torch.tensor([3.0, 4.0]).bfloat16(), "n": torch.tensor(6), "f": torch.tensor([True, False])},
    ]
    mean = weighted_mean(models, [2, 1])
    assert_same(mean, {"w": torch.tensor([5 / 3, 8 / 3]).bfloat16(), "n": torch.tensor(4), "f": models[0]["f"]})


def test_a_model_that_counts_for_nothing_leaves_no_rounding_behind() -> None:
    models = [{"w": torch.tensor([value])} for value in (1e30, 1.0, 3.0)]
    assert_same(weighted_mean(models, [0, 1, 1]), {"w": torch.tensor([2.0])})
    assert_same(weighted_mean(models[::-1], [1, 1, 0]), {"w": torch.tensor([2.0])})


def test_a_mean_too_large_for_its_type_is_refused() -> None:
    models = [{"w": torch.ones(2).half()}, {"w": torch.full((2,), 3e5)}]
    with pytest.raises(rotfed.TransformError, match=r"w: expected values that torch.float16 .*larger ones in the mean"):
        weighted_mean(models)
    assert weighted_mean(models[::-1])["w"].isfinite().all()
    # What nearly cancels may be as small as it likes.
    assert 0 < weighted_mean([{"w": torch.tensor([x]).half()} for x in (1.002e-3, -1e-3)])["w"] < 2e-6


def test_shared_and_coupled_groups_are_recovered() -> None:
    spec, theta = small_spec(), small_params(torch.Generator().manual_seed(1))
    chosen = ["qk", "qk_scale", "ff"]
    # A head part that is not scaled ties the rotation's sign: alternation finds the frame for positive scales.
    full = rotfed.random_transform(spec, torch.Generator().manual_seed(2), reflections=False)
    moved = rotfed.Transform(spec, {name: full.elements[name] for name in chosen}).apply(theta)
    assert_recovers(rotfed.align(moved, theta, spec, rotfed.AlignOptions(groups=chosen)).params, theta)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "dinov2-swiglu", "nomic_bert"])
def test_files_that_split_parameters_otherwise_are_paired_part_by_part_or_refused(name: str, tmp_path: Path) -> None:
    model = EXAMPLES[name].model()
    model.save_pretrained(tmp_path)
    stored, spec = load_file(tmp_path / "model.safetensors"), rotfed.load_spec(model)
    moved = rotfed.random_transform(spec, torch.Generator().manual_seed(0)).apply(stored)
    assert rotfed.align(moved, stored, spec).distance_after < 1e-4
    if name == "dinov2-swiglu":
        # Its older names come in another order.
        with pytest.raises(rotfed.AlignmentError, match="load both with the same transformers"):
            rotfed.align(moved, model.state_dict(), spec)
    else:
        alignment = rotfed.align(moved, model.state_dict(), spec)
        assert alignment.distance_after < 1e-4 < alignment.distance_before
        assert_recovers(alignment.params, stored)
