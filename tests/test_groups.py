"""Group laws, for every kind."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rotfed.errors import TransformError
from rotfed.groups import KINDS

KIND = st.sampled_from(sorted(KINDS))
BATCH = st.sampled_from([(), (2,), (2, 3)])
SIZE = st.integers(1, 5)
SEED = st.integers(0, 2**16)


def vectors(batch: tuple[int, ...], n: int, seed: int) -> Tensor:
    return torch.randn(*batch, n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(KIND, BATCH, SIZE, SEED)
def test_laws(name: str, batch: tuple[int, ...], n: int, seed: int) -> None:
    kind = KINDS[name]
    n = 2 if name == "rope_planes" else n
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (kind.random(batch, n, generator) for _ in range(3))
    x, y = vectors(batch, n, seed), vectors(batch, n, seed + 1)
    for element in (a, kind.identity(batch, n), kind.inverse(a), kind.compose(a, b)):
        kind.validate(element, batch, n, name)
    for dual in (False, True):
        torch.testing.assert_close(kind.act(kind.identity(batch, n), x, dual), x)
        torch.testing.assert_close(kind.act(kind.inverse(a), kind.act(a, x, dual), dual), x)
        torch.testing.assert_close(kind.act(kind.compose(a, b), x, dual), kind.act(a, kind.act(b, x, dual), dual))
    left, right = kind.compose(kind.compose(a, b), c), kind.compose(a, kind.compose(b, c))
    torch.testing.assert_close(kind.act(left, x), kind.act(right, x))
    torch.testing.assert_close(kind.act(a, x).mT @ kind.act(a, y, dual=True), x.mT @ y)


def test_random_rotations_reflect_unless_told_not_to() -> None:
    generator = torch.Generator().manual_seed(0)
    determinants = torch.linalg.det(KINDS["orthogonal"].random((200,), 3, generator))
    assert 60 < int((determinants < 0).sum()) < 140
    turns = torch.linalg.det(KINDS["orthogonal"].random((200,), 3, generator, reflections=False))
    torch.testing.assert_close(turns, torch.ones_like(turns))


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("orthogonal", 1.01 * torch.eye(3, dtype=torch.float64)),
        ("orthogonal", torch.full((3, 3), torch.nan)),
        ("orthogonal", torch.eye(3, dtype=torch.int64)),
        ("orthogonal", torch.eye(2)),
        ("permutation", torch.tensor([0, 0, 1])),
        ("permutation", torch.tensor([0.0, 1.0, 2.0])),
        ("permutation", torch.tensor([1, 2, 3])),
        ("permutation", torch.tensor([0, 1, 2], dtype=torch.uint8)),
        ("sign", torch.tensor([1.0, 2.0, 1.0])),
        ("sign", torch.tensor([1, -1, 1])),
        ("rope_planes", torch.tensor(torch.nan)),
        ("rope_planes", torch.tensor([1.0])),
        ("scale", torch.tensor([1.0, 0.0, 1.0])),
        ("scale", torch.tensor([1.0, torch.inf, 1.0])),
        ("scale", torch.tensor([1.0, 1e-310, 1.0], dtype=torch.float64)),
        ("centred_orthogonal", torch.diag(torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))),
    ],
)
def test_what_is_no_member_is_refused(name: str, element: Tensor) -> None:
    with pytest.raises(TransformError, match="here: expected"):
        KINDS[name].validate(element, (), 3, "here")


@given(SEED)
def test_rotations_within_planes_commute_with_rotary_positions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    planes = KINDS["rope_planes"]
    angles, positions = (planes.random((3,), 2, generator) for _ in range(2))
    x = vectors((3,), 2, seed)
    turned = planes.act(positions, planes.act(angles, x))
    torch.testing.assert_close(planes.act(angles, planes.act(positions, x)), turned)
    reflection = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert (planes.act(positions, reflection @ x) - reflection @ planes.act(positions, x)).abs().max() > 1e-6
