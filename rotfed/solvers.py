"""Closed forms: from the moments of two models to the group element that moves one nearest to the other.

Solvers work on plain float64 matrices, know no parameter name and mutate nothing.
"""

from dataclasses import dataclass

import lap
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pull:
    """A pull of every element toward the identity, in units of the moments' own size.

    `strength` in (0, 1] sets a proximal term of weight (1 - strength) / strength: the solution still minimises a stated
    objective, so that the distance to the anchor never exceeds that of the identity, whatever the strength.
    `null_space` decides the null space of a rank-deficient moment in favour of the identity: far above the noise of the
    products that the moment was made of, and far below anything that moves a weight.
    """

    strength: float = 1.0
    null_space: float = 1e-11

    @property
    def single(self) -> bool:
        """Whether the moment is of float32 products, so that its decomposition in float32 loses nothing."""
        return self.null_space > 1e-9

    @property
    def to_identity(self) -> float:
        """The weight of the proximal term; 1e15 already leaves nothing else in float64."""
        return (1.0 - self.strength) / max(self.strength, 1e-15)


NO_PULL = Pull()


def orthogonal_procrustes(cross: Tensor, pull: Pull = NO_PULL, reflections: bool = True) -> Tensor:
    """Solve min_R ||R S - A||_F over O(n), or over SO(n) without `reflections`, from the moment `cross = A S^T`.

    Parameters: `cross` of shape `(..., n, n)`, the sum of `A S^T` over all matrices (weights as well as biases) that
    turn together. Returns R of shape `(..., n, n)` in float64.

    R = U V^T of the singular value decomposition of `cross` (Schoenemann 1966; arXiv 2502.00264, eq. 9). For SO(n)
    the direction of the smallest singular value changes sign where det(U V^T) = -1 (Kabsch 1976, Umeyama 1991).
    """
    cross = cross.double()
    # Where the pull is only to decide null spaces, the root mean square of the singular values does as well.
    order, count = ("nuc", cross.shape[-1]) if pull.to_identity else ("fro", cross.shape[-1] ** 0.5)
    size = torch.linalg.matrix_norm(cross, ord=order, keepdim=True) / count
    # A zero moment carries no information at all: any positive pull then gives the identity.
    weight = torch.where(size > 0, (pull.to_identity + pull.null_space) * size, 1.0)
    identity = torch.eye(cross.shape[-1], dtype=torch.float64, device=cross.device)
    cross = cross + weight * identity
    if not pull.single:
        return _by_decomposition(cross, reflections)
    rotation, sure = _by_products(cross, identity)
    if not reflections:
        sure &= torch.linalg.det(rotation.float()) > 0
    if not bool(sure.all()):
        rotation[~sure] = _by_decomposition(cross[~sure], reflections)
    return rotation


def _by_decomposition(cross: Tensor, reflections: bool) -> Tensor:
    """Return the polar factors of matrices `(..., n, n)` from singular value decompositions."""
    u, _, vt = torch.linalg.svd(cross)
    if not reflections:
        u = torch.cat([u[..., :-1], u[..., -1:] * torch.linalg.det(u @ vt).sign()[..., None, None]], dim=-1)
    rotation: Tensor = u @ vt
    return rotation


# Odd polynomials a s + b s^3 + c s^5, one after another, that bring every s in [2e-4, 1] to 1 within 1e-8: each is the
# best in the maximum norm on what the one before it leaves (the composition of arXiv 2505.16932, section 3).
_TO_ONE = (
    (8.505474, -25.246879, 18.739704),
    (4.242029, -3.149754, 0.585289),
    (4.193685, -3.116238, 0.581466),
    (4.002464, -2.982652, 0.566234),
    (3.391713, -2.542908, 0.516216),
    (2.368121, -1.728811, 0.425304),
    (1.899007, -1.276423, 0.377652),
    (1.875, -1.25, 0.375),
)


