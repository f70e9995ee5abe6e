"""The shared property check notices a group that acts by the wrong one of itself and its dual, and takes no bait."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import rotfed
from rotfed.axes import Atom
from rotfed.checks import example_inputs, randomize, relative_change
from rotfed.spec import Entry
from tests.models import ARCHITECTURES, FAMILIES, assert_same, cached_model, cached_spec, copied
from tests.test_laws import WITHOUT_EFFECT


def flipped(entry: Entry) -> Iterator[Entry]:
    """The entry with one `*group` made `/group` or the reverse, for every such action (GPT-2's fused key bias aside).

    A query, key or value of its own axis segment is flipped alone, so that a fused matrix is tested part by part.
    """
    for a, axis in enumerate(entry.axes):
        for s, segment in enumerate(axis):
            if entry.name.endswith("c_attn.bias") and s == 1:
                continue
            for t, atom in enumerate(segment):
                for i, (group, dual) in enumerate(atom.actions):
                    actions = (*atom.actions[:i], (group, not dual), *atom.actions[i + 1 :])
                    changed = (*segment[:t], Atom(atom.name, actions), *segment[t + 1 :])
                    segments = (*axis[:s], changed, *axis[s + 1 :])
                    yield dataclasses.replace(entry, axes=(*entry.axes[:a], segments, *entry.axes[a + 1 :]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dual_in_place_of_its_group_fails_the_check(name: str) -> None:
    spec, model = cached_spec(name), cached_model(name)
    tried = 0
    for position, entry in enumerate(spec.entries):
        for mutated in () if WITHOUT_EFFECT.search(entry.name) else flipped(entry):
            entries = (*spec.entries[:position], mutated, *spec.entries[position + 1 :])
            with pytest.raises(rotfed.FunctionChangedError, match="changed the outputs by"):
                rotfed.check_spec(dataclasses.replace(spec, entries=entries), model)
            tried += 1
    assert tried >= 5


def test_the_checked_model_is_not_touched() -> None:
    model = ARCHITECTURES["bert"].model().train()
    before = copied(model.state_dict())
    rotfed.check_spec(cached_spec("bert"), model)
    assert_same(dict(model.state_dict()), before)
    assert model.training


def test_a_model_that_computes_nothing_finite_does_not_pass() -> None:
    model = ARCHITECTURES["vit"].model()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(torch.nan)
    with pytest.raises(rotfed.FunctionChangedError):
        rotfed.check_spec(cached_spec("vit"), model)


def test_relative_change_takes_the_worst_output_and_counts_nan_as_infinite() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([100.0, 0.0])
    assert relative_change({"a": one, "b": two}, {"a": one + torch.tensor([0.0, 0.5]), "b": two + 1}) == 0.25
    assert relative_change({"a": one}, {"a": torch.tensor([1.0, torch.nan])}) == float("inf")


def test_random_weights_leave_no_norm_at_one_and_no_bias_at_zero(generator: torch.Generator) -> None:
    model = randomize(ARCHITECTURES["bert"].model(), generator)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    assert vectors and all(bool(((p != 0) & (p != 1)).all()) for p in vectors)


def test_a_model_of_unknown_input_is_refused_with_the_remedy(generator: torch.Generator) -> None:
    model = ARCHITECTURES["bert"].model()
    model.main_input_name = "input_values"
    with pytest.raises(rotfed.SpecError, match="pass example inputs"):
        example_inputs(model, generator)
