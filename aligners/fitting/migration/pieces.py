"""Pieces of texts as queries: by them maps of queries are fitted, chosen and foretold.

A piece is a run of words of a text, and that text is what it should find: the inverse cloze task (Lee, Chang and
Toutanova 2019, Latent retrieval for weakly supervised open domain question answering, 1906.00300, section 4). Both
models embed pieces as queries, with their prompts. Vectors of queries lie elsewhere than those of documents, so a map
that has seen documents alone shifts them.

Pieces are not as hard as people's queries, but what the old model finds in the old index is known of both before
anything is embedded anew. So shares are post-stratified: with p(s) the share of judged queries whose first relevant
document the old model has first, among the next nine, or later, a search finds Σ p(s) m(s), where m(s) is what it finds
of the pieces whose texts the old model has there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from aligners.fitting.migration.forecast import (
    LEAST,
    PARTS,
    Search,
    line_to,
    log_odds,
    share,
)
from aligners.fitting.migration.search import (
    METRICS,
    TOP,
    Estimate,
    estimate,
    resampled,
)

WORDS = (3, 10)  # of a piece, at least and at most
SEED = 7  # of pieces, whatever the study's: vectors of them can be kept


def pieces_of(texts: Sequence[str]) -> list[str]:
    """Return a run of words of each text, of random length and place; the whole text where it has fewer words."""
    draw = np.random.default_rng(SEED)
    least, most = WORDS
    pieces = []
    for text in texts:
        words = text.split()
        wanted = int(draw.integers(least, most + 1))
        number = min(wanted, len(words))
        last = len(words) - number
        start = int(draw.integers(0, last + 1))
        stop = start + number
        pieces.append(" ".join(words[start:stop]))
    return pieces


def own_found(
    similar: np.ndarray, part: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Return how many documents of a part come before each piece's own text: (V,).

    Args:
        similar: (V, M) of pieces to documents, of which the first V are their own texts.
        part: places of documents; a piece's own text counts as one of them.
    """
    own = np.diagonal(similar)
    nearer = similar[:, part] > own[:, None]
    return nearer.sum(1)


def scores_at(before: np.ndarray) -> dict[str, np.ndarray]:
    """Score the only relevant document, given how many come before it (V,): each of `METRICS`, (V,)."""
    first = before < 1.0
    seen = before < TOP
    gains = seen / np.log2(2 + before)
    return {"recall1": first, "recall10": 1.0 * seen, "ndcg10": gains}


class Ranks(NamedTuple):
    """How many documents of a part of the pool come before each piece's own text, (V,), by each search."""

    mapped: np.ndarray
    new: np.ndarray
    old: np.ndarray


def forecast_by_pieces(
    made: Search, size: int, found: Mapping[str, np.ndarray], seed: int
) -> dict[str, Estimate]:
    """Predict recall relative to re-embedding.

    Args:
        made: similarities of validation pieces to the texts of the pool, which begin with their own.
        size: documents of the index.
        found: what the old model finds of the judged queries in the old index: each of `METRICS`, (Q,).
        seed: of parts of the pool, and of the resampling of pieces and queries.

    Returns:
        Each of `METRICS`, over its value for the new model.
    """
    pieces, documents = made.new.shape
    draw = np.random.default_rng(seed)
    sizes = []
    ranks = []
    for divisor in PARTS:
        number = documents // divisor
        if number < LEAST and divisor > 1:
            continue  # all are found among so few, and a line through that leads anywhere
        part = draw.permutation(documents)[:number]
        sizes.append(number)
        ranks.append(_ranks_in(made, part))
    line = line_to(np.log(sizes), np.log(size))

    strata = _strata_of(found)
    weights = resampled(draw, pieces)
    drawn_shares = resampled(draw, len(strata)) @ strata
    alike = np.full((1, pieces), 1 / pieces)
    shares = strata.mean(0, keepdims=True)
    foretold = {}
    for metric in METRICS:
        (value,) = _ratio(ranks, metric, line, alike, shares)
        drawn = _ratio(ranks, metric, line, weights, drawn_shares)
        foretold[metric] = estimate(value, drawn)
    return foretold


def _ranks_in(made: Search, part: np.ndarray) -> Ranks:
    """Rank each piece's own text among a part of the pool."""
    mapped = own_found(made.mapped, part)
    new = own_found(made.new, part)
    old = own_found(made.old, part)
    return Ranks(mapped, new, old)


def _strata_of(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return whether a relevant document is first, among the next nine, or later: (Q, 3)."""
    first = found["recall1"] > 0
    seen = found["recall10"] > 0
    next_nine = seen & ~first
    strata = np.stack([first, next_nine, ~seen], 1)
    return strata.astype(float)


def _ratio(
    ranks: Sequence[Ranks],
    metric: str,
    line: np.ndarray,
    weights: np.ndarray,
    shares: np.ndarray,
) -> np.ndarray:
    """Return what is found through the map over what the new model finds, at the size of the index: (D,).

    Args:
        ranks: in each part of the pool.
        metric: out of `METRICS`.
        line: weight of each part, see `line_to`.
        weights: (D, V) of pieces.
        shares: (D, 3) of judged queries in each stratum.
    """
    through, alone = [], []
    for part in ranks:
        strata = _strata_of(scores_at(part.old))
        mapped = scores_at(part.mapped)[metric]
        new = scores_at(part.new)[metric]
        through.append(_stratified(mapped, strata, weights, shares))
        alone.append(_stratified(new, strata, weights, shares))
    return _at_size(through, line) / _at_size(alone, line)


def _at_size(measured: Sequence[np.ndarray], line: np.ndarray) -> np.ndarray:
    """Return the share, measured (D,) in each part of the pool, at the size of the index: (D,)."""
    logits = log_odds(np.array(measured))
    return share(line @ logits)


def _stratified(
    values: np.ndarray, strata: np.ndarray, weights: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Return Σ p(s) m(s) for each of the weights (D, V); a stratum without pieces has the mean of all."""
    column = values[:, None]
    there = weights @ strata
    sums = weights @ (column * strata)
    means = sums / np.maximum(there, 1e-12)
    mean = weights @ column
    means = np.where(there > 0, means, mean)
    return (shares * means).sum(1)
