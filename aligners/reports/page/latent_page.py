"""A page to look through the latents of a dictionary of two models: their verdicts, numbers, and texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markupsafe import Markup
from torch import Tensor

from aligners.datamodules.rows.shown_rows import ShownRows
from aligners.files.atomic import write_text
from aligners.reports.names import WORDS, site_names
from aligners.reports.page.run_page import models_of, versions_of
from aligners.reports.report import Row, distinct, is_known
from aligners.reports.templates import page
from aligners.similarity.latents.contexts import AROUND, Contexts
from aligners.similarity.latents.token_shares import TopTokens

PAGE = "latents.html"
MOST = 12_000  # latents on a page
DRAWN = 50  # of them at a time
# Columns that a page shows and sorts by, as far as rows have them; by the first one at first.
COLUMNS = (
    "recovered",
    "fired",
    "norm",
    "nu_error",
    "nu_rebuilt",
    "p_own",
    "p_shared",
    "correlation",
)
LEVELS = 9  # of shading, beside none
# In JSON within a script, so that no text ends the script.
IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


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
            said.append(f"{self.shown.strings[token].strip()} {share:.0%}")
        return ", ".join(said)

    def top_context(self, site: int, latent: int) -> str:
        """Return the text around the largest code of a latent; empty where it never fires."""
        text = int(self.contexts.text[site, latent, 0])
        if text < 0:
            return ""
        place = int(self.contexts.place[site, latent, 0])
        return self.shown.around(text, place, AROUND)

    def _tokens(self, site: int, latent: int) -> list[tuple[int, float]]:
        tokens = self.tokens.token[site, latent].tolist()
        shares = self.tokens.share[site, latent].tolist()
        pairs = zip(tokens, shares, strict=True)
        return [(token, share) for token, share in pairs if token >= 0]

    def packed(self, site: int, latent: int) -> list[Any]:
        """Return the top tokens and contexts of a latent as plain values, as the page's script reads them."""
        tokens = []
        for token, share in self._tokens(site, latent):
            tokens.append([token, round(share, 3)])
        code, text, place, window, _ = self.contexts
        levels = _levels(window[site, latent])
        contexts = []
        for rank, number in enumerate(text[site, latent].tolist()):
            if number < 0:
                break
            at = int(place[site, latent, rank])
            value = float(code[site, latent, rank])
            contexts.append([number, at, _short(value, 3), levels[rank]])
        return [tokens, contexts]


def _levels(windows: Tensor) -> list[str]:
    """Return a digit for each code of the windows of a latent, (n, W): 0 for none, then by ninths of the largest."""
    largest = windows.max().clamp(min=torch.finfo(windows.dtype).tiny)
    levels = (windows / largest * LEVELS).ceil().long()
    return ["".join(map(str, window)) for window in levels.tolist()]


def write_latent_page(
    folder: Path,
    title: str,
    lead: str,
    meta: Row,
    rows: Sequence[Row],
    texts: LatentTexts,
    sites: Sequence[tuple[int, int]],
) -> Path:
    """Write the page beside a run's report.

    Args:
        folder: folder of the run.
        title: of the page.
        lead: what was found, in two or three sentences.
        meta: what holds for all rows of the report.
        rows: of the report, the most important first, with `site_x`, `site_y`, `latent`, `verdict` and what there is of
            `COLUMNS`. The first 12,000 are shown.
        texts: what all latents fire on.
        sites: site pairs in the order of the dictionaries.

    Returns:
        The page.
    """
    shown = rows[:MOST]
    data = json.dumps(
        _data(shown, texts, sites),
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    data = data.translate(IN_SCRIPT)
    size = len(data.encode()) / 1e6
    held = f"{len(shown):,} latents that fired on held-out texts"
    if len(rows) > MOST:
        held = f"The first {len(shown):,} of {len(rows):,} latents, in the order of the report"
    content = page(
        "latents.html.j2",
        title=title,
        lead=lead,
        about=f"{held}, {size:.1f} MB of data.",
        data=Markup(data),
        models=models_of(meta),
        versions=versions_of(meta),
        meta=json.dumps(meta, indent=1, ensure_ascii=False),
    )
    write_text(folder / PAGE, content)
    return folder / PAGE


def _data(
    rows: Sequence[Row], texts: LatentTexts, sites: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return what the page's script draws, with texts and tokens that occur in it alone, numbered anew."""
    columns = [name for name in COLUMNS if is_known(rows, name)]
    verdicts = distinct(rows, "verdict")
    strings, of_texts = _Numbers(), _Numbers()
    places = {pair: place for place, pair in enumerate(sites)}
    latents = []
    for row in rows:
        place = places[row["site_x"], row["site_y"]]
        tokens, contexts = texts.packed(place, row["latent"])
        for token in tokens:
            token[0] = strings.of(token[0])
        for context in contexts:
            context[0] = of_texts.of(context[0])
        numbers = [_short(row[name]) for name in columns]
        verdict = verdicts.index(row["verdict"])
        latents.append([place, row["latent"], verdict, numbers, tokens, contexts])
    written = []
    for text in of_texts.every:
        types = texts.shown.of(text)
        written.append([strings.of(number) for number in types])
    headings = [WORDS["columns"].get(name, name.replace("_", " ")) for name in columns]
    return {
        "sites": site_names(sites),
        "verdicts": verdicts,
        "columns": headings,
        "around": AROUND,
        "drawn": DRAWN,
        "latents": latents,
        "numbers": of_texts.every,
        "texts": written,
        "strings": [texts.shown.strings[number] for number in strings.every],
    }


class _Numbers:
    """Numbers things anew, 0, 1, ..., in the order in which they are met."""

    def __init__(self) -> None:
        self.every: list[int] = []
        self._new: dict[int, int] = {}

    def of(self, old: int) -> int:
        """Return the new number of a thing."""
        if old not in self._new:
            self._new[old] = len(self.every)
            self.every.append(old)
        return self._new[old]


def _short(value: float | None, digits: int = 4) -> float | None:
    """Return a number with a few digits, which JSON can hold."""
    if value is None or value != value:
        return None
    return float(f"{value:.{digits}g}")
