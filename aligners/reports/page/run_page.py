"""The report of one run as an HTML file that needs nothing else: its findings, figures, tables and settings."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from aligners.files.atomic import whole_file, write_text
from aligners.files.shared_folder import own_file
from aligners.fitting.training_status import MARK
from aligners.reports.names import (
    WORDS,
    four_digits,
    held_out_name,
    short_names,
    with_short_names,
)
from aligners.reports.report import Report, Row, largest
from aligners.reports.screen import SiteTable
from aligners.reports.templates import page as rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, CONFIG = "report.html", "config.yaml"
# of a side of an image: browsers show no larger one, and matplotlib draws at most twice that
MOST_PIXELS = 2**15 - 1
MOST_NAMES = 4
SENTENCES = re.compile(
    r"\n|(?<=[\w%)][.]) (?=[A-Z])"
)  # where one ends and the next begins
MOST_ROWS = 400  # of all rows; the CSV file has the others
ROLES = {
    "green": "ceiling",
    "dim": "floor",
    "bold": "mean",
}  # what a row's style on screen means
ENTRY = "Description"  # of the PNG's text
MOST_DRAWN = 8


def write_page(report: Report, folder: Path) -> Path:
    """Write the page of a run's report beside its figures and its config.yaml, which it holds.

    Args:
        report: of any kind.
        folder: folder of the run.

    Returns:
        The page.
    """
    sentences: list[str] = []
    for text in report.sentences:
        sentences += filter(str.strip, SENTENCES.split(text))
    config = own_file(folder, CONFIG)
    shown = {
        "title": _title(report),
        "about": _about(report, folder.name),
        "sentences": sentences,
        "figures": _figures(report, folder),
        "tables": page_tables(report),
        "models": models_of(report.meta),
        "versions": versions_of(report.meta),
        "config": config.read_text(encoding="utf-8") if config else "",
        "meta": json.dumps(report.meta, indent=1, ensure_ascii=False),
    }
    write_text(folder / PAGE, rendered("run.html.j2", **{**vars(report), **shown}))
    return folder / PAGE


# ---------------------------------------------------------------------- what was run


def models_of(meta: Row) -> list[Mapping[str, Any]]:
    """Return name, revision and fingerprint of each model, as far as the report has them."""
    models = meta.get("models") or []
    if isinstance(models, dict):
        models = models.values()
    return [model for model in models if isinstance(model, Mapping)]


def versions_of(meta: Row) -> list[str]:
    """Return the versions and the device of a run, as far as its report has them."""
    versions = meta.get("versions") or {}
    said = [f"{name} {version}" for name, version in versions.items()]
    ranks = meta.get("ranks", 1)
    if meta.get("device"):
        several = "s" * (ranks > 1)
        said.append(f"{meta['device']}, {ranks} rank{several}")
    return said


def _title(report: Report) -> str:
    kind = report.title or report.name.capitalize()
    models = [str(model["name"]) for model in models_of(report.meta)]
    if not models:
        return kind
    return f"{kind}: {_listed(short_names(models).values(), MOST_NAMES)}"


def _about(report: Report, run: str) -> str:
    """Describe the run: how many of which texts it read, and on what device."""
    parts = [f"Run {run}"]
    source = report.meta.get("text", {}).get("source")
    if source:
        texts = f"texts of {_last_part(source)}"
        counts = ", ".join(_texts_read(report))
        if counts:
            texts += f" ({counts})"
        parts.append(texts)
    if report.meta.get("device"):
        parts.append(report.meta["device"])
    return f"{'; '.join(parts)}."


def _texts_read(report: Report) -> list[str]:
    """Return how many texts each split has and, where fewer were read, how many were read."""
    meta = report.meta
    held_out = held_out_name(meta["text"])
    words = {"fit": "to fit on", "validation": "for validation", "test": "held out"}
    if held_out:
        words["test"] += f" from {_last_part(held_out)}"
    if meta.get("n_fit") is not None:
        del words["validation"]  # a comparison chooses nothing
    read = {
        "fit": meta.get("n_fit"),
        "test": meta.get("n_texts") or largest(report.rows, "n_texts"),
    }
    said = []
    for split, what in words.items():
        count = meta["text"].get("n_texts", {}).get(split)
        if not count:
            continue
        some = read.get(split)
        if some is None or some >= count:
            said.append(f"{count:,} {what}")
        else:
            said.append(f"{some:,} of {count:,} {what}")
    return said


def _last_part(path: object) -> str:
    return str(path).rstrip("/").split("/")[-1]


def _listed(names: Iterable[str], most: int) -> str:
    """List names, each once; if there are many, the first ones and the number of the others."""
    every = []
    for name in names:
        name = name.replace("\n", " ")
        if name and name not in every:
            every.append(name)
    said = ", ".join(every[:most])
    if len(every) > most:
        said += f" and {len(every) - most} more"
    return said


# ---------------------------------------------------------------------- tables


class Cell(NamedTuple):
    """A cell as text.

    Attributes:
        value: the number or the words; empty where there is nothing.
        sd: `± sd`, or empty.
        interval: its two ends in brackets, or in braces where they are a mere range; or empty.
        lost: how many pairs are left out, or empty.
        key: what the cell is sorted by, a number where it is one.
        quiet: whether it is grey.
    """

    value: str
    sd: str = ""
    interval: str = ""
    lost: str = ""
    key: float | str = ""
    quiet: bool = False


class Line(NamedTuple):
    """A row of a table: its cells, and its role, which decides its look."""

    cells: Sequence[Cell]
    role: str = ""


class PageTable(NamedTuple):
    """A table of a page: anchor, title, caption, headings, rows."""

    name: str
    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Line]
    folded: bool = False

    def without_constants(self) -> PageTable:
        """Move columns with one value into the caption; measured values move only in a folded table."""
        if len(self.rows) < 2:
            return self
        kept, known = [], []
        for place, heading in enumerate(self.headings):
            values = {line.cells[place] for line in self.rows}
            first = self.rows[0].cells[place]
            if len(values) > 1 or not (self.folded or isinstance(first.key, str)):
                kept.append(place)
            elif first.value:
                known.append(f"{heading} {first.value}")
        caption = self.caption
        if known:
            caption += f" In all rows: {'; '.join(known)}."
        rows = []
        for line in self.rows:
            rows.append(Line([line.cells[place] for place in kept], line.role))
        headings = [self.headings[place] for place in kept]
        return self._replace(caption=caption, headings=headings, rows=rows)


def page_tables(report: Report) -> list[PageTable]:
    """Return the tables of the screen, then the table of all rows, with short names of models."""
    titles = [table.title for table in report.screen]
    tables = []
    for number, table in enumerate(report.screen, start=1):
        several = titles.count(table.title) > 1
        tables.append(_of_screen(table, f"table-{number}", several))
    if report.rows:
        tables.append(_of_rows(report))
    return [table.without_constants() for table in tables]


def _of_screen(table: SiteTable, name: str, one_of_several: bool) -> PageTable:
    """Convert a table of the screen; if several share a title, their groups of columns are added to it."""
    headings, groups = [], []
    for column in table.columns:
        parts = filter(None, (column.group, column.texts[0]))
        headings.append(" · ".join(parts) or "of")
        groups.append(column.group)
    lines = []
    for place, style in enumerate(table.styles):
        texts = [column.cells[place] for column in table.columns]
        cells = []
        for number, text in enumerate(texts):
            quiet = number in table.quiet[place]
            cells.append(Cell(text, key=_sorted_by(text), quiet=quiet))
        lines.append(Line(cells, ROLES.get(style, "")))
    title = table.title
    if one_of_several and any(groups):
        title += f": {_listed(groups, len(groups))}"
    return PageTable(name, title, _how_to_read(lines), headings, lines)


def _how_to_read(lines: Sequence[Line]) -> str:
    """Return the caption of a table: the meaning of its looks and marks."""
    caption = "Sort with the headings."
    if any(line.role == "ceiling" for line in lines):
        caption += " Bold: ceilings. Grey: floors."
    if any(cell.quiet for line in lines for cell in line.cells):
        caption += " Grey values: no higher than the null."
    values = [cell.value for line in lines for cell in line.cells]
    if any(value.endswith(MARK) for value in values):
        caption += f" {MARK}: untrained start, or diverged (see the findings)."
    return caption


def _sorted_by(text: str) -> float | str:
    """Return the number that a cell begins with, or its text."""
    first = text.replace(",", "").replace("−", "-").rstrip("*%").partition(" ")[0]
    try:
        return float(first)
    except ValueError:
        return text


def _of_rows(report: Report) -> PageTable:
    """Return the table of all rows, without empty columns."""
    rows = with_short_names(report.rows[:MOST_ROWS])
    keys = []
    for key in report.rows[0]:
        measured, _, end = key.rpartition("_")
        beside = (
            end in ("low", "high") and measured in report.rows[0]
        )  # an end of an interval
        if not beside and any(row.get(key) is not None for row in rows):
            keys.append(key)
    held = "All"
    if len(report.rows) > MOST_ROWS:
        held = f"The first {MOST_ROWS} of {len(report.rows):,}"
    caption = f"To four digits, intervals in brackets; {report.name}.csv has all of them. Empty columns are left out."
    lines = []
    for row in rows:
        role = str(row.get("role"))
        if role not in ROLES.values():
            role = ""
        lines.append(Line([cell_of(row, key) for key in keys], role))
    headings = [WORDS["columns"].get(key, key.replace("_", " ")) for key in keys]
    title = f"{held} rows as they were measured"
    return PageTable("all-rows", title, caption, headings, lines, folded=True)


def cell_of(row: Row, key: str) -> Cell:
    """Format a value of a row with four digits, with its interval if it has one."""
    value, text = row.get(key), four_digits(row.get(key))
    low, high = four_digits(row.get(f"{key}_low")), four_digits(row.get(f"{key}_high"))
    interval = ""
    if text and low and high:
        interval = f"[{low}, {high}]"
    sorted_by: float | str = text
    if isinstance(value, int | float) and not isinstance(value, bool):
        sorted_by = float(value)
    return Cell(text, interval=interval, key=sorted_by)


# ---------------------------------------------------------------------- figures


def _figures(report: Report, folder: Path) -> list[Row]:
    """Yield each existing image, for the page to embed."""
    figures = []
    for name in report.figures:
        path = own_file(folder, f"{name}.png")
        if path is None:
            continue
        image = path.read_bytes()
        with Image.open(path) as opened:
            width, height = opened.size
        figures.append(
            {
                "name": path.stem,
                "title": path.stem.replace("_", " ").replace("fvu", "FVU"),
                "png": base64.b64encode(image).decode(),
                "alt": alt_text(image),
                "width": width,
                "height": height,
            }
        )
    return figures


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all, with its description.

    Names are drawn as they are: a `$` in one begins no formula.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if (
            isinstance(text, Text) and text.get_text()
        ):  # labels of ticks that hold some are empty yet
            text.set_parse_math(False)
    dpi = min(130.0, MOST_PIXELS / max(figure.get_size_inches()))
    with whole_file(path) as unfinished:
        figure.savefig(
            unfinished, dpi=dpi, format="png", metadata={ENTRY: _described(figure)}
        )


def alt_text(image: bytes) -> str:
    """Return the description stored in an image; images of earlier versions have none."""
    with Image.open(io.BytesIO(image)) as picture:
        said = picture.info.get(ENTRY)
    return str(said or "A figure without a description: its values are in the tables.")


def _described(figure: Figure) -> str:
    """Say what a figure shows: its panels, what its axes measure, and what is drawn."""
    panels = 0
    up, across, titles, drawn = (
        [figure.get_supylabel()],
        [figure.get_supxlabel()],
        [],
        [],
    )
    legends = list(figure.legends)
    kind = "Chart"
    for axis in figure.axes:
        legends += filter(None, [axis.get_legend()])
        if not axis.has_data() or axis.get_label() == "<colorbar>":
            continue
        panels += 1
        titles.append(axis.get_title())
        up.append(axis.get_ylabel())
        across.append(axis.get_xlabel())
        if axis.images or (axis.collections and not axis.lines):
            kind = "Heat map"
    if panels != 1:
        kind += f" of {panels} panels"
    if any(titles):
        kind += f" ({_listed(titles, MOST_DRAWN)})"
    for legend in legends:
        drawn += [text.get_text() for text in legend.get_texts()]
    said = [kind]
    for part, what in (
        ("vertical axis", up),
        ("horizontal axis", across),
        ("drawn", drawn),
    ):
        if any(what):
            said.append(f"{part}: {_listed(what, MOST_DRAWN)}")
    return f"{'; '.join(said)}."
