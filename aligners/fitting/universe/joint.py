"""Joint moments of k models on the same rows, and linear universes and shared directions from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.maps.base import MORE_ROWS
from aligners.maps.matrices import batch_inverse
from aligners.maps.solvers import determined_svd
from aligners.similarity.algebra.moments import Moments, squares

# Directions below this share of a model's largest variance do not vary (as in CCA).
TOLERANCE = 1e-8
# In the search for a linear universe: variance of the noise on standardised states,
# iterations of L-BFGS, and the smallest variance assumed of a feature of scaled states.
NOISE = 1e-3
ROUNDS = 60
SMALL = 1e-3
# Bounds on the sum over models of a direction's squared correlations: see `shared_variance`.
SHARED_BY_ALL = 0.75
SHARED_BY_ONE = 1.5


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
            moments: moments of `paired_rows`.
            models: k.
        """
        pairs = all_pairs(models)
        count = len(pairs)
        by_pair = []
        for part in moments[1:]:
            by_pair.append(part.unflatten(0, (count, -1)))
        mean_x, mean_y, xx, yy, xy = by_pair

        _, sites, width = mean_x.shape
        mean = mean_x.new_zeros(models, sites, width)
        scatter = xx.new_zeros(models, models, sites, width, width)
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
        sums = squares(_within(self.scatter))
        return sums.mean(-1) / self.n

    def scaled(self) -> Self:
        """The moments of states divided by one number per model and site, their root mean variance."""
        scale = self.variance.sqrt()
        both = torch.einsum("is,js->ijs", scale, scale)
        return self._replace(
            mean=self.mean / scale[..., None],
            scatter=self.scatter / both[..., None, None],
        )

    def own(self) -> Moments:
        """The moments of every model with itself, centred, at k · S places, model after model."""
        own = _within(self.scatter).flatten(0, 1)
        mean = self.mean.flatten(0, 1)
        zeros = torch.zeros_like(mean)
        return Moments(self.n, mean, zeros, own, own, own)

    def mapped(self, weights: Tensor) -> Moments:
        """The moments of every model's states with (x_i − x̄_i) W_i, at k · S places, model after model.

        Args:
            weights: W, (k, S, d, d).
        """
        moments = self.own()
        matrices = weights.flatten(0, 1)
        xy = moments.xx @ matrices
        yy = matrices.mT @ xy
        return moments._replace(yy=yy, xy=xy)


def _within(blocks: Tensor) -> Tensor:
    """The blocks of each model with itself, (k, k, ...) -> (k, ...)."""
    within = blocks.diagonal(dim1=0, dim2=1)
    return within.movedim(-1, 0)


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
    pairs = torch.tensor(all_pairs(models), device=states.device)
    x = by_model[pairs[:, 0]]
    y = by_model[pairs[:, 1]]
    return x.flatten(0, 1), y.flatten(0, 1)


# ---------------------------------------------------------------------- the best linear universe


def linear_universe(joint: JointMoments, widths: Sequence[int], shared: int) -> Tensor:
    """The linear bijections whose first m coordinates map the scaled states of k models into each other best.

    W = [A, R] is the bijection of a model, and B the first m rows of W⁻¹. L-BFGS minimises, site by site, the mean over
    i ≠ j of E ‖(x_i + ε) A_i B_j − x_j‖² / d_j. The noise ε is proportional to each feature's standard deviation.
    Without noise, directions that do not vary would be free. Noise of one size for all features would leave nothing but
    the few large features that language models have. For the same reason the search works on standardised states and
    starts from their `shared_rotations`.

    This settles the space up to a linear map. We choose the space in which the mean of B_j B_jᵀ over the models is the
    identity, so that an error counts alike in every direction once it is mapped back. Of R only the span is settled:
    its columns become orthonormal.

    Args:
        joint: of the fitting rows.
        widths: widths of the models; states of narrower ones end in zeros.
        shared: m.

    Returns:
        W, (k, S, d, d), for centred states divided by their root mean variance; zero beyond a model's width.
    """
    scaled = joint.scaled()
    sums = squares(_within(scaled.scatter))
    variances = (sums / scaled.n).clamp(min=SMALL)
    deviations = variances.sqrt()  # (k, S, d)
    sizes = torch.einsum("isa,jsb->ijsab", deviations, deviations)
    standardised = scaled._replace(scatter=scaled.scatter / sizes)
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
        solved = search.run()
        for maps, weights in zip(found, solved, strict=True):
            width = len(weights)
            maps[site, :width, :width] = weights
    return found


