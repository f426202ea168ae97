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
    n, d = y.shape
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(d, generator=draw, dtype=torch.float64)
    direction = direction.to(y.device)
    products = y.double() @ direction
    order = products.argsort(stable=True)  # equal rows become neighbours
    above = order[1:]
    below = order[:-1]
    apart = _differ(y[above], y[below])

    sets = torch.zeros_like(order)
    sets[above] = apart.cumsum(0)
    count = 1 + int(apart.sum())
    every = torch.arange(n, device=y.device)
    first = every.new_full((count,), n)
    first = first.scatter_reduce(0, sets, every, "amin")
    return first, sets


def _differ(above: Tensor, below: Tensor) -> Tensor:
    """Which rows (M, d) are not equal, (M,)."""
    gaps = (above - below).abs().amax(-1)
    largest = above.abs().amax(-1)
    return gaps > EQUAL * largest


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
    first, own = sets or distinct_rows(y)
    candidates = y[first]
    if centred:
        shift = y.double().mean(0)
        candidates = candidates.double() - shift
        mapped = mapped.double() - shift
    # the many in float32, which is as exact and takes half the time; what is mapped may be too large for it
    candidates = normalize(candidates.float(), dim=-1)
    queries = normalize(mapped.double(), dim=-1).float()
    partners = own[: len(mapped)]
    step = AT_ONCE // len(first)
    step = max(step, 1)
    parts = zip(queries.split(step), partners.split(step), strict=True)
    scores = []
    for rows, partner in parts:
        of_rows = _scores(rows, candidates, partner)
        scores.append(of_rows)
    return torch.cat(scores, 1)


def _scores(queries: Tensor, candidates: Tensor, partners: Tensor) -> Tensor:
    """The scores (3, M) of some mapped rows (M, d) against all candidates (C, d), all of them of length 1."""
    cosines = queries @ candidates.T
    right = cosines.gather(1, partners[:, None])
    nearer = _counted(cosines > right + TIE)
    near = _counted(cosines >= right - TIE)
    return _of_places(nearer, near - nearer)


def _counted(which: Tensor) -> Tensor:
    """How many of each row, in float64; counted in float32, which is exact up to 2²⁴ and three times as fast."""
    counts = which.float().sum(1)
    return counts.double()


def _of_places(before: Tensor, tied: Tensor) -> Tensor:
    """The scores (3, n) of partners that have so many candidates before them, and share their place with so many."""
    # a cosine that is no number is above nothing, and not as near as itself
    tied = tied.where(tied > 0, math.nan)
    top_1 = (1 - before) / tied
    top_10 = (TOP - before) / tied
    # Σ 1/place over the places that are shared
    last = torch.digamma(before + tied + 1)
    first = torch.digamma(before + 1)
    reciprocal = (last - first) / tied
    scores = torch.stack([top_1, top_10, reciprocal])
    return scores.clamp(0, 1)
