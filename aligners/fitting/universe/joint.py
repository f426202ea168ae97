"""Moments of k models on the same rows, and what they alone tell: linear universes, and the directions of a space."""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.maps.base import MORE_ROWS
from aligners.maps.matrices import batch_inverse
from aligners.maps.solvers import determined_svd
from aligners.similarity.algebra.moments import Moments, squares


class JointMoments(NamedTuple):
    """Centred second moments of n rows of k models at S sites, in float64.

    Attributes:
        n: number of rows, ().
        mean: (k, S, d).
        scatter: Σ (x_i − x̄_i)(x_j − x̄_j)ᵀ of models i and j, (k, k, S, d, d).
    """

    n: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, moments: Moments, models: int) -> Self:
        """Arrange the moments of all pairs of models.

        Args:
            moments: of `paired_rows`.
            models: k.
        """
        pairs = all_pairs(models)
        mean_x, mean_y, xx, yy, xy = (
            part.unflatten(0, (len(pairs), -1)) for part in moments[1:]
        )
        mean = mean_x.new_zeros(models, *mean_x.shape[1:])
        scatter = xx.new_zeros(models, models, *xx.shape[1:])
        for p, (i, j) in enumerate(pairs):
            mean[i] = mean_x[p]
            mean[j] = mean_y[p]
            scatter[i, i] = xx[p]
            scatter[j, j] = yy[p]
            scatter[i, j] = xy[p]
            scatter[j, i] = xy[p].mT
        return cls(moments.n, mean, scatter)

    @property
    def variance(self) -> Tensor:
        """Mean variance over the dimensions of each model at each site, (k, S)."""
        return _within(self.scatter).diagonal(dim1=-2, dim2=-1).mean(-1) / self.n

    def scaled(self) -> Self:
        """The moments of states divided by their root mean variance, one number for each model and site."""
        scale = self.variance.sqrt()[..., None]
        return self._replace(
            mean=self.mean / scale,
            scatter=self.scatter / (scale[:, None] * scale[None])[..., None],
        )

    def own(self) -> Moments:
        """The moments of every model with itself, centred, at k · S places, model after model."""
        own = _within(self.scatter).flatten(0, 1)
        mean = self.mean.flatten(0, 1)
        return Moments(self.n, mean, torch.zeros_like(mean), own, own, own)

    def mapped(self, weights: Tensor) -> Moments:
        """The moments of every model's states with (x_i − x̄_i) W_i, at k · S places, model after model.

        Args:
            weights: W, (k, S, d, d).
        """
        moments = self.own()
        matrices = weights.flatten(0, 1)
        xy = moments.xx @ matrices
        return moments._replace(yy=matrices.mT @ xy, xy=xy)


def _within(blocks: Tensor) -> Tensor:
    """Of blocks (k, k, ...) between models, those of each model with itself, (k, ...)."""
    return blocks.diagonal(dim1=0, dim2=1).movedim(-1, 0)


def all_pairs(models: int) -> Sequence[tuple[int, int]]:
    """Every model with each later one, by number."""
    return list(combinations(range(models), 2))


def paired_rows(states: Tensor, models: int) -> tuple[Tensor, Tensor]:
    """The rows of all pairs of models: k · S places, model after model, become k (k − 1) / 2 · S, pair after pair.

    Args:
        states: (k · S, N, d).
        models: k.
    """
    by_model = states.unflatten(0, (models, -1))
    first, second = (list(numbers) for numbers in zip(*all_pairs(models), strict=True))
    return by_model[first].flatten(0, 1), by_model[second].flatten(0, 1)


TOLERANCE = (
    1e-8  # as in CCA: directions with less of a model's largest variance do not vary
)
NOISE, ROUNDS = (
    1e-3,
    60,
)  # variance of what is added to standardised states; iterations of L-BFGS
SMALL = 1e-3  # the least variance that features of scaled states are taken to have


def linear_universe(joint: JointMoments, widths: Sequence[int], shared: int) -> Tensor:
    """The linear bijections whose first m coordinates map the scaled states of k models into each other best.

    W = [A, R] is the bijection of a model, and B the first m rows of W⁻¹. What is minimised is the mean over i ≠ j of
    E ‖(x_i + ε) A_i B_j − x_j‖² / d_j, by L-BFGS, site by site. The noise ε is in proportion to each feature's
    deviation: without it directions that do not vary would be free, and were it alike in all, a few large features,
    which language models have, would leave nothing of the others. For the same reason the search takes its steps from
    `shared_rotations` of standardised states. That settles the space up to a linear map of it. In the space that is
    taken an error counts alike in every direction once it is mapped back, on average over the models: the mean of
    B_j B_jᵀ is the identity. Of R only the span is settled: its columns become orthonormal.

    Args:
        joint: of the fitting rows.
        widths: of the models; states of narrower ones end in zeros.
        shared: m.

    Returns:
        W, (k, S, d, d), for centred states divided by their root mean variance; zero beyond a model's width.
    """
    scaled = joint.scaled()
    variances = squares(_within(scaled.scatter)) / scaled.n
    deviations = variances.clamp(min=SMALL).sqrt()  # (k, S, d)
    standardised = scaled._replace(scatter=scaled.scatter / _outer(deviations))
    starts = shared_rotations(standardised, widths, shared)
    covariances = standardised.scatter / standardised.n

    found = torch.zeros_like(starts)
    for site in range(found.shape[1]):
        search = _LeastError(
            covariances[:, :, site],
            starts[:, site],
            deviations[:, site],
            widths,
            shared,
        )
        for i, weights in enumerate(search.run()):
            found[i, site, : widths[i], : widths[i]] = weights
    return found


