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
from rotfed.solvers import (
    assign,
    identity_radius,
    linear_assignment,
    optimal_scale,
    orthogonal_procrustes,
    plane_procrustes,
)

SEED = st.integers(0, 2**16)
STRENGTH = st.sampled_from([1.0, 0.7, 0.1, 1e-6])


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEED, st.integers(1, 5), st.booleans())
def test_procrustes_beats_every_other_member(seed: int, n: int, proper: bool) -> None:
    source, anchor = matrix(n, 6, seed=seed), matrix(n, 6, seed=seed + 1)
    best = orthogonal_procrustes(anchor @ source.mT, proper)
    KINDS["orthogonal"].validate(best, (), n, "best")
    if proper:
        assert float(torch.linalg.det(best)) == pytest.approx(1.0)
    generator = torch.Generator().manual_seed(seed)
    rivals = KINDS["orthogonal"].random((300,), n, generator, proper=proper)
    skew = matrix(300, n, n, seed=seed + 2) * 0.05
    rivals = torch.cat([rivals, torch.matrix_exp(skew - skew.mT) @ best])
    cost = (best @ source - anchor).square().sum()
    assert bool(((rivals @ source - anchor).square().sum((-2, -1)) >= cost - 1e-9).all())


def test_procrustes_in_a_null_space_is_the_identity() -> None:
    source = torch.cat([matrix(2, 8, seed=0), torch.zeros(3, 8, dtype=torch.float64)])
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(orthogonal_procrustes(source @ source.mT), eye, rtol=0, atol=1e-4)
    torch.testing.assert_close(orthogonal_procrustes(torch.zeros(5, 5)), eye, rtol=0, atol=1e-12)


@given(SEED, st.integers(1, 5), STRENGTH)
def test_assignment_equals_brute_force(seed: int, n: int, strength: float) -> None:
    source, anchor = matrix(n, 3, seed=seed), matrix(n, 3, seed=seed + 1)

    def cost(order: Tensor | tuple[int, ...]) -> float:
        return float((source[torch.as_tensor(order)] - anchor).square().sum())

    found = linear_assignment(source, anchor, identity_radius(anchor), strength)
    KINDS["permutation"].validate(found, (), n, "found")
    assert cost(found) <= cost(tuple(range(n))) + 1e-12
    if strength == 1.0:
        assert cost(found) == pytest.approx(min(cost(order) for order in itertools.permutations(range(n))))


@given(SEED, st.integers(2, 12), st.sampled_from([0.01, 0.3, 1.0, 3.0]))
def test_the_certificate_never_contradicts_the_assignment(seed: int, n: int, noise: float) -> None:
    anchor = matrix(n, 4, seed=seed)
    source = anchor + noise * matrix(n, 4, seed=seed + 1)
    certified = linear_assignment(source, anchor, identity_radius(anchor))
    _, columns = linear_sum_assignment((anchor @ source.mT).numpy(), maximize=True)
    torch.testing.assert_close(certified, torch.as_tensor(columns))


def test_the_certificate_is_sharp_at_twins() -> None:
    anchor = torch.tensor([[0.0, 0.0], [0.0, 0.0], [5.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(identity_radius(anchor)[:2], torch.zeros(2, dtype=torch.float64))
    assert identity_radius(anchor)[2] == pytest.approx(2.5)


@given(SEED, STRENGTH)
def test_scale_equals_a_fine_grid(seed: int, strength: float) -> None:
    s, a, t, b = (matrix(6, seed=seed + i) for i in range(4))
    found = float(optimal_scale(s @ s, a @ s, t @ t, b @ t, strength))

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
    pulls = [float((orthogonal_procrustes(cross, strength=s) - eye).norm()) for s in (1.0, 0.3, 0.05, 1e-6)]
    assert pulls == sorted(pulls, reverse=True) and pulls[-1] < 1e-5 < pulls[0]


@given(SEED)
def test_plane_procrustes_is_the_best_angle(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source, anchor = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
    cross = anchor @ source.mT
    angle = plane_procrustes(cross)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).reshape(3, 2, 2)
    torch.testing.assert_close(rotation, orthogonal_procrustes(cross, proper=True), rtol=1e-8, atol=1e-8)
    half = plane_procrustes(cross, strength=0.5)
    assert bool(((half.abs() <= angle.abs() + 1e-12) & (half * angle >= 0)).all())
    torch.testing.assert_close(plane_procrustes(torch.zeros(2, 2)), torch.tensor(0.0, dtype=torch.float64))


@given(st.integers(1, 5), SEED)
def test_assign_equals_brute_force(n: int, seed: int) -> None:
    gain = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = max(sum(float(gain[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(n)))
    assert float(gain[torch.arange(n), assign(gain)].sum()) == pytest.approx(best)


@given(st.floats(-4, 4).filter(lambda c: abs(c) > 0.01), SEED)
def test_a_scale_is_found_from_its_dual_side_alone(c: float, seed: int) -> None:
    source = matrix(7, seed=seed)
    zero = torch.zeros((), dtype=torch.float64)
    found = optimal_scale(zero, zero, source.square().sum(), (source / c * source).sum())
    torch.testing.assert_close(found, torch.tensor(c, dtype=torch.float64))
