"""What the papers print, beside which ours stand: read from `numbers.yaml`."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from aligners.reports.study.estimates import Estimate

__all__ = ["paper_note", "paper_value", "plain"]

FILE = Path(__file__).with_name("numbers.yaml")


def paper_value(table: str, quantity: str, present: Collection[str] = (), **where: str | None) -> Estimate | None:
    """Return the paper's number for the same thing, or None if it has none.

    Args:
        table: of the paper, such as `ren_table_4`.
        quantity: `test`, `score`, ...
        present: the methods that the study has; of several that are the same thing, the closest gets the number.
        where: `task`, `method`, `variant`, ...; names of tasks agree if they differ in case and punctuation only.
    """
    for entry in _read()[table]["values"]:
        if all(_agrees(entry[key], value, present) for key, value in where.items()):
            printed = entry[quantity]
            mean, sd = printed if isinstance(printed, list) else (printed, None)
            return Estimate(mean, sd)
    return None


def paper_note(table: str) -> str:
    """Say where the paper's numbers are from, and how they were measured."""
    entry = _read()[table]
    return f"Paper: {entry['source']}: {entry['setting']}."


def plain(name: str) -> str:
    """A name in lower case, letters and digits only: SST-2 and sst2 are one task."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _agrees(printed: str | list[str], ours: str | None, present: Collection[str]) -> bool:
    if ours is None:
        return False
    if isinstance(printed, list):
        return ours == next((name for name in printed if name in present), None)
    return plain(printed) == plain(ours)


@cache
def _read() -> dict[str, Any]:
    entries: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return entries
