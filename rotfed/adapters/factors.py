"""Low-rank factors of several clients, and what can stand for the mean of their products. Matrices only, no names.

A client's update is `B @ A`. (B G)(G^-1 A) is the same update for every invertible G, so two clients' factors sit in
frames of their own, and the mean of factors is not the mean of updates. Nothing here forms an `out x in` matrix: every
aggregation is a pair of small matrices of coefficients over the clients' factors laid side by side, and its error is
measured in the triangular factors of two QR decompositions. Float64 inside, on the factors' own device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rotfed.errors import AlignmentError
from rotfed.solvers import orthogonal_procrustes

OVER = ("both", "A", "B")

# Singular values below this share of the largest are what rounding leaves in float64.
_NOTHING = 1e-11

# How far G^-1 G may be from the identity in a change of frame, and how many times larger than the update its components
# may become, which cancel each other: what is rounded then is each of them.
_INVERSE = 1e-9
_CANCELLED = 10.0


class Factors(NamedTuple):
    """An update `B @ A`: `B` of shape `(..., out, rank)`, `A` of shape `(..., rank, in)`."""

    B: Tensor
    A: Tensor

    @property
    def rank(self) -> int:
        """The number of columns of B and rows of A."""
        return self.A.shape[-2]

    def leading(self, rank: int) -> "Factors":
        """The first `rank` components, with zeros where there are fewer."""
        missing = max(0, rank - self.rank)
        return Factors(
            torch.nn.functional.pad(self.B[..., :rank], (0, missing)),
            torch.nn.functional.pad(self.A[..., :rank, :], (0, 0, 0, missing)),
        )

    def padded(self, anchor: "Factors") -> "Factors":
        """The same update at the anchor's rank, where that is higher: with the anchor's A, and zeros in B.

        With zeros in A, too, a mean of factors would shrink what other clients have there.
        """
        wider = self.leading(max(self.rank, anchor.rank))
        return Factors(wider.B, torch.cat([self.A, anchor.A[..., self.rank :, :].to(self.A.dtype)], dim=-2))

    def turned(self, element: Tensor, inverse: Tensor) -> "Factors":
        """The same update in another frame, `(B G, G^-1 A)`."""
        return Factors(self.B @ element, inverse @ self.A)

    def double(self) -> "Factors":
        """The factors in float64."""
        return Factors(self.B.double(), self.A.double())

    def at(self, index: int) -> "Factors":
        """Those of one module out of several."""
        return Factors(self.B[index], self.A[index])


class Coefficients(NamedTuple):
    """An update inside the span of a stack: `stack.B @ left @ right @ stack.A`."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class Stack:
    """Clients' factors side by side; the weighted mean of their products is `B @ diag(shares) @ A`.

    `B` of shape `(..., out, total)`, `A` of shape `(..., total, in)`, `shares` of shape `(total,)`, float64; `ranks`
    are the clients', `total` their sum.
    """

    B: Tensor
    A: Tensor
    shares: Tensor
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, clients: Sequence[Factors], shares: Sequence[float]) -> "Stack":
        """Stack clients' factors; `shares`, one a client, weight their products and need not sum to one."""
        ranks = tuple(client.rank for client in clients)
        spread = [share for share, rank in zip(shares, ranks, strict=True) for _ in range(rank)]
        B = torch.cat([client.B for client in clients], dim=-1).double()
        A = torch.cat([client.A for client in clients], dim=-2).double()
        return cls(B, A, torch.tensor(spread, dtype=torch.float64, device=B.device), ranks)

    @cached_property
    def triangles(self) -> tuple[Tensor, Tensor]:
        """The R of the QR decompositions of `B` and of `A^T`: inner products of all there is in the two spans.

        Without the orthonormal factors QR costs what a Gram matrix does and keeps all digits, however alike the
        clients' factors are.
        """
        return torch.linalg.qr(self.B, mode="r")[1], torch.linalg.qr(self.A.mT, mode="r")[1]

    def norm(self, coefficients: Coefficients | None = None) -> Tensor:
        """The Frobenius norm, of shape `(...)`, of the mean of products less what `coefficients` stand for."""
        left, right = self.triangles
        core = torch.diag_embed(self.shares)
        if coefficients is not None:
            core = core - coefficients.left @ coefficients.right
        size: Tensor = torch.linalg.matrix_norm(left @ core @ right.mT)
        return size

    def factors(self, coefficients: Coefficients) -> Factors:
        """What coefficients stand for."""
        return Factors(self.B @ coefficients.left, coefficients.right @ self.A)

    def mean(self, rotations: Sequence[Tensor] | None = None) -> Coefficients:
        """The mean of factors, each turned by its rotation of shape `(..., rank, rank)` first, where there are any."""
        rank = max(self.ranks) if rotations is None else rotations[0].shape[-1]
        blocks = [
            torch.eye(rank, dtype=torch.float64, device=self.B.device)[:own]
            if rotations is None
            else rotations[client][..., :own, :]
            for client, own in enumerate(self.ranks)
        ]
        weighted = torch.cat(blocks, dim=-2) * self.shares[:, None]
        return Coefficients(weighted, weighted.mT)

    def best(self, rank: int) -> Coefficients:
        """The best approximation of at most `rank` (Eckart and Young 1936), its strength split evenly.

        From the small matrix `R_B diag(shares) R_A^T = U S V^T` alone: the left singular vectors are
        `B diag(shares) R_A^T V / S`, so that no triangular factor is ever inverted. Components that are nothing but
        rounding are zero.
        """
        left, right = self.triangles
        core = left @ (self.shares[:, None] * right.mT)
        U, S, Vt = torch.linalg.svd(core, full_matrices=False)
        rank = min(rank, S.shape[-1])
        U, S, Vt = U[..., :rank], S[..., :rank], Vt[..., :rank, :]
        nothing = (_NOTHING * S[..., :1]).clamp_min(torch.finfo(torch.float64).tiny)
        there = nothing < S
        root = torch.where(there, S, torch.ones_like(S)).rsqrt() * there
        onto = self.shares[:, None] * right.mT @ (Vt.mT * root[..., None, :])
        back = (U * root[..., None, :]).mT @ left * self.shares
        return Coefficients(onto, back)