def _outer(values: Tensor) -> Tensor:
    """Products of all models' values (k, S, d) with each other's, (k, k, S, d, d)."""
    return values[:, None, :, :, None] * values[None, :, :, None]


class _LeastError:
    """The search of `linear_universe` at one site.

    Args:
        covariances: of standardised states, (k, k, d, d).
        starts: where to start, (k, d, d).
        deviations: of the features, (k, d).
        widths: of the models.
        shared: m.
    """

    def __init__(
        self,
        covariances: Tensor,
        starts: Tensor,
        deviations: Tensor,
        widths: Sequence[int],
        shared: int,
    ) -> None:
        self.widths = widths
        self.shared = shared
        self.deviations: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.within: list[Tensor] = []
        for i, width in enumerate(widths):
            self.deviations.append(deviations[i, :width])
            self.weights.append(starts[i, :width, :width].clone().requires_grad_())
            own = covariances[i, i, :width, :width]
            self.within.append(own + NOISE * torch.eye(width).to(own))
        self.between: list[tuple[int, int, Tensor]] = []
        for i, j in permutations(range(len(widths)), 2):
            block = covariances[i, j, : widths[i], : widths[j]]
            self.between.append((i, j, block * self.deviations[j]))

    @torch.enable_grad()
    def run(self) -> list[Tensor]:
        """Return W of each model, (d_i, d_i)."""
        optimizer = torch.optim.LBFGS(
            self.weights, max_iter=ROUNDS, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            error = self._error()
            error.backward()
            return error

        optimizer.step(closure)
        return self._settled()

    def _back(self) -> list[Tensor]:
        """B of each model, (m, d_i)."""
        inverses = [batch_inverse(weight)[: self.shared] for weight in self.weights]
        return [b * size for b, size in zip(inverses, self.deviations, strict=True)]

    def _error(self) -> Tensor:
        into = [weight[:, : self.shared] for weight in self.weights]
        back = self._back()
        spread = torch.stack(
            [a.mT @ c @ a for a, c in zip(into, self.within, strict=True)]
        )
        counts = torch.stack(
            [b @ b.mT / width for b, width in zip(back, self.widths, strict=True)]
        )
        error = (spread.sum(0) * counts.sum(0)).sum() - (spread * counts).sum()
        for i, j, block in self.between:
            error = error - 2 * (into[i].mT @ block * back[j]).sum() / self.widths[j]
        return error

    @torch.no_grad()
    def _settled(self) -> list[Tensor]:
        """The maps in the space in which the mean of B Bᵀ is the identity, each with an orthonormal rest."""
        back = self._back()
        values, vectors = torch.linalg.eigh(
            torch.stack([b @ b.mT for b in back]).mean(0)
        )
        root = (vectors * values.sqrt()) @ vectors.mT
        found = []
        for weight, size, b in zip(self.weights, self.deviations, back, strict=True):
            into = weight[:, : self.shared] @ root / size[:, None]
            rest = torch.linalg.svd(b).Vh[self.shared :].mT
            found.append(torch.cat([into, rest], 1))
        return found


def shared_rotations(joint: JointMoments, widths: Sequence[int], shared: int) -> Tensor:
    """Rotations of each model's own space whose first m coordinates are alike, (k, S, d, d).

    They are the nearest to the models' parts of the m leading eigenvectors of the matrix of all blocks.

    Args:
        joint: of the fitting rows, `scaled`.
        widths: of the models; states of narrower ones end in zeros.
        shared: m.
    """
    parts = _leading(joint.scatter, shared)[0]
    found = torch.zeros_like(joint.scatter[0])
    for i, width in enumerate(widths):
        polar = _polar(parts[i, :, :width])
        found[i, :, :width, :shared] = polar
        found[i, :, :width, shared:width] = torch.linalg.svd(polar)[0][..., shared:]
    return found


def maxvar(joint: JointMoments) -> tuple[Tensor, Tensor]:
    """Generalised canonical correlation analysis in its form MAXVAR (Kettenring 1971).

    G, (n, d) with orthonormal columns, minimises Σ_i ‖G − X_i W_i‖²: its columns are the leading eigenvectors of the
    sum of the k projections onto the models' states. The way back is the least-squares map from G: with fewer varying
    directions than dimensions, or weakly shared ones, W_i has no usable inverse.

    Args:
        joint: of the fitting rows.

    Returns:
        W (k, S, d, d), which predicts √n · G, of unit variance, from a model's centred states, and the way back
        (k, S, d, d).

    Raises:
        ValueError: there are no more rows than the models have dimensions together, which any states would fit.
    """
    dimensions = int(
        (squares(_within(joint.scatter)) > 0).sum((0, 2)).max()
    )  # padding does not vary
    if joint.n <= dimensions:
        raise UserError(
            f"MAXVAR expects more fitting rows than the {len(joint.mean)} models have dimensions together, "
            f"{dimensions}, but got {int(joint.n)}: with fewer, any states agree. {MORE_ROWS}"
        )
    roots, inverses, white = _whitened(joint)
    vectors, values = _leading(white, joint.mean.shape[-1])
    size = values.clamp(min=0).sqrt()[:, None]
    return inverses @ vectors * size, (roots @ vectors * size).mT


SHARED_BY_ALL, SHARED_BY_ONE = (
    0.75,
    1.5,
)  # of a direction's squared correlations, added up over the models


def shared_variance(joint: JointMoments) -> tuple[Tensor, Tensor]:
    """How much of each model's variance lies in directions that all models share, or some, or itself alone.

    MAXVAR over all directions that the models have together: those of unit variance along which the squared
    correlations with the models, added up, are largest. A direction that all k have has the sum k, one that is a single
    model's the sum 1. It counts as shared by all from `SHARED_BY_ALL` · k on, and as one model's own below
    `SHARED_BY_ONE`. Together they hold every model's whole variance.

    Args:
        joint: of the fitting rows; there have to be many more than dimensions of all models together.

    Returns:
        Shares of the variance in directions of all, some and one model, (3, k, S), and the share in the first m
        directions, m = 1, ..., k d: (k, S, k d).
    """
    models = len(joint.mean)
    width = joint.mean.shape[-1]
    roots, _, white = _whitened(joint)
    vectors, values = _leading(white, models * width)
    held = (roots @ vectors).square().sum(-2) * values.clamp(min=0)  # (k, S, k d)
    held /= (
        _within(joint.scatter / joint.n).diagonal(dim1=-2, dim2=-1).sum(-1)[..., None]
    )
    everyone = values >= SHARED_BY_ALL * models
    alone = values < SHARED_BY_ONE
    groups = torch.stack(
        [(held * chosen).sum(-1) for chosen in (everyone, ~everyone & ~alone, alone)]
    )
    return groups, held.cumsum(-1)


def _whitened(joint: JointMoments) -> tuple[Tensor, Tensor, Tensor]:
    """Roots of the models' covariances, their pseudo-inverses, and the covariances of whitened states."""
    covariance = joint.scatter / joint.n
    roots, inverses = _roots(_within(covariance))
    return (
        roots,
        inverses,
        torch.einsum("isab,ijsbc,jscd->ijsad", inverses, covariance, inverses),
    )


def _leading(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The leading eigenvectors of the matrices of blocks (k, k, S, d, d), as (k, S, d, most), and values (S, most)."""
    models, _, _, width, _ = blocks.shape
    values, vectors = torch.linalg.eigh(
        blocks.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    )
    parts = vectors[..., -most:].flip(-1).unflatten(1, (models, width)).movedim(1, 0)
    return parts, values[:, -most:].flip(-1)


def _polar(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, (S, d, d) -> (S, d, d)."""
    u, _, vh = determined_svd(matrices)
    return u @ vh


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Σ^(1/2) and its pseudo-inverse; directions that do not vary are left out of both."""
    values, vectors = torch.linalg.eigh(covariance)
    varies = values > TOLERANCE * values[..., -1:]
    root = values.clamp(min=0).sqrt() * varies
    inverse = torch.where(varies, 1 / values.clamp(min=1e-300).sqrt(), 0.0)
    return vectors * root[..., None, :] @ vectors.mT, vectors * inverse[
        ..., None, :
    ] @ vectors.mT


def directions(joint: JointMoments) -> tuple[Tensor, Tensor]:
    """Find the principal axes of the mean of all models in the shared space, the largest first.

    Args:
        joint: of the embedded states u_i(x_i) of all models.

    Returns:
        The variance of the mean along each axis, (S, d): the eigenvalues of its covariance; and the share of the
        variance of the other models' mean along it that a model explains, the squared correlation, (k, S, d), which is
        0 where nothing varies.
    """
    covariance = joint.scatter / joint.n
    models = len(joint.mean)
    variance, axes = torch.linalg.eigh(covariance.sum((0, 1)) / models**2)
    along = torch.einsum("sab,ijsac,scb->ijsb", axes, covariance, axes).flip(
        -1
    )  # (k, k, S, d)
    within = _within(along)
    shared = along.sum(1) - within
    others = along.sum((0, 1)) - 2 * along.sum(1) + within
    both = within * others
    varies = both > 1e-20 * both.amax(-1, keepdim=True)
    return variance.flip(-1), torch.where(
        varies, shared.square() / torch.where(varies, both, 1.0), 0.0
    )
