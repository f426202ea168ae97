"""Stitching layers: affine maps whose parameters are trained on activations or through a frozen tail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aligners.maps.affine_starts import Start, Started
from aligners.maps.base import BankLinear
from aligners.maps.linear import NULL
from aligners.maps.solving import batch_inverse, batch_solve
from aligners.similarity.algebra.moments import Moments

__all__ = ["AffineLayer", "LowRank", "Orthogonal", "low_rank"]

# How far from zero, in standard deviations, a start puts what the LayerNorm normalises. At 0 the layer starts by giving
# all rows the same length: that costs most where lengths vary, and nothing where a LayerNorm made the states. The
# further from zero, the less it costs, and the less use the layer can learn to make of its LayerNorm.
_LEVEL = 4.0
_SMALLEST_VARIANCE = 1e-6  # of a feature, as a share of the mean variance
_ORTHOGONAL = 1e-4  # how far WᵀW may be from the identity: no further than single precision takes it


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
        ridge: λ of least squares, relative to the mean variance of X.

    Raises:
        ValueError: the start is unknown or impossible, or the ridge is negative.
    """

    def __init__(
        self, sites: int, d_x: int, d_y: int, *, start: Start = "linear", norm: bool = False, ridge: float = 1e-6
    ) -> None:
        super().__init__(sites, d_x, d_y, start, ridge)
        self.affine = BankLinear(sites, d_x, d_y)
        if start != "random":
            _set(self.affine, torch.eye(d_x, d_y))
        self.norm = norm
        if norm:
            self.gain = nn.Parameter(torch.ones(sites, 1, d_y))
            self.shift = nn.Parameter(torch.zeros(sites, 1, d_y))

    def _mapped(self, x: Tensor) -> Tensor:
        y = self.affine(self.scaling.scale(x))
        return torch.addcmul(self.shift, nn.functional.layer_norm(y, (self.d_y,)), self.gain) if self.norm else y

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        weight, offset = self._scaled(weight, offset)
        if self.norm:
            moments = self._moments_for(moments, "AffineLayer with `norm`")
            deviation, pattern = _pattern(moments)
            deviation = deviation / self.scaling.scale_y
            weight = weight / deviation
            spread = moments.xx / (moments.n * self.scaling.scale_x.double().square())
            # mean square of what is normalised, over rows and features, without the level
            square = (weight * (spread @ weight)).sum(1, keepdim=True).mean(-1, keepdim=True)
            level = _LEVEL * square.sqrt()
            self.gain.copy_(deviation * (level.square() + square).sqrt())
            self.shift.copy_(offset - level * deviation * pattern)
            offset = level * pattern
        _set(self.affine, weight, offset)

    def options(self) -> dict[str, Any]:
        """Start, ridge, and whether a LayerNorm follows."""
        return {**super().options(), "norm": self.norm}


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
        ridge: λ of least squares, relative to the mean variance of X.

    Raises:
        ValueError: the rank is impossible, the start is unknown or impossible, or the ridge is negative.
    """

    def __init__(
        self, sites: int, d_x: int, d_y: int, *, rank: int, start: Start = "linear", ridge: float = 1e-6
    ) -> None:
        super().__init__(sites, d_x, d_y, start, ridge)
        if not 1 <= rank <= min(d_x, d_y):
            raise ValueError(
                f"Expected `rank` to be at least 1 and at most {min(d_x, d_y)}, the smaller width, but got {rank}. "
                "A map of full rank is an AffineLayer."
            )
        self.rank = rank
        self.down = BankLinear(sites, d_x, rank).weight
        self.up = BankLinear(sites, rank, d_y)
        if start != "random":
            with torch.no_grad():
                self.down.copy_(torch.eye(d_x, rank))
            _set(self.up, torch.eye(rank, d_y))

    def _mapped(self, x: Tensor) -> Tensor:
        return self.up(self.scaling.scale(x) @ self.down)

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        weight, offset = self._scaled(weight, offset)
        down, up = low_rank(weight, self._moments_for(moments, "LowRank").xx, self.rank)
        self.down.copy_(down)
        _set(self.up, up, offset)

    def options(self) -> dict[str, Any]:
        """Rank, start and ridge."""
        return {**super().options(), "rank": self.rank}


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

    def __init__(self, sites: int, d_x: int, d_y: int, *, start: Start = "procrustes") -> None:
        super().__init__(sites, d_x, d_y, start)
        base = torch.eye(d_x)
        if start == "random":
            q, r = torch.linalg.qr(torch.randn(d_x, d_x))
            base = q * r.diagonal().sign()  # without the signs the draw would not be uniform (Mezzadri 2007)
        self.register_buffer("base", base.repeat(sites, 1, 1))
        self.skew = nn.Parameter(torch.zeros(sites, d_x * (d_x - 1) // 2))
        self.bias = nn.Parameter(torch.zeros(sites, 1, d_y))

    def rotation(self) -> Tensor:
        """R, (S, d, d)."""
        i, j = torch.tril_indices(self.d_x, self.d_x, -1, device=self.skew.device)
        lower = torch.zeros_like(self.base)
        lower[:, i, j] = self.skew
        skew, one = lower - lower.mT, torch.eye(self.d_x, dtype=lower.dtype, device=lower.device)
        return self.base @ batch_solve(one - skew, one + skew)

    def _mapped(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, (x - self.scaling.mean_x) / self.scaling.scale_y, self.rotation())

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d), the exact inverse of `forward`."""
        centred = self.scaling.scale_target(y) - self.bias
        # R₀ is orthogonal only up to rounding, so Rᵀ would be R's inverse only up to rounding, too
        return centred @ batch_inverse(self.rotation()) * self.scaling.scale_y + self.scaling.mean_x

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        gap = (weight.mT @ weight - torch.eye(self.d_x, dtype=weight.dtype, device=weight.device)).abs().amax()
        if not gap < _ORTHOGONAL:
            raise ValueError(
                "Orthogonal can only take over a map that keeps lengths, such as Procrustes without scale or "
                f"Permutation, but the `aligner`'s WᵀW differs from the identity by up to {float(gap):.2g}. Use an "
                "AffineLayer."
            )
        self.base.copy_(weight)
        self.skew.zero_()
        self.bias.copy_((offset - self.scaling.mean_y.double()) / self.scaling.scale_y)

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """The fan-in of the rotation for the entries of A."""
        return self.d_x if name == "skew" else super().fan_in(name, parameter)

    def options(self) -> dict[str, Any]:
        """The start."""
        return {"start": self.start}


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
    components = torch.linalg.eigh(weight.mT @ scatter @ weight).eigenvectors[..., -rank:]
    return weight @ components, components.mT


