"""The largest codes of each latent, each with its text, its place there, and the codes around it, in one pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.similarity.double_metric import DoubleMetric
from aligners.similarity.latents.dictionary import (
    Firing,
    check_codes,
    check_numbers,
    firing,
)
from aligners.similarity.latents.ordering import first_of_runs, ranks_within, sorted_by

AROUND = 8  # rows on each side of a context
WINDOW = 2 * AROUND + 1
# What is kept of a context: its text, its place, and its window, in whose middle its own code is.
TEXT, PLACE, CODE = 0, 1, 2 + AROUND
EXACT = 2**24  # below this float32 has every whole number


class Contexts(NamedTuple):
    """The n largest codes of each latent, at most one of each text.

    Attributes:
        code: (S, m, n), the largest first; 0 where there are fewer.
        text: (S, m, n) numbers of the texts; −1 where there are fewer.
        place: (S, m, n) of the rows in their texts, from 0.
        window: (S, m, n, 17) codes of the latent on the 8 rows before, the row itself, and the 8 after; 0 beyond the
            text.
        fired: (S, m) rows with a code above 0.
    """

    code: Tensor
    text: Tensor
    place: Tensor
    window: Tensor
    fired: Tensor


class LatentContexts(DoubleMetric):
    """Keeps the rows on which each latent has its largest codes, whatever the batches, their order and the ranks.

    At most one row of each text is kept; equal codes go by the number of the text, then by place. It takes 76 · S · m ·
    n bytes: 7.5 MB a site for 12,288 latents and 8 contexts. Codes are kept in float32.

    Args:
        sites: S.
        latents: m.
        count: n.
    """

    full_state_update = False
    best: Tensor
    fired: Tensor

    def __init__(self, sites: int, latents: int, count: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range(least=1, sites=sites, latents=latents, count=count)
        best = torch.zeros(sites, latents, count, 2 + WINDOW)
        self.add_state("best", best, dist_reduce_fx=merged)
        fired = torch.zeros(sites, latents, dtype=torch.long)
        self.add_state("fired", fired, dist_reduce_fx="sum")

    def update(self, codes: Tensor, text: Tensor, place: Tensor) -> None:
        """Add rows, all of a text at once, for the codes around one are those of the same batch.

        Args:
            codes: (S, N, m) at least 0.
            text: (N,) numbers of the rows' texts.
            place: (N,) of the rows in their texts, as of `Rows.place`.

        Raises:
            ValueError: a shape that does not fit, codes below 0 or not finite, or numbers below 0 or from 2²⁴ on.
        """
        sites, latents, _, _ = self.best.shape
        check_codes(codes, sites, latents)
        rows = codes.shape[1]
        check_numbers("text", text, rows, EXACT)
        check_numbers("place", place, rows, EXACT)
        for site in range(sites):
            at_site = codes[site]
            entries = firing(at_site.float())
            fired = entries.latent.bincount(minlength=latents)
            self.fired[site] += fired
            self._enter(site, entries, at_site, text, place)

    def _enter(
        self, site: int, entries: Firing, codes: Tensor, text: Tensor, place: Tensor
    ) -> None:
        """Let the entries in that are among the largest of their latents."""
        least = self.best[site, :, -1, CODE]
        may = entries.value >= least[entries.latent]
        row = entries.row[may]
        latent = entries.latent[may]
        code = entries.value[may]
        texts = text[row]
        places = place[row]
        candidates = _Candidates(latent, code, texts, places)
        count = self.best.shape[2]
        kept, _ = candidates.largest(count)
        if not len(kept):
            return
        row = row[kept]
        latent = latent[kept]
        window = _windows(codes, text, place, row, latent)
        about = torch.stack([texts[kept], places[kept]], 1)
        about = about.to(window)
        records = torch.cat([about, window], 1)
        self._add(site, latent, records)

    def _add(self, site: int, latent: Tensor, new: Tensor) -> None:
        """Keep the largest of new records (E, ...) and of those that their latents have."""
        touched, number = latent.unique(return_inverse=True)
        old = self.best[site, touched]
        shape = old.shape
        numbers = torch.arange(len(touched), device=latent.device)
        of_old = numbers.repeat_interleave(shape[1])
        owner = torch.cat([of_old, number])
        old = old.flatten(0, 1)
        records = torch.cat([old, new])
        table = _table(owner, records, shape)
        self.best[site, touched] = table

    def compute(self) -> Contexts:
        """Return what was kept."""
        code = self.best[..., CODE]
        kept = code > 0
        text = self.best[..., TEXT].long()
        text = text.where(kept, -1)
        place = self.best[..., PLACE].long()
        window = self.best[..., 2:]
        return Contexts(code, text, place, window, self.fired)


def merged(each: Tensor) -> Tensor:
    """Merge what R ranks have kept, (R, S, m, n, ...), by the rule of one: (S, m, n, ...)."""
    ranks, sites, latents, count, _ = each.shape
    numbers = torch.arange(latents, device=each.device)
    of_rank = numbers.repeat_interleave(count)
    owner = of_rank.repeat(ranks)
    best = []
    for site in range(sites):
        at_site = each[:, site]
        shape = at_site.shape[1:]
        records = at_site.flatten(0, 2)
        table = _table(owner, records, shape)
        best.append(table)
    return torch.stack(best)


def _table(owner: Tensor, records: Tensor, shape: torch.Size) -> Tensor:
    """Return the largest records (E, ...) of each owner (E,) by rank, zeros where there are fewer: `shape`."""
    real = records[:, CODE] > 0
    owner = owner[real]
    records = records[real]
    code = records[:, CODE]
    text = records[:, TEXT]
    place = records[:, PLACE]
    candidates = _Candidates(owner, code, text, place)
    kept, rank = candidates.largest(shape[1])
    table = records.new_zeros(shape)
    table[owner[kept], rank] = records[kept]
    return table


class _Candidates(NamedTuple):
    """E codes that may be kept, (E,) each, with what decides between them."""

    latent: Tensor
    code: Tensor
    text: Tensor
    place: Tensor

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of those to keep, by latent, and the rank of each."""
        latent, code, text, place = self
        order = sorted_by(latent, text, -code, place)
        first = first_of_runs(latent[order], text[order])
        one = order[first]
        owner = latent[one]
        largest = -code[one]
        by_code = sorted_by(owner, largest, text[one])
        order = one[by_code]
        rank = ranks_within(latent[order])
        kept = rank < count
        return order[kept], rank[kept]


def _windows(
    codes: Tensor, text: Tensor, place: Tensor, row: Tensor, latent: Tensor
) -> Tensor:
    """Return the codes of some latents around some rows, (E,) each, 0 where there is no row: (E, W) float32."""
    span = int(place.max()) + WINDOW
    start = text * span
    key = start + place + AROUND
    ordered, order = key.sort()
    off = torch.arange(WINDOW, device=key.device)
    off = off - AROUND
    wanted = key[row, None] + off
    at = torch.searchsorted(ordered, wanted)
    last = len(key) - 1
    at = at.clamp(max=last)
    rows = order[at]
    found = codes[rows, latent[:, None]]
    there = ordered[at] == wanted
    return found.float() * there
