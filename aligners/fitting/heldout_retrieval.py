"""Retrieval on held-out rows: a random sample of rows is kept, and every map is scored on it at the end."""

import torch
from torch import Tensor

from aligners.maps.by_rows.drawn_rows import DrawnRows
from aligners.similarity.controls import jackknife_interval
from aligners.similarity.functional.retrieval import distinct_rows, retrieval_scores

# Number of rows to map; their partners are the candidates of the first columns.
QUERIES = 1000
MOST = 10_000  # candidates of the columns with `_all`
NUMBERS = (
    2**27
)  # numbers that the candidates at all sites may take together, in float32: 512 MiB


def _columns() -> tuple[str, ...]:
    names = ["queries", "candidates", "candidates_all"]
    for end in ("", "_centred", "_all", "_all_centred"):
        names += [f"top1{end}", f"top1{end}_low", f"top1{end}_high"]
        names += [f"top10{end}", f"mrr{end}"]
    return tuple(names)


RETRIEVAL_COLUMNS = _columns()


class HeldOutRows:
    """A random sample of held-out paired rows, and how well mapped ones find their partners.

    A hash of the seed, the text and the place in it draws the rows, so they are the same for any batches and any number
    of ranks. The first `QUERIES` of the draw are mapped. Their partners are the candidates of the first columns. The
    candidates of the columns with `_all` are all rows of Y, or a draw of `MOST` of them, or of fewer if these would be
    more than `NUMBERS` numbers at all sites together.

    Args:
        sites: S.
        d_x: width of the rows that are mapped.
        d_y: width of the candidates.
        seed: seed of the draw.
        device: where the rows are.
    """

    def __init__(
        self, sites: int, d_x: int, d_y: int, seed: int, device: torch.device
    ) -> None:
        most = min(MOST, NUMBERS // (sites * d_y))
        most = max(QUERIES, most)
        self._queries = DrawnRows(sites, QUERIES, d_x, seed, device)
        self._candidates = DrawnRows(sites, most, d_y, seed, device)

    def add(self, x: Tensor, y: Tensor, text: Tensor, place: Tensor) -> None:
        """Draw from a batch.

        Args:
            x: (S, N, d_x).
            y: (S, N, d_y).
            text: (N,) ids of the texts of the rows.
            place: (N,) places of the rows in their texts.
        """
        self._queries.add(x, text, place)
        self._candidates.add(y, text, place)

    def end(self) -> Tensor:
        """Take the rows of all ranks, each of which has to call it, and return those to be mapped, (S, n, d_x)."""
        x = self._queries.end()
        y = self._candidates.end()
        text = self._queries.draw.text
        _, self._owner = text.unique(return_inverse=True)
        queries = x.shape[1]
        partners = _Candidates(y[:, :queries])
        self._among = {"": partners, "_all": _Candidates(y)}
        return x

    def columns(self, mapped: Tensor, at: slice = slice(None)) -> dict[str, Tensor]:
        """Score mapped rows.

        Intervals are those of a jackknife over texts; they never leave 0 to 1.

        Args:
            mapped: (S', n, d_y) mapped rows.
            at: which of the S sites the mapped rows belong to.

        Returns:
            Each of `RETRIEVAL_COLUMNS`, (S',).
        """
        sites, queries, _ = mapped.shape
        columns = {"queries": torch.full((sites,), queries)}
        for among, candidates in self._among.items():
            columns[f"candidates{among}"] = candidates.counts[at]
            scores = candidates.scores(mapped, at, centred=False)
            columns |= self._columns(among, scores)
            scores = candidates.scores(mapped, at, centred=True)
            columns |= self._columns(f"{among}_centred", scores)
        return columns

    def _columns(self, end: str, scores: Tensor) -> dict[str, Tensor]:
        """Return the columns with this ending, from scores (3, S', n)."""
        top1, top10, mrr = scores
        low, high = self._interval(top1)
        return {
            f"top1{end}": top1.mean(-1),
            f"top1{end}_low": low,
            f"top1{end}_high": high,
            f"top10{end}": top10.mean(-1),
            f"mrr{end}": mrr.mean(-1),
        }

    def _interval(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the 95 % interval over texts of the mean score of rows (S, n), as two ends (S,); NaN for one text."""
        counts = self._owner.bincount()
        texts = len(counts)
        sites, rows = scores.shape
        if texts < 2:
            nothing = torch.full((sites,), torch.nan)
            return nothing, nothing
        sums = scores.new_zeros(texts, sites)
        sums.index_add_(0, self._owner, scores.T)
        left = rows - counts
        others = sums.sum(0) - sums
        without = others / left[:, None]  # the mean without each text
        mean = scores.mean(-1)
        low, high = jackknife_interval(mean, without)
        return low.clamp(0, 1), high.clamp(0, 1)


class _Candidates:
    """Rows (S, n, d) among which mapped rows look for their partners."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.distinct = []
        counts = []
        for of_site in rows:
            kept, number = distinct_rows(of_site)
            self.distinct.append((kept, number))
            counts.append(len(kept))
        self.counts = torch.tensor(counts)

    def scores(self, mapped: Tensor, at: slice, centred: bool) -> Tensor:
        """Return top 1, top 10 and reciprocal rank of each row at some sites, (3, S', n)."""
        rows = self.rows[at]
        distinct = self.distinct[at]
        found = []
        for queries, candidates, once in zip(mapped, rows, distinct, strict=True):
            scores = retrieval_scores(queries, candidates, once, centred=centred)
            found.append(scores)
        return torch.stack(found, 1)
