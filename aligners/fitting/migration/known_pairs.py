"""What maps are fitted on and chosen by: pairs of texts, and of a piece of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aligners.fitting.migration.forecast import through
from aligners.fitting.migration.pieces import own_found, scores_at
from aligners.fitting.migration.search import Similarity
from aligners.fitting.migration.vector_files import lengths
from aligners.fitting.migration.vector_maps import (
    NETWORKS,
    Pairs,
    VectorMap,
    fit_vectors,
    together,
)

SCALES = tuple(2.0 ** (power / 2) for power in range(-4, 5))


@dataclass(frozen=True)
class Known:
    """Pairs (old, new) of texts, row by row with those of their pieces, embedded as queries.

    Attributes:
        texts: embedded as documents.
        pieces: None: they are not embedded.
    """

    texts: Pairs
    pieces: Pairs | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: np.ndarray | slice) -> "Known":
        """Return some of the texts, with their pieces."""
        pieces = self.pieces and self.pieces.at(rows)
        return Known(self.texts.at(rows), pieces)

    def whole(self) -> np.ndarray:
        """Return which rows have no zero vector: (N,)."""
        pairs = [self.texts] if self.pieces is None else [self.texts, self.pieces]
        kept = np.ones(len(self), bool)
        for vectors in pairs:
            kept &= (lengths(vectors.x) > 0) & (lengths(vectors.y) > 0)
        return kept

    def turned(self) -> "Known":
        """Return the pairs from new to old."""
        pieces = self.pieces and self.pieces.turned()
        return Known(self.texts.turned(), pieces)


def pool_of(route: str, fit: Known, validation: Known) -> Pairs:
    """Return the texts that validation rows search, which begin with their own.

    The old index is as it is, so for mapped queries texts that maps are fitted on are as good as others.
    """
    if route == "documents":
        return validation.texts
    return together([validation.texts, fit.texts], centred=False)


def fit_route(
    name: str,
    route: str,
    fit: Known,
    validation: Known,
    *,
    similarity: Similarity,
    normalised: bool,
    seed: int,
) -> VectorMap:
    """Fit a map of a route; pieces, if there are any, choose its scale.

    A map of queries is fitted on texts and pieces, each about their own means, and takes the mean of new pieces to that
    of the old texts. The scale is by how much mapped vectors differ from their mean: the less they do, the more the
    search prefers what is near the mean, whatever is asked.

    Args:
        name: out of `MAPS`.
        route: `queries` or `documents`.
        fit: pairs (old, new) to fit on.
        validation: pairs (old, new) that choose.
        similarity: of the search.
        normalised: whether all vectors of the target have length 1.
        seed: of networks.
    """
    pairs, others = fit, validation
    if route == "queries":
        pairs, others = fit.turned(), validation.turned()
    if pairs.pieces is None or others.pieces is None:
        return fit_vectors(
            name, pairs.texts, others.texts, normalised=normalised, seed=seed
        )
    centre_x, centre_y = pairs.texts.means()
    rows, chosen_by = pairs.texts, others.texts
    if route == "queries":
        centred = name not in NETWORKS
        rows = together([rows, pairs.pieces], centred=centred)
        chosen_by = together([chosen_by, others.pieces], centred=centred)
        centre_x, _ = pairs.pieces.means()
    fitted = fit_vectors(name, rows, chosen_by, normalised=normalised, seed=seed)
    if fitted.bank is not None:
        return fitted
    scaled = [fitted.placed(centre_x, centre_y, scale) for scale in SCALES]
    pool = pool_of(route, fit, validation)
    return best_of(scaled, route, validation, pool, similarity)


def best_of(
    maps: Sequence[VectorMap],
    route: str,
    validation: Known,
    pool: Pairs,
    similarity: Similarity,
) -> VectorMap:
    """Return the map through which validation pieces find their own texts best."""
    found = []
    for map_ in maps:
        found.append(pieces_found(map_, route, validation, pool, similarity))
    return maps[int(np.argmax(found))]


def pieces_found(
    map_: VectorMap, route: str, validation: Known, pool: Pairs, similarity: Similarity
) -> float:
    """Return nDCG@10 of validation pieces that search for their own texts through a map."""
    if validation.pieces is None:
        raise ValueError("Expected the vectors of pieces, but got none.")
    similar = through(route, map_, validation.pieces, pool, similarity)
    return float(scores_at(own_found(similar))["ndcg10"].mean())