def factor_mean(clients: Sequence[Factors], shares: Sequence[float]) -> Factors:
    """The mean of factors (FedIT), with zeros in place of the components that a client lacks. Float64."""
    stack = Stack.of(clients, shares)
    return stack.factors(stack.mean())


def optimal(
    clients: Sequence[Factors], shares: Sequence[float], rank: int | None = None, anchor: Factors | None = None
) -> Factors:
    """Solve min ||X - sum_i share_i B_i A_i||_F over all X of rank `rank`, by default the highest of the clients'.

    Returns factors of `rank` in float64: in the frame nearest to `anchor`'s (see `nearest_frame`), else with the
    strength split evenly. Where the mean of products has fewer directions, B is zero in the others and A the anchor's.
    """
    stack = Stack.of(clients, shares)
    rank = max(stack.ranks) if rank is None else rank
    return nearest_frame(stack.factors(stack.best(rank)).leading(rank), anchor)


def stacked(clients: Sequence[Factors], shares: Sequence[float]) -> Factors:
    """The mean of products without any error, at the sum of the clients' ranks (FLoRA, arXiv 2409.05976). Float64."""
    stack = Stack.of(clients, shares)
    return Factors(stack.B * stack.shares, stack.A)


def left_over(
    clients: Sequence[Factors], shares: Sequence[float], result: Factors | None = None, smallest: float = 0.0
) -> Factors:
    """What the mean of products has beyond `result` (FedEx-LoRA, arXiv 2410.09432), at the lowest rank that holds it.

    Without a result it is the mean of products. Components of a singular value up to `smallest` are left out. Returns
    float64 factors, for one module each (no leading dimensions).
    """
    stack = Stack.of([*clients, *([result] if result else [])], [*shares, *([-1.0] if result else [])])
    whole = stack.factors(stack.best(sum(stack.ranks)))
    # The split is even: a row's square is its singular value.
    return whole.leading(int((whole.A.square().sum(-1) > smallest).sum()))


