"""Stitching layers: affine maps whose parameters are trained on activations or through a frozen tail."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from aligners.errors import UserError, check_known, check_range
from aligners.maps.base import Aligner, BankLinear, Scaled
from aligners.maps.linear import Affine
from aligners.maps.matrices import batch_inverse, batch_solve, identity_like
from aligners.maps.solvers import (
    NULL,
    deviations,
    fixed_direction,
    least_squares,
    procrustes_rotation,
)
from aligners.similarity.algebra.moments import Moments, squares

# How far from zero, in standard deviations, a start puts what the LayerNorm normalises. At 0 the layer starts by giving
# all rows the same length: that costs most where lengths vary, and nothing where a LayerNorm made the states. The
# further from zero, the less it costs, and the less use the layer can learn to make of its LayerNorm.
_LEVEL = 4.0
_SMALLEST_VARIANCE = 1e-6  # of a feature, as a share of the mean variance
_ORTHOGONAL = 1e-4  # how far WᵀW may be from the identity: no further than single precision takes it

Start = Literal["identity", "linear", "procrustes", "random"]


class Started(Scaled):
    """What stitching layers share: a linear start, and the FVU as their loss on activations.

    Until `fit` or `adopt` is called, states are neither centred nor scaled, and a start that needs moments is the
    identity (at unequal widths, padded with zeros or cut).
    """

    starts: ClassVar[tuple[str, ...]] = get_args(Start)

    def __init__(
        self, sites: int, d_x: int, d_y: int, start: Start, ridge: float = 0.0
    ) -> None:
        super().__init__(sites, d_x, d_y)
        check_known(self.starts, start=start)
        if start == "identity" and d_x != d_y:
            raise UserError(
                f"{type(self).__name__} can start at the identity only between equal widths, but `d_x` is {d_x} and "
                f'`d_y` is {d_y}. Set `start` to "linear", "procrustes" or "random".'
            )
        check_range(least=0, ridge=ridge)
        self.start = start
        self.ridge = ridge
        if start == "linear":
            self.rows_needed = d_x + 1  # one more than there are unknowns

    @abstractmethod
    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments) -> None:
        """Start at x ↦ (x − x̄) W + o, for W (S, d_x, d_y) and o (S, 1, d_y) in float64 and the x̄ of the scaling."""

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Take centres, scales and the start from the moments.

        Raises:
            ValueError: the states of a site are constant or not finite, or least squares cannot be solved.
        """
        deviations(moments, constant_neurons=True)
        self.scaling.fit(moments)
        if self.start == "random":
            return
        offset = moments.mean_y
        if self.start == "identity":
            same = identity_like(moments.xx)
            weight = same.repeat(self.sites, 1, 1)
            offset = moments.mean_x
        elif self.start == "linear":
            weight = least_squares(moments, self.ridge)
        else:
            weight, _ = procrustes_rotation(moments)
        self._begin(weight, offset[:, None], moments)

    @torch.no_grad()
    def adopt(self, aligner: Aligner, moments: Moments) -> None:
        """Start at a map that is already fitted, in place of `start`.

        Args:
            aligner: a fitted closed form (`linear`, `permutation` and `canonical` of this package) of the same sites
                and widths.
            moments: moments of rows such as it was fitted on, from which centres and scales are taken.

        Raises:
            ValueError: the aligner is no such map, or this layer cannot start at it.
        """
        sizes = (self.sites, self.d_x, self.d_y)
        others = (aligner.sites, aligner.d_x, aligner.d_y)
        if not isinstance(aligner, Affine) or sizes != others:
            raise UserError(
                f"Expected `aligner` to be a closed form (x − x̄) W + ȳ with (sites, d_x, d_y) = {sizes}, such as "
                f"Linear, Procrustes or CCA, but got {type(aligner).__name__} with {others}. Train an aligner of "
                "another kind as it is, and set `start` for the identity."
            )
        self.scaling.fit(moments)
        weight = aligner.weight.double()
        mean_x = aligner.mean_x.double()
        mean_y = aligner.mean_y.double()
        shift = moments.mean_x[:, None] - mean_x
        offset = mean_y + shift @ weight
        self._begin(weight, offset, moments)

    def start_names(self) -> Sequence[str]:
        """`start`, at every site."""
        return [self.start] * self.sites

    def _scaled(self, weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Convert W and o of `_begin` to centred and scaled states."""
        scale_x = self.scaling.scale_x.double()
        scale_y = self.scaling.scale_y.double()
        mean_y = self.scaling.mean_y.double()
        centred = offset - mean_y
        return weight * scale_x / scale_y, centred / scale_y


class AffineLayer(Started):
    """y = h W + b, followed by a LayerNorm over the features of y if asked for (Brown et al. 2023, §3 and C.1).

    W and b act on centred and scaled states (`Scaling`). This changes what a step of the optimiser does, but not what
    can be learned.

    With `norm`, the layer can represent exactly those targets whose rows, after one shift and one gain per feature,
    have mean zero and equal lengths: states that are themselves the output of a LayerNorm. To let rows of other lengths
    pass at the start as well, what is normalised then lies four deviations from zero, along the pattern of features in
    which Y varies least. Two things are lost: that direction, and the mean over standardised features. Along the
    pattern, a row of r times the usual length is off by about (r² − 1)/8 deviations.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        start: where training begins: "identity", x as it is (equal widths only); "linear", least squares;
            "procrustes", the (semi-)orthogonal map; "random", the draw of `torch.nn.Linear` on centred and scaled
            states, the same at every site.
        norm: whether a LayerNorm with gain and bias follows.
        ridge: ridge of least squares: the penalty of each feature, relative to its own variance.

    Raises:
        ValueError: the start is unknown or impossible, or the ridge is negative.
    """

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        start: Start = "linear",
        ridge: float = 1e-6,
        norm: bool = False,
    ) -> None:
        super().__init__(sites, d_x, d_y, start, ridge)
        self.affine = BankLinear(sites, d_x, d_y)
        if start != "random":
            padded = torch.eye(d_x, d_y)
            _set(self.affine, padded)
        self.norm = norm
        if norm:
            gain = torch.ones(sites, 1, d_y)
            shift = torch.zeros(sites, 1, d_y)
            self.gain = nn.Parameter(gain)
            self.shift = nn.Parameter(shift)

    def _mapped(self, x: Tensor) -> Tensor:
        x = self.scaling.scale(x)
        y = self.affine(x)
        if not self.norm:
            return y
        features = (self.d_y,)
        normalised = nn.functional.layer_norm(y, features)
        return torch.addcmul(self.shift, normalised, self.gain)

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments) -> None:
        weight, offset = self._scaled(weight, offset)
        if self.norm:
            weight, offset = self._begin_norm(weight, offset, moments)
        _set(self.affine, weight, offset)

    def _begin_norm(
        self, weight: Tensor, offset: Tensor, moments: Moments
    ) -> tuple[Tensor, Tensor]:
        """Set gain and shift; return W and b with which the layer, LayerNorm included, is nearest to x W + o."""
        deviation = _feature_deviations(moments)
        pattern = _steady_pattern(moments, deviation)
        deviation = deviation / self.scaling.scale_y
        weight = weight / deviation
        square = self._mean_square(weight, moments)
        level = _LEVEL * square.sqrt()
        size = (level.square() + square).sqrt()
        self.gain.copy_(deviation * size)
        shift = offset - level * deviation * pattern
        self.shift.copy_(shift)
        return weight, level * pattern

    def _mean_square(self, weight: Tensor, moments: Moments) -> Tensor:
        """Return the mean square of x W over rows and features, for x centred and scaled: (S, 1, 1)."""
        scale = self.scaling.scale_x.double()
        total_variance = moments.n * scale.square()
        covariance = moments.xx / total_variance
        products = weight * (covariance @ weight)
        of_features = products.sum(1, keepdim=True)
        return of_features.mean(-1, keepdim=True)


class LowRank(Started):
    """y = h U V + b with U (d_x, r) and V (r, d_y): r directions of X's centred states reach r directions of Y's.

    A start is the map of rank r whose images of the fitting rows are nearest to those of the full map. For "linear"
    that is reduced-rank regression (Izenman 1975); "identity" projects on the r leading principal components of X.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        rank: r, at least 1 and at most the smaller width.
        start: as for `AffineLayer`, cut to rank r.
        ridge: ridge of least squares: the penalty of each feature, relative to its own variance.

    Raises:
        ValueError: the rank is impossible, the start is unknown or impossible, or the ridge is negative.
    """

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        start: Start = "linear",
        ridge: float = 1e-6,
        rank: int,
    ) -> None:
        super().__init__(sites, d_x, d_y, start, ridge)
        check_range(least=1, most=min(d_x, d_y), rank=rank)
        self.rank = rank
        self.down = BankLinear(sites, d_x, rank).weight
        self.up = BankLinear(sites, rank, d_y)
        if start != "random":
            self._begin_cut()

    @torch.no_grad()
    def _begin_cut(self) -> None:
        """Start at the identity, truncated to rank r."""
        down = torch.eye(self.d_x, self.rank)
        up = torch.eye(self.rank, self.d_y)
        self.down.copy_(down)
        _set(self.up, up)

    def _mapped(self, x: Tensor) -> Tensor:
        x = self.scaling.scale(x)
        return self.up(x @ self.down)

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments) -> None:
        weight, offset = self._scaled(weight, offset)
        down, up = low_rank(weight, moments.xx, self.rank)
        self.down.copy_(down)
        _set(self.up, up, offset)


class Orthogonal(Started):
    """y = (x − x̄) R + b, with R orthogonal after every step: R = R₀ (I − A)⁻¹ (I + A) for A skew-symmetric.

    The d (d − 1)/2 entries of A below its diagonal are the parameters, zero at the start, where the map is R₀. A
    Cayley transform has determinant 1, so the sign of det R is that of R₀; a turn by exactly 180° is all that it cannot
    reach. Lengths are kept, not scaled: the states of X and Y should be of one size.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states, equal to `d_x`.
        start: R₀: "identity", "procrustes", or "random", drawn uniformly, the same at every site.

    Raises:
        ValueError: the widths differ, or the start is unknown.
    """

    bijective = invertible = True
    needs_equal_width = True
    starts = ("identity", "procrustes", "random")
    base: Tensor

    def __init__(
        self, sites: int, d_x: int, d_y: int, *, start: Start = "procrustes"
    ) -> None:
        super().__init__(sites, d_x, d_y, start)
        base = torch.eye(d_x)
        if start == "random":
            base = _drawn_rotation(d_x)
        base = base.repeat(sites, 1, 1)
        skew = torch.zeros(sites, d_x * (d_x - 1) // 2)
        bias = torch.zeros(sites, 1, d_y)
        self.register_buffer("base", base)
        self.skew = nn.Parameter(skew)
        self.bias = nn.Parameter(bias)

    def rotation(self) -> Tensor:
        """R, (S, d, d)."""
        d = self.d_x
        rows, columns = torch.tril_indices(d, d, -1, device=self.skew.device)
        lower = torch.zeros_like(self.base)
        lower[:, rows, columns] = self.skew
        skew = lower - lower.mT
        same = identity_like(skew)
        turn = batch_solve(same - skew, same + skew)
        return self.base @ turn

    def _mapped(self, x: Tensor) -> Tensor:
        x = x - self.scaling.mean_x
        x = x / self.scaling.scale_y
        return torch.baddbmm(self.bias, x, self.rotation())

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d), the exact inverse of `forward`."""
        centred = self.scaling.scale_target(y) - self.bias
        # R₀ is orthogonal only up to rounding, so Rᵀ would be R's inverse only up to rounding, too
        turned_back = batch_inverse(self.rotation())
        back = centred @ turned_back
        return back * self.scaling.scale_y + self.scaling.mean_x

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments) -> None:
        difference = weight.mT @ weight - identity_like(weight)
        gap = difference.abs().amax()
        if not gap < _ORTHOGONAL:
            raise UserError(
                "Orthogonal can only take over a map that keeps lengths, such as Procrustes without scale or "
                f"Permutation, but the `aligner`'s WᵀW differs from the identity by up to {float(gap):.2g}. Use an "
                "AffineLayer."
            )
        self.base.copy_(weight)
        self.skew.zero_()
        centred = offset - self.scaling.mean_y.double()
        self.bias.copy_(centred / self.scaling.scale_y)

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Return the fan-in of the rotation for the entries of A."""
        if name == "skew":
            return self.d_x
        return super().fan_in(name, parameter)


def _drawn_rotation(width: int) -> Tensor:
    """Draw an orthogonal matrix (d, d) uniformly."""
    normal = torch.randn(width, width)
    q, r = torch.linalg.qr(normal)
    # without the signs the draw would not be uniform (Mezzadri 2007)
    signs = r.diagonal().sign()
    return q * signs


def low_rank(weight: Tensor, scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Find the map of rank r whose images of X are nearest to those of W: argmin ‖X W − X U V‖ (Izenman 1975).

    It is W projected on the r leading principal components of its images.

    Args:
        weight: W, (S, d_x, d_y).
        scatter: XᵀX of centred rows, (S, d_x, d_x).
        rank: r.

    Returns:
        U (S, d_x, r), and V (S, r, d_y) with orthonormal rows.
    """
    images = weight.mT @ scatter @ weight
    _, vectors = torch.linalg.eigh(images)
    components = vectors[..., -rank:]
    return weight @ components, components.mT


