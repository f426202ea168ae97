"""What invertible networks are built of: couplings, rotations, matrices cheap to invert, and their starting points."""

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from aligners.maps.base import BankLinear, deviation
from aligners.maps.matrices import batch_inverse
from aligners.maps.solvers import (
    RIDGES,
    determined_svd,
    procrustes_rotation,
    ridge_regression,
)
from aligners.similarity.algebra.moments import Moments, squares


class Conditioner(nn.Module):
    """The network inside a coupling: (S, N, d_in) -> (S, N, d_out), zero at the start.

    Args:
        sites: S.
        d_in: width of its input.
        d_out: width of its output.
        hidden: width of its hidden layers.
        depth: number of hidden layers, at least 1.
    """

    def __init__(
        self, sites: int, d_in: int, d_out: int, hidden: int, depth: int
    ) -> None:
        super().__init__()
        widths = [d_in] + [hidden] * depth
        self.hidden = nn.ModuleList(
            BankLinear(sites, a, b) for a, b in pairwise(widths)
        )
        self.last = BankLinear(sites, hidden, d_out)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_in) -> (S, N, d_out)."""
        for layer in self.hidden:
            x = gelu(layer(x))
        return self.last(x)


class AffineCoupling(nn.Module):
    """y_b = x_b ⊙ exp(tanh(r)) + t, where (r, t) is computed from x_a, which passes unchanged.

    The log-scale s = tanh(r) lies in [-1, 1], so neither direction can overflow. A new coupling is the identity.

    Reference: Dinh, Sohl-Dickstein and Bengio 2016, "Density estimation using Real NVP", arXiv 1605.08803,
    eq. 4-8.

    Args:
        sites: S.
        d_keep: width of x_a.
        d_change: width of x_b.
        hidden: width of the conditioner's hidden layers.
        depth: number of the conditioner's hidden layers.
    """

    def __init__(
        self, sites: int, d_keep: int, d_change: int, hidden: int, depth: int
    ) -> None:
        super().__init__()
        self.conditioner = Conditioner(sites, d_keep, 2 * d_change, hidden, depth)

    def forward(self, x_a: Tensor, x_b: Tensor) -> Tensor:
        """y_b, (S, N, d_change)."""
        return _Affine.apply(x_b, self.conditioner(x_a), False)

    def inverse(self, x_a: Tensor, y_b: Tensor) -> Tensor:
        """x_b, (S, N, d_change)."""
        return _Affine.apply(y_b, self.conditioner(x_a), True)

    def log_scale(self, x_a: Tensor) -> Tensor:
        """s, (S, N, d_change); its sum over the last axis is the log-determinant of `forward`."""
        return self.conditioner(x_a).chunk(2, dim=-1)[0].tanh()


class _Affine(torch.autograd.Function):
    """x ⊙ exp(tanh(r)) + t for conditions (r, t), or its inverse (y − t) ⊙ exp(−tanh(r)).

    Its backward pass writes the gradient of the conditions into one tensor; autograd would make two and join them.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, conditions: Tensor, inverse: bool) -> Tensor:
        raw, shift = conditions.chunk(2, dim=-1)
        log_scale = raw.tanh()
        scale = (-log_scale if inverse else log_scale).exp()
        result = (
            (given - shift).mul_(scale)
            if inverse
            else torch.addcmul(shift, given, scale)
        )
        ctx.inverse = inverse
        ctx.save_for_backward(result if inverse else given, log_scale, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, log_scale, scale = ctx.saved_tensors
        scaled = grad * scale
        if ctx.inverse:
            return scaled, _join(grad * x, log_scale, scaled).neg_(), None
        return scaled, _join(scaled * x, log_scale, grad), None


def _join(grad_log_scale: Tensor, log_scale: Tensor, grad_shift: Tensor) -> Tensor:
    """Return the gradient of (r, t), given those of tanh(r) and t."""
    width = log_scale.shape[-1]
    joined = grad_shift.new_empty(*grad_shift.shape[:-1], 2 * width)
    torch.addcmul(
        grad_log_scale,
        grad_log_scale,
        log_scale.square(),
        value=-1,
        out=joined[..., :width],
    )
    joined[..., width:] = grad_shift
    return joined


class ShuffledHadamard(nn.Module):
    """A fixed rotation: shuffle the features, flip some signs, then mix blocks of them by Hadamard matrices.

    Blocks have 4, 16 or 64 features, whose Hadamard matrices have entries ±1/2, ±1/4 and ±1/8: no entry is rounded,
    so the transpose is the inverse in any precision. If the width is no multiple of 4, up to three features are
    shuffled but not mixed. One product costs 64 d multiplications a row, not d².

    The same at every site and for every seed: it is part of the architecture, and no checkpoint holds it.

    Reference: Ailon and Chazelle 2009, "The Fast Johnson-Lindenstrauss Transform", SIAM J. Comput. 39, section 2.

    Args:
        width: d.
        number: the seed; each number gives another rotation of this width.
    """

    order: Tensor
    back: Tensor
    signs: Tensor
    block: Tensor

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        order = torch.randperm(width, generator=draw)
        fours, two = (
            next(power for power in (3, 2, 1, 0) if 4**power <= width),
            torch.tensor([[1.0, 1.0], [1.0, -1.0]]),
        )
        for name, value in {
            "order": order,
            "back": order.argsort(),
            "signs": 2.0 * torch.randint(2, (width,), generator=draw) - 1,
            "block": reduce(
                torch.kron, [torch.kron(two, two) / 2] * fours, torch.ones(1, 1)
            ),
        }.items():
            self.register_buffer(name, value, persistent=False)
        self.mixed = width - width % len(self.block)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return self._mix(_shuffled(x, self.order) * self.signs.to(x.dtype))

    def inverse(self, y: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return _shuffled(self._mix(y) * self.signs.to(y.dtype), self.back)

    def _mix(self, x: Tensor) -> Tensor:
        """Multiply by the blocks, which are symmetric and their own inverses."""
        blocks = x[..., : self.mixed].unflatten(
            -1, (-1, len(self.block))
        ) @ self.block.to(x.dtype)
        mixed = blocks.flatten(-2)
        return (
            mixed
            if self.mixed == x.shape[-1]
            else torch.cat((mixed, x[..., self.mixed :]), -1)
        )


def _shuffled(x: Tensor, order: Tensor) -> Tensor:
    """Features in another order. On a CPU, `index_select` would take half as long again along the last dimension."""
    return x.gather(-1, order.expand_as(x))


class TriangularPair(nn.Module):
    """x ↦ x (I + L) (D + U): L strictly lower and U strictly upper triangular, D a positive diagonal.

    It starts at the identity, where a step can move the product in any direction. Its inverse solves two triangular
    systems, which takes as many multiplications as two matrix products; no matrix is inverted.

    Reference: Kingma and Dhariwal 2018, "Glow", arXiv 1807.03039, section 3.2.

    Args:
        sites: S.
        width: d.
    """

    def __init__(self, sites: int, width: int) -> None:
        super().__init__()
        # the diagonal holds the logarithm of D, all else is L and U
        self.entries = nn.Parameter(torch.zeros(sites, width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        lower, upper = self._factors()
        return x @ lower @ upper

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        lower, upper = self._factors()
        y = torch.linalg.solve_triangular(upper, y, upper=True, left=False)
        return torch.linalg.solve_triangular(
            lower, y, upper=False, left=False, unitriangular=True
        )

    def log_det(self) -> Tensor:
        """The logarithm of the determinant, (S,)."""
        return self.entries.diagonal(dim1=-2, dim2=-1).sum(-1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """I + L and D + U, each (S, d, d)."""
        diagonal = self.entries.diagonal(dim1=-2, dim2=-1)
        lower = self.entries.tril(-1) + torch.eye(
            diagonal.shape[-1], dtype=diagonal.dtype, device=diagonal.device
        )
        return lower, self.entries.triu(1) + torch.diag_embed(diagonal.exp())


Start = Literal["identity", "procrustes", "linear", "covariance", "best"]


RIGID: tuple[Start, ...] = ("identity", "procrustes")  # starts that stretch nothing


# Least squares shrinks what it cannot predict, in the limit to zero, and the start needs a usable inverse.
SMALLEST_SINGULAR_VALUE = 0.03


# States after a LayerNorm do not vary in one direction: without a floor their covariance has no inverse square root.
SMALLEST_VARIANCE = 1e-4


# A feature with less than this share of the usual variance does not vary.
NO_VARIANCE = 1e-12


JUDGED = 0.5


class StartingMap(NamedTuple):
    """Where a bijection starts, between centred states divided by their model's root mean variance.

    Attributes:
        weight: M, (S, d, d).
        inverse: M⁻¹, (S, d, d).
        taken: the place in `START_NAMES` of what was taken, (S,).
        error: its FVU on rows that it was not solved on, or the mean of both ways', (S,).
    """

    weight: Tensor
    inverse: Tensor
    taken: Tensor
    error: Tensor


def invertible_start(moments: Moments, start: Start, both_ways: bool) -> StartingMap:
    """Find each site's starting map.

    `best` takes, site by site, the candidate with the least error on rows that it was not solved on: its FVU, plus that
    of its inverse under `both_ways`, where each is solved on one half of the rows and judged on the other. What is
    returned is solved on all of them. See `thinned` for how moments, which have no rows any more, are parted.

    Args:
        moments: moments of the fitting rows; the widths are equal.
        start: the map.
        both_ways: whether the error of the inverse counts.
    """
    moments = _scaled(moments)
    names = START_NAMES if start == "best" else (start,)
    maps = torch.stack([_MAPS[name](moments) for name in names])
    inverses = batch_inverse(maps)
    solved, judged = thinned(moments, JUDGED)
    errors = torch.stack(
        [_error(_MAPS[name](solved), judged, both_ways) for name in names]
    )
    chosen = errors.argmin(0)
    sites = torch.arange(maps.shape[1], device=maps.device)
    known = torch.tensor(
        [START_NAMES.index(name) for name in names], device=maps.device
    )
    ways = 2 if both_ways else 1
    return StartingMap(
        maps[chosen, sites],
        inverses[chosen, sites],
        known[chosen],
        errors[chosen, sites] / ways,
    )


def calm_space(moments: Moments, start: Tensor, rigid: Tensor) -> tuple[Tensor, Tensor]:
    """Find the space in which steps of matrices move a map and its inverse least, the map being M at the start.

    A step changes all entries of a matrix alike, so it adds to a state xA of that space noise of one size in every
    direction, in proportion to the state's norm. In Y's space that is noise through A⁻¹M, in X's, on the way back,
    through A⁻¹. Both together are least, per size of step, where A Aᵀ is the geometric mean of Σ⁻¹ and I + M Mᵀ: the
    symmetric W with W Σ W = I + M Mᵀ. (By Cauchy and Schwarz, tr(W Σ) · tr(W⁻¹ (I + M Mᵀ)) is then least.)

    Args:
        moments: of the fitting rows; Σ is the covariance of x, divided by its mean variance.
        start: M, (S, d, d).
        rigid: (S,) where M stretches nothing, and so amplifies nothing: there A is I.

    Returns:
        A (S, d, d), symmetric, which gives states of mean variance 1, and A⁻¹ (S, d, d).
    """
    moments = _scaled(moments)
    covariance = moments.xx / moments.n
    root, inverse = _roots(covariance)
    same = torch.eye(start.shape[-1]).to(start)
    both = same + start @ start.mT
    into, out_of = _roots(inverse @ _roots(root @ both @ root)[0] @ inverse)
    scale = (
        (into * (covariance @ into))
        .sum((1, 2), keepdim=True)
        .div(start.shape[-1])
        .sqrt()
    )
    stretched = ~rigid[:, None, None]
    return torch.where(stretched, into / scale, same), torch.where(
        stretched, out_of * scale, same
    )


def thinned(moments: Moments, share: float) -> tuple[Moments, Moments]:
    """Part the moments of n rows in two, as if those of some rows had been gathered apart.

    The scatter of n normal rows is a Wishart matrix with n − 1 degrees of freedom, T = L Lᵀ. For B from the matrix beta
    distribution, L B Lᵀ and T − L B Lᵀ are independent Wishart matrices (Muirhead 1982, "Aspects of Multivariate
    Statistical Theory", section 3.3): just what two sets of rows would give. The draw is the same at every site and in
    every run. Where rows are alike, as neighbours in a text are, so are the two sets, as after a random split.

    Args:
        moments: of n rows, at least 2.
        share: of the rows in the second set.

    Returns:
        The moments of the two sets, with the means of all rows.
    """
    d, rows = moments.xx.shape[-1], int(moments.n) - 1
    rank = min(d + moments.yy.shape[-1], rows)
    second = max(1, round(share * rows))
    first = max(1, rows - second)
    draw = np.random.default_rng(0)
    of_first, of_second = (
        torch.from_numpy(_scatter(n, rank, draw)).to(moments.xx)
        for n in (first, second)
    )
    joint = torch.cat(
        (
            torch.cat((moments.xx, moments.xy), 2),
            torch.cat((moments.xy.mT, moments.yy), 2),
        ),
        1,
    )
    values, vectors = torch.linalg.eigh(joint)
    # signs of eigenvectors are rounding's to choose: fix them
    fixed = torch.arange(
        1.0, 1 + values.shape[-1], dtype=values.dtype, device=values.device
    ).cos()
    vectors = vectors * (fixed @ vectors).sign()[:, None]
    root = vectors[..., -rank:] * values[..., -rank:].clamp(min=0).sqrt()[:, None]
    factor = torch.linalg.cholesky(of_first + of_second)
    parts = []
    for n, scatter in ((first, of_first), (second, of_second)):
        half = torch.linalg.solve_triangular(factor, scatter, upper=False)
        beta = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        part = root @ beta @ root.mT
        count = torch.full_like(moments.n, n + 1)
        parts.append(
            moments._replace(
                n=count, xx=part[:, :d, :d], yy=part[:, d:, d:], xy=part[:, :d, d:]
            )
        )
    return parts[0], parts[1]


def _scatter(rows: int, width: int, draw: np.random.Generator) -> np.ndarray:
    """The sum of z zᵀ over so many standard normal rows z, (width, width).

    Of many rows only its Cholesky factor is drawn (Bartlett 1933, "On the theory of statistical regression").
    """
    if rows < width:
        drawn = draw.standard_normal((rows, width))
        return drawn.T @ drawn
    factor = np.zeros((width, width))
    factor[np.tril_indices(width, -1)] = draw.standard_normal(width * (width - 1) // 2)
    np.fill_diagonal(factor, np.sqrt(draw.chisquare(rows - np.arange(width))))
    return factor @ factor.T


def _scaled(moments: Moments) -> Moments:
    """Moments of states divided by their root mean variance."""
    x, y = (deviation(scatter, moments.n) for scatter in (moments.xx, moments.yy))
    return moments._replace(
        xx=moments.xx / x.square(), yy=moments.yy / y.square(), xy=moments.xy / (x * y)
    )


def _linear(moments: Moments) -> Tensor:
    """Least squares, the smallest singular values raised, between states whose features have one size."""
    of_x, of_y = (feature_deviations(scatter) for scatter in (moments.xx, moments.yy))
    weight = ridge_regression(moments, RIDGES)[0] * of_x[..., None] / of_y[:, None]
    u, s, vh = determined_svd(weight)
    raised = u * s.clamp(min=SMALLEST_SINGULAR_VALUE * s[:, :1])[:, None] @ vh
    return raised / of_x[..., None] * of_y[:, None]


def _covariance(moments: Moments) -> Tensor:
    """Find the map with the least error both ways among those that turn X's covariance into Y's.

    M = Σ_x^(−1/2) R Σ_y^(1/2), R orthogonal. The cross terms of both errors, each relative to its total variance (d on
    scaled states), are linear in R: R = U Vᵀ of the SVD of Σ_x^(−1/2) Σ_xy Σ_y^(1/2) + Σ_x^(1/2) Σ_xy Σ_y^(−1/2).
    """
    (root_x, inverse_x), (root_y, inverse_y) = (
        _roots(scatter / moments.n) for scatter in (moments.xx, moments.yy)
    )
    cross = moments.xy / moments.n
    u, _, vh = determined_svd(inverse_x @ cross @ root_y + root_x @ cross @ inverse_y)
    return inverse_x @ u @ vh @ root_y


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ^(1/2) and Σ^(−1/2), small variances raised.

    They are raised between features of one size: next to a feature of 10,000 times the others' size, these would all
    be small.
    """
    sizes = feature_deviations(covariance)
    both = sizes[..., None] * sizes[:, None]
    values, vectors = torch.linalg.eigh(covariance / both)
    raised = vectors * values.clamp(min=SMALLEST_VARIANCE)[:, None] @ vectors.mT
    values, vectors = torch.linalg.eigh(raised * both)
    root = values.sqrt()[:, None]
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT


def feature_deviations(scatter: Tensor) -> Tensor:
    """The root of each feature's sum of squares, (S, d); of one that does not vary the root of the median of all."""
    variance = squares(scatter)
    usual = variance.median(-1, keepdim=True).values
    usual = torch.where(usual > 0, usual, variance.mean(-1, keepdim=True))
    return torch.where(variance > NO_VARIANCE * usual, variance, usual).sqrt()


_MAPS: dict[Start, Callable[[Moments], Tensor]] = {
    "identity": lambda moments: (
        torch.eye(moments.xx.shape[-1]).to(moments.xx).expand_as(moments.xx)
    ),
    "procrustes": lambda moments: procrustes_rotation(moments)[0],
    "linear": _linear,
    "covariance": _covariance,
}


START_NAMES: tuple[Start, ...] = get_args(Start)[: len(_MAPS)]


def _error(weight: Tensor, moments: Moments, both_ways: bool) -> Tensor:
    """The criterion of `invertible_start`, (S,)."""
    there = _fvu(weight, moments.xx, moments.yy, moments.xy)
    return (
        there + _fvu(batch_inverse(weight), moments.yy, moments.xx, moments.xy.mT)
        if both_ways
        else there
    )


def _fvu(weight: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    """FVU of x ↦ x W from moments, (S,)."""
    total = squares(yy).sum(-1)
    return (
        1
        + ((weight * (xx @ weight)).sum((1, 2)) - 2 * (weight * xy).sum((1, 2))) / total
    )
