"""The residual stream: folding keeps the function, and the stream's rotations, permutations and signs do."""

import contextlib
import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import rotfed
from rotfed.checks import example_inputs, outputs, relative_change, unsettling_transform
from rotfed.examples import Example
from rotfed.groups import KINDS
from rotfed.layout import lay_out
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params
from tests.models import EXAMPLES, assert_recovers, assert_same, copied, distance, norm
from tests.test_specs import faults

# One of each form that a stream and its head can have: an example, a class, changes of the configuration, the group.
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "vit": ("vit", "AutoModelForImageClassification", {}, "centred_orthogonal"),
    "vit-no-qkv-bias": ("vit-no-qkv-bias", "AutoModelForImageClassification", {}, "centred_orthogonal"),
    "llama": ("llama-biases-wide-heads", "AutoModelForCausalLM", {"tie_word_embeddings": False}, "orthogonal"),
    "llama-tied": ("llama", "AutoModelForCausalLM", {"tie_word_embeddings": True}, "signed"),
    "gemma": ("gemma", "AutoModelForCausalLM", {"tie_word_embeddings": False}, "orthogonal"),
    "gemma2": ("gemma2", "AutoModelForCausalLM", {}, "signed"),
    "olmo-tied": ("olmo", "AutoModelForCausalLM", {}, "centred_orthogonal"),
    "gpt2": ("gpt2", "AutoModelForCausalLM", {}, "permutation"),
    "gpt2-untied": ("gpt2", "AutoModelForCausalLM", {"tie_word_embeddings": False}, "centred_orthogonal"),
    "gpt_neox": ("gpt_neox", "AutoModelForCausalLM", {}, "centred_orthogonal"),
    "bert": ("bert", "AutoModelForSequenceClassification", {}, "permutation"),
    "bert-words": ("bert", "AutoModelForMaskedLM", {}, "permutation"),
    "modernbert": ("modernbert-biases", "AutoModelForMaskedLM", {}, "permutation"),
    "dinov2": ("dinov2-swiglu", "AutoModelForImageClassification", {}, "centred_orthogonal"),
    "t5": ("t5", "AutoModelForSeq2SeqLM", {}, "signed"),
    "electra": ("electra", "AutoModelForMaskedLM", {}, "permutation"),
    "roberta": ("roberta", "AutoModelForSequenceClassification", {}, "permutation"),
}


def knows_the_stream(example: Example) -> bool:
    with contextlib.suppress(rotfed.SpecError):
        return rotfed.load_spec(example.config(), residual=True) is not None
    return False


# The examples whose stream is known, and of every model type the first.
KNOWN = {name: example for name, example in EXAMPLES.items() if knows_the_stream(example)}
STREAMS = {example.model_type: example for example in reversed(KNOWN.values())}