def _by_products(cross: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """Return the polar factors of matrices `(..., n, n)` by products in float32, and which of them are.

    Several times as fast as a decomposition, of matrices whose singular values lie within a factor of 5000.
    """
    x = cross.float().reshape(-1, *cross.shape[-2:])
    # Of the norms that bound the largest singular value this one is close, and takes one product.
    bound = torch.linalg.matrix_norm(x @ x.mT, keepdim=True).sqrt()
    x = x / (1.001 * bound).clamp_min(torch.finfo(torch.float32).tiny)
    for a, b, c in _TO_ONE:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(cross.shape)
    sure = (x @ x.mT - identity.float()).abs().amax((-2, -1)) < 1e-5
    # One step of Newton and Schulz: what is orthogonal to float32 becomes so to float64.
    rotation = x.double()
    return rotation @ (1.5 * identity - 0.5 * rotation.mT @ rotation), sure


def plane_procrustes(cross: Tensor, pull: Pull = NO_PULL) -> Tensor:
    """Solve min_phi ||R(phi) S - A||_F over rotations of the plane, from the moment `cross = A S^T`.

    Parameters: `cross` of shape `(..., 2, 2)`. Returns the angles, of shape `(...)`, in float64 radians.

    phi = atan2(c_10 - c_01, c_00 + c_11): the argument of the inner product of S and A read as complex numbers.
    """
    cross = cross.double()
    even = cross[..., 0, 0] + cross[..., 1, 1]
    odd = cross[..., 1, 0] - cross[..., 0, 1]
    return torch.atan2(odd, even + (pull.to_identity + pull.null_space) * torch.hypot(even, odd))


def assign(gain: Tensor, pull: Pull = NO_PULL) -> Tensor:
    """Solve max_p sum_i gain[i, p[i]] over permutations p.

    Parameters: `gain` of shape `(n, n)`, how much it gains to put unit j in the place of unit i. Returns p of shape
    `(n,)`, int64: the aligned source is `source[p]`. Ties go to the identity.

    The linear assignment problem of Git Re-Basin (arXiv 2209.04836) and of arXiv 2502.00264, section 4.2, solved
    exactly by the shortest augmenting paths of Jonker and Volgenant (1987), as the package lapx has them.
    """
    identity = torch.arange(gain.shape[0], device=gain.device)
    largest = float(gain.abs().amax()) or 1.0
    cost = -gain
    # A pull that the type of the gains cannot hold would decide nothing.
    weight = max(pull.to_identity + pull.null_space, 4 * torch.finfo(cost.dtype).eps)
    cost.diagonal().sub_(weight * largest)
    if torch.equal(cost.argmin(0), identity):
        # Each source unit gains most at its own place, so no permutation gains more.
        return identity
    single = cost.dtype == torch.float32
    _, columns = lap.lapjvs(cost.cpu().numpy(), extend_cost=False, return_cost=False, prefer_float32=single)
    return torch.from_numpy(columns).to(gain.device)


def optimal_scale(
    direct_norm2: Tensor,
    direct_inner: Tensor,
    dual_norm2: Tensor,
    dual_inner: Tensor,
    pull: Pull = NO_PULL,
    reflections: bool = True,
) -> Tensor:
    """Solve min_c ||c S - A||^2 + ||T / c - B||^2 over the non-zero reals c, the positive ones without `reflections`.

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
    observed = pull.to_identity * (norm2 + dual2) / 2
    norm2, inner, dual2, dual = norm2 + observed, inner + observed, dual2 + observed, dual + observed

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
        & ((candidate > 0) | reflections)
    )
    candidate = torch.where(usable, candidate, 1.0)
    # Without a direct side the quartic degenerates: ||T / c - B||^2 is least at c = ||T||^2 / <B, T>.
    alone = torch.where(dual != 0, dual2 / torch.where(dual != 0, dual, torch.ones_like(dual)), torch.ones_like(dual))
    lone = ~solvable & (alone.abs() > 1e-3) & (alone.abs() < 1e3) & ((alone > 0) | reflections)
    alone = torch.where(lone, alone, torch.ones_like(alone))
    candidate = torch.cat([torch.ones_like(candidate[..., :1]), alone[..., None], candidate], dim=-1)
    cost = norm2[..., None] * candidate**2 - 2 * inner[..., None] * candidate
    cost = cost + dual2[..., None] / candidate**2 - 2 * dual[..., None] / candidate
    best = cost.argmin(-1, keepdim=True)
    return candidate.gather(-1, best).squeeze(-1)
