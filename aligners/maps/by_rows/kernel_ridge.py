"""Ridge regression in the space of an RBF kernel, on a draw of landmarks."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.solvers import STRENGTHS, ridge_path
from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of

SMALLEST = 1e-6  # eigenvalues of the landmarks' kernel below this share of the largest are left out
AT_ONCE = 4096  # rows whose features are held at a time while fitting


class KernelRidge(ByRows):
    """Ridge regression on the features of an RBF kernel, approximated by landmarks (Nyström).

    The kernel is k(a, b) = exp(−‖a − b‖² / 2σ²), σ the `width` times the median distance between landmarks. With the
    landmarks' kernel K_mm = U Λ Uᵀ, the features of a row are k(x, landmarks) U Λ^(−1/2) (Williams and Seeger 2001).
    The penalty on their weights is that on the function's norm. Its strength is that of least error on other rows, out
    of `STRENGTHS`, relative to the mean variance of the features.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        landmarks: the most rows that are kept as landmarks, the first of the draw; of fewer rows, all.
        width: σ in units of the median distance.
        rows: the most rows that the regression is fitted on.
        seed: seed of the draw.

    Attributes:
        ridge: (S,) the strength that was chosen.

    Raises:
        ValueError: an option is out of range.
    """

    chooses = True
    of_rows = ("kept_x", "weight")
    mean_x: Tensor
    kept_x: Tensor
    weight: Tensor
    offset: Tensor
    variance: Tensor
    ridge: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        landmarks: int = 512,
        width: float = 1.0,
        rows: int = 10_000,
        seed: int = 0,
    ) -> None:
        super().__init__(sites, d_x, d_y, rows, seed)
        check_range(least=2, most=rows, landmarks=landmarks)
        check_range(above=0, width=width)
        self.landmarks = landmarks
        self.width = width
        self.rows_needed = 4
        self.register_buffer("mean_x", torch.zeros(sites, 1, d_x))
        self.register_buffer("kept_x", torch.zeros(sites, landmarks, d_x))
        self.register_buffer("weight", torch.zeros(sites, landmarks, d_y))
        self.register_buffer("offset", torch.zeros(sites, 1, d_y))
        self.register_buffer("variance", torch.ones(sites, 1, 1))
        self.register_buffer("ridge", torch.full((sites,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self._in_parts(self._mapped, x, self.kept_x.shape[1])

    def _mapped(self, x: Tensor) -> Tensor:
        kernel = _kernel(x - self.mean_x, self.kept_x, self.variance)
        return torch.baddbmm(self.offset, kernel, self.weight)

    def _fit(
        self, moments: Moments, kept: PairedRows, validation: PairedRows | None
    ) -> None:
        mean = moments.mean_x[:, None]
        first = kept.x[:, : self.landmarks]
        landmarks = first - mean
        variance = self.width**2 * _median_square(landmarks)
        among = _kernel(landmarks, landmarks, variance)
        values, vectors = torch.linalg.eigh(among)
        known = values > SMALLEST * values[:, -1:]
        kept_values = torch.where(known, values, torch.inf)
        factors = kept_values.rsqrt()
        whitened = vectors * factors[:, None]

        def features(x: Tensor) -> Tensor:
            kernel = _kernel(x - mean, landmarks, variance)
            return kernel @ whitened

        found = regression(features, kept, validation)
        self.mean_x.copy_(mean)
        self.variance.copy_(variance)
        self._keep("kept_x", landmarks)
        self._keep("weight", whitened @ found.weight)
        self.offset.copy_(found.offset)
        self.ridge.copy_(found.ridge)

    def findings(self) -> dict[str, Any]:
        """Return the strength at each site, and the number of landmarks."""
        strengths = [float(f"{value:.3g}") for value in self.ridge.tolist()]
        return {"ridge": strengths, "landmarks": self.kept_x.shape[1]}


class Regression(NamedTuple):
    """y = features W + offset, with the ridge of least error on other rows at each site.

    Attributes:
        weight: (S, m, d_y).
        offset: (S, 1, d_y).
        ridge: (S,).
        error: (S,) the squared error on these rows.
    """

    weight: Tensor
    offset: Tensor
    ridge: Tensor
    error: Tensor

    def better(self, other: Self) -> Self:
        """Take the better of two at each site."""
        wins = other.error < self.error
        parts = []
        for own, others in zip(self, other, strict=True):
            further = [1] * (own.ndim - 1)
            of_parts = wins.reshape(-1, *further)
            part = torch.where(of_parts, others, own)
            parts.append(part)
        return type(self)(*parts)


def regression(
    features: Callable[[Tensor], Tensor],
    rows: PairedRows,
    validation: PairedRows | None,
) -> Regression:
    """Regress Y on features of X, with the ridge of `STRENGTHS` that has the least error on validation rows.

    Args:
        features: of rows of X, (S, N, d_x) -> (S, N, m).
        rows: fitting rows.
        validation: other rows.
    """
    if validation is None:
        raise ValueError("Expected `validation` rows to choose on, but got none.")
    moments = _moments_of_features(features, rows)
    held_out = features(validation.x.double())
    best = None
    weights = ridge_path(moments, STRENGTHS, common=True)
    for strength, weight in zip(STRENGTHS, weights, strict=True):
        shift = moments.mean_x[:, None] @ weight
        offset = moments.mean_y[:, None] - shift
        mapped = torch.baddbmm(offset, held_out, weight)
        residual = mapped - validation.y
        squared = residual.square()
        error = squared.sum((1, 2))
        ridge = torch.full_like(error, strength)
        found = Regression(weight, offset, ridge, error)
        best = found if best is None else best.better(found)
    return cast(Regression, best)


def _moments_of_features(
    features: Callable[[Tensor], Tensor], rows: PairedRows
) -> Moments:
    """Moments of features of X with Y, some rows at a time."""
    of_x = rows.x.split(AT_ONCE, 1)
    of_y = rows.y.split(AT_ONCE, 1)
    batches = []
    for x, y in zip(of_x, of_y, strict=True):
        of_batch = features(x)
        moments = moments_of(of_batch, y)
        batches.append(moments)
    return reduce(merge_moments, batches)


def _kernel(a: Tensor, b: Tensor, variance: Tensor) -> Tensor:
    """exp(−‖a − b‖² / 2σ²), (S, N, d) and (S, m, d) -> (S, N, m)."""
    squares_a = a.square().sum(-1)
    squares_b = b.square().sum(-1)
    both = squares_a[:, :, None] + squares_b[:, None]
    distances = torch.baddbmm(both, a, b.mT, alpha=-2)
    distances = distances.clamp(min=0)
    exponent = distances / (-2 * variance)
    return exponent.exp()


def _median_square(rows: Tensor) -> Tensor:
    """The square of the median distance between rows (S, m, d), (S, 1, 1)."""
    m = rows.shape[1]
    every = torch.ones(m, m, dtype=torch.bool, device=rows.device)
    above = every.triu(1)
    distances = torch.cdist(rows, rows)
    distances = distances[:, above]
    median = distances.median(-1).values
    if not (median > 0).all():
        raise UserError(
            "Expected landmarks with a median distance above 0, but most of them are equal at some site. Leave that "
            "site out (site 0 with `rows` 'cls'), or draw others by another `seed`."
        )
    return median.square()[:, None, None]
