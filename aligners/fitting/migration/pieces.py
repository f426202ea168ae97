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

import numpy as np

from aligners.fitting.migration.forecast import PARTS, Search, line_to, log_odds, share
from aligners.fitting.migration.search import DRAWS, METRICS, TOP, Estimate

WORDS = (3, 10)  # of a piece, at least and at most
SEED = 7  # of pieces, whatever the study's: vectors of them can be kept


def pieces_of(texts: Sequence[str]) -> list[str]:
    """Return a run of words of each text, of random length and place; the whole text where it has fewer words."""
    draw = np.random.default_rng(SEED)
    least, most = WORDS
    pieces = []
    for text in texts:
        words = text.split()
        number = min(len(words), int(draw.integers(least, most + 1)))
        start = int(draw.integers(0, len(words) - number + 1))
        pieces.append(" ".join(words[start : start + number]))
    return pieces


def own_found(
    similar: np.ndarray, part: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Return how many documents of a part come before each piece's own text: (V,).

    Args:
        similar: (V, M) of pieces to documents, of which the first V are their own texts.
        part: places of documents; a piece's own text counts as one of them.
    """
    own = np.diagonal(similar)[:, None]
    return (similar[:, part] > own).sum(1)


def scores_at(before: np.ndarray) -> dict[str, np.ndarray]:
    """Score the only relevant document, given how many come before it (V,): each of `METRICS`, (V,)."""
    seen = before < TOP
    gains = seen / np.log2(2 + before)
    return {"recall1": before < 1.0, "recall10": 1.0 * seen, "ndcg10": gains}


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
    sizes, parts = [], []
    for divisor in PARTS:
        part = draw.permutation(documents)[: documents // divisor]
        sizes.append(len(part))
        parts.append([own_found(table, part) for table in made])
    line = line_to(np.log(sizes), np.log(size))
    queries = len(found["recall1"])
    known = _strata_of(found)
    weights = _weights(draw, pieces)
    drawn_known = _weights(draw, queries) @ known
    foretold = {}
    for metric in METRICS:
        alike = np.full((1, pieces), 1 / pieces)
        (value,) = _ratio(parts, metric, line, alike, known.mean(0)[None])
        drawn = _ratio(parts, metric, line, weights, drawn_known)
        low, high = np.quantile(drawn, [0.025, 0.975])
        foretold[metric] = Estimate(float(value), float(low), float(high))
    return foretold


def _weights(draw: np.random.Generator, rows: int) -> np.ndarray:
    """Return the weight of each row in each resampling: (DRAWS, rows)."""
    return draw.multinomial(rows, np.full(rows, 1 / rows), DRAWS) / rows


def _strata_of(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return whether a relevant document is first, among the next nine, or later: (Q, 3)."""
    first = found["recall1"] > 0
    seen = found["recall10"] > 0
    return np.stack([first, seen & ~first, ~seen], 1).astype(float)


def _ratio(
    parts: Sequence[Sequence[np.ndarray]],
    metric: str,
    line: np.ndarray,
    weights: np.ndarray,
    known: np.ndarray,
) -> np.ndarray:
    """Return what is found through the map over what the new model finds, at the size of the index: (D,).

    Args:
        parts: of the pool: how many documents come before each piece's own, through the map, by the new model and by
            the old one.
        metric: out of `METRICS`.
        line: weight of each part, see `line_to`.
        weights: (D, V) of pieces.
        known: (D, 3) shares of judged queries in each stratum.
    """
    shares = []
    for place in (0, 1):
        measured = []
        for part in parts:
            strata = _strata_of(scores_at(part[2]))
            values = scores_at(part[place])[metric]
            measured.append(_stratified(values, strata, weights, known))
        shares.append(share(line @ log_odds(np.array(measured))))
    return shares[0] / shares[1]


def _stratified(
    values: np.ndarray, strata: np.ndarray, weights: np.ndarray, known: np.ndarray
) -> np.ndarray:
    """Return Σ p(s) m(s) for each of the weights (D, V); a stratum without pieces has the mean of all."""
    there = weights @ strata
    sums = weights @ (values[:, None] * strata)
    means = np.where(
        there > 0, sums / np.maximum(there, 1e-12), weights @ values[:, None]
    )
    return (known * means).sum(1)
