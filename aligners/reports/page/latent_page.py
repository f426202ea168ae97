"""A page to look through the latents of a dictionary of two models: their verdicts, numbers, and texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from markupsafe import Markup

from aligners.files.atomic import write_text
from aligners.injection.latents.latent_texts import LatentTexts, rounded
from aligners.progress import tell
from aligners.reports.finished_runs import make_report
from aligners.reports.names import WORDS, site_names, with_short_names
from aligners.reports.page.run_page import models_of, versions_of
from aligners.reports.publishing import environment
from aligners.reports.report import Row, distinct, is_known
from aligners.reports.runs.updates.features_report import words_of
from aligners.reports.templates import page
from aligners.similarity.latents.contexts import AROUND

PAGE = "latents.html"
MOST = 12_000  # latents on a page
DRAWN = 50  # of them at a time
# Columns that a page shows and sorts by, as far as rows have them; by the first one at first.
COLUMNS = (
    "recovered",
    "attributed_by_row",
    "turned",
    "variance_x",
    "variance_y",
    "fired",
    "norm",
    "nu_error",
    "nu_rebuilt",
    "p_own",
    "p_shared",
    "correlation",
    "seeds",
)
# In JSON within a script, so that no text ends the script.
IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


class WriteLatentPage(pl.Callback):
    """Writes the page once a `LatentEvaluation` has read what its latents fire on.

    Args:
        folder: where it is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it on rank 0."""
        found: Any = pl_module
        if not trainer.is_global_zero or found.texts is None:
            return
        report = make_report("features", found.meta, found.rows, **found.report_tables)
        write_latent_page(
            self.folder,
            report.title,
            report.lead,
            {**found.meta, **environment(trainer)},
            sorted(report.rows, key=_importance),
            found.texts,
            found.stream.reader.sites,
            report.note,
        )
        tell(f"Latents to look through: {self.folder / PAGE}")


def _importance(row: Row) -> tuple[float, float]:
    """Sort first what recovers most of the change, then what adds most to the states of a model."""
    adds = max(row.get("variance_x") or 0, row.get("variance_y") or 0)
    return -(row.get("recovered") or 0), -adds


def write_latent_page(
    folder: Path,
    title: str,
    lead: str,
    meta: Row,
    rows: Sequence[Row],
    texts: LatentTexts,
    sites: Sequence[tuple[int, int]],
    note: str = "",
) -> Path:
    """Write the page beside a run's report.

    Args:
        folder: folder of the run.
        title: of the page.
        lead: what was found, in two or three sentences.
        meta: what holds for all rows of the report.
        rows: of the report, the most important first, with `model_x`, `model_y`, `site_x`, `site_y`, `latent`,
            `verdict`, and what there is of `COLUMNS`. The first 12,000 are shown.
        texts: what all latents fire on.
        sites: site pairs in the order of the dictionaries.
        note: what the columns are.

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
        note=note,
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
    called = {}
    if rows:
        called = words_of(with_short_names(rows[:1])[0])
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
        numbers = [rounded(row[name]) for name in columns]
        verdict = verdicts.index(row["verdict"])
        latents.append([place, row["latent"], verdict, numbers, tokens, contexts])
    written = []
    for text in of_texts.every:
        types = texts.shown.of(text)
        written.append([strings.of(number) for number in types])
    headings = [WORDS["columns"].get(name, name.replace("_", " ")) for name in columns]
    return {
        "sites": site_names(sites),
        "verdicts": [called[verdict] for verdict in verdicts],
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
