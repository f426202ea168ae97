"""What a study's numbers come from: cells, settings, versions, models' fingerprints, failures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from aligners.reports.report import Row

__all__ = ["Provenance", "provenance_of"]


class Provenance(NamedTuple):
    """What a study ran.

    Attributes:
        config: the study file, resolved; empty if there is none.
        cells: for each kind: kind, cells, hours.
        models: name, revision and fingerprint of every model.
        versions: a line for each set of versions and devices.
        failures: cell -> the last line of its traceback.
    """

    config: str
    cells: list[Row]
    models: list[Row]
    versions: list[str]
    failures: dict[str, str]

    def said(self) -> str:
        """How much the study ran, in a sentence."""
        count = sum(row["cells"] for row in self.cells) + len(self.failures)
        hours = sum(row["hours"] for row in self.cells)
        failed = f", {len(self.failures)} of them failed" if self.failures else ""
        time = f"{hours:.1f} hours" if hours >= 1 else _counted(round(60 * hours), "minute")
        return f"{_counted(count, 'cell')}{failed}, {time} of computing in all."

    def shown(self) -> dict[str, Any]:
        """The parts as the page shows them."""
        return self._asdict()


def provenance_of(folder: Path, collected: Mapping[str, pd.DataFrame]) -> Provenance:
    """Read what the cells say of themselves.

    Args:
        folder: of the study: `study.yaml`, `plan.json` with the ids of its cells, `cells/ID/result.json`,
            `cells/ID/error.txt`; what is not there is left out, and so are cells that are not in the plan.
        collected: kind -> rows, for the number of cells where they left no files.
    """
    config = folder / "study.yaml"
    cells = _places(folder)
    results = [_read(place / "result.json") for place in cells if (place / "result.json").exists()]
    failed = [place for place in cells if (place / "error.txt").exists() and not (place / "result.json").exists()]
    return Provenance(
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        cells=_cells(results, collected),
        models=_models(results),
        versions=_versions(results),
        failures={place.name: _last_line(place / "error.txt") for place in failed},
    )


def _places(folder: Path) -> list[Path]:
    """The folders of the cells that the study has now: those of an earlier version may still be there."""
    plan, places = folder / "plan.json", sorted(folder.glob("cells/*"))
    if not plan.exists():
        return places
    now = set(json.loads(plan.read_text(encoding="utf-8")))
    return [place for place in places if place.name in now]


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _cells(results: list[dict[str, Any]], collected: Mapping[str, pd.DataFrame]) -> list[Row]:
    """Number of cells and hours by kind."""
    found: dict[str, list[float]] = {}
    for result in results:
        found.setdefault(str(result.get("kind", "cells")), []).append(float(result.get("seconds") or 0.0))
    if not found:
        found = {kind: [0.0] * frame["cell"].nunique() for kind, frame in collected.items() if "cell" in frame}
    return [{"kind": kind, "cells": len(seconds), "hours": sum(seconds) / 3600} for kind, seconds in found.items()]


def _models(results: list[dict[str, Any]]) -> list[Row]:
    """Every model once, by its fingerprint."""
    found: dict[tuple[str, str], Row] = {}
    for result in results:
        listed = (result.get("meta") or {}).get("models") or []
        for model in listed.values() if isinstance(listed, dict) else listed:
            if isinstance(model, dict):
                row = {key: str(model.get(key) or "") for key in ("name", "revision", "fingerprint")}
                found[row["name"], row["fingerprint"]] = row
    return sorted(found.values(), key=lambda row: str(row["name"]))


def _versions(results: list[dict[str, Any]]) -> list[str]:
    """A line for each set of versions and devices, with the number of cells."""
    counts: dict[str, int] = {}
    for result in results:
        meta = result.get("meta") or {}
        versions = meta.get("versions") or result.get("versions") or {}
        if isinstance(versions, dict) and versions:
            said = ", ".join(f"{name} {version}" for name, version in versions.items())
            ranks = _counted(meta.get("ranks", 1), "rank")
            device = f"; {meta['device']}, {ranks}" if meta.get("device") else ""
            counts[said + device] = counts.get(said + device, 0) + 1
    return [f"{said} ({_counted(count, 'cell')})" for said, count in counts.items()]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no traceback"
