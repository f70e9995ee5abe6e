"""What must hold for every architecture: the function stays, frames are recovered, no distance rises, faults show."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import rotfed
from rotfed.axes import Atom, Axis
from rotfed.spec import Entry, SymmetrySpec, acting_groups, parts
from tests.models import (
    ARCHITECTURES,
    FAMILIES,
    assert_recovers,
    assert_same,
    backbone,
    cached_model,
    cached_spec,
    change_of_function,
    distance,
    norm,
)

BARE_AND_HEADS = [(name, head) for name, a in ARCHITECTURES.items() for head in (transformers.AutoModel, *a.heads)]


@pytest.mark.parametrize(
    ("name", "head"), BARE_AND_HEADS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_random_transforms_keep_the_function(name: str, head: type) -> None:
    model = ARCHITECTURES[name].model(head)
    spec = rotfed.load_spec(model)
    # All groups at once and each alone; raises where a change exceeds 1e-12 in float64, 1e-5 in float32.
    assert 0 < rotfed.check_spec(spec, model) <= 1e-12
    assert 0 < rotfed.check_spec(spec, model, torch.float32) <= 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_alignment_recovers_a_transformed_model(name: str, generator: torch.Generator) -> None:
    spec, theta = backbone(name)
    moved = rotfed.random_transform(spec, generator).apply(theta)
    alignment = rotfed.align(moved, theta, spec)
    assert alignment.distance_before > 0.3 * norm(theta)
    assert_recovers(alignment.params, theta)
    assert alignment.distance_after == pytest.approx(distance(alignment.params, theta), abs=1e-9)
    assert_recovers(alignment.transform.apply(moved), alignment.params, 1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_alignment_with_itself_is_the_identity_to_the_bit(name: str) -> None:
    spec, theta = backbone(name)
    alignment = rotfed.align(theta, theta, spec)
    assert_same(alignment.params, theta)
    assert (alignment.distance_before, alignment.distance_after, alignment.identity_permutations) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_distance_never_rises_over_200_random_pairs(name: str, generator: torch.Generator) -> None:
    spec, theta = backbone(name)
    choices = [None, ["qk"], ["vo", "vo_scale"], ["d_ff"], ["qk", "qk_scale", "d_ff"]]
    fell = 0
    for pair in range(200):
        source, anchor = (
            {n: t + torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in theta.items()}
            for _ in range(2)
        )
        alignment = rotfed.align(
            source,
            anchor,
            spec,
            groups=choices[pair % len(choices)],
            layers=[pair % 2] if pair % 3 == 0 else None,
            proper=pair % 2 == 0,
            strength=(1.0, 0.5, 0.01)[pair % 3],
        )
        assert alignment.distance_after <= alignment.distance_before
        fell += alignment.distance_after < alignment.distance_before
    assert fell > 150


def droppable(name: str) -> list[Entry]:
    """The entries of a spec that stand for parameters of the architecture's backbone."""
    found = cached_spec(name).resolve(cached_model(name).state_dict()).names
    return [entry for entry in cached_spec(name).entries if entry.name.replace("{layer}", "0") in found]


@pytest.mark.parametrize("name", FAMILIES)
def test_dropping_any_parameter_from_a_spec_fails_the_check(name: str) -> None:
    spec, model = cached_spec(name), cached_model(name)
    assert len(droppable(name)) > 15
    for entry in droppable(name):
        with pytest.raises(rotfed.SpecError, match=r"no entry in|no parameter is named"):
            rotfed.check_spec(spec.without(entry.name), model)


def mutations(entry: Entry, spec: SymmetrySpec) -> list[Entry]:
    """The entry with one group taken away from all its atoms, for each group that acts on it."""
    acting = sorted(set().union(*(acting_groups(part, spec.groups) for part in parts(entry.axes))))

    def lacking(group: str, atom: Atom) -> Atom:
        if atom.name == group:
            # A group's name on an axis stands for its size as well.
            return Atom(str(spec.groups[group].size), atom.actions)
        return Atom(atom.name, tuple(action for action in atom.actions if action[0] != group))

    def stripped(group: str) -> tuple[Axis, ...]:
        return tuple(tuple(tuple(lacking(group, a) for a in segment) for segment in axis) for axis in entry.axes)

    return [dataclasses.replace(entry, axes=stripped(group)) for group in acting]


# A bias of the keys adds the same amount to all scores of a query, which the softmax takes away again (DeBERTa's
# keys also meet relative positions, which its own key bias does not cancel out of).
WITHOUT_EFFECT = re.compile(r"attention\.(k_proj|self\.key|k_lin|self\.pos_key_proj)\.bias")


@pytest.mark.parametrize("name", FAMILIES)
def test_taking_a_group_off_any_parameter_fails_the_check(name: str) -> None:
    spec, model = cached_spec(name), cached_model(name)
    tried = 0
    for position, entry in enumerate(spec.entries):
        for mutated in [] if WITHOUT_EFFECT.search(entry.name) else mutations(entry, spec):
            entries = (*spec.entries[:position], mutated, *spec.entries[position + 1 :])
            with pytest.raises(rotfed.FunctionChangedError, match="changed the outputs by"):
                rotfed.check_spec(dataclasses.replace(spec, entries=entries), model)
            tried += 1
    assert tried >= 10


def test_the_names_of_transformers_4_are_the_ones_that_transformers_loads(
    tmp_path: Path, generator: torch.Generator
) -> None:
    architecture = ARCHITECTURES["vit"]
    model = architecture.model(architecture.heads[0])
    spec = rotfed.load_spec(model)
    (naming,) = set(spec.namings()) - {"current"}
    old_names = {
        f"vit.{entry.name}".replace("{layer}", str(layer)): f"vit.{spec.rename(entry.name, naming)}".replace(
            "{layer}", str(layer)
        )
        for entry in spec.entries
        for layer in range(spec.num_layers)
    }
    old = {old_names.get(name, name): tensor for name, tensor in model.state_dict().items()}
    assert "vit.encoder.layer.0.attention.attention.query.weight" in old
    moved = rotfed.random_transform(spec, generator).apply(old)
    assert spec.resolve(moved).naming == naming
    assert_recovers(rotfed.align(moved, model.state_dict(), spec).params, old)

    save_file({name: tensor.contiguous() for name, tensor in moved.items()}, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    # transformers 5 renames old checkpoints by rules of its own: an independent witness of the names.
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    pixels = {"pixel_values": torch.randn(2, 1, 8, 8, generator=generator)}
    assert change_of_function(model, model.state_dict(), loaded.state_dict(), pixels) < 1e-5


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
