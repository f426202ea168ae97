"""Every kind of report, as `kinds.yaml` lists them, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from aligners.reports.report import Report, Row
from datamodules.text.fitted import words_on_left_out
from datamodules.text.texts import words_on_copies

KINDS: dict[str, Row] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def file_name(kind: str) -> str:
    """Name of the files of a kind of report, which is the `name` of its Report."""
    return str(KINDS[kind].get("name", kind))


def maker(kind: str) -> Callable[..., Report]:
    """The function that makes a kind of report; its module is imported now."""
    make: Callable[..., Report] = import_module(f".runs.{KINDS[kind]['module']}", __package__).report
    return make


def make_report(kind: str, meta: Row, rows: Sequence[Row], **more: Any) -> Report:
    """Turn what was measured into a report.

    Args:
        kind: one of `KINDS`.
        meta: what holds for all rows.
        rows: one for each thing that was measured, all with the same keys.
        more: further tables and options of this kind of report.
    """
    about = KINDS[kind]
    report = maker(kind)(meta, rows, **about.get("options", {}), **more)
    described = [meta.get(texts, {}) for texts in ("text", "other_text")]
    said = [words for texts in described for words in (*words_on_copies(texts), *words_on_left_out(texts))]
    sentences = [*meta.get("cautions", ()), *report.sentences, *said]
    fields = {
        "title": about.get("title", ""),
        "note": about.get("note", report.note),
        "columns": about.get("columns", report.columns),
    }
    return replace(report, name=file_name(kind), sentences=sentences, **fields)
