"""One test over every spec that rotfed ships: it keeps the function of the real model class, and a faulty one shows.

The models are tiny, randomly initialised, with random norms and biases: `[tiny]` and `[[examples]]` of the spec files.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import rotfed
from rotfed.checks import example_inputs, outputs, relative_change, unsettling_transform
from rotfed.examples import Example, examples
from rotfed.layout import Block, Layout, lay_out
from rotfed.library import load_spec, spec_files, supported_model_types
from rotfed.spec import SymmetrySpec
from rotfed.tensors import to_work
from rotfed.transform import Moved
from tests.models import assert_recovers, assert_same, norm

EXAMPLES = examples()
FIRST = {example.family: example for example in reversed(EXAMPLES.values())}
BARE_AND_HEADS = [(name, head) for name, example in EXAMPLES.items() for head in example.classes]
every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=lambda example: example.name)


@cache
def cached_model(example: str) -> nn.Module:
    """The backbone of an example in float64; tests must not change it."""
    return EXAMPLES[example].model().double()


def backbone(example: Example) -> tuple[SymmetrySpec, dict[str, Tensor]]:
    model = cached_model(example.name)
    return load_spec(model), dict(model.state_dict())


def test_every_model_type_has_an_example() -> None:
    assert {example.model_type for example in EXAMPLES.values()} == set(supported_model_types())


@pytest.mark.parametrize(("name", "head"), BARE_AND_HEADS)
def test_random_transforms_keep_the_function(name: str, head: str) -> None:
    model = EXAMPLES[name].model(head)
    spec = load_spec(model)
    # All groups at once; raises where a change exceeds 1e-12 in float64, 1e-5 in float32.
    assert 0 < rotfed.check_spec(spec, model) <= 1e-12
    if head == EXAMPLES[name].classes[0]:
        assert rotfed.check_spec(spec, model, torch.float32) <= 1e-5


@every_example
def test_alignment_recovers_a_transformed_model_and_keeps_an_aligned_one(
    example: Example, generator: torch.Generator
) -> None:
    spec, theta = backbone(example)
    moved = rotfed.random_transform(spec, generator).apply(theta)
    alignment = rotfed.align(moved, theta, spec)
    assert alignment.distance_before > 0.1 * norm(theta)
    assert_recovers(alignment.params, theta)
    assert_recovers(alignment.transform.apply(moved), alignment.params, 1e-12)
    assert_recovers(alignment.transform.inverse().apply(alignment.params), moved, 1e-9)
    kept = rotfed.align(theta, theta, spec)
    assert_same(kept.params, theta)
    assert (kept.distance_before, kept.distance_after, kept.identity_permutations) == (0.0, 0.0, 1.0)


@every_example
def test_transforms_compose_and_invert(example: Example, generator: torch.Generator) -> None:
    spec, theta = backbone(example)
    one, two = (rotfed.random_transform(spec, generator) for _ in range(2))
    assert_recovers(one.compose(two).apply(theta), one.apply(two.apply(theta)), 1e-12)
    assert_recovers(one.inverse().apply(one.apply(theta)), theta, 1e-12)


@pytest.mark.parametrize("example", FIRST.values(), ids=lambda example: example.name)
def test_a_bfloat16_model_is_aligned_in_float32_and_comes_back_in_bfloat16(
    example: Example, generator: torch.Generator
) -> None:
    spec, theta = backbone(example)
    half = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in theta.items()}
    moved = rotfed.random_transform(spec, generator, reflections=False).apply(half)
    alignment = rotfed.align(moved, half, spec)
    assert [t.dtype for t in alignment.params.values()] == [t.dtype for t in half.values()]
    # Two roundings to eight bits lie between the two; the transform itself is found to float32.
    assert_recovers(alignment.params, half, 0.02)


@every_example
def test_names_on_disk_fit(example: Example, tmp_path: Path) -> None:
    """`save_pretrained` writes the names of older releases for some models; they must lead to the same transform."""
    for head in example.classes:
        model = example.model(head)
        spec = load_spec(model)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        in_memory = lay_out(model.state_dict(), spec)
        on_disk = lay_out(stored, spec)
        assert on_disk.stacks == in_memory.stacks
        transform = rotfed.random_transform(spec, torch.Generator().manual_seed(1))
        moved = transform.apply(stored)
        assert any(moved[name] is not stored[name] for name in stored)
        for name, tensor in moved.items():
            if tensor is not stored[name]:
                stored[name] = tensor
        from safetensors.torch import save_file

        save_file(
            {name: t.contiguous() for name, t in stored.items()}, tmp_path / "model.safetensors", {"format": "pt"}
        )
        loaded = type(model).from_pretrained(tmp_path)
        expected = transform.apply(model.state_dict())
        assert_recovers(
            {name: t for name, t in loaded.state_dict().items() if t.is_floating_point()},
            {name: t for name, t in expected.items() if t.is_floating_point()},
            1e-6,
        )


@dataclasses.dataclass(frozen=True)
class Fault:
    """One group taken off one part of a parameter, in all layers, or a scale that multiplies what it should divide."""

    block: Block
    group: str
    flipped: bool

    def moved(self, layout: Layout, transform: rotfed.Transform, theta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of the block as a transform makes them under the fault."""
        changed = [
            dataclasses.replace(action, dual=not action.dual) if action.group.name == self.group else action
            for action in self.block.actions
            if self.flipped or action.group.name != self.group
        ]
        blocks = tuple(
            dataclasses.replace(block, actions=tuple(changed)) if block is self.block else block
            for block in layout.blocks
        )
        faulty = Moved(theta, transform, dataclasses.replace(layout, blocks=blocks))
        return {name: faulty[name] for names in self.block.names for name in names}

    def __str__(self) -> str:
        return f"{self.block.names[0][0]} with {self.group} {'the other way round' if self.flipped else 'taken off'}"


