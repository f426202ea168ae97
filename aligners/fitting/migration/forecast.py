"""What a search through a map will find, said from the pairs alone, before anything is embedded anew.

Every validation text is a query, and the other texts of the pool are its documents. The old and the new vectors of both
are known, so the search through the map can be made, and set beside that of the new model alone. What is relevant to a
text is not known. Where no judgements are to come, it is the ten documents that the new model itself finds nearest.
Where there are some, it is the one document that both models together find nearest: the largest sum of both
similarities, each less its mean and over its deviation for that text. Neither model is right by itself then, as neither
is for judgements.

The pool is smaller than the index. The share s(m) is measured in random parts of the pool, of m = M/8, M/4, M/2 and M
texts. It is read off at the size N of the index on the line logit s(m) = a + b log m of least squares. Intervals
resample the validation texts.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from aligners.fitting.migration.search import (
    METRICS,
    TOP,
    Estimate,
    Similarity,
    estimate,
    resampled,
    scores,
)
from aligners.fitting.migration.vector_maps import Pairs, VectorMap

PARTS = (8, 4, 2, 1)  # the pool is divided by these
LEAST = 4 * TOP  # texts of the smallest part
EDGE = 1e-4  # shares are kept so far from 0 and 1, where the logit has no value


class Search(NamedTuple):
    """Similarities (V, M) of validation texts to a pool: through the map, of the new model, and of the old one."""

    mapped: np.ndarray
    new: np.ndarray
    old: np.ndarray


def forecast(
    route: str,
    fitted: VectorMap,
    validation: Pairs,
    pool: Pairs,
    size: int,
    *,
    judged: bool,
    similarity: Similarity,
    seed: int,
) -> dict[str, Estimate]:
    """Predict recall relative to re-embedding, from pairs (old vector, new vector) of the same texts.

    Args:
        route: `queries`: the map takes new queries to the old index; `documents`: old documents to the new space.
        fitted: the map, fitted on neither of the pairs below if it maps documents.
        validation: pairs (old, new) whose texts are the queries.
        pool: pairs (old, new) whose texts are the documents; the first ones are those of `validation`.
        size: documents of the index.
        judged: see above.
        similarity: of vectors.
        seed: of the parts and of the resampling.

    Returns:
        Each of `METRICS`, over its value for the new model.
    """
    made = leave_out_own(searched(route, fitted, validation, pool, similarity))
    draw = np.random.default_rng(seed)
    sizes, through, alone = [], [], []
    for divisor in PARTS:
        number = len(pool) // divisor
        if number < LEAST:
            continue
        part = draw.permutation(len(pool))[:number]
        by_new, by_map = _in_part(made, part, judged)
        sizes.append(number)
        through.append(by_map)
        alone.append(by_new)
    weights = resampled(draw, len(validation))
    line = line_to(np.log(sizes), np.log(size))
    found = {}
    for metric in METRICS:
        mapped = [part[metric] for part in through]
        new = [part[metric] for part in alone]
        found[metric] = _at_size(mapped, new, line, weights)
    return found


def searched(
    route: str, fitted: VectorMap, asked: Pairs, pool: Pairs, similarity: Similarity
) -> Search:
    """Compare queries with a pool through a map, by the new model, and by the old one."""
    new = _similar(asked.y, pool.y, similarity)
    old = _similar(asked.x, pool.x, similarity)
    mapped = through(route, fitted, asked, pool, similarity)
    return Search(mapped, new, old)


def through(
    route: str, fitted: VectorMap, asked: Pairs, pool: Pairs, similarity: Similarity
) -> np.ndarray:
    """Compare queries with a pool through a map: (Q, M)."""
    if route == "queries":
        return _similar(fitted.mapped(asked.y), pool.x, similarity)
    return _similar(asked.y, fitted.mapped(pool.x), similarity)


def leave_out_own(made: Search) -> Search:
    """Make texts, which begin the pool, not find themselves."""
    for table in made:
        np.fill_diagonal(table, -np.inf)
    return made


def _similar(
    queries: np.ndarray, index: np.ndarray, similarity: Similarity
) -> np.ndarray:
    rows = []
    for vectors in (queries, index):
        made = torch.from_numpy(np.array(vectors, np.float32))
        rows.append(normalize(made, dim=1) if similarity == "cosine" else made)
    return (rows[0] @ rows[1].T).numpy()


def _in_part(
    made: Search, part: np.ndarray, judged: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Score the new model alone and the search through the map, among some texts of the pool."""
    mapped, new, old = (table[:, part] for table in made)
    if judged:
        both = _standard(new) + _standard(old)
        relevant = [{int(place): 1.0} for place in both.argmax(1)]
    else:
        relevant = [{int(place): 1.0 for place in row} for row in _first(new)]
    return scores(_first(new), relevant), scores(_first(mapped), relevant)


def _first(similar: np.ndarray) -> np.ndarray:
    """Return the places of the ten nearest, (V, 10)."""
    return torch.from_numpy(similar).topk(TOP, 1).indices.numpy()


def _standard(similar: np.ndarray) -> np.ndarray:
    """Return similarities (V, m) of each text less their mean and over their deviation; −∞ stays."""
    finite = np.where(np.isfinite(similar), similar, np.nan)
    mean = np.nanmean(finite, 1, keepdims=True)
    deviation = np.nanstd(finite, 1, keepdims=True)
    return (similar - mean) / np.maximum(deviation, 1e-12)


def _at_size(
    through: list[np.ndarray],
    alone: list[np.ndarray],
    line: np.ndarray,
    weights: np.ndarray,
) -> Estimate:
    """Read the ratio of two mean shares off at the size of the index, with its interval."""

    def ratio(mean: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        shares = []
        for values in (through, alone):
            measured = np.stack([mean(one) for one in values])
            logits = log_odds(measured)
            shares.append(share(line @ logits))
        return shares[0] / shares[1]

    value = float(ratio(np.mean))
    drawn = ratio(lambda one: weights @ one)
    return estimate(value, drawn)


def log_odds(shares: np.ndarray) -> np.ndarray:
    """Return the logit of shares, which are kept `EDGE` from 0 and 1."""
    kept = shares.clip(EDGE, 1 - EDGE)
    return np.log(kept / (1 - kept))


def share(logit: np.ndarray) -> np.ndarray:
    """Return the share of a logit."""
    return 1 / (1 + np.exp(-logit))


def line_to(at: np.ndarray, to: float) -> np.ndarray:
    """Return the weights (n,) with which values at some places make that of their line of least squares at another."""
    if len(at) < 2:
        return np.ones(len(at))
    design = np.stack([np.ones(len(at)), at], 1)
    return np.array([1.0, to]) @ np.linalg.pinv(design)
