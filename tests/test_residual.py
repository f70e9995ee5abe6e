"""The residual stream: folding keeps the function, and the stream's rotations, permutations and signs do."""

import pytest
import torch
from torch import Tensor

import rotfed
from rotfed.checks import example_inputs
from rotfed.flower import RotFedAvg, align_mod
from rotfed.groups import KINDS
from rotfed.residual import fold_norms
from tests.models import EXAMPLES, assert_recovers, assert_same, change_of_function, copied, distance, norm

CASES = {
    "vit": ("vit", "AutoModelForImageClassification", {}, "centred_orthogonal"),
    "deit": ("deit", "DeiTForImageClassification", {}, "centred_orthogonal"),
    "llama": ("llama-biases-wide-heads", "AutoModelForCausalLM", {"tie_word_embeddings": False}, "orthogonal"),
    "llama-tied": ("llama", "AutoModelForCausalLM", {"tie_word_embeddings": True}, "signed"),
    "qwen2": ("qwen2", "AutoModelForCausalLM", {"tie_word_embeddings": False}, "orthogonal"),
    "gpt2": ("gpt2", "AutoModelForCausalLM", {}, "permutation"),
    "roberta": ("roberta", "AutoModelForSequenceClassification", {}, "permutation"),
}
every_case = pytest.mark.parametrize("case", CASES)


def built(case: str, seed: int = 0) -> tuple[torch.nn.Module, rotfed.SymmetrySpec, dict[str, Tensor]]:
    name, head, changes, _ = CASES[case]
    model = EXAMPLES[name].model(head, seed, **changes).double()
    return model, rotfed.load_spec(model, residual=True), dict(model.state_dict())


@every_case
def test_the_function_stays(case: str) -> None:
    model, spec, _ = built(case)
    assert 0 < rotfed.check_spec(spec, model) <= 1e-12
    assert 0 < rotfed.check_spec(spec, model, torch.float32) <= 1e-5
    kind = CASES[case][3]
    assert ("residual_sign" in spec.groups) == (kind == "signed")
    assert spec.groups["residual"].kind_name == {"signed": "permutation"}.get(kind, kind)


@every_case
def test_folding_keeps_the_function_and_changes_nothing_twice(case: str, generator: torch.Generator) -> None:
    model, spec, theta = built(case)
    before = copied(theta)
    folded = fold_norms(theta, spec)
    assert_same(theta, before)
    inputs = example_inputs(model, generator)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    assert change_of_function(model, theta, folded, inputs) <= 1e-12
    assert_recovers(fold_norms(folded, spec), folded, 1e-14)
    assert spec.residual is not None
    if spec.residual.folded:
        assert distance(folded, theta) > 0.01 * norm(theta)
        with pytest.raises(rotfed.SpecError, match=r"expected a norm that is folded.*fold_norms"):
            rotfed.align(theta, folded, spec)


@every_case
def test_alignment_recovers_a_moved_model(case: str, generator: torch.Generator) -> None:
    _, spec, theta = built(case)
    folded = fold_norms(theta, spec)
    for _ in range(3):
        moved = rotfed.random_transform(spec, generator).apply(folded)
        assert_recovers(rotfed.align(moved, folded, spec).params, folded)
    kept = rotfed.align(folded, folded, spec)
    assert_same(kept.params, folded)
    one, two = (rotfed.random_transform(spec, generator) for _ in range(2))
    assert_recovers(one.compose(two).apply(folded), one.apply(two.apply(folded)), 1e-12)
    assert_recovers(one.inverse().apply(one.apply(folded)), folded, 1e-12)


def test_narrow_models_in_any_two_frames_meet() -> None:
    _, spec, theta = built("vit")
    folded = fold_norms(theta, spec)
    frames = [rotfed.random_transform(spec, torch.Generator().manual_seed(seed)) for seed in (2, 1, 3, 6)]
    first, *others = [frame.apply(folded) for frame in frames]
    for other in others:
        assert_recovers(rotfed.align(other, first, spec).params, first)


@every_case
def test_permutations_of_the_stream_need_no_folding(case: str, generator: torch.Generator) -> None:
    model, _, theta = built(case)
    spec = rotfed.load_spec(model, residual="permutation")
    assert 0 < rotfed.check_spec(spec, model) <= 1e-12
    moved = rotfed.random_transform(spec, generator).apply(theta)
    assert_recovers(rotfed.align(moved, theta, spec).params, theta)
    assert_same(fold_norms(theta, spec), theta)


@every_case
def test_models_of_their_own_come_nearer_than_without_the_stream(case: str) -> None:
    model, spec, theta = built(case)
    source, anchor = fold_norms(built(case, seed=1)[2], spec), fold_norms(theta, spec)
    inside = rotfed.align(source, anchor, rotfed.load_spec(model))
    whole = rotfed.align(source, anchor, spec)
    assert whole.distance_after < inside.distance_after < whole.distance_before


