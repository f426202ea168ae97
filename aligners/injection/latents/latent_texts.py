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
        largest = site, latent, 0
        text = int(self.contexts.text[largest])
        if text < 0:
            return ""
        place = int(self.contexts.place[largest])
        return self.shown.around(text, place, AROUND)

    def _tokens(self, site: int, latent: int) -> list[tuple[int, float]]:
        tokens = self.tokens.token[site, latent]
        shares = self.tokens.share[site, latent]
        found = tokens >= 0
        numbers = tokens[found].tolist()
        of_tokens = shares[found].tolist()
        pairs = zip(numbers, of_tokens, strict=True)
        return list(pairs)

    def packed(self, site: int, latent: int) -> list[Any]:
        """Return the top tokens and contexts of a latent as plain values, as the page's script reads them."""
        tokens = []
        for token, share in self._tokens(site, latent):
            share = round(share, 3)
            tokens.append([token, share])
        contexts = self._packed_contexts(site, latent)
        return [tokens, contexts]

    def _packed_contexts(self, site: int, latent: int) -> list[list[Any]]:
        contexts = self.contexts
        levels = _levels(contexts.window[site, latent])
        packed = []
        for rank, shades in enumerate(levels):
            at = site, latent, rank
            text = int(contexts.text[at])
            if text < 0:
                break
            place = int(contexts.place[at])
            code = float(contexts.code[at])
            packed.append([text, place, rounded(code, 3), shades])
        return packed


def _levels(windows: Tensor) -> list[str]:
    """Return a digit for each code of the windows of a latent, (n, W): 0 for none, then by ninths of the largest."""
    tiny = torch.finfo(windows.dtype).tiny
    largest = windows.max()
    shares = windows / largest.clamp(min=tiny)
    shading = shares * LEVELS
    levels = shading.ceil().long()
    written = []
    for window in levels.tolist():
        digits = map(str, window)
        written.append("".join(digits))
    return written


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
        text = text.cpu()
        place = place.cpu()
        types = self.shown.at(text, place)
        types = types.to(codes.device)
        self.tokens.update(codes, types)

    def compute(self) -> LatentTexts:
        """Return what was kept, on the CPU."""
        contexts = _on_cpu(self.contexts.compute())
        tokens = _on_cpu(self.tokens.compute())
        return LatentTexts(Contexts(*contexts), TopTokens(*tokens), self.shown)


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
    places = {}
    for place, (x, y) in enumerate(sites):
        places[x, y] = place
    for row in rows:
        pair = row["site_x"], row["site_y"]
        place = places[pair]
        row["top_tokens"] = texts.top_tokens(place, row["latent"])
