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
        self.aligner = dictionary
        self.pair = dictionary.paired()
        check_one_space(self.pair)
        sites, latents = dictionary.sites, dictionary.latents
        self.alone = self.pair.bias_x.new_zeros(sites, latents)
        self.total = self.pair.bias_x.new_zeros(sites)
        self.left = torch.zeros_like(self.total)
        self.rows = 0
        reader = LatentReader(sites, latents, shown, CONTEXTS)
        self.reader = reader.to(self.pair.bias_x.device)

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
            difference = y[site].double() - x[site].double()
            self._add(site, codes[site], difference)

    def _add(self, site: int, codes: Tensor, difference: Tensor) -> None:
        """Add the difference y − x of some rows (N, d) at a site."""
        bias = self.pair.bias_y[site] - self.pair.bias_x[site]
        difference = difference - bias
        change = self.pair.decoder_y[site] - self.pair.decoder_x[site]
        entries = firing(codes)
        along = entries.along(change, difference)
        lengths = change.square().sum(1)
        length = lengths[entries.latent]
        explained = 2 * entries.value * along - entries.value**2 * length
        self.alone[site].index_add_(0, entries.latent, explained)
        rebuilt = entries.rebuilt(change, len(difference))
        left = difference - rebuilt
        self.total[site] += difference.square().sum()
        self.left[site] += left.square().sum()

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
                row: Row = {"site": site, "latent": latent, "share": share}
                row["together"] = together
                fired = int(texts.contexts.fired[place, latent])
                row["fired"] = fired / self.rows
                row["top_tokens"] = texts.top_tokens(place, latent)
                row["context"] = texts.top_context(place, latent)
                rows.append(row)
        return rows

    def _top(self, place: int) -> list[tuple[int, float]]:
        """Return the latents that explain most at a site, with their shares."""
        shares = self.alone[place] / self.total[place]
        order = shares.argsort(descending=True, stable=True)
        top = []
        for latent in order[:TOP].tolist():
            share = float(shares[latent])
            if share < LEAST:
                break
            top.append((latent, share))
        return top
