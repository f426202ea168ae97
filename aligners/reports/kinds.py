"""Every kind of report, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from aligners.reports.report import Report, Row
from datamodules.text.fitted import words_on_left_out
from datamodules.text.texts import words_on_copies

__all__ = ["KINDS", "NAMES", "make_report"]

# Kind -> the module whose function `report(meta, rows, ...)` makes a Report.
KINDS = {
    "attention": "aligners.reports.attention",
    "bijection": "aligners.reports.bijection",
    "finetuning": "aligners.reports.finetuning",
    "fit": "aligners.reports.fit",
    "injection": "aligners.reports.injection.report",
    "probes_across": "aligners.reports.probing.across",
    "probing": "aligners.reports.probing.report",
    "recovery": "aligners.reports.recovery",
    "similarity": "aligners.reports.similarity.report",
    "stitching": "aligners.reports.stitching.report",
    "surgery": "aligners.reports.surgery",
    "universe": "aligners.reports.universe",
}
# Kind -> name of its files, which is the `name` of its Report.
NAMES = {kind: kind for kind in KINDS} | {"fit": "summary", "injection": "report", "recovery": "recover"}


def make_report(kind: str, meta: Row, rows: Sequence[Row], **more: Any) -> Report:
    """Turn what was measured into a report.

    Args:
        kind: one of `KINDS`; its module is imported now.
        meta: what holds for all rows.
        rows: one for each thing that was measured, all with the same keys.
        more: further tables and options of this kind of report.
    """
    report: Report = import_module(KINDS[kind]).report(meta, rows, **more)
    described = [meta.get(texts, {}) for texts in ("text", "other_text")]
    said = [words for texts in described for words in (*words_on_copies(texts), *words_on_left_out(texts))]
    return replace(report, sentences=[*meta.get("cautions", ()), *report.sentences, *said])
