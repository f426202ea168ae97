"""Retrieval on held-out rows: a draw of them is kept while they pass, and every map is scored on it at the end."""

import torch
from torch import Tensor

from aligners.similarity.controls import Draw, jackknife_interval
from aligners.similarity.functional.retrieval import distinct_rows, retrieval_scores

QUERIES = (
    1000  # rows that are mapped, whose partners are the candidates of the first columns
)
MOST = 10_000  # candidates of the columns with `_all`
NUMBERS = 2**27  # of the candidates at all sites together, in float32: 512 MiB
AMONG = ("", "_all")


def _columns() -> list[str]:
    names = ["queries", "candidates", "candidates_all"]
    for among in AMONG:
        for end in (among, f"{among}_centred"):
            top1 = f"top1{end}"
            names += [top1, f"{top1}_low", f"{top1}_high", f"top10{end}", f"mrr{end}"]
    return names


RETRIEVAL_COLUMNS = tuple(_columns())


class HeldOutRows:
    """Paired rows drawn from those that pass, and how well mapped ones find their partners.

    A hash of the seed, the text and the place in it draws the rows, so they are the same for any batches and any number
    of ranks. The first `QUERIES` of the draw are mapped. Their partners are the candidates of the first columns. Those
    of the columns with `_all` are all rows of Y, or a draw of `MOST` of them, or of fewer where these would be more
    than `NUMBERS` numbers at all sites together.

    Args:
        sites: S.
        d_x: width of the rows that are mapped.
        d_y: width of the candidates.
        seed: of the draw.
        device: where the rows are.
    """

    def __init__(
        self, sites: int, d_x: int, d_y: int, seed: int, device: torch.device
    ) -> None:
        most = max(QUERIES, min(MOST, NUMBERS // (sites * d_y)))
        self._drawn = []
        for budget, width in ((QUERIES, d_x), (most, d_y)):
            kept = torch.empty(sites, budget, width, device=device)
            self._drawn.append((Draw(budget, seed, device), kept))

    def add(self, x: Tensor, y: Tensor, text: Tensor, place: Tensor) -> None:
        """Draw from a batch.

        Args:
            x: (S, N, d_x).
            y: (S, N, d_y).
            text: (N,) ids of the texts of the rows.
            place: (N,) places of the rows in their texts.
        """
        for (draw, kept), rows in zip(self._drawn, (x, y), strict=True):
            places, chosen = draw.admit(text, place)
            kept[:, places] = rows[:, chosen].to(kept.dtype)

    def end(self) -> Tensor:
        """Take the rows of all ranks, each of which has to call it, and return those to be mapped, (S, n, d_x)."""
        for draw, _ in self._drawn:
            draw.end(groups=1)
        x, self._y = (draw.collect(kept) for draw, kept in self._drawn)
        self._owner = self._drawn[0][0].text.unique(return_inverse=True)[1]
        few = x.shape[1]
        self._distinct = [(distinct_rows(y[:few]), distinct_rows(y)) for y in self._y]
        return x

    def columns(self, mapped: Tensor, at: slice = slice(None)) -> dict[str, Tensor]:
        """Each of `RETRIEVAL_COLUMNS`, (S',), of mapped rows (S', n, d_y) whose partners are at these of the S sites.

        Intervals are those of a jackknife over texts, and end at 0 and 1 at the latest.
        """
        places = range(len(self._y))[at]
        columns = {"queries": torch.full((len(places),), mapped.shape[1])}
        for whole, among in enumerate(AMONG):
            counts = [len(self._distinct[s][whole][0]) for s in places]
            columns[f"candidates{among}"] = torch.tensor(counts)
            for centred in (False, True):
                end = f"{among}_centred" if centred else among
                scores = self._scores(mapped, places, whole, centred)
                for k, name in enumerate(("top1", "top10", "mrr")):
                    columns[f"{name}{end}"] = scores[:, k].mean(-1)
                low, high = self._interval(scores[:, 0])
                columns |= {f"top1{end}_low": low, f"top1{end}_high": high}
        return columns

    def _scores(
        self, mapped: Tensor, places: range, whole: int, centred: bool
    ) -> Tensor:
        """Top 1, top 10 and reciprocal rank of each row, (S', 3, n), among as many candidates or among all."""
        scores = []
        for s, rows in zip(places, mapped, strict=True):
            candidates = self._y[s] if whole else self._y[s, : mapped.shape[1]]
            distinct = self._distinct[s][whole]
            scores.append(retrieval_scores(rows, candidates, distinct, centred=centred))
        return torch.stack(scores)

    def _interval(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of the 95 % interval over texts of the mean score of rows (S, n), each (S,); NaN of one text."""
        texts = int(self._owner.max()) + 1
        if texts < 2:
            nothing = torch.full((len(scores),), torch.nan)
            return nothing, nothing
        sums = scores.new_zeros(texts, len(scores)).index_add_(0, self._owner, scores.T)
        left = scores.shape[1] - self._owner.bincount()
        without = (sums.sum(0) - sums) / left[:, None]  # the mean without each text
        low, high = jackknife_interval(scores.mean(-1), without)
        return low.clamp(0, 1), high.clamp(0, 1)
