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
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (kind.random(batch, n, generator) for _ in range(3))
    x, y = vectors(batch, n, seed), vectors(batch, n, seed + 1)
    for element in (a, kind.identity(batch, n), kind.inverse(a), kind.compose(a, b)):
        kind.validate(element, batch, n, name)
    for dual in (False, True):
        torch.testing.assert_close(kind.act(kind.identity(batch, n), x, dual), x)
        torch.testing.assert_close(kind.act(kind.inverse(a), kind.act(a, x, dual), dual), x)
        torch.testing.assert_close(kind.act(kind.compose(a, b), x, dual), kind.act(a, kind.act(b, x, dual), dual))
    torch.testing.assert_close(kind.compose(kind.compose(a, b), c), kind.compose(a, kind.compose(b, c)))
    torch.testing.assert_close(kind.act(a, x).mT @ kind.act(a, y, dual=True), x.mT @ y)


def test_random_rotations_reflect_unless_proper() -> None:
    generator = torch.Generator().manual_seed(0)
    determinants = torch.linalg.det(KINDS["orthogonal"].random((200,), 3, generator))
    assert 60 < int((determinants < 0).sum()) < 140
    proper = torch.linalg.det(KINDS["orthogonal"].random((200,), 3, generator, proper=True))
    torch.testing.assert_close(proper, torch.ones_like(proper))


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
        ("scale", torch.tensor([1.0, 0.0, 1.0])),
        ("scale", torch.tensor([1.0, torch.inf, 1.0])),
    ],
)
def test_what_is_no_member_is_refused(name: str, element: Tensor) -> None:
    with pytest.raises(TransformError, match="here: expected"):
        KINDS[name].validate(element, (), 3, "here")