def aggregation_error(result: Factors, clients: Sequence[Factors], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """||result - mean of products||_F and ||mean of products||_F, both of shape `(...)`, in float64."""
    clients = list(clients)
    return (
        Stack.of([*clients, result], [*shares, -1.0]).norm(),
        Stack.of(clients, shares).norm(),
    )


def rotation(
    source: Factors, anchor: Factors, over: str = "both", reflections: bool = True, strength: float = 1.0
) -> Tensor:
    """Solve min_R ||B R - B_anchor||_F^2 + ||R^T A - A_anchor||_F^2 over O(r), or one of the two terms alone.

    Parameters: `source`, of a rank up to the anchor's r; `over`, `"both"` terms, `"A"` or `"B"`; `reflections`,
    whether they are allowed; `strength` in [0, 1], which pulls R to the identity as FedRot-LoRA does: R becomes the
    orthogonal matrix nearest to (1 - strength) I + strength R. A reflection is not on that way, so any strength below
    one is proper. Returns R of shape `(..., r, r)` in float64; the identity where the moment says nothing.

    FedRot-LoRA (arXiv 2602.23638) is without reflections, over A in one round and over B in the next.
    """
    if over not in OVER:
        raise AlignmentError(f"over: expected one of {', '.join(OVER)}, found {over!r}")
    source, anchor = source.double().leading(anchor.rank), anchor.double()
    moment = torch.zeros(source.A.shape[-2], anchor.rank, dtype=torch.float64, device=source.A.device)
    if over != "A":
        moment = moment + source.B.mT @ anchor.B
    if over != "B":
        moment = moment + source.A @ anchor.A.mT
    turn = orthogonal_procrustes(moment, reflections=reflections and strength == 1)
    if strength < 1:
        identity = torch.eye(anchor.rank, dtype=torch.float64, device=turn.device)
        U, _, Vt = torch.linalg.svd((1 - strength) * identity + strength * turn)
        turn = U @ Vt
    return turn


def consensus(
    clients: Sequence[Factors], shares: Sequence[float], anchor: Factors, over: str = "both", sweeps: int = 20
) -> Factors:
    """What the clients agree on (generalized Procrustes): the mean of their turned factors, in the anchor's frame.

    Starts from `anchor` and stops where the mean has settled to 1e-6 of its size, or after `sweeps`. Float64.
    """
    agreed, stack = anchor.double(), Stack.of(clients, shares)
    for _ in range(sweeps):
        turns = [rotation(client, agreed, over) for client in clients]
        last, agreed = agreed, stack.factors(stack.mean(turns))
        moved = (agreed.B - last.B).square().sum() + (agreed.A - last.A).square().sum()
        if moved <= 1e-12 * (agreed.B.square().sum() + agreed.A.square().sum()):
            break
    turn = rotation(agreed, anchor, over)
    return agreed.turned(turn, turn.mT)


def nearest_frame(factors: Factors, anchor: Factors | None, steps: int = 8) -> Factors:
    """Solve min_G ||B G - B_anchor||_F^2 + ||G^-1 A - A_anchor||_F^2 over GL(r), for the factors of `Stack.best`.

    All invertible G are the same update, but not the same start for the training that follows: a balanced split of a
    small first update would leave A a hundredth of what it was initialised to, and every gradient of B with it. So
    neither rotations alone nor an even split will do.

    From the better of two closed forms (the nearest rotation; A as near to the anchor's as its rows allow, B following)
    Gauss-Newton descends: to first order (I + X)^-1 A is A - X A, and the best X solves the Sylvester equation
    B^T B X + X A A^T = B^T (B_anchor - B) + (A - A_anchor) A^T, of size r. A step counts only where the distance falls,
    so the result is never further than the nearest rotation. Frames whose components are large beside the update and
    cancel each other, as those near to a much larger anchor may be, would lose it when factors are rounded to their
    type, and are no candidates. Directions in which the update has nothing (B and A both zero) would stay dead under
    any training: they take A from the anchor, and B stays zero.
    """
    if anchor is None:
        return factors.double()
    factors, anchor = _filled(factors.double(), anchor.double()), anchor.double()
    P, Q = factors.B.mT @ factors.B, factors.A @ factors.A.mT
    X, Y = factors.B.mT @ anchor.B, factors.A @ anchor.A.mT
    identity = torch.eye(factors.rank, dtype=torch.float64, device=P.device)
    base = anchor.B.square().sum((-2, -1)) + anchor.A.square().sum((-2, -1))
    largest = _CANCELLED**2 * (P * Q).sum((-2, -1))

    def distance2(G: Tensor, H: Tensor) -> Tensor:
        b, a = ((G.mT @ P @ G).diagonal(dim1=-2, dim2=-1), (H @ Q @ H.mT).diagonal(dim1=-2, dim2=-1))
        found = (b.sum(-1) - 2 * (G * X).sum((-2, -1)) + base) + (a.sum(-1) - 2 * (H.mT * Y).sum((-2, -1)))
        # An inverse that lost its digits would be another update.
        inverse = (G @ H - identity).abs().amax((-2, -1)) < _INVERSE
        return torch.where(inverse & found.isfinite() & ((b * a).sum(-1) <= largest), found, torch.inf)

    def better(new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        falls = distance2(*new) < distance2(*old)
        pick = falls[..., None, None]
        return (torch.where(pick, new[0], old[0]), torch.where(pick, new[1], old[1])), falls

    turn = orthogonal_procrustes(X + Y)
    follow = torch.linalg.solve_ex(Q, Y)[0].mT
    found, _ = better((turn, turn.mT), (identity.expand_as(turn), identity.expand_as(turn)))
    found, _ = better((torch.linalg.inv_ex(follow)[0], follow), found)
    size = torch.ones(P.shape[:-2], dtype=torch.float64, device=P.device)
    for _ in range(steps):
        G, H = found
        left, right = G.mT @ P @ G, H @ Q @ H.mT
        wanted = G.mT @ X - left + right - (H @ Y).mT
        p, U = torch.linalg.eigh(left)
        q, V = torch.linalg.eigh(right)
        both = p[..., :, None] + q[..., None, :]
        solvable = both > 1e-14 * both.amax((-2, -1), keepdim=True)
        step = torch.where(solvable, U.mT @ wanted @ V, 0.0) / torch.where(solvable, both, 1.0)
        move = identity + size[..., None, None] * (U @ step @ V.mT)
        found, falls = better((G @ move, torch.linalg.inv_ex(move)[0] @ H), found)
        size = torch.where(falls, (2 * size).clamp_max(1.0), size / 2)
    return factors.turned(*found)


def _filled(factors: Factors, anchor: Factors) -> Factors:
    """The factors with the anchor's own directions of A in place of those that are zero."""
    size = factors.A.square().sum(-1)
    dead = (size == 0) & (factors.B.square().sum(-2) == 0)
    if not bool(dead.any()):
        return factors
    # What the anchor's rows have beyond the update's own, which are orthogonal, strongest first.
    own = factors.A / torch.where(size > 0, size, 1.0).sqrt()[..., None]
    beyond = anchor.A - (anchor.A @ own.mT) @ own
    _, S, Vt = torch.linalg.svd(beyond, full_matrices=False)
    spare = Factors(anchor.B, S[..., None] * Vt).leading(factors.rank).A
    place = (dead.cumsum(-1) - 1).clamp_min(0)
    rows = spare.gather(-2, place[..., None].expand_as(factors.A))
    return Factors(factors.B, torch.where(dead[..., None], rows, factors.A))