def _feature_deviations(moments: Moments) -> Tensor:
    """Return the deviations of Y's features, (S, 1, d_y), raised where one hardly varies, as they are divisors."""
    variance = squares(moments.yy) / moments.n
    mean = variance.mean(-1, keepdim=True)
    raised = variance.clamp(min=_SMALLEST_VARIANCE * mean)
    return raised.sqrt()[:, None]


def _steady_pattern(moments: Moments, deviation: Tensor) -> Tensor:
    """Return the pattern over Y's features, divided by their deviations, that varies least.

    Returns:
        (S, 1, d_y), of mean zero and mean square one.
    """
    d = moments.yy.shape[-1]
    both = deviation * deviation.mT
    correlation = moments.yy / moments.n / both
    mean = torch.full_like(correlation, 1 / d)
    apart = correlation - mean @ correlation
    apart = apart - apart @ mean
    # with the mean over features lifted above every other direction, the last one is orthogonal to it
    lifted = apart + 2 * d * mean
    values, vectors = torch.linalg.eigh(lifted)

    pattern = _least(values, vectors)
    largest = pattern.abs().argmax(-1, keepdim=True)
    sign = pattern.gather(-1, largest).sign()
    pattern = pattern * sign * d**0.5
    return pattern[:, None]


def _least(values: Tensor, vectors: Tensor) -> Tensor:
    """The eigenvector of the least value; a fixed one of all that are zero, if there are several, as with few rows.

    Args:
        values: (S, d), ascending.
        vectors: (S, d, d), in columns.

    Returns:
        (S, d), of length one.
    """
    null = values <= NULL * values[:, -1:]
    several = null.sum(-1, keepdim=True) > 1
    shares = null * (vectors.mT @ fixed_direction(values))
    among = vectors @ shares[..., None]
    among = among.squeeze(-1)
    among = nn.functional.normalize(among, dim=-1)
    first = vectors[..., 0]
    return torch.where(several, among, first)


def _set(layer: BankLinear, weight: Tensor, bias: Tensor | None = None) -> None:
    """Set the weights of a layer; a missing bias means zero."""
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
        if bias is not None:
            layer.bias.copy_(bias)
