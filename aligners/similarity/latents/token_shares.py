"""The tokens that each latent fires on, by the share of its codes that lies on them, in one pass over texts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.similarity.double_metric import DoubleMetric
from aligners.similarity.latents.dictionary import check_codes, check_numbers, firing
from aligners.similarity.latents.ordering import ranks_within, sorted_by

BUFFER = 2**20  # entries that may wait to be summed


class TopTokens(NamedTuple):
    """The tokens with the most of the codes of each latent.

    Attributes:
        token: (S, m, n) numbers of the tokens; −1 where there are fewer.
        share: (S, m, n) of the sum of the latent's codes; 0 where there are fewer.
    """

    token: Tensor
    share: Tensor


class LatentTokens(DoubleMetric):
    """Sums the codes of each latent by token. It takes 16 bytes for each latent and each token that it has fired on.

    A share of the sum names tokens on which a latent fires both often and strongly: the mean code alone would name what
    it met once, the number of firings alone what is frequent anyway. Equal shares go by the number of the token.

    Args:
        sites: S.
        latents: m.
        tokens: how many tokens, or other types of rows, there are.
        count: n of `TopTokens`.
    """

    full_state_update = False
    keys: list[Tensor]
    sums: list[Tensor]

    def __init__(
        self, sites: int, latents: int, tokens: int, count: int = 5, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_range(least=1, sites=sites, latents=latents, tokens=tokens, count=count)
        self.shape = sites, latents, tokens
        self.count = count
        self.add_state("keys", [], dist_reduce_fx="cat")
        self.add_state("sums", [], dist_reduce_fx="cat")

    def update(self, codes: Tensor, token: Tensor) -> None:
        """Add rows.

        Args:
            codes: (S, N, m) at least 0.
            token: (N,) number of the token of each row.

        Raises:
            ValueError: a shape that does not fit, codes below 0 or not finite, or a token that does not exist.
        """
        sites, latents, tokens = self.shape
        check_codes(codes, sites, latents)
        check_numbers("token", token, codes.shape[1], tokens)
        for site in range(sites):
            entries = firing(codes[site])
            latent = site * latents + entries.latent
            key = latent * tokens + token[entries.row]
            keys, sums = _summed(key, entries.value)
            self.keys.append(keys)
            self.sums.append(sums)
        sizes = list(map(len, self.keys))
        waiting = sum(sizes[1:])
        if waiting > max(BUFFER, sizes[0]):
            self._join()

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the entries of all ranks.

        A rank without any sends none of the types that the others send; torchmetrics would send float32 for both.
        """
        if not len(self.keys):
            self._join()
        super().sync(*args, **kwargs)

    def _join(self) -> None:
        """Put one entry for each latent and token in the place of all parts."""
        key, total = self._summed()
        self.keys = [key]
        self.sums = [total]

    def _summed(self) -> tuple[Tensor, Tensor]:
        if not len(self.keys):
            nothing = torch.zeros(0, device=self.device)
            return nothing.long(), nothing.double()
        keys = _joined(self.keys)
        sums = _joined(self.sums)
        return _summed(keys, sums)

    def compute(self) -> TopTokens:
        """Return the tokens with the largest shares."""
        sites, latents, tokens = self.shape
        shape = sites, latents, self.count
        key, total = self._summed()
        cells = sites * latents
        latent = key // tokens
        of_latent = total.new_zeros(cells)
        of_latent.index_add_(0, latent, total)
        whole = of_latent[latent]
        share = total / whole
        # or the order of the batches would decide between equal ones
        rounded = share.float()
        order = sorted_by(latent, -rounded, key)
        rank = ranks_within(latent[order])
        kept = rank < self.count
        order = order[kept]
        at = latent[order], rank[kept]
        found = key.new_full((cells, self.count), -1)
        shares = total.new_zeros(found.shape)
        first = key[order]
        found[at] = first % tokens
        shares[at] = share[order]
        found = found.view(shape)
        shares = shares.view(shape)
        return TopTokens(found, shares)


def _summed(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values by key: both (E,) → (K,), by ascending key."""
    keys, place = key.unique(return_inverse=True)
    sums = value.new_zeros(len(keys))
    sums.index_add_(0, place, value)
    return keys, sums


def _joined(parts: list[Tensor] | Tensor) -> Tensor:
    """Join the parts of a list state, which ranks have joined before."""
    if isinstance(parts, Tensor):
        return parts
    return torch.cat(parts)
