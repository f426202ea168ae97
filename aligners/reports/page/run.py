"""The report of one run as an HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligners.files.whole import write_text
from aligners.reports.names import short_names
from aligners.reports.page.images import alt_text, size
from aligners.reports.page.tables import page_tables
from aligners.reports.page.templates import rendered
from aligners.reports.report import Report, Row
from aligners.reports.words import held_out_name

__all__ = ["CONFIG", "PAGE", "models_of", "write_page"]

PAGE, CONFIG = "report.html", "config.yaml"
MOST_BYTES = 2_000_000  # of images in a page
TITLES = {
    "attention": "Maps between attention weights",
    "bijection": "The price of a bijection",
    "finetuning": "Fine-tuned classifiers",
    "probes_across": "Probes across maps",
    "probing": "What is encoded",
    "recover": "Known bijections recovered",
    "report": "Injection",
    "similarity": "Similarity of layers",
    "stitching": "Stitching",
    "summary": "Fit",
    "surgery": "Truncated and skipped layers",
    "universe": "One space for many models",
}
MOST_NAMES = 4
SENTENCES = re.compile(r"\n|(?<=[\w%)][.]) (?=[A-Z])")  # where one ends and the next begins


def write_page(report: Report, folder: Path) -> Path:
    """Write the page of a run's report beside its figures and its config.yaml, which it holds.

    Args:
        report: of any kind.
        folder: of the run.

    Returns:
        The page.
    """
    config = folder / CONFIG
    page = rendered(
        "run.html.j2",
        title=_title(report),
        about=_about(report, folder),
        sentences=[each for said in report.sentences for each in SENTENCES.split(said) if each.strip()],
        note=report.note,
        figures=_figures(folder / f"{name}.png" for name in report.figures),
        tables=page_tables(report),
        models=models_of(report.meta),
        versions=_versions(report.meta),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        meta=json.dumps(report.meta, indent=1, ensure_ascii=False),
    )
    write_text(folder / PAGE, page)
    return folder / PAGE


def models_of(meta: Row) -> list[Mapping[str, Any]]:
    """Name, revision and fingerprint of each model, as far as the report says."""
    models = meta.get("models", [])
    return [model for model in (models.values() if isinstance(models, dict) else models) if isinstance(model, Mapping)]


def _title(report: Report) -> str:
    names = list(short_names(str(model["name"]) for model in models_of(report.meta)).values())
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    kind = TITLES.get(report.name, report.name.capitalize())
    return f"{kind}: {', '.join(names[:MOST_NAMES])}{more}" if names else kind


def _about(report: Report, folder: Path) -> str:
    """The run, its texts and its device in one line."""
    text = report.meta.get("text", {})
    counts = text.get("n_texts", {})
    said = [f"Run {folder.name}"]
    source = f"texts of {Path(str(text.get('source'))).name}{_counted(counts, held_out_name(text))}"
    said += [source] if text.get("source") else []
    said += [str(report.meta["device"])] if report.meta.get("device") else []
    return "; ".join(said) + "."


def _counted(counts: Mapping[str, int], held_out: str | None) -> str:
    of_another = f" from {Path(held_out).name}" if held_out else ""
    parts = {"fit": "to fit on", "validation": "to watch training on", "test": f"held out{of_another}"}
    said = [f"{counts[split]:,} {words}" for split, words in parts.items() if counts.get(split)]
    return f" ({', '.join(said)})" if said else ""


def _figures(paths: Iterable[Path]) -> list[Row]:
    """Each image that is there, inlined as long as the page does not become too large."""
    found, room = list[Row](), MOST_BYTES
    for path in paths:
        if not path.is_file():
            continue
        image = path.read_bytes()
        title = path.stem.replace("_", " ").replace("fvu", "FVU")
        shown: Row = {"name": path.stem, "title": title, "png": "", "alt": alt_text(image)}
        if len(image) <= room:
            room -= len(image)
            width, height = size(image)
            shown |= {"png": base64.b64encode(image).decode(), "width": width, "height": height}
        found.append(shown)
    return found


def _versions(meta: Row) -> Sequence[str]:
    ranks = [f"{meta['device']}, {meta.get('ranks', 1)} rank{'s' if meta.get('ranks', 1) > 1 else ''}"] \
        if meta.get("device") else []  # fmt: skip
    return [*(f"{name} {version}" for name, version in meta.get("versions", {}).items()), *ranks]