# Classes that are refused: their heads are not in the spec, or there is none. Of the others none may be.
REFUSED = {
    *("DeiTForMaskedImageModeling", "ElectraForMultipleChoice", "GPT2DoubleHeadsModel", "ViTForMaskedImageModeling"),
    *("BeitForMaskedImageModeling", "Data2VecVisionForSemanticSegmentation"),
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
    assert change(model, theta, folded, inputs) <= 1e-12
    assert_recovers(fold_norms(folded, spec), folded, 1e-14)
    assert spec.residual is not None
    if spec.residual.folded and "norm" in " ".join(theta).replace("ln_f", "norm"):
        assert distance(folded, theta) > 0.01 * norm(theta)
        with pytest.raises(rotfed.SpecError, match=r"expected a gain that is folded.*fold_norms"):
            rotfed.align(theta, folded, spec)


@pytest.mark.parametrize(("dtype", "gain", "found"), [(torch.float16, 1e5, "larger"), (torch.float16, 1e-6, "smaller"),
    (torch.float32, 1e39, "larger"), (torch.float64, 1e308, "larger")])  # fmt: skip
def test_folding_refuses_what_the_type_cannot_hold(dtype: torch.dtype, gain: float, found: str) -> None:
    # In two factors, each of which the type does hold.
    _, spec, theta = built("vit")
    part = {"layernorm_before.weight": gain**0.5, "q_proj.weight": 10 * gain**0.5}
    odd = {n: (next((f for end, f in part.items() if n.endswith(end)), 1) * t).to(dtype) for n, t in theta.items()}
    with pytest.raises(
        rotfed.TransformError, match=rf"q_proj.weight: .*{found} ones after folding layers.0.layernorm_b"
    ):
        fold_norms(odd, spec)


def test_folding_takes_constants_off_in_half_precision() -> None:
    # A bias that is the same everywhere is nothing but what centring takes off.
    _, spec, theta = built("vit")
    half = {n: (torch.full_like(t, 0.1) if n.endswith("o_proj.bias") else t).half() for n, t in theta.items()}
    assert not fold_norms(half, spec)["vit.layers.0.attention.o_proj.bias"].any()


@every_case
def test_alignment_recovers_a_moved_model(case: str, generator: torch.Generator) -> None:
    _, spec, theta = built(case)
    folded = fold_norms(theta, spec)
    for _ in range(2):
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


@pytest.mark.parametrize("case", ["vit", "llama", "llama-tied", "gpt2", "bert-words"])
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
        assert change(model, theta, merged, inputs) < 1e-6


@pytest.mark.parametrize(
    ("example", "head", "changes", "error"),
    [
        ("vit", "AutoModel", {}, r"pooler\.dense\.\w+: no entry in .* for this class"),
        ("llama", "AutoModel", {}, r"task head: expected beside the backbone, not found"),
        (
            "electra",
            "ElectraForMultipleChoice",
            {},
            r"sequence_summary\.summary\.weight: no entry in",
        ),
        ("gpt2", "AutoModelForCausalLM", {"add_cross_attention": True}, "does not know the residual stream"),
        ("bert-cross-attention", "AutoModelForCausalLM", {}, "does not know the residual stream"),
        ("bloom", "AutoModelForCausalLM", {}, "does not know the residual stream"),
    ],
)
def test_what_the_residual_stream_does_not_allow_is_refused(
    example: str, head: str, changes: dict[str, object], error: str
) -> None:
    model = EXAMPLES[example].model(head, **changes)
    with pytest.raises(rotfed.SpecError, match=error):
        fold_norms(model.state_dict(), rotfed.load_spec(model, residual=True))


def classes(model_type: str) -> list[str]:
    """Every class of transformers that is built from a model type's configuration."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    found = [c for _, c in inspect.getmembers(module, inspect.isclass) if getattr(c, "config_class", None) is config]
    names = [c.__name__ for c in found if c.__module__ == module.__name__ and hasattr(transformers, c.__name__)]
    # The last is not built from the example's configuration.
    return [name for name in names if not name.endswith(("PreTrainedModel", "BeitForSemanticSegmentation"))]


def moved(model: nn.Module, generator: torch.Generator) -> tuple[SymmetrySpec, dict[str, Tensor], dict[str, Tensor]]:
    """A model's spec with the residual stream, its folded parameters, and those in a random frame."""
    spec = rotfed.load_spec(model, residual=True)
    params = fold_norms(dict(model.state_dict()), spec)
    return spec, params, unsettling_transform(spec, generator).apply(params)


def inputs_of(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    inputs = example_inputs(model, generator)
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = {name: tokens.unsqueeze(1).repeat(1, 3, 1) for name, tokens in inputs.items()}
    if type(model).__name__.endswith("ForSequenceClassification") and "decoder_input_ids" in inputs:
        inputs["input_ids"][:, -1] = model.config.eos_token_id
        del inputs["decoder_input_ids"]
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def seen_outputs(model: nn.Module, params: Params, inputs: Params) -> dict[str, Tensor]:
    """What a head puts out; hidden states are in the frame of the stream."""
    return {name: x for name, x in outputs(model, params, inputs).items() if "hidden_state" not in name}


def change(model: nn.Module, before: Params, after: Params, inputs: Params) -> float:
    """The relative change of what a head puts out."""
    return relative_change(seen_outputs(model, before, inputs), outputs(model, after, inputs))


@pytest.mark.parametrize(("model_type", "name"), [(t, name) for t in STREAMS for name in classes(t)])
def test_every_class_of_a_family_is_exact_or_refused(model_type: str, name: str, generator: torch.Generator) -> None:
    bare = name.endswith(("Model", "Encoder", "Decoder", "Backbone")) and not name.endswith("HeadModel")
    labels = 2 if name.endswith("ForQuestionAnswering") else 3
    seen: list[object] = []
    for tied in (True, False):
        model = STREAMS[model_type].model(name, tie_word_embeddings=tied, num_labels=labels).double()
        if (groups := rotfed.load_spec(model, residual=True).groups) in seen:
            continue
        seen.append(groups)
        if bare or name in REFUSED:
            with pytest.raises(rotfed.SpecError, match=r"for this class of model|beside the backbone, not"):
                moved(model, generator)
        else:
            _, _, other = moved(model, generator)
            assert change(model, dict(model.state_dict()), other, inputs_of(model, generator)) <= 1e-12


@pytest.mark.parametrize("name", [name for name, e in KNOWN.items() if e not in STREAMS.values()])
def test_every_variant_of_a_family_is_exact(name: str, generator: torch.Generator) -> None:
    head = next(head for head in classes(KNOWN[name].model_type) if head.endswith(("LM", "Generation", "ssification")))
    model = KNOWN[name].model(head).double()
    _, _, other = moved(model, generator)
    assert change(model, dict(model.state_dict()), other, inputs_of(model, generator)) <= 1e-12


@pytest.mark.parametrize("model_type", STREAMS)
def test_a_fault_in_any_entry_changes_the_function(model_type: str, generator: torch.Generator) -> None:
    seen: set[object] = set()
    for name in classes(model_type):
        if name in REFUSED or not name.endswith(("LM", "Classification", "HeadModel", "Generation")):
            continue
        model = STREAMS[model_type].model(name).double()
        spec, params, _ = moved(model, generator)
        for bias in [name for name, tensor in params.items() if not tensor.any()]:
            # Folding left nothing there, which stays nothing in every frame.
            params[bias] = torch.randn(params[bias].shape, generator=generator).double()
        drawn = unsettling_transform(spec, generator).elements
        elements = {group: element for group, element in drawn.items() if group.startswith("residual")}
        transform, layout = rotfed.Transform(spec, elements), lay_out(params, spec)
        inputs = inputs_of(model, generator)
        right, expected = transform.apply(params), seen_outputs(model, params, inputs)
        for fault in faults(layout, seen):
            # No patch is masked here, and T5 reads its embeddings by the names of its stacks.
            if fault.group in elements and not fault.block.names[0][0].endswith(("mask_token", "shared.weight")):
                faulty = {**right, **fault.moved(layout, transform, params)}
                found = relative_change(expected, outputs(model, faulty, inputs))
                assert found > 1e-9, f"{name}: {fault} does not show"
    assert len(seen) > 10


def test_what_a_classifier_reads_is_known_by_the_class(tmp_path: Path, generator: torch.Generator) -> None:
    """A configuration may belong to any class, and a directory's to another one than the parameters do."""
    words = EXAMPLES["bert"].model("BertForTokenClassification").double()
    pooled = EXAMPLES["bert"].model("BertForSequenceClassification", seed=1).double()
    for model, other in ((words, pooled), (pooled, words)):
        model.save_pretrained(tmp_path)
        for source in (model, tmp_path):
            spec = rotfed.load_spec(source, residual=True)
            theta = model.state_dict()
            moved = unsettling_transform(spec, generator).apply(theta)
            assert change(model, theta, moved, inputs_of(model, generator)) <= 1e-12
            with pytest.raises(rotfed.SpecError, match=r"pooler\.dense\.weight: (no entry|expected by)"):
                fold_norms(other.state_dict(), spec)
    own_class = type("OwnForTokenClassification", (transformers.BertPreTrainedModel,), {})(words.config)
    for source in (words.config, own_class):
        for model in (words, pooled):
            with pytest.raises(rotfed.SpecError, match=r"for this class of model.*pass load_spec the model itself"):
                fold_norms(model.state_dict(), rotfed.load_spec(source, residual=True))


def _reading_otherwise(self: Any, pixel_values: Tensor | None = None, **_: Any) -> Any:
    return self.classifier(self.vit(pixel_values).last_hidden_state.amax(1))


@pytest.mark.parametrize("case", ["directory", "subclass", "backbone"])
def test_a_head_that_is_not_of_the_class_is_refused(case: str, tmp_path: Path) -> None:
    """Names alone do not tell what a head reads: a base model's directory, a forward of one's own, a wrapper."""
    if case == "directory":
        model: Any = EXAMPLES["bert"].model("BertForSequenceClassification")
        EXAMPLES["bert"].model("BertForMaskedLM").save_pretrained(tmp_path)
        source: Any = tmp_path
    else:
        model = EXAMPLES["vit"].model("AutoModelForImageClassification")
        own = type("Own", (type(model),), {"forward": _reading_otherwise})
        source = own(model.config) if case == "subclass" else model.vit
    with pytest.raises(rotfed.SpecError, match=r"(pooler|classifier)\S*: no entry"):
        fold_norms(model.state_dict(), rotfed.load_spec(source, residual=True))


def test_a_descent_that_has_not_settled_says_so() -> None:
    (_, spec, source), (_, _, anchor) = built("gpt_neox"), built("gpt_neox", seed=1)
    source, anchor = (fold_norms(theta, spec) for theta in (source, anchor))
    with pytest.warns(rotfed.ConvergenceWarning, match=r"residual.* in the last of 2 sweeps.*raise max_sweeps"):
        rotfed.align(source, anchor, spec, rotfed.AlignOptions(max_sweeps=2))
    rotfed.align(source, anchor, spec)


def test_a_gain_that_no_layer_takes_up_is_refused() -> None:
    _, spec, theta = built("llama")
    assert spec.residual is not None
    unread = dataclasses.replace(spec.residual, folds={**spec.residual.folds, "norm": ()})
    with pytest.raises(rotfed.SpecError, match=r"model\.norm\.weight: expected a layer that reads this norm"):
        fold_norms(theta, dataclasses.replace(spec, residual=unread))


def test_a_bias_that_no_layer_takes_up_stays_in_its_norm() -> None:
    _, spec, theta = built("gpt_neox")
    norm = "gpt_neox.final_layer_norm"
    folded = fold_norms(theta, spec)
    assert_recovers({"": folded[f"{norm}.bias"]}, {"": theta[f"{norm}.bias"] / theta[f"{norm}.weight"]}, 1e-12)
    assert not folded["gpt_neox.layers.0.input_layernorm.bias"].any()
    for gain, dtype in ((0.0, torch.float64), (1e-7, torch.float16), (1e-4, torch.float64)):
        theta[f"{norm}.weight"][3] = gain
        with pytest.raises(rotfed.SpecError, match=r"final_layer_norm\.weight: expected a gain not near zero"):
            fold_norms({name: tensor.to(dtype) for name, tensor in theta.items()}, spec)


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


@pytest.mark.parametrize("reflections", [True, False])
def test_centred_alignment_is_the_nearest_of_its_kind(reflections: bool, generator: torch.Generator) -> None:
    _, spec, theta = built("vit")
    folded = fold_norms(theta, spec)
    kind = KINDS["centred_orthogonal"]
    for _ in range(8):
        source = {n: t + torch.randn(t.shape, generator=generator).double() for n, t in folded.items()}
        source = fold_norms({n: folded[n] if "layernorm" in n else t for n, t in source.items()}, spec)
        best = rotfed.align(source, folded, spec, rotfed.AlignOptions(groups=["residual"], reflections=reflections))
        element = best.transform.elements["residual"]
        assert reflections or float(torch.linalg.det(element)) == pytest.approx(1)
        turn = kind.random((), 12, generator, reflections=False)
        for rival in (turn, turn @ element):
            other = rotfed.Transform(spec, {"residual": rival}).apply(source)
            assert best.distance_after <= distance(other, folded)
        moved = rotfed.Transform(spec, {"residual": turn}).apply(folded)
        assert_recovers(
            rotfed.align(moved, folded, spec, rotfed.AlignOptions(groups=["residual"], reflections=reflections)).params,
            folded,
        )


def test_centred_rotations_keep_the_mean(generator: torch.Generator) -> None:
    kind = KINDS["centred_orthogonal"]
    element = kind.random((3,), 5, generator)
    torch.testing.assert_close(element.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    with pytest.raises(rotfed.TransformError):
        kind.validate(KINDS["orthogonal"].random((3,), 5, generator), (3,), 5, "here")
