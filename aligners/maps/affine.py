"""Stitching layers: affine maps with parameters, to be trained on the activations or through a frozen tail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aligners.maps.affine_starts import Start, Started
from aligners.maps.base import BankLinear
from aligners.maps.linear import NULL
from aligners.maps.solving import batch_inverse, batch_solve
from similarity.algebra.moments import Moments

__all__ = ["AffineLayer", "LowRank", "Orthogonal", "low_rank"]

# How far, in standard deviations, a start puts what its LayerNorm normalises from zero. At 0 the layer starts by giving
# every row one length, which costs most where lengths vary and nothing where a LayerNorm made the states; the further
# away, the less it costs, and the less the layer can learn to make of its LayerNorm.
_LEVEL = 4.0
_SMALLEST_VARIANCE = 1e-6  # of a feature, as share of the mean
_ORTHOGONAL = 1e-4  # how far WᵀW may be from the identity: what single precision leaves, and no more


class AffineLayer(Started):
    """y = h W + b, on request with a LayerNorm over the features of y behind it (Brown et al. 2023, §3 and C.1).

    W and b act between centred and scaled states (`Scaling`), which changes what a step of the optimiser does and not
    what can be learned.

    With `norm`, exactly those targets can be represented whose rows, after one shift and one gain per feature, have
    mean zero and one length: states that are themselves the output of a LayerNorm. So that rows of other lengths pass
    at the start as well, what is normalised then lies four deviations from zero, along the pattern of features in
    which Y varies least: lost are that direction and the mean over standardised features, and along the pattern a row
    of r times the usual length is off by about (r² − 1)/8 deviations.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        start: where training begins: "identity", x as it is (equal widths only); "linear", least squares;
            "procrustes", the (semi-)orthogonal map; "random", the draw of `torch.nn.Linear` between centred and
            scaled states, the same at every site.
        norm: whether a LayerNorm with gain and bias follows.
        ridge: λ of least squares, relative to the mean variance of X.

    Raises:
        ValueError: an unknown or an impossible start, or a negative ridge.
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
    """y = h U V + b with U (d_x, r) and V (r, d_y): of the centred states, r directions of X reach r of Y.

    A start is the map of rank r whose images of the fitting rows are nearest to those of the full one. For "linear"
    that is reduced-rank regression (Izenman 1975); "identity" projects on the r leading principal components of X.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        rank: r, at least 1 and at most the smaller width.
        start: as of `AffineLayer`, cut to rank r.
        ridge: λ of least squares, relative to the mean variance of X.

    Raises:
        ValueError: an impossible rank, an unknown or an impossible start, or a negative ridge.
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
    Cayley transform has determinant 1: the sign of det R is that of R₀, and turns by exactly 180° are its only
    limit. Lengths are kept, not scaled: X and Y are expected to have states of one size.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states, equal to `d_x`.
        start: R₀: "identity", "procrustes", or "random", drawn uniformly, the same at every site.

    Raises:
        ValueError: unequal widths or an unknown start.
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
        # R₀ is orthogonal up to rounding, so that Rᵀ would be R's inverse up to rounding, too
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
        """The rotation's for the entries of A."""
        return self.d_x if name == "skew" else super().fan_in(name, parameter)

    def options(self) -> dict[str, Any]:
        """The start."""
        return {"start": self.start}


def low_rank(weight: Tensor, scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The map of rank r whose images of X are nearest to those of W: argmin ‖X W − X U V‖ (Izenman 1975).

    It is W, projected on the r leading principal components of its images.

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
    """Deviations of Y's features, and the pattern over standardised ones in which they vary least.

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
    # where several directions do not vary at all, as with few rows, a fixed one out of them
    fixed = torch.arange(1.0, d + 1, dtype=values.dtype, device=values.device).cos()
    among = (vectors @ (null * (vectors.mT @ fixed))[..., None])[..., 0]
    pattern = torch.where(null.sum(-1, keepdim=True) > 1, torch.nn.functional.normalize(among, dim=-1), vectors[..., 0])
    sign = pattern.gather(-1, pattern.abs().argmax(-1, keepdim=True)).sign()
    return deviation, (pattern * sign * d**0.5)[:, None]


def _set(layer: BankLinear, weight: Tensor, bias: Tensor | None = None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_() if bias is None else layer.bias.copy_(bias)
