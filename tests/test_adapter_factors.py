"""Low-rank factors: laws of every way to stand for the mean of clients' products."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rotfed.adapters.factors import (
    Factors,
    Stack,
    aggregation_error,
    consensus,
    factor_mean,
    left_over,
    nearest_frame,
    optimal,
    rotation,
    stacked,
)
from rotfed.errors import AlignmentError


def random(rows: int, columns: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    B, A = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((rows, rank), (rank, columns)))
    return Factors(B, A)


def product(factors: Factors) -> Tensor:
    return factors.B.double() @ factors.A.double()


def mean_of_products(clients: list[Factors], shares: list[float]) -> Tensor:
    return torch.stack([share * product(client) for share, client in zip(shares, clients, strict=True)]).sum(0)


def orthogonal(rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64))[0]


def distance2(one: Factors, other: Factors) -> float:
    return sum(float((x.double() - y.double()).square().sum()) for x, y in zip(one, other, strict=True))


SHARES = [0.5, 0.3, 0.2]
CASES = st.tuples(
    st.integers(1, 12), st.integers(1, 12), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(0, 10**6)
)


def clients_of(case: tuple[int, int, list[int], int]) -> list[Factors]:
    rows, columns, ranks, seed = case
    return [random(rows, columns, rank, seed + number) for number, rank in enumerate(ranks)]


@given(CASES)
def test_optimal_is_the_best_approximation_of_its_rank_in_any_frame(case: tuple[int, int, list[int], int]) -> None:
    clients = clients_of(case)
    target = mean_of_products(clients, SHARES)
    singular = torch.linalg.svdvals(target)
    for rank in (1, max(case[2])):
        anchor = random(*case[:2], rank, case[3] + 7)
        for frame in (None, anchor, Factors(0 * anchor.B, anchor.A)):
            found = optimal(clients, SHARES, rank, frame)
            assert found.rank == rank
            error, norm = aggregation_error(found, clients, SHARES)
            torch.testing.assert_close(norm, target.norm(), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(error, singular[rank:].norm(), rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(error, (product(found) - target).norm(), rtol=1e-6, atol=1e-8)


@given(CASES)
def test_no_rotation_beats_optimal_and_none_is_off_the_truth(case: tuple[int, int, list[int], int]) -> None:
    clients = clients_of(case)
    rank = max(case[2])
    anchor = random(*case[:2], rank, case[3] + 7)
    stack = Stack.of(clients, SHARES)
    best, target = float(stack.norm(stack.best(rank))), mean_of_products(clients, SHARES)
    for over, strength in itertools.product(("both", "A", "B"), (0.0, 0.4, 1.0)):
        turns = [rotation(client, anchor, over, strength=strength) for client in clients]
        turned = [client.leading(rank).turned(turn, turn.mT) for client, turn in zip(clients, turns, strict=True)]
        for client, moved in zip(clients, turned, strict=True):
            torch.testing.assert_close(product(moved), product(client), rtol=1e-9, atol=1e-9)
        mean = factor_mean(turned, SHARES)
        error = float(aggregation_error(mean, clients, SHARES)[0])
        assert best <= error + 1e-9
        assert error == pytest.approx(float((product(mean) - target).norm()), rel=1e-6, abs=1e-9)
        assert error == pytest.approx(float(stack.norm(stack.mean(turns))), rel=1e-6, abs=1e-9)


@given(CASES)
def test_a_residual_leaves_no_error_at_the_lowest_rank(case: tuple[int, int, list[int], int]) -> None:
    clients = clients_of(case)
    target = mean_of_products(clients, SHARES)
    for result in (factor_mean(clients, SHARES), optimal(clients, SHARES), None):
        rest = left_over(clients, SHARES, result)
        whole = product(rest) + (0 if result is None else product(result))
        torch.testing.assert_close(whole, target, rtol=1e-8, atol=1e-8)
        # What factors hold of a matrix below the rank of rounding is no direction of its own.
        assert rest.rank <= min(*target.shape, sum(case[2]) + (max(case[2]) if result is not None else 0))
    torch.testing.assert_close(product(stacked(clients, SHARES)), target, rtol=1e-9, atol=1e-9)


def test_clients_that_are_turned_copies_average_to_the_original() -> None:
    original = random(9, 7, 3)
    clients = [original.turned(R, R.mT) for R in (orthogonal(3, seed) for seed in range(3))]
    assert float(aggregation_error(factor_mean(clients, SHARES), clients, SHARES)[0]) > 0.1
    for over in ("both", "A", "B"):
        turns = [rotation(client, original, over) for client in clients]
        turned = [client.turned(turn, turn.mT) for client, turn in zip(clients, turns, strict=True)]
        assert distance2(factor_mean(turned, SHARES), original) < 1e-18
    assert distance2(consensus(clients, SHARES, original), original) < 1e-18
    agreed = consensus(clients, SHARES, clients[0])
    assert distance2(agreed, clients[0]) < 1e-18


def fedrot(source: Factors, reference: Factors, over: str, strength: float) -> Factors:
    """FedRot-LoRA as its authors define it: R* of det 1, blended with I, then the nearest orthogonal matrix."""
    M = source.A @ reference.A.mT if over == "A" else source.B.mT @ reference.B
    U, _, Vt = torch.linalg.svd(M)
    if torch.linalg.det(U @ Vt) < 0:
        Vt = torch.cat([Vt[:-1], -Vt[-1:]])
    blend = (1 - strength) * torch.eye(len(M), dtype=M.dtype) + strength * U @ Vt
    U, _, Vt = torch.linalg.svd(blend)
    return Factors(source.B @ U @ Vt, (U @ Vt).mT @ source.A)


@pytest.mark.parametrize("over", ["A", "B"])
@pytest.mark.parametrize("strength", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_the_rotation_is_that_of_fedrot_lora(over: str, strength: float) -> None:
    for seed in range(6):
        source, reference = random(9, 8, 4, seed), random(9, 8, 4, seed + 50)
        turn = rotation(source, reference, over, reflections=False, strength=strength)
        found, expected = source.turned(turn, turn.mT), fedrot(source, reference, over, strength)
        torch.testing.assert_close(found.B, expected.B, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(found.A, expected.A, rtol=1e-7, atol=1e-7)


def test_no_strength_is_the_identity_and_nothing_to_go_by_is_too() -> None:
    source, anchor = random(9, 8, 4), random(9, 8, 4, 1)
    identity = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(rotation(source, anchor, strength=0.0), identity, rtol=0, atol=1e-14)
    fresh = Factors(0 * source.B, source.A)
    torch.testing.assert_close(rotation(fresh, fresh, "B"), identity, rtol=0, atol=1e-14)
    with pytest.raises(AlignmentError, match="over: expected one of both, A, B"):
        rotation(source, anchor, "C")


def test_the_frame_is_never_further_than_the_nearest_rotation_and_no_step_brings_it_nearer() -> None:
    for seed in range(4):
        stack = Stack.of([random(9, 8, 4, seed), random(9, 8, 4, seed + 9)], [0.5, 0.5])
        start, anchor = stack.factors(stack.best(4)), random(9, 8, 4, seed + 20)
        R = rotation(start, anchor)
        found = nearest_frame(start, anchor, steps=60)
        torch.testing.assert_close(product(found), product(start), rtol=1e-9, atol=1e-9)
        assert distance2(found, anchor) <= distance2(start.turned(R, R.mT), anchor)
        for nudge in range(5):
            G = torch.eye(4, dtype=torch.float64) + 1e-3 * random(4, 4, 4, nudge).B
            assert distance2(found.turned(G, torch.linalg.inv(G)), anchor) > distance2(found, anchor) - 1e-9


def test_a_first_small_update_leaves_a_where_it_was() -> None:
    """An even split would shrink A to a small part of what it was initialised to."""
    before = Factors(torch.zeros(40, 4, dtype=torch.float64), random(40, 30, 4).A)
    clients = [
        Factors(1e-3 * random(40, 30, 4, seed).B, before.A + 1e-3 * random(40, 30, 4, seed).A) for seed in range(3)
    ]
    found = optimal(clients, SHARES, anchor=before)
    assert float((found.A - before.A).norm()) < 0.01 * float(before.A.norm())
    even = optimal(clients, SHARES)
    assert float(even.A.norm()) < 0.2 * float(before.A.norm())


@pytest.mark.parametrize("size", [1e-2, 1e-3])
def test_a_much_larger_anchor_costs_the_update_no_digits(size: float) -> None:
    for seed in range(4):
        # The frame nearest to such an anchor has components of its size, that cancel each other.
        clients = [Factors(size * f.B, f.A) for f in (random(64, 48, 8, 10 * seed + n) for n in range(3))]
        found = optimal(clients, SHARES, anchor=random(64, 48, 8, 10 * seed + 7))
        rounded = Factors(found.B.bfloat16(), found.A.bfloat16())
        assert float((product(rounded) - product(found)).norm()) < 0.04 * float(product(found).norm())


def test_what_the_update_lacks_keeps_the_anchors_a() -> None:
    before = Factors(torch.zeros(9, 4, dtype=torch.float64), random(9, 8, 4).A)
    untrained = optimal([before, before], [0.5, 0.5], anchor=before)
    assert not untrained.B.any()
    torch.testing.assert_close(untrained.A, before.A)
    one = Factors(before.B.clone(), before.A)
    one.B[:, 0] = 1.0
    trained = optimal([one, one], [0.5, 0.5], anchor=before)
    torch.testing.assert_close(product(trained), product(one))
    assert int(torch.linalg.matrix_rank(trained.A)) == 4


@pytest.mark.parametrize("closeness", [1e-1, 1e-4, 1e-8, 0.0])
def test_float32_factors_lose_no_digits_however_alike_the_clients_are(closeness: float) -> None:
    base = random(60, 50, 4)
    clients = [
        Factors(*(x + closeness * y for x, y in zip(base, random(60, 50, 4, seed + 1), strict=True)))
        for seed in range(3)
    ]
    single = [Factors(client.B.float(), client.A.float()) for client in clients]
    target = mean_of_products(single, SHARES)
    U, S, Vt = torch.linalg.svd(target)
    torch.testing.assert_close(product(optimal(single, SHARES, 4, base)), U[:, :4] * S[:4] @ Vt[:4], atol=1e-9, rtol=0)


def test_modules_of_one_shape_are_solved_together() -> None:
    batched = [
        Factors(*(torch.stack(side) for side in zip(*(random(9, 8, 4, 10 * c + m) for m in range(3)), strict=True)))
        for c in range(2)
    ]
    anchor = batched[0]
    found = optimal(batched, [0.5, 0.5], anchor=anchor)
    errors = aggregation_error(found, batched, [0.5, 0.5])[0]
    for module in range(3):
        alone = [client.at(module) for client in batched]
        expected = optimal(alone, [0.5, 0.5], anchor=anchor.at(module))
        torch.testing.assert_close(found.at(module).A, expected.A, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(errors[module], aggregation_error(expected, alone, [0.5, 0.5])[0])
