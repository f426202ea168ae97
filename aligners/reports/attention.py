"""The report of maps between attention weights: their errors on held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aligners.reports import fit
from aligners.reports.report import Report, Row

__all__ = ["report"]


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each map and pair of blocks."""
    return replace(fit.report(meta, rows, "on the held-out texts, attention weights"), name="attention")