def test_merging_folds_first(generator: torch.Generator) -> None:
    model, spec, theta = built("vit")
    folded = fold_norms(theta, spec)
    copies = [rotfed.random_transform(spec, generator).apply(folded) for _ in range(3)]
    inputs = {"pixel_values": torch.randn(2, 1, 8, 8, generator=generator).double()}
    for anchor in ("medoid", "consensus", "progressive", "tree"):
        merged = rotfed.merge([theta, *copies], spec, anchor=anchor)
        assert change_of_function(model, theta, merged, inputs) < 1e-6


@pytest.mark.parametrize(
    ("example", "head", "changes", "error"),
    [
        ("vit", "AutoModel", {}, r"pooler\.dense\.weight: no entry"),
        ("llama", "AutoModel", {}, r"lm_head\.weight: expected beside the backbone, not found"),
        ("bert", "BertForTokenClassification", {}, "does not know the residual stream"),
        ("roberta", "RobertaForTokenClassification", {}, r"classifier\.weight: no entry in \[residual\.head\]"),
        ("roberta", "AutoModelForMaskedLM", {}, r"lm_head.*no entry in \[residual\.head\]"),
        ("gpt2", "AutoModelForCausalLM", {"add_cross_attention": True}, "does not know the residual stream"),
        ("gemma", "AutoModelForCausalLM", {}, "does not know the residual stream"),
        ("t5", "AutoModelForSeq2SeqLM", {}, "does not know the residual stream"),
        ("vit-no-qkv-bias", "ViTForImageClassification", {}, "expected a bias that can take up the norm's"),
    ],
)
def test_what_the_residual_stream_does_not_allow_is_refused(
    example: str, head: str, changes: dict[str, object], error: str
) -> None:
    model = EXAMPLES[example].model(head, **changes)
    with pytest.raises(rotfed.SpecError, match=error):
        fold_norms(model.state_dict(), rotfed.load_spec(model, residual=True))


@pytest.mark.parametrize("case", ["vit", "llama"])
def test_folding_refuses_what_it_would_untie(case: str) -> None:
    _, spec, theta = built(case)
    one, other = {
        "vit": ("vit.layers.0.mlp.fc1.weight", "vit.layers.1.mlp.fc1.weight"),
        "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    }[case]
    with pytest.raises(rotfed.SpecError, match=r"shares its values with .*; .*untie them by a copy"):
        fold_norms({**theta, other: theta[one]}, spec)
    fold_norms({**theta, other: theta[one].clone()}, spec)


@pytest.mark.parametrize("proper", [False, True])
def test_centred_alignment_is_the_nearest_of_its_kind(proper: bool, generator: torch.Generator) -> None:
    _, spec, theta = built("vit")
    folded = fold_norms(theta, spec)
    kind = KINDS["centred_orthogonal"]
    for _ in range(8):
        source = {n: t + torch.randn(t.shape, generator=generator).double() for n, t in folded.items()}
        source = fold_norms({n: folded[n] if "layernorm" in n else t for n, t in source.items()}, spec)
        best = rotfed.align(source, folded, spec, groups=["residual"], proper=proper)
        element = best.transform.elements["residual"]
        assert not proper or float(torch.linalg.det(element)) == pytest.approx(1)
        turn = kind.random((), 12, generator, proper=True)
        for rival in (turn, turn @ element):
            other = rotfed.Transform(spec, {"residual": rival}).apply(source)
            assert best.distance_after <= distance(other, folded)
        moved = rotfed.Transform(spec, {"residual": turn}).apply(folded)
        assert_recovers(rotfed.align(moved, folded, spec, groups=["residual"], proper=proper).params, folded)


def test_in_flower_a_spec_that_takes_folded_models_is_refused_before_the_first_round() -> None:
    model, spec, _ = built("vit")
    for build in (RotFedAvg, align_mod):
        with pytest.raises(rotfed.SpecError, match="residual='permutation'"):
            build(spec)
        build(rotfed.load_spec(model, residual="permutation"))
    with pytest.raises(rotfed.AlignmentError, match="expected one of global, medoid, consensus, found 'tree'"):
        RotFedAvg(rotfed.load_spec(model), anchor="tree")


def test_centred_rotations_keep_the_mean(generator: torch.Generator) -> None:
    kind = KINDS["centred_orthogonal"]
    element = kind.random((3,), 5, generator)
    torch.testing.assert_close(element.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    with pytest.raises(rotfed.TransformError):
        kind.validate(KINDS["orthogonal"].random((3,), 5, generator), (3,), 5, "here")
