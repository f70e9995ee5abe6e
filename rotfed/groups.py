"""The kinds of group under which a transformer keeps its function: how their elements look, act, combine, are found.

An element belongs to one index of its group (a layer, a head, ...); elements of all indices are stacked into one
tensor, so every function here is batched over leading dimensions. Nothing in this file knows a parameter name.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rotfed.errors import TransformError
from rotfed.solvers import Pull, optimal_scale, orthogonal_procrustes, plane_procrustes


@dataclass(frozen=True)
class Moment:
    """What a group has to know of two models to find its nearest element, in float64, stacked over the group's batch.

    `cross`, `(*batch, n, n)`, is the sum of anchor times source transposed; None for kinds that mix no coordinates.
    `inner` and `norm2`, `(2, *batch, n)`, are the inner products of source and anchor and the source's squared norms,
    first where the group acts directly, then where its dual does; `energy`, `(*batch,)`, the squared norms of source
    and anchor together. A gain below `noise` times the energy is rounding.
    """

    cross: Tensor | None
    inner: Tensor
    norm2: Tensor
    energy: Tensor
    noise: float


class Kind(ABC):
    """One kind of group acting on vectors of length `n`; elements are stacked over `batch`.

    `act` and its dual take `x` of shape `(*batch, n, m)`: `m` vectors of length `n` for every batch index. The dual
    is the inverse transpose, so that `act(e, x)` and `act(e, y, dual=True)` keep the product `x.mT @ y`. A kind that
    `mixes` adds coordinates up; one that `multiplies` has a factor for each; permutations do neither.
    """

    mixes = False
    multiplies = False

    @abstractmethod
    def identity(self, batch: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """The neutral element at every batch index."""

    @abstractmethod
    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        """A random element at every batch index; without `reflections`, no reflection and no negative scale."""

    @abstractmethod
    def inverse(self, element: Tensor) -> Tensor:
        """The element that undoes `element`."""

    @abstractmethod
    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """The element that acts as `earlier` followed by `later`."""

    @abstractmethod
    def act(self, element: Tensor, x: Tensor, dual: bool = False) -> Tensor:
        """Apply `element` to `x` of shape `(*batch, n, m)`, or its inverse transpose where `dual`."""

    @abstractmethod
    def solve(self, moment: Moment, pull: Pull, reflections: bool) -> Tensor:
        """The elements that bring the source nearest to the anchor; exactly the identity where nothing is gained."""

    @abstractmethod
    def element_shape(self, batch: tuple[int, ...], n: int) -> tuple[int, ...]:
        """The shape of a stack of elements."""

    @abstractmethod
    def dimension(self, n: int) -> int:
        """The number of parameters on which an element near the identity depends; 0 for a discrete group."""

    @abstractmethod
    def defect(self, element: Tensor) -> float:
        """How far the worst element is from being a member: 0 for a perfect one, inf for a hopeless one."""

    def validate(self, element: Tensor, batch: tuple[int, ...], n: int, name: str) -> None:
        """Raise TransformError unless `element` is a stack of members of the group of the given shape."""
        expected = self.element_shape(batch, n)
        if tuple(element.shape) != expected:
            raise TransformError(
                f"{name}: expected elements of shape {expected}, found {tuple(element.shape)}; "
                "build transforms with random_transform or align for the same spec"
            )
        # An element stored in float32 is orthogonal to float32 accuracy only.
        tolerance = 1e-4 if element.dtype in (torch.float32, torch.float16, torch.bfloat16) else 1e-9
        if (defect := self.defect(element)) > tolerance:
            raise TransformError(
                f"{name}: expected members of a group of kind {type(self).__name__.lower()}, found one that is off "
                f"by {defect:.2g}; applying it would change the function of the model"
            )


class Orthogonal(Kind):
    """O(n), rotations and reflections; an element is a matrix `(n, n)` that acts from the left."""

    mixes = True

    def identity(self, batch: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.eye(n, dtype=dtype).expand(*batch, n, n).clone()

    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        """Haar-distributed: QR of a Gaussian matrix with the signs of R's diagonal moved into Q (Mezzadri 2007)."""
        gaussian = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)
        q: Tensor
        q, r = torch.linalg.qr(gaussian)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        if not reflections:
            q[..., 0] *= torch.linalg.det(q).sign().unsqueeze(-1)
        return q.to(dtype)

    def inverse(self, element: Tensor) -> Tensor:
        return element.mT.contiguous()

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        # A product is as accurate as its less accurate factor, which the type must tell `validate`.
        coarser = min(later.dtype, earlier.dtype, key=lambda dtype: dtype.itemsize)
        return (later.double() @ earlier.double()).to(coarser)

    def act(self, element: Tensor, x: Tensor, dual: bool = False) -> Tensor:
        # The inverse transpose of an orthogonal matrix is the matrix itself.
        return element @ x

    def solve(self, moment: Moment, pull: Pull, reflections: bool) -> Tensor:
        assert moment.cross is not None
        best = self._nearest(moment.cross, pull, reflections)
        eye = torch.eye(best.shape[-1], dtype=best.dtype, device=best.device)
        gain = ((best - eye) * moment.cross).sum((-2, -1))
        return torch.where((gain > moment.noise * moment.energy)[..., None, None], best, eye)

    def _nearest(self, cross: Tensor, pull: Pull, reflections: bool) -> Tensor:
        return orthogonal_procrustes(cross, pull, reflections)

    def element_shape(self, batch: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (*batch, n, n)

    def dimension(self, n: int) -> int:
        return n * (n - 1) // 2

    def defect(self, element: Tensor) -> float:
        if not element.is_floating_point():
            return float("inf")
        gram = element.double() @ element.double().mT
        error = (gram - torch.eye(element.shape[-1], dtype=torch.float64, device=element.device)).abs()
        return float(torch.nan_to_num(error, nan=torch.inf).max()) if error.numel() else 0.0


class CentredOrthogonal(Orthogonal):
    """O(n) where it keeps the all-ones direction, which is O(n - 1): what commutes with taking off the mean."""

    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        return self.extend(super().random(batch, n - 1, generator, torch.float64, reflections)).to(dtype)

    def _nearest(self, cross: Tensor, pull: Pull, reflections: bool) -> Tensor:
        basis = self.complement(cross.shape[-1]).to(cross.device)
        return self.extend(orthogonal_procrustes(basis.T @ cross @ basis, pull, reflections))

    @staticmethod
    def complement(n: int) -> Tensor:
        """An orthonormal basis `(n, n - 1)` of the vectors that sum to zero."""
        # The last n - 1 columns of the Householder matrix that maps the first unit vector to the all-ones direction.
        v = torch.full((n,), n**-0.5, dtype=torch.float64)
        v[0] -= 1
        basis = torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v) / v.dot(v).clamp_min(1e-300)
        return basis[:, 1:]

    def extend(self, inner: Tensor) -> Tensor:
        """The elements that act as `inner`, orthogonal matrices `(n - 1, n - 1)`, on the complement of all ones."""
        n = inner.shape[-1] + 1
        basis = self.complement(n).to(inner.device)
        return basis @ inner @ basis.T + 1 / n

    def dimension(self, n: int) -> int:
        return super().dimension(n - 1)

    def defect(self, element: Tensor) -> float:
        orthogonal = super().defect(element)
        if not orthogonal < float("inf"):
            return orthogonal
        moved = (element.double().sum(-1) - 1).abs()
        return max(orthogonal, float(moved.max()) if moved.numel() else 0.0)


