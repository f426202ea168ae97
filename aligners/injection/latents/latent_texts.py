"""What latents fire on, in words and as plain values: their top tokens, and the texts around their largest codes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aligners.datamodules.rows.shown_rows import ShownRows
from aligners.similarity.latents.contexts import AROUND, Contexts, LatentContexts
from aligners.similarity.latents.token_shares import LatentTokens, TopTokens

Row = dict[str, Any]
LEVELS = 9  # of shading, beside none


class LatentTexts(NamedTuple):
    """What the latents of S dictionaries of m latents fire on.

    Attributes:
        contexts: their largest codes.
        tokens: the tokens with the most of their codes.
        shown: what the rows of the texts read.
    """

    contexts: Contexts
    tokens: TopTokens
    shown: ShownRows

    def top_tokens(self, site: int, latent: int) -> str:
        """List the top tokens of a latent with their shares: `cat 62%, dog 20%`."""
        said = []
        for token, share in self._tokens(site, latent):
            string = self.shown.strings[token].strip()
            said.append(f"{string} {share:.0%}")
        return ", ".join(said)

    def top_context(self, site: int, latent: int) -> str:
        """Return the text around the largest code of a latent; empty where it never fires."""
        text = int(self.contexts.text[site, latent, 0])
        if text < 0:
            return ""
        place = int(self.contexts.place[site, latent, 0])
        return self.shown.around(text, place, AROUND)

    def _tokens(self, site: int, latent: int) -> list[tuple[int, float]]:
        tokens = self.tokens.token[site, latent]
        found = tokens >= 0
        shares = self.tokens.share[site, latent, found]
        numbers = tokens[found].tolist()
        return list(zip(numbers, shares.tolist(), strict=True))

    def packed(self, site: int, latent: int) -> list[Any]:
        """Return the top tokens and contexts of a latent as plain values, as the page's script reads them."""
        tokens = []
        for token, share in self._tokens(site, latent):
            tokens.append([token, round(share, 3)])
        contexts = self._packed_contexts(site, latent)
        return [tokens, contexts]

    def _packed_contexts(self, site: int, latent: int) -> list[list[Any]]:
        codes = self.contexts.code[site, latent].tolist()
        texts = self.contexts.text[site, latent].tolist()
        places = self.contexts.place[site, latent].tolist()
        levels = _levels(self.contexts.window[site, latent])
        packed = []
        for rank, text in enumerate(texts):
            if text < 0:
                break
            code = rounded(codes[rank], 3)
            packed.append([text, places[rank], code, levels[rank]])
        return packed


def _levels(windows: Tensor) -> list[str]:
    """Return a digit for each code of the windows of a latent, (n, W): 0 for none, then by ninths of the largest."""
    tiny = torch.finfo(windows.dtype).tiny
    largest = windows.max().clamp(min=tiny)
    shading = windows / largest * LEVELS
    levels = shading.ceil().long()
    digits = []
    for window in levels.tolist():
        digits.append("".join(map(str, window)))
    return digits


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a number with a few digits, which JSON can hold."""
    if value is None or value != value:
        return None
    return float(f"{value:.{digits}g}")


class LatentReader(nn.Module):
    """Keeps what the latents of S dictionaries fire on while texts are read, whatever the batches and ranks.

    Args:
        sites: S.
        latents: m.
        shown: what the rows of the texts read.
        contexts: texts of each latent, see `LatentContexts`.
        tokens: top tokens of each, see `LatentTokens`.
    """

    def __init__(
        self,
        sites: int,
        latents: int,
        shown: ShownRows,
        contexts: int = 8,
        tokens: int = 5,
    ) -> None:
        super().__init__()
        self.shown = shown
        self.contexts = LatentContexts(sites, latents, contexts)
        types = len(shown.strings)
        self.tokens = LatentTokens(sites, latents, types, tokens)

    def update(self, codes: Tensor, text: Tensor, place: Tensor) -> None:
        """Add rows, all of a text at once: see `LatentContexts.update`."""
        self.contexts.update(codes, text, place)
        types = self.shown.at(text.cpu(), place.cpu())
        self.tokens.update(codes, types.to(codes.device))

    def compute(self) -> LatentTexts:
        """Return what was kept, on the CPU."""
        contexts = Contexts(*_on_cpu(self.contexts.compute()))
        tokens = TopTokens(*_on_cpu(self.tokens.compute()))
        return LatentTexts(contexts, tokens, self.shown)


def _on_cpu(parts: Iterable[Tensor]) -> list[Tensor]:
    return [part.cpu() for part in parts]


def add_tokens(
    rows: Sequence[Row], sites: Sequence[tuple[int, int]], texts: LatentTexts
) -> None:
    """Add the column `top_tokens` to the rows of latents.

    Args:
        rows: with `site_x`, `site_y` and `latent`.
        sites: site pairs in the order of the dictionaries.
        texts: what all latents fire on.
    """
    places = {tuple(pair): place for place, pair in enumerate(sites)}
    for row in rows:
        place = places[row["site_x"], row["site_y"]]
        row["top_tokens"] = texts.top_tokens(place, row["latent"])