def faults(layout: Layout, seen: set[object]) -> Iterator[Fault]:
    """Every fault that is not yet in `seen`, where the variants of a spec are alike."""
    parts: dict[object, int] = {}
    for block in layout.blocks:
        part = parts[block.names] = parts.get(block.names, -1) + 1
        name, layer = block.names[0][0].removeprefix(layout.prefix), block.layers[0]
        pattern = name if layer is None else name.replace(f".{layer}.", ".{layer}.", 1)
        for action in block.actions:
            for flipped in [False] + [True] * (action.group.kind_name == "scale"):
                fault = (pattern, part, action.group.name, flipped)
                if fault not in seen:
                    seen.add(fault)
                    yield Fault(block, action.group.name, flipped)


@pytest.mark.parametrize("family", spec_files())
def test_a_fault_in_any_entry_changes_the_function(family: str, generator: torch.Generator) -> None:
    seen: set[object] = set()
    inert = 0
    for example in [example for example in EXAMPLES.values() if example.family == family]:
        spec, theta = backbone(example)
        model = cached_model(example.name)
        inputs = example_inputs(model, generator)
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        transform, layout = unsettling_transform(spec, generator), lay_out(theta, spec)
        moved, expected = transform.apply(theta), outputs(model, theta, inputs)
        for fault in faults(layout, seen):
            faulty = {**moved, **fault.moved(layout, transform, theta)}
            if relative_change(expected, outputs(model, faulty, inputs)) > 1e-9:
                continue
            # Not every parameter has an effect: the softmax cancels a bias of the keys. Then any values will do.
            noisy = {name: tensor.clone() for name, tensor in theta.items()}
            assert not fault.block.stacked, f"{fault} does not show"
            for (name,) in fault.block.names:
                view = fault.block.view(noisy[name])
                view.add_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
            change = relative_change(expected, outputs(model, noisy, inputs))
            assert change <= 1e-9, f"{example.name}: {fault} does not show"
            inert += 1
    assert len(seen) > 10 and inert <= len(seen) / 4


@every_example
def test_an_entry_that_is_missing_or_misshapen_is_refused(example: Example) -> None:
    spec, theta = backbone(example)
    found = lay_out(theta, spec).names
    entries = [entry for entry in spec.entries if any(name in found for name in spec_names(spec, entry.name))]
    assert len(entries) > 5
    for entry in entries:
        with pytest.raises(rotfed.SpecError, match=r"no entry in|no parameter is named"):
            lay_out(theta, spec.without(entry.name))
        if not entry.optional:
            first = found[spec_names(spec, entry.name)[0]]
            with pytest.raises(rotfed.SpecError, match=r"not found among the parameters|no parameter is named"):
                lay_out({name: tensor for name, tensor in theta.items() if name != first}, spec)
            with pytest.raises(rotfed.SpecError, match="expected shape"):
                lay_out({**theta, first: theta[first].unsqueeze(0)}, spec)


def spec_names(spec: SymmetrySpec, entry: str) -> list[str]:
    """The spec's names of an entry's parameters."""
    others = set(spec.without(entry).names())
    return [name for name in spec.names() if name not in others]


def test_what_half_precision_moves_by_is_found_in_float32(generator: torch.Generator) -> None:
    spec, theta = backbone(EXAMPLES["llama"])
    half = {name: tensor.bfloat16() for name, tensor in theta.items()}
    moved = {name: to_work(t) for name, t in rotfed.random_transform(spec, generator).apply(half).items()}
    in_half = rotfed.align({name: t.bfloat16() for name, t in moved.items()}, half, spec).transform
    in_double = rotfed.align(moved, {name: to_work(t) for name, t in half.items()}, spec).transform
    for name, element in in_half.elements.items():
        torch.testing.assert_close(element, in_double.elements[name], rtol=0, atol=1e-5)
