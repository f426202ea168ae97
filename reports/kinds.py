"""Every kind of report, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from datamodules.text.fitted import words_on_left_out
from datamodules.text.texts import words_on_copies
from reports.report import Report, Row

__all__ = ["KINDS", "NAMES", "make_report"]

# Kind -> the module whose function `report(meta, rows, ...)` makes a Report.
KINDS = {
    "attention": "reports.attention",
    "bijection": "reports.bijection",
    "finetuning": "reports.finetuning",
    "fit": "reports.fit",
    "injection": "reports.injection.report",
    "probes_across": "reports.probing.across",
    "probing": "reports.probing.report",
    "recovery": "reports.recovery",
    "similarity": "reports.similarity.report",
    "stitching": "reports.stitching.report",
    "surgery": "reports.surgery",
    "universe": "reports.universe",
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