class Permutation(Kind):
    """S_n; an element is an index vector `(n,)` with `act(p, x)[i] = x[p[i]]`."""

    def identity(self, batch: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.arange(n).expand(*batch, n).clone()

    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        return torch.rand(*batch, n, generator=generator, dtype=torch.float64).argsort(-1)

    def inverse(self, element: Tensor) -> Tensor:
        return element.argsort(-1)

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return earlier.gather(-1, later)

    def act(self, element: Tensor, x: Tensor, dual: bool = False) -> Tensor:
        if element.numel() == x.shape[-2]:
            return x.index_select(-2, element.reshape(-1))
        return x.gather(-2, element.unsqueeze(-1).expand_as(x))

    def solve(self, moment: Moment, pull: Pull, reflections: bool) -> Tensor:
        raise NotImplementedError("permutations are assigned, by all pairs of units: see rotfed.matching")

    def element_shape(self, batch: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (*batch, n)

    def dimension(self, n: int) -> int:
        return 0

    def defect(self, element: Tensor) -> float:
        if element.dtype != torch.int64:
            return float("inf")
        in_order = torch.arange(element.shape[-1], device=element.device)
        return 0.0 if torch.equal(element.sort(-1).values, in_order.expand_as(element)) else float("inf")


class Scale(Kind):
    """The non-zero reals, one for each of `n` coordinates; the dual divides."""

    multiplies = True

    def identity(self, batch: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.ones(*batch, n, dtype=dtype)

    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        """Log-normal with a spread of half a natural unit and, with `reflections`, a random sign."""
        magnitude = (0.5 * torch.randn(*batch, n, generator=generator, dtype=torch.float64)).exp()
        sign = torch.randint(0, 2, (*batch, n), generator=generator) * 2 - 1
        return (magnitude * sign if reflections else magnitude).to(dtype)

    def inverse(self, element: Tensor) -> Tensor:
        return element.reciprocal()

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return later * earlier

    def act(self, element: Tensor, x: Tensor, dual: bool = False) -> Tensor:
        factor = element.unsqueeze(-1)
        return x / factor if dual else x * factor

    def solve(self, moment: Moment, pull: Pull, reflections: bool) -> Tensor:
        (norm2, dual_norm2), (inner, dual_inner) = moment.norm2, moment.inner
        best = optimal_scale(norm2, inner, dual_norm2, dual_inner, pull, reflections)
        return torch.where((best - 1).abs() > moment.noise, best, 1.0)

    def element_shape(self, batch: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (*batch, n)

    def dimension(self, n: int) -> int:
        return n

    def defect(self, element: Tensor) -> float:
        if not element.is_floating_point():
            return float("inf")
        # The dual divides: the inverse of a subnormal number is infinite.
        return 0.0 if bool((element.isfinite() & element.reciprocal().isfinite()).all()) else float("inf")


class Sign(Scale):
    """{+1, -1}, one for each of `n` coordinates: what a norm over the coordinates leaves of the scales."""

    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        if not reflections:
            return self.identity(batch, n, dtype)
        return (torch.randint(0, 2, (*batch, n), generator=generator) * 2 - 1).to(dtype)

    def inverse(self, element: Tensor) -> Tensor:
        return element.clone()

    def solve(self, moment: Moment, pull: Pull, reflections: bool) -> Tensor:
        norm2, inner = moment.norm2.sum(0), moment.inner.sum(0)
        # The pull is in units of the identity's own gain, as for a rotation.
        turned = inner + pull.to_identity * norm2 < -moment.noise * norm2
        return 1.0 - 2.0 * turned.to(norm2.dtype) if reflections else torch.ones_like(norm2)

    def dimension(self, n: int) -> int:
        return 0

    def defect(self, element: Tensor) -> float:
        return 0.0 if element.is_floating_point() and bool((element.abs() == 1).all()) else float("inf")


class RopePlanes(Kind):
    """SO(2) on one plane of a rotary position embedding; an element is an angle in radians.

    RoPE rotates each plane by an angle of its own, so only rotations within the plane commute with it. The plane is
    an axis of length 2, and the axis string says where its two coordinates lie: `(heads pair planes)` for halves,
    `(heads planes pair)` for neighbours.
    """

    mixes = True

    def identity(self, batch: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(batch, dtype=dtype)

    def random(
        self,
        batch: tuple[int, ...],
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
        reflections: bool = True,
    ) -> Tensor:
        return (torch.pi * (2 * torch.rand(batch, generator=generator, dtype=torch.float64) - 1)).to(dtype)

    def inverse(self, element: Tensor) -> Tensor:
        return -element

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        # Kept within [-pi, pi], so that an angle does not lose digits over many rounds.
        total = later.double() + earlier.double()
        coarser = min(later.dtype, earlier.dtype, key=lambda dtype: dtype.itemsize)
        return torch.atan2(total.sin(), total.cos()).to(coarser)

    def act(self, element: Tensor, x: Tensor, dual: bool = False) -> Tensor:
        # The inverse transpose of a rotation is the rotation itself.
        cos, sin = element.cos().unsqueeze(-1), element.sin().unsqueeze(-1)
        first, second = x[..., 0, :], x[..., 1, :]
        return torch.stack([cos * first - sin * second, sin * first + cos * second], dim=-2)

    def solve(self, moment: Moment, pull: Pull, reflections: bool) -> Tensor:
        assert moment.cross is not None
        best, cross = plane_procrustes(moment.cross, pull), moment.cross
        even, odd = cross[..., 0, 0] + cross[..., 1, 1], cross[..., 1, 0] - cross[..., 0, 1]
        gain = (best.cos() - 1) * even + best.sin() * odd
        return torch.where(gain > moment.noise * moment.energy, best, 0.0)

    def element_shape(self, batch: tuple[int, ...], n: int) -> tuple[int, ...]:
        return batch

    def dimension(self, n: int) -> int:
        return 1

    def defect(self, element: Tensor) -> float:
        return 0.0 if element.is_floating_point() and bool(element.isfinite().all()) else float("inf")


KINDS: dict[str, Kind] = {
    "orthogonal": Orthogonal(),
    "centred_orthogonal": CentredOrthogonal(),
    "rope_planes": RopePlanes(),
    "permutation": Permutation(),
    "scale": Scale(),
    "sign": Sign(),
}
