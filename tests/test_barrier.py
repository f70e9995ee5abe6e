"""Losses along a line: what a barrier is, and that a mean loss does not depend on how the examples are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rotfed.barrier import barrier_of, line, losses_along, score
from rotfed.errors import AlignmentError, SpecError
from tests.models import EXAMPLES

floats = st.floats(-10, 10)


@given(st.lists(floats, min_size=3, max_size=12), floats, floats)
def test_a_barrier_is_what_rises_above_the_ends(losses: list[float], slope: float, offset: float) -> None:
    places = line(len(losses))
    height = barrier_of(places, losses)
    assert height >= 0
    assert barrier_of(places, [slope * place + offset for place in places]) == pytest.approx(0, abs=1e-12)
    tilted = [loss + slope * place + offset for place, loss in zip(places, losses, strict=True)]
    assert barrier_of(places, tilted) == pytest.approx(height, abs=1e-9)
    reverse = barrier_of(places, losses[::-1])
    assert reverse == pytest.approx(height, abs=1e-9)


def test_the_line_runs_from_one_model_to_the_other() -> None:
    one, other = ({"w": torch.tensor([x], dtype=torch.float64)} for x in (-1.0, 1.0))
    assert line(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    losses = losses_along(lambda params: 1 - float(params["w"]) ** 2, one, other, line(5))
    assert losses == [0.0, 0.75, 1.0, 0.75, 0.0]
    assert barrier_of(line(5), losses) == 1.0
    with pytest.raises(AlignmentError, match="expected at least 3"):
        line(2)
    with pytest.raises(AlignmentError, match=r"loss: expected a finite number at 0.5 of the line, found nan"):
        losses_along(lambda params: float("nan") if params["w"] == 0 else 1.0, one, other, line(3))
    with pytest.raises(AlignmentError, match=r"w: expected shape \(1,\)"):
        losses_along(lambda _: 0.0, one, {"w": torch.zeros(2)}, line(3))


def test_a_score_does_not_depend_on_the_batches(generator: torch.Generator) -> None:
    model = EXAMPLES["vit"].model("AutoModelForImageClassification", num_labels=3)
    pixels = torch.randn(10, 1, 8, 8, generator=generator)
    labels = torch.randint(3, (10,), generator=generator)
    labels[4] = -100
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits
    expected = float(torch.nn.functional.cross_entropy(logits, labels))
    right = float((logits.argmax(-1) == labels).sum()) / 9
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for size in (1, 3, 10):
        cuts = range(0, 10, size)
        batches = [{"pixel_values": pixels[i : i + size], "labels": labels[i : i + size]} for i in cuts]
        found = score(model, model.state_dict(), batches)
        assert found.loss == pytest.approx(expected, rel=1e-5)
        assert found.accuracy == pytest.approx(right)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_labels_that_are_no_classes_have_no_accuracy(generator: torch.Generator) -> None:
    model = EXAMPLES["gpt2"].model("AutoModelForCausalLM")
    tokens = torch.randint(2, 25, (3, 7), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    found = score(model, model.state_dict(), [batch])
    assert found.accuracy is None and found.loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    with pytest.raises(
        SpecError, match=r"GPT2LMHeadModel: expected batches that it can take, found input_ids \(3, 7\)"
    ):
        score(model, model.state_dict(), [{"input_ids": tokens, "labels": tokens[:, 1:]}])
    with pytest.raises(SpecError, match="expected some other than -100"):
        score(model, model.state_dict(), [{"input_ids": tokens, "labels": torch.full_like(tokens, -100)}])
