"""Exact search over an index, what it finds of what is relevant, and intervals over queries."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from aligners.errors import UserError

Similarity = Literal["cosine", "dot"]
TOP = 10  # documents that are looked at
AT_ONCE = 2**24  # similarities that are held at a time
DRAWS = 1000
METRICS = ("recall1", "recall10", "ndcg10")

# ---------------------------------------------------------------------- search


def nearest(
    queries: np.ndarray,
    index: np.ndarray,
    k: int = TOP,
    *,
    similarity: Similarity = "cosine",
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Return the places of the k nearest documents of each query, the nearest first: (Q, k).

    The index is read a part at a time, so it may be a memory-mapped file.

    Args:
        queries: (Q, d).
        index: (N, d).
        k: at most N.
        similarity: cosine, or the inner product.
        device: where products are formed.

    Raises:
        ValueError: there are fewer than k documents, or widths differ.
    """
    _check_index(queries, index, k)
    asked = _rows(queries, similarity, device)
    number = len(asked)
    values = asked.new_zeros(number, 0)
    places = values.long()
    fitting = AT_ONCE // max(1, number)
    step = max(k, fitting)
    for start in range(0, len(index), step):
        stop = start + step
        part = _rows(index[start:stop], similarity, device)
        similar = asked @ part.T
        found, at = _largest(similar, k)
        # the best so far, and the best of this part
        at += start
        values = torch.cat([values, found], 1)
        places = torch.cat([places, at], 1)
        values, at = _largest(values, k)
        places = places.gather(1, at)
    return places.cpu().numpy()


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, or all that there are, and their places."""
    most = min(k, values.shape[1])
    found = values.topk(most, 1)
    return found.values, found.indices


def _check_index(queries: np.ndarray, index: np.ndarray, k: int) -> None:
    documents, width = index.shape
    if documents < k:
        raise UserError(
            f"Expected at least {k} documents in the index, but got {documents}. Give more texts."
        )
    asked = queries.shape[1]
    if asked != width:
        raise UserError(
            f"Expected queries of the width of the index, {width}, but got {asked}."
        )


def _rows(
    vectors: np.ndarray, similarity: Similarity, device: torch.device | str
) -> Tensor:
    """Return vectors as float32 rows on a device, of length 1 for the cosine."""
    single = np.array(vectors, np.float32)
    rows = torch.from_numpy(single).to(device)
    if similarity == "cosine":
        rows = normalize(rows, dim=1)
    return rows


# ---------------------------------------------------------------------- scores


def scores(
    found: np.ndarray, relevant: Sequence[Mapping[int, float]]
) -> dict[str, np.ndarray]:
    """Score what a search has found: each of `METRICS` for each query, (Q,).

    recall@k is the share of the relevant documents among the first k, of at most k of them. nDCG@10 has the gains as
    they are given, divided by log2(1 + place), over that of the best order.

    Args:
        found: (Q, 10) places of documents, the nearest first.
        relevant: for each query, place of a relevant document -> its gain, above 0.
    """
    first, recall, ndcg = [], [], []
    for row, wanted in zip(found, relevant, strict=True):
        gains = _gains(row, wanted)
        best = _best_gains(wanted)
        hits = gains > 0
        ideal = _discounted(best)
        first.append(float(hits[0]))
        recall.append(hits.sum() / len(best))
        ndcg.append(_discounted(gains) / ideal)
    return {
        "recall1": np.array(first),
        "recall10": np.array(recall),
        "ndcg10": np.array(ndcg),
    }


def _gains(row: np.ndarray, wanted: Mapping[int, float]) -> np.ndarray:
    """Return the gain of each document that was found, 0 for what is not relevant: (10,)."""
    gains = []
    for place in row[:TOP]:
        gain = wanted.get(int(place), 0.0)
        gains.append(gain)
    return np.array(gains)


def _best_gains(wanted: Mapping[int, float]) -> np.ndarray:
    """Return the largest gains, at most ten, the largest first."""
    gains = sorted(wanted.values(), reverse=True)
    return np.array(gains[:TOP])


def _discounted(gains: np.ndarray) -> float:
    """Return the sum of gains, each divided by log2(1 + place)."""
    place = 1 + np.arange(len(gains))
    discounts = 1 / np.log2(1 + place)
    return float(gains @ discounts)


# ---------------------------------------------------------------------- intervals


class Estimate(NamedTuple):
    """A mean over queries with its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(value: float, drawn: np.ndarray) -> Estimate:
    """Return a value with the interval of its resamplings (D,); without one if any of these is not finite."""
    value = float(value)
    if not np.isfinite(drawn).all():
        return Estimate(value, np.nan, np.nan)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def resampled(draw: np.random.Generator, rows: int) -> np.ndarray:
    """Return the weight of each row in each resampling, (DRAWS, rows)."""
    alike = np.full(rows, 1 / rows)
    times = draw.multinomial(rows, alike, DRAWS)
    return times / rows


class Resampling:
    """Bootstrap over queries: the same draws for all that is compared.

    Args:
        queries: number of them.
        seed: of the draws.
    """

    def __init__(self, queries: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._weights = resampled(draw, queries)

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of values (Q,)."""
        drawn = self._weights @ values
        return estimate(values.mean(), drawn)

    def ratio(self, values: np.ndarray, ceiling: np.ndarray) -> Estimate:
        """Return the mean of values (Q,) over that of others (Q,); NaN where the latter is 0."""
        above = self._weights @ values
        below = self._weights @ ceiling
        with np.errstate(divide="ignore", invalid="ignore"):
            value = values.mean() / ceiling.mean()
            return estimate(value, above / below)
