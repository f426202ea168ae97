"""Moments of k models on the same rows, and what they alone tell: linear universes, and the directions of a space."""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.maps.base import MORE_ROWS
from aligners.maps.linear import determined_svd, least_squares
from aligners.maps.matrices import batch_inverse
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
        mean_x, mean_y, xx, yy, xy = (part.unflatten(0, (len(pairs), -1)) for part in moments[1:])
        mean = mean_x.new_zeros(models, *mean_x.shape[1:])
        scatter = xx.new_zeros(models, models, *xx.shape[1:])
        for p, (i, j) in enumerate(pairs):
            mean[i], mean[j] = mean_x[p], mean_y[p]
            scatter[i, i], scatter[j, j] = xx[p], yy[p]
            scatter[i, j], scatter[j, i] = xy[p], xy[p].mT
        return cls(moments.n, mean, scatter)

    @property
    def variance(self) -> Tensor:
        """Mean variance over the dimensions of each model at each site, (k, S)."""
        return _within(self.scatter).diagonal(dim1=-2, dim2=-1).mean(-1) / self.n

    def scaled(self) -> Self:
        """The moments of states divided by their root mean variance, one number for each model and site."""
        scale = self.variance.sqrt()[..., None]
        return self._replace(
            mean=self.mean / scale, scatter=self.scatter / (scale[:, None] * scale[None])[..., None]
        )

    def own(self) -> Moments:
        """The moments of every model with itself, centred, at k · S places, model after model."""
        own, mean = _within(self.scatter).flatten(0, 1), self.mean.flatten(0, 1)
        return Moments(self.n, mean, torch.zeros_like(mean), own, own, own)

    def mapped(self, weights: Tensor) -> Moments:
        """The moments of every model's states with (x_i − x̄_i) W_i, at k · S places, model after model.

        Args:
            weights: W, (k, S, d, d).
        """
        moments, matrices = self.own(), weights.flatten(0, 1)
        xy = moments.xx @ matrices
        return moments._replace(yy=matrices.mT @ xy, xy=xy)

    def with_sum(self, weights: Tensor) -> Moments:
        """The moments of every model's states with Σ_i (x_i − x̄_i) W_i, at k · S places, model after model.

        Args:
            weights: W, (k, S, d, d).
        """
        xy = torch.einsum("ijsab,jsbc->isac", self.scatter, weights)
        yy = torch.einsum("isba,isbc->sac", weights, xy).expand_as(xy)
        return self.own()._replace(yy=yy.flatten(0, 1), xy=xy.flatten(0, 1))


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


ITERATIONS, STEADY = 200, 1e-10  # what one iteration gains, in norms of all moments
SHRINKING = 1e-6  # the ridge of regressions on the mean, which a few directions hardly vary along
TOLERANCE = 1e-8  # as in CCA: directions with less of a model's largest variance do not vary


def generalised_procrustes(joint: JointMoments) -> Tensor:
    """Rotate the centred states of k models into one space, each as near as possible to the mean of all.

    Maximises Σ_{i≠j} tr(R_iᵀ C_ij R_j) over orthogonal R_i. There is no closed form for more than two models. The
    iteration replaces each R_i in turn by the polar factor of Σ_{j≠i} C_ij R_j, so that the sum never falls (Gower
    1975, "Generalized Procrustes analysis"; ten Berge 1977). It starts from the polar factors of the d leading
    eigenvectors of the matrix of all blocks C_ij, the solution under R_1ᵀR_1 + ... + R_kᵀR_k = k I alone, so that no
    model is special. The space then has the principal axes of the mean of all as its axes, the largest first.

    Args:
        joint: of the fitting rows. To give each model the same weight, pass it `scaled`.

    Returns:
        R, (k, S, d, d): x_i R_i is in the shared space. What the rows leave open, as with fewer rows than dimensions,
        is settled as `determined_svd` does.
    """
    width = joint.mean.shape[-1]
    rotations = shared_rotations(joint, [width] * len(joint.mean), width)
    norm = joint.scatter.square().sum((0, 1, 3, 4)).sqrt()
    for _ in range(ITERATIONS):
        before = rotations.clone()
        for i in range(len(rotations)):
            others = torch.einsum("jsab,jsbc->sac", joint.scatter[i], rotations)
            rotations[i] = _polar(others - joint.scatter[i, i] @ rotations[i])
        gained = torch.einsum("isab,ijsac,jscb->s", rotations, joint.scatter, rotations)
        gained -= torch.einsum("isab,ijsac,jscb->s", before, joint.scatter, before)
        if bool((gained.abs() <= STEADY * norm).all()):
            break
    return _principal(joint, rotations)


