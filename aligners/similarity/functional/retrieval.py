"""Retrieval: whether the row of Y that is nearest to a mapped row of X, by the cosine, is its own partner.

Equal rows of Y, such as [CLS] before the first block, are one candidate: nothing could tell them apart, so each is as
right as the other. Candidates that differ and are as near as the right one, to `TIE`, share their ranks: what is scored
is the mean over all orders in which they could stand, so that a map to one point has the score of chance.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

TOP = 10
TIE = 1e-6  # a difference of cosines that float32 cannot tell from rounding
EQUAL = 1e-5  # rows of Y that differ by no more than this share of their largest entry are one candidate
AT_ONCE = 2**22  # cosines that are held at a time


def distinct_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """Find equal rows of y (N, d): the first row of each of C sets, (C,), and the set of every row, (N,)."""
    direction = torch.randn(
        y.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    order = (y.double() @ direction.to(y.device)).argsort(
        stable=True
    )  # equal rows have equal products: neighbours
    above, below = y[order[1:]], y[order[:-1]]
    apart = (above - below).abs().amax(-1) > EQUAL * above.abs().amax(-1)
    every, sets = torch.arange(len(y), device=y.device), torch.zeros_like(order)
    sets[order[1:]] = apart.cumsum(0)
    first = torch.full((1 + int(apart.sum()),), len(y), device=y.device)
    return first.scatter_reduce(0, sets, every, "amin"), sets


def retrieval_scores(
    mapped: Tensor,
    y: Tensor,
    sets: tuple[Tensor, Tensor] | None = None,
    *,
    centred: bool = False,
) -> Tensor:
    """Score each mapped row by the place of its partner among Y's rows, the nearest first: (3, n) float64.

    The scores are top 1 and top 10, whether the partner is the nearest, or among the ten nearest, and the reciprocal of
    its place; their means over rows are the accuracies and the mean reciprocal rank. Of t candidates as near as the
    partner, which is one of them, each is at each of their places with a chance of 1/t. NaN where a mapped row is not
    finite. Memory grows with N, not with n · N.

    Args:
        mapped: (n, d) rows whose partners are the first n of y.
        y: (N, d), N >= n.
        sets: `distinct_rows(y)`, where it is known.
        centred: subtract the mean of y from both first.
    """
    first, own = distinct_rows(y) if sets is None else sets
    partners = y[first]
    if centred:
        shift = y.double().mean(0)
        partners, mapped = (partners.double() - shift).float(), mapped.double() - shift
    # the many in float32, which is as exact and takes half the time; what is mapped may be too large for it
    candidates, queries = (
        normalize(partners.float(), dim=-1),
        normalize(mapped.double(), dim=-1).float(),
    )
    above, tied = [], []
    step = max(1, AT_ONCE // len(first))
    for rows, right in zip(
        queries.split(step), own[: len(mapped)].split(step), strict=True
    ):
        near = rows @ candidates.T
        least = near.gather(1, right[:, None])
        # counted in float32, which is exact up to 2²⁴ and three times as fast
        above.append((near > least + TIE).float().sum(1))
        tied.append((near >= least - TIE).float().sum(1) - above[-1])
    before, among = torch.cat(above).double(), torch.cat(tied).double()
    among = among.where(
        among > 0, math.nan
    )  # a cosine that is no number is above nothing, and not as near as itself
    places = torch.digamma(before + among + 1) - torch.digamma(
        before + 1
    )  # Σ 1/place over the places that are shared
    return torch.stack(
        [*(((top - before) / among).clamp(0, 1) for top in (1, TOP)), places / among]
    )