def _pattern(moments: Moments) -> tuple[Tensor, Tensor]:
    """Find the deviations of Y's features, and the pattern over standardised features in which they vary least.

    Returns:
        Deviations and pattern, each (S, 1, d_y); the pattern has mean zero and mean square one.
    """
    d = moments.yy.shape[-1]
    variance = moments.yy.diagonal(dim1=-2, dim2=-1) / moments.n
    # a feature that hardly varies must not be divided by its deviation
    deviation = variance.clamp(min=_SMALLEST_VARIANCE * variance.mean(-1, keepdim=True)).sqrt()[:, None]
    correlation = moments.yy / moments.n / (deviation * deviation.mT)
    mean = torch.full_like(correlation, 1 / d)
    apart = correlation - mean @ correlation
    apart = apart - apart @ mean
    # with the mean over features lifted above every other direction, the last one is orthogonal to it
    values, vectors = torch.linalg.eigh(apart + 2 * d * mean)
    null = values <= NULL * values[:, -1:]
    # where several directions do not vary at all, as with few rows, take a fixed one of them
    fixed = torch.arange(1.0, d + 1, dtype=values.dtype, device=values.device).cos()
    among = (vectors @ (null * (vectors.mT @ fixed))[..., None])[..., 0]
    pattern = torch.where(null.sum(-1, keepdim=True) > 1, torch.nn.functional.normalize(among, dim=-1), vectors[..., 0])
    sign = pattern.gather(-1, pattern.abs().argmax(-1, keepdim=True)).sign()
    return deviation, (pattern * sign * d**0.5)[:, None]


def _set(layer: BankLinear, weight: Tensor, bias: Tensor | None = None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_() if bias is None else layer.bias.copy_(bias)