@dataclass
class _Member:
    """One model in a search, of width d.

    Attributes:
        deviations: deviations of its features, (d,).
        noisy: covariance of its standardised states with noise, (d, d).
        weights: W of standardised states, (d, d).
    """

    deviations: Tensor
    noisy: Tensor
    weights: Tensor

    @property
    def width(self) -> int:
        return len(self.deviations)

    def back(self, shared: int) -> Tensor:
        """B, (m, d)."""
        inverse = batch_inverse(self.weights)
        return inverse[:shared] * self.deviations


class _LeastError:
    """The search of `linear_universe` at one site.

    Args:
        covariances: of standardised states, (k, k, d, d).
        starts: starting points, (k, d, d).
        deviations: deviations of the features, (k, d).
        widths: widths of the models.
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
        self.shared = shared
        self.members: list[_Member] = []
        for i, width in enumerate(widths):
            own = covariances[i, i, :width, :width]
            identity = torch.eye(width).to(own)
            start = starts[i, :width, :width].clone()
            member = _Member(
                deviations=deviations[i, :width],
                noisy=own + NOISE * identity,
                weights=start.requires_grad_(),
            )
            self.members.append(member)
        self.between: list[tuple[int, int, Tensor]] = []
        numbers = range(len(widths))
        for i, j in permutations(numbers, 2):
            target = self.members[j]
            block = covariances[i, j, : widths[i], : target.width]
            weighted = block * target.deviations
            self.between.append((i, j, weighted))

    @torch.enable_grad()
    def run(self) -> list[Tensor]:
        """Return W of each model, (d_i, d_i)."""
        optimizer = torch.optim.LBFGS(
            [member.weights for member in self.members],
            max_iter=ROUNDS,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            error = self._error()
            error.backward()
            return error

        optimizer.step(closure)
        return self._settled()

    def _error(self) -> Tensor:
        """Return the error that is minimised, up to a constant."""
        into = []
        back = []
        spreads = []  # AᵀΣA
        sizes = []  # B Bᵀ / d
        for member in self.members:
            a = member.weights[:, : self.shared]
            b = member.back(self.shared)
            into.append(a)
            back.append(b)
            spreads.append(a.mT @ member.noisy @ a)
            sizes.append(b @ b.mT / member.width)

        spread = torch.stack(spreads)
        size = torch.stack(sizes)
        of_all = spread.sum(0) * size.sum(0)
        of_itself = spread * size
        error = of_all.sum() - of_itself.sum()
        for i, j, block in self.between:
            mapped = into[i].mT @ block
            agreement = mapped * back[j]
            width = self.members[j].width
            error = error - 2 * agreement.sum() / width
        return error

    @torch.no_grad()
    def _settled(self) -> list[Tensor]:
        """Return the maps into the space in which the mean of B Bᵀ is the identity, with orthonormal rests."""
        shared = self.shared
        back = [member.back(shared) for member in self.members]
        sizes = torch.stack([b @ b.mT for b in back])
        mean = sizes.mean(0)
        values, vectors = torch.linalg.eigh(mean)
        root = _with_values(vectors, values.sqrt())

        found = []
        for member, b in zip(self.members, back, strict=True):
            into = member.weights[:, :shared] @ root
            into = into / member.deviations[:, None]
            _, _, vh = torch.linalg.svd(b)
            rest = vh[shared:].mT
            whole = torch.cat([into, rest], 1)
            found.append(whole)
        return found


def shared_rotations(joint: JointMoments, widths: Sequence[int], shared: int) -> Tensor:
    """Find rotations of each model's own space whose first m coordinates agree, (k, S, d, d).

    They are the nearest to the models' parts of the m leading eigenvectors of the matrix of all blocks.

    Args:
        joint: of the fitting rows, `scaled`.
        widths: widths of the models; states of narrower ones end in zeros.
        shared: m.
    """
    parts, _ = _leading(joint.scatter, shared)
    found = torch.zeros_like(joint.scatter[0])
    for i, width in enumerate(widths):
        part = parts[i, :, :width]
        u, _, vh = determined_svd(part)
        polar = u @ vh  # the nearest orthonormal columns
        u, _, _ = torch.linalg.svd(polar)
        rest = u[..., shared:]
        rotation = torch.cat([polar, rest], -1)
        found[i, :, :width, :width] = rotation
    return found


# ---------------------------------------------------------------------- canonical correlations of all models


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
        ValueError: there are no more rows than the models have dimensions together, so that any states would fit.
    """
    varies = squares(_within(joint.scatter)) > 0  # padding does not vary
    each_site = varies.sum((0, 2))
    dimensions = int(each_site.max())
    if joint.n <= dimensions:
        raise UserError(
            f"MAXVAR expects more fitting rows than the {len(joint.mean)} models have dimensions together, "
            f"{dimensions}, but got {int(joint.n)}: with fewer, any states would agree. {MORE_ROWS}"
        )
    roots, inverses, white = _whitened(joint)
    width = joint.mean.shape[-1]
    vectors, values = _leading(white, width)
    values = values.clamp(min=0)
    size = values.sqrt().unsqueeze(1)
    into = inverses @ vectors * size
    back = roots @ vectors * size
    return into, back.mT


