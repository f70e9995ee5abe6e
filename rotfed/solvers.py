"""Closed forms: from the moments of two models to the group element that moves one nearest to the other.

Every solver works on plain float64 matrices, knows no parameter name and mutates nothing. `strength` in (0, 1] pulls
an element toward the identity by a proximal term of weight (1 - strength) / strength in units of the moments' own
size: the solution still minimises a stated objective, so the distance to the anchor never exceeds that of the
identity, whatever the strength.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

# Relative to the mean singular value: decides the null space of a rank-deficient moment in favour of the identity,
# far above the noise of a float64 decomposition (about 1e-15) and far below anything that moves a weight.
_NULL_SPACE_PULL = 1e-11


def proximal_weight(strength: float) -> float:
    """The weight (1 - strength) / strength of the pull to the identity; 1e15 already leaves nothing else in float64."""
    return (1.0 - strength) / max(strength, 1e-15)


def orthogonal_procrustes(cross: Tensor, proper: bool = False, strength: float = 1.0) -> Tensor:
    """Solve min_R ||R S - A||_F over O(n), or over SO(n) where `proper`, from the moment `cross = A S^T`.

    Parameters: `cross` of shape `(..., n, n)`, the sum of `A S^T` over all matrices (weights as well as biases) that
    turn together. Returns R of shape `(..., n, n)` in float64.

    R = U V^T of the singular value decomposition of `cross` (Schoenemann 1966; arXiv 2502.00264, eq. 9). For SO(n)
    the direction of the smallest singular value changes sign where det(U V^T) = -1 (Kabsch 1976, Umeyama 1991).
    """
    cross = cross.double()
    identity = torch.eye(cross.shape[-1], dtype=torch.float64, device=cross.device)
    mean_singular = torch.linalg.matrix_norm(cross, ord="nuc", keepdim=True) / cross.shape[-1]
    pull = proximal_weight(strength) + _NULL_SPACE_PULL
    # A zero moment carries no information at all: any positive pull then gives the identity.
    pull_weight = torch.where(mean_singular > 0, pull * mean_singular, torch.ones_like(mean_singular))
    u, _, vt = torch.linalg.svd(cross + pull_weight * identity)
    if proper:
        u = torch.cat([u[..., :-1], u[..., -1:] * torch.linalg.det(u @ vt).sign()[..., None, None]], dim=-1)
    rotation: Tensor = u @ vt
    return rotation


def plane_procrustes(cross: Tensor, strength: float = 1.0) -> Tensor:
    """Solve min_phi ||R(phi) S - A||_F over rotations of the plane, from the moment `cross = A S^T`.

    Parameters: `cross` of shape `(..., 2, 2)`. Returns the angles, of shape `(...)`, in float64 radians.

    phi = atan2(c_10 - c_01, c_00 + c_11): the argument of the inner product of S and A read as complex numbers.
    """
    cross = cross.double()
    even = cross[..., 0, 0] + cross[..., 1, 1]
    odd = cross[..., 1, 0] - cross[..., 0, 1]
    pull = proximal_weight(strength) + _NULL_SPACE_PULL
    return torch.atan2(odd, even + pull * torch.hypot(even, odd))


def identity_radius(anchor: Tensor) -> Tensor:
    """Half the distance from each row of `anchor` `(n, m)` to its nearest other row; shape `(n,)`, float64.

    If each row of a source is nearer to the same row of the anchor than this, every row is nearest to its own
    counterpart (triangle inequality), and the identity is the optimal assignment.
    """
    anchor = anchor.double()
    if anchor.shape[0] < 2:
        return torch.full((anchor.shape[0],), torch.inf, dtype=torch.float64, device=anchor.device)
    square = (anchor * anchor).sum(-1)
    distance2 = square[:, None] + square[None, :] - 2 * anchor @ anchor.mT
    # Cancellation leaves an error of about eps times the squares: take it off so that the certificate stays safe.
    distance2 = distance2 - 1e-13 * (square[:, None] + square[None, :])
    distance2.fill_diagonal_(torch.inf)
    return 0.5 * distance2.clamp_min(0).min(-1).values.sqrt()


def linear_assignment(source: Tensor, anchor: Tensor, radius: Tensor | None = None, strength: float = 1.0) -> Tensor:
    """Solve min_p sum_i ||source[p[i]] - anchor[i]||^2 over permutations p.

    Parameters: `source` and `anchor` of shape `(n, m)`, a unit a row; `radius`, what `identity_radius(anchor)` gave,
    to certify the identity without forming the `n x n` moment. Returns p of shape `(n,)`, int64: the aligned source
    is `source[p]`. Ties go to the identity, which the certificate and the pull both favour.

    The linear assignment problem of Git Re-Basin (arXiv 2209.04836) and of arXiv 2502.00264, section 4.2, solved by
    `scipy.optimize.linear_sum_assignment`.
    """
    source, anchor = source.double(), anchor.double()
    n = source.shape[0]
    identity = torch.arange(n, device=source.device)
    if radius is not None and bool(((source - anchor).square().sum(-1).sqrt() < radius).all()):
        return identity
    return assign(anchor @ source.mT, strength)


def assign(gain: Tensor, strength: float = 1.0) -> Tensor:
    """Solve max_p sum_i gain[i, p[i]] over permutations p, for `gain` of shape `(n, n)`. Returns p, `(n,)`, int64."""
    identity = torch.arange(gain.shape[0], device=gain.device)
    largest = gain.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    pull = (proximal_weight(strength) + _NULL_SPACE_PULL) * largest
    gain = gain + pull * torch.eye(gain.shape[0], dtype=torch.float64, device=gain.device)
    if torch.equal(gain.argmax(0), identity):
        # Each source unit gains most at its own place, so no permutation gains more.
        return identity
    _, columns = linear_sum_assignment(gain.cpu().numpy(), maximize=True)
    return torch.as_tensor(columns, device=gain.device)


def optimal_scale(
    direct_norm2: Tensor,
    direct_inner: Tensor,
    dual_norm2: Tensor,
    dual_inner: Tensor,
    strength: float = 1.0,
    proper: bool = False,
) -> Tensor:
    """Solve min_c ||c S - A||^2 + ||T / c - B||^2 over the non-zero reals c, the positive ones where `proper`.

    Parameters, all of one shape `(...)`: `direct_norm2 = ||S||^2`, `direct_inner = <A, S>`, `dual_norm2 = ||T||^2`,
    `dual_inner = <B, T>`. Returns c of the same shape, float64.

    Stationary points are the real roots of the quartic ||S||^2 c^4 - <A,S> c^3 + <B,T> c - ||T||^2 = 0 (arXiv
    2502.00264, section 4.3); the best of them and of c = 1 is kept. Scales beyond a factor of 1000 are not
    considered: they only occur where one side is all but zero and the scale carries no information.
    """
    norm2, inner, dual2, dual = torch.broadcast_tensors(
        direct_norm2.double(), direct_inner.double(), dual_norm2.double(), dual_inner.double()
    )
    # The pull is a pseudo-observation of size one weight: both sides see an identity source and anchor.
    pull = proximal_weight(strength) * (norm2 + dual2) / 2
    norm2, inner, dual2, dual = norm2 + pull, inner + pull, dual2 + pull, dual + pull

    solvable = norm2 > 0
    lead = torch.where(solvable, norm2, torch.ones_like(norm2))
    companion = torch.zeros(*norm2.shape, 4, 4, dtype=torch.float64, device=norm2.device)
    companion[..., 1, 0] = companion[..., 2, 1] = companion[..., 3, 2] = 1.0
    companion[..., 0, 3] = dual2 / lead
    companion[..., 1, 3] = -dual / lead
    companion[..., 3, 3] = inner / lead
    roots = torch.linalg.eigvals(companion)
    candidate = roots.real
    for _ in range(2):  # Newton's step takes the eigenvalues' last digits off.
        value = ((lead[..., None] * candidate - inner[..., None]) * candidate**2 + dual[..., None]) * candidate
        value = value - dual2[..., None]
        slope = (4 * lead[..., None] * candidate - 3 * inner[..., None]) * candidate**2 + dual[..., None]
        step = torch.where(slope != 0, value / torch.where(slope != 0, slope, torch.ones_like(slope)), 0.0)
        candidate = candidate - step
    usable = (
        (roots.imag.abs() < 1e-6 * roots.abs())
        & (candidate.abs() > 1e-3)
        & (candidate.abs() < 1e3)
        & solvable[..., None]
        & ((candidate > 0) | (not proper))
    )
    candidate = torch.where(usable, candidate, 1.0)
    # Without a direct side the quartic degenerates: ||T / c - B||^2 is least at c = ||T||^2 / <B, T>.
    alone = torch.where(dual != 0, dual2 / torch.where(dual != 0, dual, torch.ones_like(dual)), torch.ones_like(dual))
    lone = ~solvable & (alone.abs() > 1e-3) & (alone.abs() < 1e3) & ((alone > 0) | (not proper))
    alone = torch.where(lone, alone, torch.ones_like(alone))
    candidate = torch.cat([torch.ones_like(candidate[..., :1]), alone[..., None], candidate], dim=-1)
    cost = norm2[..., None] * candidate**2 - 2 * inner[..., None] * candidate
    cost = cost + dual2[..., None] / candidate**2 - 2 * dual[..., None] / candidate
    best = cost.argmin(-1, keepdim=True)
    return candidate.gather(-1, best).squeeze(-1)