NOISE, ROUNDS = 1e-3, 60  # variance of what is added to standardised states; iterations of L-BFGS
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
    sizes = (squares(_within(scaled.scatter)) / scaled.n).clamp(min=SMALL).sqrt()  # (k, S, d)
    alike = scaled._replace(
        scatter=scaled.scatter / (sizes[:, None, :, :, None] * sizes[None, :, :, None])
    )
    rotations, found = shared_rotations(alike, widths, shared), torch.zeros_like(scaled.scatter[0])
    for site in range(found.shape[1]):
        own = [
            (rotations[i, site, :width, :width], sizes[i, site, :width])
            for i, width in enumerate(widths)
        ]
        for i, weights in enumerate(_least_error(alike.scatter[:, :, site] / alike.n, own, shared)):
            found[i, site, : widths[i], : widths[i]] = weights
    return found


@torch.enable_grad()
def _least_error(
    blocks: Tensor, own: Sequence[tuple[Tensor, Tensor]], shared: int
) -> Sequence[Tensor]:
    """The maps of one site.

    Args:
        blocks: covariances of standardised states, (k, k, d, d).
        own: of each model, where to start (d_i, d_i), and the deviations of its features (d_i,).
        shared: m.
    """
    widths, sizes = [len(size) for _, size in own], [size for _, size in own]
    within = [blocks[i, i, :w, :w] + NOISE * torch.eye(w).to(blocks) for i, w in enumerate(widths)]
    pairs = list(permutations(range(len(own)), 2))
    between = [(i, j, blocks[i, j, : widths[i], : widths[j]] * sizes[j]) for i, j in pairs]
    weights = [start.clone().requires_grad_() for start, _ in own]
    optimizer = torch.optim.LBFGS(weights, max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def back() -> list[Tensor]:
        return [
            batch_inverse(weight)[:shared] * size
            for weight, size in zip(weights, sizes, strict=True)
        ]

    def error() -> Tensor:
        optimizer.zero_grad()
        into, out_of = [weight[:, :shared] for weight in weights], back()
        spread = torch.stack([a.mT @ c @ a for a, c in zip(into, within, strict=True)])
        counts = torch.stack([b @ b.mT / width for b, width in zip(out_of, widths, strict=True)])
        found = (spread.sum(0) * counts.sum(0)).sum() - (spread * counts).sum()
        for i, j, block in between:
            found = found - 2 * (into[i].mT @ block * out_of[j]).sum() / widths[j]
        found.backward()
        return found

    optimizer.step(error)
    with torch.no_grad():
        out_of = back()
        values, vectors = torch.linalg.eigh(torch.stack([b @ b.mT for b in out_of]).mean(0))
        square = (vectors * values.sqrt()) @ vectors.mT
        into = [
            weight[:, :shared] @ square / size[:, None]
            for weight, size in zip(weights, sizes, strict=True)
        ]
        rest = [torch.linalg.svd(b).Vh[shared:].mT for b in out_of]
        return [torch.cat(parts, 1) for parts in zip(into, rest, strict=True)]


def shared_rotations(joint: JointMoments, widths: Sequence[int], shared: int) -> Tensor:
    """Rotations of each model's own space whose first m coordinates are alike, (k, S, d, d).

    They are the nearest to the models' parts of the m leading eigenvectors of the matrix of all blocks.

    Args:
        joint: of the fitting rows, `scaled`.
        widths: of the models; states of narrower ones end in zeros.
        shared: m.
    """
    parts, found = _leading(joint.scatter, shared)[0], torch.zeros_like(joint.scatter[0])
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


def gcpa(joint: JointMoments) -> tuple[Tensor, Tensor]:
    """Generalised Procrustes, corrected for directions in which rotations disagree, after Achara et al. 2026.

    The space is that of `generalised_procrustes` on scaled states. A model's map into it is its regression on the mean
    of all, and its way back that of its states on this mean; in place of the paper's correction, which we do not
    follow in detail (arXiv 2602.06205, "Multi-Way Representation Alignment").

    Args:
        joint: of the fitting rows.

    Returns:
        W (k, S, d, d), from a model's centred states, and the way back (k, S, d, d).
    """
    models, scale = len(joint.mean), joint.variance.sqrt()[..., None, None]
    weights = generalised_procrustes(joint.scaled()) / scale / models
    moments = joint.with_sum(weights)
    into, back = least_squares(moments, SHRINKING), least_squares(moments.swap(), SHRINKING)
    return into.unflatten(0, (models, -1)), back.unflatten(0, (models, -1))


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
    models, width = len(joint.mean), joint.mean.shape[-1]
    roots, _, white = _whitened(joint)
    vectors, values = _leading(white, models * width)
    held = (roots @ vectors).square().sum(-2) * values.clamp(min=0)  # (k, S, k d)
    held /= _within(joint.scatter / joint.n).diagonal(dim1=-2, dim2=-1).sum(-1)[..., None]
    everyone, alone = values >= SHARED_BY_ALL * models, values < SHARED_BY_ONE
    groups = torch.stack(
        [(held * chosen).sum(-1) for chosen in (everyone, ~everyone & ~alone, alone)]
    )
    return groups, held.cumsum(-1)


def _whitened(joint: JointMoments) -> tuple[Tensor, Tensor, Tensor]:
    """Roots of the models' covariances, their pseudo-inverses, and the covariances of whitened states."""
    covariance = joint.scatter / joint.n
    roots, inverses = _roots(_within(covariance))
    return roots, inverses, torch.einsum("isab,ijsbc,jscd->ijsad", inverses, covariance, inverses)


def _leading(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The leading eigenvectors of the matrices of blocks (k, k, S, d, d), as (k, S, d, most), and values (S, most)."""
    models, _, _, width, _ = blocks.shape
    values, vectors = torch.linalg.eigh(blocks.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
    parts = vectors[..., -most:].flip(-1).unflatten(1, (models, width)).movedim(1, 0)
    return parts, values[:, -most:].flip(-1)


def _polar(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, (S, d, d) -> (S, d, d)."""
    u, _, vh = determined_svd(matrices)
    return u @ vh


def _principal(joint: JointMoments, rotations: Tensor) -> Tensor:
    """Turn the space so that its axes are the principal axes of the mean of all, the largest first."""
    variance = joint.with_sum(rotations).yy[: rotations.shape[1]]
    axes = torch.linalg.eigh(variance).eigenvectors.flip(-1)
    largest = axes.abs().argmax(-2, keepdim=True)
    return rotations @ (axes * axes.take_along_dim(largest, -2).sign())


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Σ^(1/2) and its pseudo-inverse; directions that do not vary are left out of both."""
    values, vectors = torch.linalg.eigh(covariance)
    varies = values > TOLERANCE * values[..., -1:]
    root = values.clamp(min=0).sqrt() * varies
    inverse = torch.where(varies, 1 / values.clamp(min=1e-300).sqrt(), 0.0)
    return vectors * root[..., None, :] @ vectors.mT, vectors * inverse[..., None, :] @ vectors.mT


def directions(joint: JointMoments) -> tuple[Tensor, Tensor]:
    """Find the principal axes of the mean of all models in the shared space, the largest first.

    Args:
        joint: of the embedded states u_i(x_i) of all models.

    Returns:
        The variance of the mean along each axis, (S, d): the eigenvalues of its covariance; and the share of the
        variance of the other models' mean along it that a model explains, the squared correlation, (k, S, d), which is
        0 where nothing varies.
    """
    covariance, models = joint.scatter / joint.n, len(joint.mean)
    variance, axes = torch.linalg.eigh(covariance.sum((0, 1)) / models**2)
    along = torch.einsum("sab,ijsac,scb->ijsb", axes, covariance, axes).flip(-1)  # (k, k, S, d)
    within = _within(along)
    shared = along.sum(1) - within
    others = along.sum((0, 1)) - 2 * along.sum(1) + within
    both = within * others
    varies = both > 1e-20 * both.amax(-1, keepdim=True)
    return variance.flip(-1), torch.where(
        varies, shared.square() / torch.where(varies, both, 1.0), 0.0
    )
