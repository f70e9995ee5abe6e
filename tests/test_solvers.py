"""Closed forms against brute force."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotfed.groups import KINDS
from rotfed.solvers import Pull, assign, optimal_scale, orthogonal_procrustes, plane_procrustes

SEED = st.integers(0, 2**16)
STRENGTH = st.sampled_from([1.0, 0.7, 0.1, 1e-6])


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEED, st.integers(1, 5), st.booleans())
def test_procrustes_beats_every_other_member(seed: int, n: int, reflections: bool) -> None:
    source, anchor = matrix(n, 6, seed=seed), matrix(n, 6, seed=seed + 1)
    best = orthogonal_procrustes(anchor @ source.mT, reflections=reflections)
    KINDS["orthogonal"].validate(best, (), n, "best")
    if not reflections:
        assert float(torch.linalg.det(best)) == pytest.approx(1.0)
    generator = torch.Generator().manual_seed(seed)
    rivals = KINDS["orthogonal"].random((300,), n, generator, reflections=reflections)
    skew = matrix(300, n, n, seed=seed + 2) * 0.05
    rivals = torch.cat([rivals, torch.matrix_exp(skew - skew.mT) @ best])
    cost = (best @ source - anchor).square().sum()
    assert bool(((rivals @ source - anchor).square().sum((-2, -1)) >= cost - 1e-9).all())


def test_procrustes_in_a_null_space_is_the_identity() -> None:
    source = torch.cat([matrix(2, 8, seed=0), torch.zeros(3, 8, dtype=torch.float64)])
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(orthogonal_procrustes(source @ source.mT), eye, rtol=0, atol=1e-4)
    torch.testing.assert_close(orthogonal_procrustes(torch.zeros(5, 5)), eye, rtol=0, atol=1e-12)


@given(SEED, st.integers(1, 6), STRENGTH, st.sampled_from([torch.float64, torch.float32]))
def test_assign_equals_brute_force(seed: int, n: int, strength: float, dtype: torch.dtype) -> None:
    source, anchor = matrix(n, 3, seed=seed).to(dtype), matrix(n, 3, seed=seed + 1).to(dtype)
    gain = anchor @ source.mT
    kept, size = gain.clone(), float(gain.abs().max())
    found = assign(gain, Pull(strength))
    torch.testing.assert_close(gain, kept, rtol=0, atol=0)
    KINDS["permutation"].validate(found, (), n, "found")

    def total(order: Tensor | tuple[int, ...]) -> float:
        places = torch.as_tensor(order)
        fixed = int((places == torch.arange(n)).sum())
        return float(gain.double()[torch.arange(n), places].sum()) + (1 / strength - 1) * size * fixed

    slack = 1e-12 if dtype == torch.float64 else 1e-5 / strength
    assert total(found) >= max(total(order) for order in itertools.permutations(range(n))) - slack * size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ties_go_to_the_identity(dtype: torch.dtype) -> None:
    for gain in (torch.zeros(5, 5, dtype=dtype), torch.ones(5, 5, dtype=dtype), torch.ones(1, 1, dtype=dtype)):
        torch.testing.assert_close(assign(gain), torch.arange(len(gain)))


@given(
    SEED, st.integers(2, 12), st.sampled_from([0.01, 0.3, 1.0, 3.0]), st.sampled_from([torch.float64, torch.float32])
)
def test_assign_is_what_scipy_finds(seed: int, n: int, noise: float, dtype: torch.dtype) -> None:
    anchor = matrix(n, 4, seed=seed)
    source = anchor + noise * matrix(n, 4, seed=seed + 1)
    _, columns = linear_sum_assignment((anchor @ source.mT).numpy(), maximize=True)
    torch.testing.assert_close(assign((anchor @ source.mT).to(dtype)), torch.as_tensor(columns))


@given(SEED, STRENGTH)
def test_scale_equals_a_fine_grid(seed: int, strength: float) -> None:
    s, a, t, b = (matrix(6, seed=seed + i) for i in range(4))
    found = float(optimal_scale(s @ s, a @ s, t @ t, b @ t, Pull(strength)))

    def cost(c: np.ndarray | float) -> np.ndarray:
        c = np.asarray(c)[..., None]
        direct = np.square(c * s.numpy() - a.numpy()).sum(-1)
        return np.asarray(direct + np.square(t.numpy() / c - b.numpy()).sum(-1))

    assert cost(found) <= cost(1.0) + 1e-12
    if strength == 1.0:
        grid = np.geomspace(1e-2, 1e2, 4000)
        assert cost(found) <= cost(np.concatenate([grid, -grid])).min() + 1e-9
    if strength == 1e-6:
        assert found == pytest.approx(1.0, abs=1e-3)


def test_scale_of_nothing_is_one() -> None:
    zero = torch.zeros(3)
    torch.testing.assert_close(optimal_scale(zero, zero, zero, zero), torch.ones(3, dtype=torch.float64))


def test_little_strength_stays_near_the_identity() -> None:
    cross = matrix(4, 4, seed=3)
    eye = torch.eye(4, dtype=torch.float64)
    pulls = [float((orthogonal_procrustes(cross, Pull(s)) - eye).norm()) for s in (1.0, 0.3, 0.05, 1e-6)]
    assert pulls == sorted(pulls, reverse=True) and pulls[-1] < 1e-5 < pulls[0]


@given(SEED)
def test_plane_procrustes_is_the_best_angle(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source, anchor = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
    cross = anchor @ source.mT
    angle = plane_procrustes(cross)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).reshape(3, 2, 2)
    torch.testing.assert_close(rotation, orthogonal_procrustes(cross, reflections=False), rtol=1e-8, atol=1e-8)
    half = plane_procrustes(cross, Pull(0.5))
    assert bool(((half.abs() <= angle.abs() + 1e-12) & (half * angle >= 0)).all())
    torch.testing.assert_close(plane_procrustes(torch.zeros(2, 2)), torch.tensor(0.0, dtype=torch.float64))


@given(st.floats(-4, 4).filter(lambda c: abs(c) > 0.01), SEED)
def test_a_scale_is_found_from_its_dual_side_alone(c: float, seed: int) -> None:
    source = matrix(7, seed=seed)
    zero = torch.zeros((), dtype=torch.float64)
    found = optimal_scale(zero, zero, source.square().sum(), (source / c * source).sum())
    torch.testing.assert_close(found, torch.tensor(c, dtype=torch.float64))


@pytest.mark.parametrize("smallest", [1e-1, 1e-3, 2e-4, 1e-5, 0.0])
def test_products_give_members_of_the_group_or_leave_it_to_a_decomposition(
    smallest: float, generator: torch.Generator
) -> None:
    u, v = (torch.linalg.qr(torch.randn(40, 24, 24, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    singular = torch.logspace(0, -1, 24, dtype=torch.float64).clone()
    singular[-1] = smallest
    cross = u * singular @ v.mT
    found = orthogonal_procrustes(cross, Pull(null_space=1e-6))
    eye = torch.eye(24, dtype=torch.float64).expand_as(cross)
    torch.testing.assert_close(found @ found.mT, eye, rtol=0, atol=1e-9)
    assert float((found * cross).sum()) > float(torch.linalg.matrix_norm(cross, ord="nuc").sum()) * (1 - 1e-5)
