"""Alignment refined on data: exact at every step, gradients of the true average, and never worse than its start."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rotfed
from rotfed.learned import LearnedAlignment, Loss, model_loss, refine
from rotfed.residual import fold_norms
from rotfed.transform import identity_transform
from tests.models import (
    EXAMPLES,
    assert_recovers,
    assert_same,
    backbone,
    change_of_function,
    copied,
    distance,
    small_params,
    small_spec,
)

Params = dict[str, Tensor]


def classifier(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, rotfed.SymmetrySpec, Params]:
    """A small ViT with a head, its spec with the residual stream, and its folded parameters."""
    model = EXAMPLES["vit"].model("AutoModelForImageClassification", seed=seed, num_labels=4).to(dtype)
    spec = rotfed.load_spec(model, residual=True)
    return model, spec, fold_norms(copied(model.state_dict()), spec)


def images(generator: torch.Generator, count: int = 3, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    return [
        {
            "pixel_values": torch.randn(6, 1, 8, 8, generator=generator, dtype=dtype),
            "labels": torch.randint(4, (6,), generator=generator),
        }
        for _ in range(count)
    ]


def small_pair(generator: torch.Generator) -> tuple[rotfed.SymmetrySpec, Params, Params]:
    return small_spec(), small_params(generator), small_params(generator)


def disturb(learned: LearnedAlignment, generator: torch.Generator, size: float = 0.5) -> None:
    learned.load(
        {
            name: size * torch.randn(own.shape, generator=generator, dtype=own.dtype)
            for name, own in learned.parameters.items()
        }
    )


def to_target(target: Mapping[str, Tensor]) -> Loss:
    """A loss that pulls the average to `target`, times the batch's sign."""

    def loss(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        away = [(params[n] - t).square().sum() for n, t in target.items() if t.is_floating_point()]
        return batch["sign"] * torch.stack(away).sum()

    return loss


NEAR, FAR = {"sign": torch.tensor(1.0)}, {"sign": torch.tensor(-1.0)}


@pytest.mark.parametrize("name", ["small", "vit", "llama", "gpt2", "qwen3", "mixtral", "t5"])
def test_what_is_differentiated_is_the_average_with_the_moved_source(name: str, generator: torch.Generator) -> None:
    if name == "small":
        spec, source, anchor = small_pair(generator)
    elif name == "vit":
        _, spec, source = classifier(0)
        anchor = classifier(1)[2]
    else:
        (spec, source), anchor = backbone(name), backbone(name, seed=1)[1]
    start = rotfed.random_transform(spec, generator)
    learned = LearnedAlignment([anchor, source], spec, [start], [0.7, 0.3], spec.groups)
    assert_recovers(learned.merged(), rotfed.weighted_mean([start.apply(source), anchor], [0.3, 0.7]), 1e-13)
    disturb(learned, generator)
    moved = learned.transforms()[0].apply(source)
    assert distance(moved, start.apply(source)) > 0.1
    assert_recovers(learned.merged(), rotfed.weighted_mean([moved, anchor], [0.3, 0.7]), 1e-13)


def test_several_models_are_moved_at_once(generator: torch.Generator) -> None:
    spec = small_spec()
    models = [small_params(generator) for _ in range(4)]
    starts = [rotfed.random_transform(spec, generator) for _ in range(3)]
    learned = LearnedAlignment(models, spec, starts, [1, 2, 3, 4], spec.groups)
    disturb(learned, generator)
    transforms = learned.transforms()
    moved = [models[0], *(t.apply(model) for t, model in zip(transforms, models[1:], strict=True))]
    assert_recovers(learned.merged(), rotfed.weighted_mean(moved, [1, 2, 3, 4]), 1e-13)
    for number in range(3):
        alone = LearnedAlignment([models[0], models[number + 1]], spec, [starts[number]], groups=spec.groups)
        alone.load({name: own[number : number + 1] for name, own in learned.parameters.items()})
        assert_same(alone.transforms()[0].apply(models[number + 1]), moved[number + 1])


def test_gradients_are_those_of_the_average(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    learned = LearnedAlignment([anchor, source], spec, [rotfed.random_transform(spec, generator)], groups=spec.groups)
    disturb(learned, generator, 0.2)
    names = list(learned.parameters)
    assert set(names) == {"qk", "qk_scale", "unit", "shared"}
    loss = to_target(source)

    def value(*parameters: Tensor) -> Tensor:
        return loss(learned.merged(dict(zip(names, parameters, strict=True))), NEAR)

    assert torch.autograd.gradcheck(value, [p.clone().requires_grad_() for p in learned.parameters.values()])


def test_the_function_stays_to_rounding_however_far_a_float32_alignment_turns(generator: torch.Generator) -> None:
    model, spec, theta = classifier(dtype=torch.float32)
    learned = LearnedAlignment(
        [classifier(1, torch.float32)[2], theta], spec, [rotfed.random_transform(spec, generator)]
    )
    disturb(learned, generator, 3.0)
    transform = learned.transforms()[0]
    for name in ("residual", "qk", "vo"):
        assert learned.parameters[name].dtype == torch.float32
        assert transform.elements[name].dtype == torch.float64
        assert spec.groups[name].kind.defect(transform.elements[name]) < 1e-12
    wide = {name: tensor.double() for name, tensor in theta.items()}
    assert (
        change_of_function(
            model.double(), wide, transform.apply(wide), {"pixel_values": images(generator)[0]["pixel_values"]}
        )
        < 1e-12
    )


def test_parameters_count_a_rotation_once(generator: torch.Generator) -> None:
    _, spec, theta = classifier()
    learned = LearnedAlignment([theta, theta], spec)
    assert {name: tuple(own.shape) for name, own in learned.parameters.items()} == {
        "residual": (1, 55),
        "qk": (1, 2, 3, 6),
        "vo": (1, 2, 3, 6),
    }
    assert not any(bool(own.any()) for own in learned.parameters.values())


def test_training_finds_the_rotation_that_was_taken_away(generator: torch.Generator) -> None:
    _, spec, theta = classifier()
    away = LearnedAlignment([theta, theta], spec, [rotfed.random_transform(spec, generator)])
    base = away.transforms()[0]
    disturb(away, generator, 0.3)
    source = away.transforms()[0].inverse().apply(theta)
    learned = LearnedAlignment([theta, source], spec, [base])
    before = learned.parameters
    losses = learned.train(to_target(theta), [NEAR], max_steps=200)
    assert learned.parameters is before
    assert losses[-1] < 1e-4 * losses[0]
    assert_recovers(learned.transforms()[0].apply(source), theta, 0.02)


def test_the_rate_does_not_depend_on_the_size(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    learned = LearnedAlignment([anchor, source], spec)
    assert learned.train(to_target(anchor), [NEAR], 0.1, max_steps=1, decay=False)
    for name, n in (("qk", 3), ("shared", 5)):
        expected = torch.full_like(learned.parameters[name], 0.1 * n**-0.5)
        torch.testing.assert_close(learned.parameters[name].abs(), expected, rtol=1e-4, atol=0)


def test_the_rate_falls_to_zero_or_stays(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)

    def last_step(decay: bool) -> float:
        learned = LearnedAlignment([anchor, source], spec)
        seen: list[Tensor] = []

        def loss(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
            seen.append(learned.parameters["shared"].clone())
            return to_target(anchor)(params, batch)

        learned.train(loss, [NEAR], 1e-4, max_steps=10, decay=decay)
        return float((learned.parameters["shared"] - seen[-1]).norm() / (seen[1] - seen[0]).norm())

    assert last_step(decay=True) == pytest.approx(0.1, rel=0.05)
    assert last_step(decay=False) == pytest.approx(1.0, rel=0.05)


def test_the_same_batches_give_the_same_alignment_and_touch_nothing_else(generator: torch.Generator) -> None:
    model, spec, theta = classifier()
    anchor = classifier(1)[2]
    kept = copied(theta), copied(anchor), copied(model.state_dict())
    batches = images(generator)
    found = [refine(theta, anchor, spec, model_loss(model), batches, steps=7, patience=3) for _ in range(2)]
    assert found[0].losses == found[1].losses
    assert_same(found[0].alignment.params, found[1].alignment.params)
    for mapping, before in zip((theta, anchor, dict(model.state_dict())), kept, strict=True):
        assert_same(mapping, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_refining_lowers_the_loss_of_the_average_and_keeps_the_source(generator: torch.Generator) -> None:
    model, spec, source = classifier()
    anchor = classifier(1)[2]
    batches, loss = images(generator, 2), model_loss(model)
    aligned = rotfed.align(source, anchor, spec, rotfed.AlignOptions(max_sweeps=1))
    found = refine(source, anchor, spec, loss, batches, share=0.4, validation=batches)

    def of_average(params: Mapping[str, Tensor]) -> float:
        average = rotfed.weighted_mean([params, anchor], [0.4, 0.6])
        return sum(float(loss(average, batch)) for batch in batches)

    alignment = found.alignment
    assert of_average(alignment.params) < 0.8 * of_average(aligned.params)
    assert len(found.losses) == found.steps and found.seconds > 0
    assert_same(alignment.params, alignment.transform.apply(source))
    assert alignment.distance_before == pytest.approx(aligned.distance_before)
    assert alignment.distance_after == pytest.approx(distance(alignment.params, anchor))
    assert alignment.identity_permutations == aligned.identity_permutations
    assert torch.equal(alignment.transform.elements["d_ff"], aligned.transform.elements["d_ff"])
    pixels = {"pixel_values": batches[0]["pixel_values"]}
    assert change_of_function(model, source, alignment.params, pixels) < 1e-12


def test_what_validation_does_not_like_is_not_returned(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    start = rotfed.random_transform(spec, generator)
    found = refine(source, anchor, spec, to_target(anchor), [FAR], start=start, steps=50, patience=4, validation=[NEAR])
    assert found.steps == 4
    for name, element in start.elements.items():
        torch.testing.assert_close(found.alignment.transform.elements[name], element, rtol=0, atol=1e-14)


def test_the_best_state_is_returned_and_not_the_last(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    start = identity_transform(spec)
    stream = itertools.chain([NEAR] * 10, itertools.repeat(FAR))
    good = LearnedAlignment([anchor, source], spec, [start])
    good.train(to_target(anchor), [NEAR], 0.01, max_steps=10, decay=False)
    best = distance(good.transforms()[0].apply(source), anchor)
    found = refine(
        source,
        anchor,
        spec,
        to_target(anchor),
        stream,
        start=start,
        learning_rate=0.01,
        steps=1000,
        patience=10,
        validation=[NEAR],
    )
    assert found.steps < 60
    assert found.alignment.distance_after == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("steps", [3, 5])
def test_the_last_steps_count_however_often_validation_is_looked_at(steps: int, generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    start = identity_transform(spec)
    found = refine(source, anchor, spec, to_target(anchor), iter([NEAR] * steps), start=start, patience=4)
    assert found.steps == steps
    learned = LearnedAlignment([anchor, source], spec, [start])
    learned.train(to_target(anchor), iter([NEAR] * steps))
    assert_same(found.alignment.params, learned.transforms()[0].apply(source))


def test_batches_are_gone_through_again_unless_they_run_out(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    learned = LearnedAlignment([anchor, source], spec)
    seen: list[int] = []

    def loss(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        seen.append(int(batch["number"]))
        return params["net.embed"].square().sum()

    numbered = [{"number": torch.tensor(number)} for number in range(3)]

    def passing() -> Iterator[dict[str, Tensor]]:
        yield from numbered

    assert len(learned.train(loss, numbered, max_steps=7)) == 7
    assert len(learned.train(loss, passing(), max_steps=7)) == 3
    assert seen == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2]
    seen.clear()
    # Those that decide are trained on, too, in their place.
    assert refine(source, anchor, spec, loss, passing(), patience=9).steps == 3
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_an_alignment_travels_by_its_parameters(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    start = rotfed.random_transform(spec, generator)
    here, there = (LearnedAlignment([anchor, source], spec, [start]) for _ in range(2))
    here.train(to_target(anchor), [NEAR], max_steps=3)
    there.load(here.parameters)
    assert_same(there.transforms()[0].apply(source), here.transforms()[0].apply(source))
    here.train(to_target(anchor), [NEAR], max_steps=1)
    assert not torch.equal(here.parameters["shared"], there.parameters["shared"])
    wrong: list[dict[str, Tensor]] = [
        {"shared": here.parameters["shared"]},
        {**here.parameters, "other": torch.zeros(1)},
        {**here.parameters, "shared": torch.zeros(9)},
        {**here.parameters, "shared": torch.full((10,), torch.nan)},
    ]
    before = copied(there.parameters)
    for parameters in wrong:
        with pytest.raises(rotfed.AlignmentError, match=r"parameters|shared"):
            there.load(parameters)
    assert_same(there.parameters, before)


def test_scales_are_learned_where_they_are_named(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    start = identity_transform(spec)
    assert set(LearnedAlignment([anchor, source], spec, [start]).parameters) == {"qk", "shared"}
    named = LearnedAlignment([anchor, source], spec, [start], groups=["unit", "ff", "qk"])
    assert set(named.parameters) == {"qk", "unit"}
    with pytest.raises(rotfed.AlignmentError, match="ff"):
        LearnedAlignment([anchor, source], spec, [start], groups=["ff"])


def test_the_groups_of_refine_are_those_of_its_start(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    moved = refine(source, anchor, spec, to_target(anchor), [NEAR], groups=["unit"], steps=2).alignment.params
    assert {name for name in source if not torch.equal(moved[name], source[name])} == {
        f"net.h.{layer}.{part}" for layer in range(2) for part in ("up", "down")
    }


def test_the_loss_is_the_models_own_with_other_parameters(generator: torch.Generator) -> None:
    model, _, _ = classifier()
    other = dict(classifier(1)[0].state_dict())
    batch = images(generator)[0]
    loss = model_loss(model)
    own = model(**batch).loss.detach()
    assert not torch.isclose(loss(other, batch), own)
    model.load_state_dict(other)
    torch.testing.assert_close(loss(other, batch), model(**batch).loss)
    with pytest.raises(rotfed.AlignmentError, match=r"ViTForImageClassification.*pixel_values"):
        loss(other, {"pixel_values": batch["pixel_values"]})


def test_a_batch_without_names_is_refused() -> None:
    model, _, theta = classifier()
    with pytest.raises(rotfed.SpecError, match=r"batch: expected a mapping .* found tuple"):
        model_loss(model)(theta, (torch.zeros(1), torch.zeros(1)))  # type: ignore[arg-type]


def test_class_counts_take_off_how_often_a_class_is_seen(generator: torch.Generator) -> None:
    model, _, theta = classifier()
    batch = images(generator)[0]
    plain, even = model_loss(model), model_loss(model, [9, 9, 9, 9])
    torch.testing.assert_close(even(theta, batch), plain(theta, batch))
    # One that answers with the counts alone is told nothing: its logits are as good as none.
    counts = torch.tensor([99.0, 9.0, 0.0, 0.0])
    telling = {**theta, "classifier.weight": 0 * theta["classifier.weight"]}
    telling["classifier.bias"] = -(counts + 1).log().double()
    expected = torch.tensor(4.0, dtype=torch.float64).log()
    torch.testing.assert_close(model_loss(model, counts)(telling, batch), expected)


def test_language_models_are_refined_too(generator: torch.Generator) -> None:
    models = [
        EXAMPLES["llama"].model("AutoModelForCausalLM", seed=seed, tie_word_embeddings=False) for seed in range(2)
    ]
    spec = rotfed.load_spec(models[0], residual=True)
    source, anchor = (fold_norms(copied(model.state_dict()), spec) for model in models)
    tokens = torch.randint(3, 9, (2, 8), generator=generator)
    batches = [{"input_ids": tokens, "labels": tokens}]
    found = refine(source, anchor, spec, model_loss(models[0]), batches, steps=10)
    assert {"qk", "vo", "residual"} <= set(found.alignment.transform.elements)
    assert found.losses[-1] < found.losses[0]
    with torch.no_grad():
        assert change_of_function(models[0], source, found.alignment.params, {"input_ids": tokens}) < 1e-4


class Once:
    """Batches that can be gone through once, though they are no iterator."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches, self.batches = self.batches, []
        return iter(batches)


def test_batches_that_are_empty_the_second_time_end_it(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    learned = LearnedAlignment([anchor, source], spec)
    assert len(learned.train(to_target(anchor), Once([NEAR] * 3), max_steps=9)) == 3


def test_the_average_is_the_callers_to_change(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    learned = LearnedAlignment((model for model in (anchor, source)), spec)
    kept = copied(learned.merged())
    for tensor in learned.merged().values():
        tensor.add_(1)
    assert_same(learned.merged(), kept)
    with torch.no_grad():
        assert learned.train(to_target(anchor), [NEAR], max_steps=1)


@pytest.mark.parametrize("counts", [[1], [9] * 5, [], [-5, 1, 1, 1], [1e308] * 4, [torch.nan] * 4, "abc", [[1] * 4]])
def test_counts_that_are_none_are_refused(counts: Any, generator: torch.Generator) -> None:
    model, _, theta = classifier()
    with pytest.raises(rotfed.AlignmentError, match="class_counts: expected"):
        model_loss(model, counts)(theta, images(generator)[0])


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda params, batch: to_target(params)(params, batch).detach(), "with a gradient, found none"),
        (lambda params, batch: 1.0, "a tensor of one finite number, found 1.0"),
        (lambda params, batch: None, "a tensor of one finite number, found None"),
        (lambda params, batch: params["net.embed"], "a tensor of one finite number, found tensor"),
        # Finite, and its gradient is not.
        (lambda params, batch: (0 * params["net.embed"].sum()).sqrt(), "a finite gradient, found NaN"),
    ],
)
def test_a_loss_without_a_gradient_is_refused_before_its_step(
    loss: Loss, sentence: str, generator: torch.Generator
) -> None:
    spec, source, anchor = small_pair(generator)
    learned = LearnedAlignment([anchor, source], spec)
    with pytest.raises(rotfed.AlignmentError, match=f"loss: expected (one )?{sentence}.*step 0"):
        learned.train(loss, [NEAR])
    assert not any(bool(own.any()) for own in learned.parameters.values())


def test_what_cannot_work_is_refused(generator: torch.Generator) -> None:
    spec, source, anchor = small_pair(generator)
    start, loss = identity_transform(spec), to_target(anchor)
    learned = LearnedAlignment([anchor, source], spec, [start])
    for share in (0, 1, -0.1, float("nan"), "half"):
        with pytest.raises(rotfed.AlignmentError, match="share"):
            refine(source, anchor, spec, loss, [NEAR], share=share)  # type: ignore[arg-type]
    wrong: list[tuple[Any, Any]] = [([anchor], None), ([anchor, source], [1, 0]), ([anchor, source], [1, 2, 3])]
    for models, weights in [*wrong, (None, None), (anchor, None)]:
        with pytest.raises(rotfed.AlignmentError, match=r"models|weights"):
            LearnedAlignment(models, spec, weights=weights)
    unfit: list[Any] = [[identity_transform(backbone("bert")[0])], [], [start, start], ["x"]]
    for starts in unfit:
        with pytest.raises(rotfed.AlignmentError, match="starts"):
            LearnedAlignment([anchor, source], spec, starts)
    nothing: list[Any] = [None, {name: [1] for name in learned.parameters}]
    for parameters in nothing:
        with pytest.raises(rotfed.AlignmentError, match="parameters: expected"):
            learned.load(parameters)
    with pytest.raises(rotfed.SpecError, match="spec: expected a SymmetrySpec, found str"):
        refine(source, anchor, "vit", loss, [NEAR], groups=["qk"])  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.raises(rotfed.AlignmentError, match="inference mode"):
        learned.train(loss, [NEAR])
    broken = {**anchor, "net.embed": torch.full_like(anchor["net.embed"], torch.nan)}
    for models in ([broken, source], [source, broken]):
        with pytest.raises(rotfed.AlignmentError, match=r"net.embed.*model"):
            LearnedAlignment(models, spec, [start])
    none: list[Any] = [[], None, NEAR]
    for batches in none:
        with pytest.raises(rotfed.AlignmentError, match="batches"):
            learned.train(loss, batches)
    with pytest.raises(rotfed.AlignmentError, match=r"loss.*step 0"):
        learned.train(loss, [{"sign": torch.tensor(torch.nan)}])
    with pytest.raises(rotfed.AlignmentError, match="validation"):
        refine(source, anchor, spec, loss, [NEAR], validation=[])
    for options in ({"learning_rate": 0}, {"learning_rate": 1e38}, {"steps": 0}, {"steps": 2.5}, {"patience": -1}):
        with pytest.raises(rotfed.AlignmentError, match=next(iter(options))):
            refine(source, anchor, spec, loss, [NEAR], **options)  # type: ignore[arg-type]
