"""Which latents of a sparse dictionary of two models the change from one to the other lies in."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.datamodules.rows.shown_rows import ShownRows
from aligners.injection.latents.latent_texts import LatentReader
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.latents.dictionary import check_one_space, firing

Row = dict[str, Any]
TOP = 10  # latents of a site in the table
CONTEXTS = 1  # of each latent
LEAST = 1e-3  # smallest share of the difference at which a latent is named


class ChangedLatents:
    """Sums over rows how much of NEW minus OLD each latent explains, and keeps what each fires on.

    With f_j the code and D_j = d_y,j − d_x,j the difference of its decoders, latent j adds f_j D_j to the difference
    δ = y − x − (b_y − b_x). Alone it explains the share Σ (2 f_j D_j·δ − f_j² ‖D_j‖²) / Σ ‖δ‖² of it: at most 1, and
    below 0 where it adds what others take away again. All latents together explain 1 − Σ ‖δ − Σ_j f_j D_j‖² / Σ ‖δ‖².
    Rows that have not changed add nothing to the sums.

    Args:
        dictionary: of both models, of S site pairs.
        shown: what the rows of the texts read.

    Raises:
        ValueError: the models' widths differ, or the dictionary is of one model.
    """

    def __init__(self, dictionary: SparseAligner, shown: ShownRows) -> None:
        pair = dictionary.paired()
        check_one_space(pair)
        self.aligner = dictionary
        self.changes = pair.decoder_y - pair.decoder_x
        self.shift = pair.bias_y - pair.bias_x
        sites = dictionary.sites
        latents = dictionary.latents
        self.alone = self.shift.new_zeros(sites, latents)
        self.total = self.shift.new_zeros(sites)
        self.left = torch.zeros_like(self.total)
        self.rows = 0
        reader = LatentReader(sites, latents, shown, CONTEXTS)
        self.reader = reader.to(self.shift.device)

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, text: Tensor, place: Tensor) -> None:
        """Add rows, all of a text at once.

        Args:
            x: (S, N, d) of OLD.
            y: (S, N, d) of NEW.
            text: (N,) numbers of the texts.
            place: (N,) of the rows in their texts.
        """
        codes = self.aligner.codes(x, y)
        self.reader.update(codes, text, place)
        self.rows += len(text)
        for site in range(len(codes)):
            old = x[site].double()
            new = y[site].double()
            self._add(site, codes[site], new - old)

    def _add(self, site: int, codes: Tensor, difference: Tensor) -> None:
        """Add the difference y − x of some rows (N, d) at a site."""
        difference = difference - self.shift[site]
        change = self.changes[site]
        entries = firing(codes)
        latent = entries.latent
        value = entries.value
        along = entries.along(change, difference)
        lengths = change.square().sum(1)
        gained = 2 * value * along
        lost = value**2 * lengths[latent]
        self.alone[site].index_add_(0, latent, gained - lost)
        rebuilt = entries.rebuilt(change, len(difference))
        left = difference - rebuilt
        self.total[site] += _squares(difference)
        self.left[site] += _squares(left)

    def table(self, sites: Sequence[int]) -> list[Row]:
        """Return the latents that explain most at each site, with what they fire on; `sites` are those of NEW."""
        texts = self.reader.compute()
        rows = []
        for place, site in enumerate(sites):
            total = float(self.total[place])
            if total == 0:
                continue
            left = float(self.left[place])
            together = 1 - left / total
            for latent, share in self._top(place):
                of_latent = place, latent
                fired = int(texts.contexts.fired[of_latent])
                row: Row = {"site": site, "latent": latent}
                row["share"] = share
                row["together"] = together
                row["fired"] = fired / self.rows
                row["top_tokens"] = texts.top_tokens(*of_latent)
                row["context"] = texts.top_context(*of_latent)
                rows.append(row)
        return rows

    def _top(self, place: int) -> list[tuple[int, float]]:
        """Return the latents that explain most at a site, with their shares."""
        shares = self.alone[place] / self.total[place]
        order = shares.argsort(descending=True, stable=True)
        first = order[:TOP]
        top = []
        for latent in first.tolist():
            share = float(shares[latent])
            if share < LEAST:
                break
            top.append((latent, share))
        return top


def _squares(rows: Tensor) -> Tensor:
    """Sum the squares of all numbers."""
    squares = rows.square()
    return squares.sum()
