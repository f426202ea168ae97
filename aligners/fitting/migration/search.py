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
    values = torch.full((len(asked), 0), -torch.inf, device=device)
    places = torch.zeros((len(asked), 0), dtype=torch.long, device=device)
    step = max(k, AT_ONCE // max(1, len(asked)))
    for start in range(0, len(index), step):
        part = _rows(index[start : start + step], similarity, device)
        similar = asked @ part.T
        found, at = _largest(similar, k)
        values = torch.cat([values, found], 1)
        places = torch.cat([places, at + start], 1)
        values, best = _largest(values, k)
        places = places.gather(1, best)
    return places.cpu().numpy()


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, or all that there are, and their places."""
    most = min(k, values.shape[1])
    found = values.topk(most, 1)
    return found.values, found.indices


def _check_index(queries: np.ndarray, index: np.ndarray, k: int) -> None:
    if len(index) < k:
        raise UserError(
            f"Expected at least {k} documents in the index, but got {len(index)}. Give more texts."
        )
    if queries.shape[1] != index.shape[1]:
        raise UserError(
            f"Expected queries of the width of the index, {index.shape[1]}, but got {queries.shape[1]}."
        )


def _rows(
    vectors: np.ndarray, similarity: Similarity, device: torch.device | str
) -> Tensor:
    """Return vectors as float32 rows on a device, of length 1 for the cosine."""
    rows = torch.from_numpy(np.array(vectors, np.float32)).to(device)
    if similarity == "cosine":
        rows = normalize(rows, dim=1)
    return rows


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
    discounts = 1 / np.log2(np.arange(2, TOP + 2))
    columns: dict[str, list[float]] = {name: [] for name in METRICS}
    for row, wanted in zip(found, relevant, strict=True):
        gains = np.array([wanted.get(int(place), 0.0) for place in row[:TOP]])
        best = np.sort(np.array(list(wanted.values())))[::-1][:TOP]
        hits = gains > 0
        columns["recall1"].append(float(hits[0]))
        columns["recall10"].append(hits.sum() / len(best))
        ideal = best @ discounts[: len(best)]
        columns["ndcg10"].append(float(gains @ discounts / ideal))
    return {name: np.array(values) for name, values in columns.items()}


class Estimate(NamedTuple):
    """A mean over queries with its 95 % interval."""

    value: float
    low: float
    high: float


class Resampling:
    """Bootstrap over queries: the same draws for all that is compared.

    Args:
        queries: number of them.
        seed: of the draws.
    """

    def __init__(self, queries: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        share = np.full(queries, 1 / queries)
        self._weights = draw.multinomial(queries, share, DRAWS) / queries

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of values (Q,)."""
        return _estimate(values.mean(), self._weights @ values)

    def ratio(self, values: np.ndarray, ceiling: np.ndarray) -> Estimate:
        """Return the mean of values (Q,) over that of others (Q,); NaN where the latter is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = (self._weights @ values) / (self._weights @ ceiling)
            return _estimate(values.mean() / ceiling.mean(), drawn)


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    if not np.isfinite(drawn).all():
        return Estimate(float(value), np.nan, np.nan)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))
