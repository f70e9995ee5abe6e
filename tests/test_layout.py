"""Layouts are made once and shared; lazy models are read once; moving when read is the same as moving at once."""

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

import rotfed
from rotfed import layout
from rotfed.frames_differ import align_where_frames_differ
from rotfed.layout import lay_out
from rotfed.mergers import MeanOf
from tests.models import EXAMPLES, FAMILIES, assert_same, backbone, copied

Params = dict[str, Tensor]


class Lazy(Mapping[str, Tensor]):
    """Parameters that count how often each is read, with shapes that are known without."""

    def __init__(self, params: Params) -> None:
        self.params = params
        self.reads: Counter[str] = Counter()
        self.shapes = {name: tensor.to("meta") for name, tensor in params.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __getitem__(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self.params[name]

    def meta(self) -> Params:
        return self.shapes

    def most(self) -> int:
        """How often the parameter that was read most was read, since the last time that this was asked."""
        most = max(self.reads.values(), default=0)
        self.reads.clear()
        return most


def noisy(params: Params, size: float, generator: torch.Generator) -> Params:
    return {n: t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in params.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_is_made_once_and_shared_by_like_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EXAMPLES[name].model()
    spec, theta = rotfed.load_spec(model), dict(model.state_dict())
    made = []
    whole = layout._laid_out
    monkeypatch.setattr(layout, "_laid_out", lambda params, spec: made.append(1) or whole(params, spec))
    first = lay_out(theta, spec)
    for other in (theta, copied(theta), Lazy(theta), {n: t.to("meta") for n, t in theta.items()}):
        assert lay_out(other, spec) is first
    moved = rotfed.random_transform(spec).apply(theta)
    rotfed.align(moved, theta, spec)
    rotfed.align_all([moved, theta, copied(theta)], spec)
    assert len(made) == 1
    wide = lay_out({n: t.double() if t.is_floating_point() else t for n, t in theta.items()}, spec)
    assert wide is not first and wide.blocks == first.blocks


@pytest.mark.parametrize("name", [*FAMILIES, "mixtral", "t5", "albert"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_moved_when_it_is_read_is_what_is_moved_at_once(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    spec, theta = backbone(name)
    theta = {n: t.to(dtype) if t.is_floating_point() else t for n, t in theta.items()}
    transform = rotfed.random_transform(spec, generator, reflections=False)
    at_once, when_read = transform.apply(theta), transform.over(theta)
    assert list(when_read) == list(theta) and len(when_read) == len(theta)
    for backwards in (False, True):
        names = list(theta)[:: -1 if backwards else 1]
        assert_same({n: when_read[n] for n in names}, {n: at_once[n] for n in names})
    meta = when_read.meta()
    assert {n: (t.shape, t.dtype) for n, t in at_once.items()} == {n: (t.shape, t.dtype) for n, t in meta.items()}
    assert any(at_once[n] is not t for n, t in theta.items())


# By model: the parts of a parameter that different groups act on; each is read by itself.
PARTS = {"vit": 1, "gpt2": 3, "llama": 1, "mixtral": 2, "bert": 1, "t5": 1}


@pytest.mark.parametrize("name", PARTS)
def test_a_lazy_model_is_read_a_few_times(name: str, generator: torch.Generator) -> None:
    spec, theta = backbone(name)
    anchor = rotfed.Anchor(theta, spec)
    far = rotfed.random_transform(spec, generator).apply(theta)
    parts = PARTS[name]
    # Once to see that all is finite, once for the moments; where units change places, once more to compare the result
    # with the anchor.
    for params, most in ((noisy(theta, 1e-3, generator), 1 + parts), (far, 1 + 2 * parts)):
        source, lazy_anchor = Lazy(params), Lazy(theta)
        prepared = rotfed.Anchor(lazy_anchor, spec)
        alignment = rotfed.align(source, prepared, spec)
        assert source.most() <= most and lazy_anchor.most() <= most
        expected = rotfed.align(params, anchor, spec)
        assert alignment.distance_after == expected.distance_after
        assert_same(dict(alignment.params), dict(expected.params))
    models = [Lazy(noisy(theta, 1e-3, generator)) for _ in range(3)]
    centre = dict(MeanOf([m.params for m in models], [1, 1, 1], wide=True))
    for min_gain in (0.0, 100.0):
        found = align_where_frames_differ(models, spec, "consensus", [1, 1, 1], centre, min_gain)
        assert [model.most() <= parts for model in models] == [True] * 3
        assert bool(found.groups) == (min_gain == 0)