def shared_variance(joint: JointMoments) -> tuple[Tensor, Tensor]:
    """Return how much of each model's variance lies in directions of all models, of some, or of it alone.

    This is MAXVAR over all directions that the models have together: those of unit variance along which the sum over
    models of squared correlations is largest. The sum is k for a direction that all models have, and 1 for one that a
    single model has. A direction counts as shared by all from `SHARED_BY_ALL` · k on, and as one model's own below
    `SHARED_BY_ONE`. Together the directions hold every model's whole variance.

    Args:
        joint: of the fitting rows; many more than all models together have dimensions.

    Returns:
        Shares of the variance in directions of all, some and one model, (3, k, S), and the share in the first m
        directions, m = 1, ..., k d: (k, S, k d).
    """
    models, _, width = joint.mean.shape
    roots, _, white = _whitened(joint)
    vectors, values = _leading(white, models * width)
    loadings = (roots @ vectors).square()
    sizes = values.clamp(min=0)
    held = loadings.sum(-2) * sizes  # (k, S, k d)
    covariance = _within(joint.scatter / joint.n)
    variances = squares(covariance)
    held /= variances.sum(-1, keepdim=True)

    everyone = values >= SHARED_BY_ALL * models
    alone = values < SHARED_BY_ONE
    some = ~(everyone | alone)
    groups = torch.stack([everyone, some, alone])
    by_group = held * groups[:, None]
    return by_group.sum(-1), held.cumsum(-1)


def _whitened(joint: JointMoments) -> tuple[Tensor, Tensor, Tensor]:
    """Return roots of the models' covariances, their pseudo-inverses, and the covariances of whitened states."""
    covariance = joint.scatter / joint.n
    roots, inverses = _roots(_within(covariance))
    white = torch.einsum("isab,ijsbc,jscd->ijsad", inverses, covariance, inverses)
    return roots, inverses, white


def _leading(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return leading eigenvectors of the block matrices (k, k, S, d, d), as (k, S, d, most), and values (S, most)."""
    models, _, _, width, _ = blocks.shape
    by_rows = blocks.permute(2, 0, 3, 1, 4)  # (S, k, d, k, d)
    rows = by_rows.flatten(3, 4)
    whole = rows.flatten(1, 2)
    values, vectors = torch.linalg.eigh(whole)
    leading = vectors[..., -most:].flip(-1)
    parts = leading.unflatten(1, (models, width))
    leading_values = values[:, -most:].flip(-1)
    return parts.movedim(1, 0), leading_values


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ^(1/2) and its pseudo-inverse; both leave out directions that do not vary."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values[..., -1:]
    varies = values > TOLERANCE * largest
    sizes = values.clamp(min=0).sqrt()
    safe = values.clamp(min=1e-300).sqrt()
    inverses = torch.where(varies, 1 / safe, 0.0)
    root = _with_values(vectors, sizes * varies)
    inverse = _with_values(vectors, inverses)
    return root, inverse


def _with_values(vectors: Tensor, values: Tensor) -> Tensor:
    """Return the symmetric matrices with these eigenvectors and eigenvalues."""
    scaled = vectors * values[..., None, :]
    return scaled @ vectors.mT


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
    of_all = covariance.sum((0, 1))
    of_mean = of_all / models**2
    variance, axes = torch.linalg.eigh(of_mean)
    along = torch.einsum("sab,ijsac,scb->ijsb", axes, covariance, axes)
    along = along.flip(-1)  # (k, k, S, d)

    own = _within(along)
    with_all = along.sum(1)
    shared = with_all - own
    whole = along.sum((0, 1))
    others = whole - 2 * with_all + own
    both = own * others
    largest = both.amax(-1, keepdim=True)
    varies = both > 1e-20 * largest
    safe = torch.where(varies, both, 1.0)
    explained = shared.square() / safe
    explained = torch.where(varies, explained, 0.0)
    return variance.flip(-1), explained
