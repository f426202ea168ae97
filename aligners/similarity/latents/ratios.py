"""How much of each latent the model that does not own it has, with intervals and tests over texts."""

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.similarity.latents.unit_sums import Parts

LATENTS = 1024  # resampled at a time
LEAST_UNITS = 5  # in which a latent fires, for a test
Limits = tuple[float, float]  # of ν^ε and ν^r


class Ratios(NamedTuple):
    """ν of each latent, by kind of target, with the ends of its interval over texts.

    Attributes:
        ratio: (2, S, m) ν^ε of errors, high where a shared latent's decoder was shrunk to 0, and ν^r of what is
            rebuilt, high where a shared latent was split into one for each model; NaN where the owner has nothing.
        low, high: (2, S, m) ends of the 95 % interval.
    """

    ratio: Tensor
    low: Tensor
    high: Tensor


def ratios(parts: Parts) -> Tensor:
    """What the other model has of each latent over what its owner has, (2, S, m): near 0 its own, near 1 shared.

    NaN where the owner's part is not above 0.
    """
    own = parts.own.sum(1)
    other = parts.other.sum(1)
    return _ratio(own, other, parts.squared)


def ratios_with_intervals(parts: Parts, counts: Tensor, level: float = 0.95) -> Ratios:
    """Return the ratios with percentile intervals over resampled units of text.

    Args:
        parts: see `LatentSums.parts`.
        counts: (1 + R, G) how often each unit counts, as of `resampled_counts`: once, then as drawn.
        level: coverage.

    Raises:
        ValueError: `counts` are not of these units.
    """
    check_range(above=0, below=1, level=level)
    units = parts.own.shape[1]
    if counts.ndim != 2 or counts.shape[1] != units:
        raise UserError(
            f"Expected `counts` of shape (resamples, {units}), but got {tuple(counts.shape)}."
        )
    tail = (1 - level) / 2
    ends = counts.new_tensor([tail, 1 - tail])
    own = parts.own.flatten(2)
    other = parts.other.flatten(2)
    own_blocks = own.split(LATENTS, 2)
    other_blocks = other.split(LATENTS, 2)
    found = []
    for some_own, some_other in zip(own_blocks, other_blocks, strict=True):
        drawn_own = counts @ some_own
        drawn_other = counts @ some_other
        drawn = _ratio(drawn_own, drawn_other, parts.squared)
        found.append(_with_ends(drawn, ends))
    joined = torch.cat(found, 2)
    kinds, _, *shape = parts.own.shape
    joined = joined.view(3, kinds, *shape)
    return Ratios(*joined)


def _with_ends(drawn: Tensor, ends: Tensor) -> Tensor:
    """Return the ratios and the ends of their intervals, (3, 2, m): drawn (2, 1 + R, m), the ratios first.

    A resample without the owner's part could be anything: it widens the interval on both sides.
    """
    ratio = drawn[:, 0]
    resampled = drawn[:, 1:]
    finite = resampled.isfinite()
    below = resampled.where(finite, -torch.inf)
    above = resampled.where(finite, torch.inf)
    first, last = ends
    low = below.quantile(first, dim=1, interpolation="lower")
    high = above.quantile(last, dim=1, interpolation="higher")
    known = ratio.isfinite()
    low = low.where(known, torch.nan)
    high = high.where(known, torch.nan)
    return torch.stack([ratio, low, high])


def _ratio(own: Tensor, other: Tensor, squared: bool) -> Tensor:
    """Divide, with the sign kept where lengths are squared; NaN where there is nothing to divide by."""
    above_0 = own.where(own > 0, torch.nan)
    ratio = other / above_0
    if not squared:
        return ratio
    sign = ratio.sign()
    length = ratio.abs().sqrt()
    return sign * length


def p_below(parts: Parts, limits: Limits) -> Tensor:
    """One-sided p of ν ≥ limit against ν < limit, (2, S, m), over units of text.

    The ratio itself is skewed where its denominator varies; other − limit · own is a mean over units and has the same
    sign (Fieller 1954): t = mean / standard error, with as many degrees of freedom as units in which the latent fires,
    less one. A latent that fires in fewer than 5 has p = 1, and so has one of which the owner has nothing.

    Args:
        parts: see `LatentSums.parts`.
        limits: of ν^ε and ν^r.
    """
    return _p(parts, limits, 1)


def p_above(parts: Parts, limits: Limits) -> Tensor:
    """One-sided p of ν ≤ limit against ν > limit, (2, S, m); see `p_below`."""
    return _p(parts, limits, -1)


def _p(parts: Parts, limits: Limits, sign: int) -> Tensor:
    from scipy.stats import t as student

    limit = parts.own.new_tensor(limits)
    limit = limit[:, None, None, None]
    if parts.squared:
        limit = limit.square()
    allowed = limit * parts.own
    excess = parts.other - allowed
    total = excess.sum(1)
    units = excess.shape[1]
    spread = excess.var(1) * units
    error = spread.sqrt()
    statistic = sign * total / error
    t = statistic.cpu().numpy()

    fires = parts.fired > 0
    fired_in = fires.sum(0)
    freedom = (fired_in - 1).clamp(min=1)
    freedom = freedom.expand_as(total)
    degrees = freedom.cpu().numpy()
    below = student.cdf(t, degrees)
    p = torch.from_numpy(below).to(total)

    own = parts.own.sum(1)
    owned = own > 0
    varies = spread > 0
    enough = fired_in >= LEAST_UNITS
    known = owned & varies & enough
    return p.where(known, 1.0)
