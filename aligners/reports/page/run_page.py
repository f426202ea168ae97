"""The report of one run as an HTML file that needs nothing else: its findings, figures, tables and settings."""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from aligners.files.atomic import whole_file, write_text
from aligners.files.shared_folder import own_file
from aligners.fitting.training_status import MARK
from aligners.reports.drawing import shown_lines
from aligners.reports.names import WORDS, four_digits, held_out_name, short_names, with_short_names
from aligners.reports.report import Report, Row, largest_known
from aligners.reports.screen import SiteTable
from aligners.reports.templates import page as rendered

PAGE, CONFIG = "report.html", "config.yaml"
MOST_BYTES = 2_000_000  # of images in a page
MOST_NARROW, NARROW = 3, 4.2  # figures that are also laid out for a phone; inches
MOST_PIXELS = (
    2**15 - 1
)  # of a side of an image: browsers show no larger one, and matplotlib draws at most twice that
MOST_NAMES = 4
SENTENCES = re.compile(r"\n|(?<=[\w%)][.]) (?=[A-Z])")  # where one ends and the next begins
MOST_ROWS = 400  # of all rows; the CSV file has the others
ROLES = {"green": "ceiling", "dim": "floor", "bold": "mean"}  # what a row's style on screen means
ENTRY = "Description"  # of the PNG's text
MOST_DRAWN = 8


def write_page(report: Report, folder: Path) -> Path:
    """Write the page of a run's report beside its figures and its config.yaml, which it holds.

    Args:
        report: of any kind.
        folder: of the run.

    Returns:
        The page.
    """
    config = own_file(folder, CONFIG)
    shown = {
        "title": _title(report),
        "about": _about(report, folder.name),
        "sentences": [
            sentence
            for text in report.sentences
            for sentence in SENTENCES.split(text)
            if sentence.strip()
        ],
        "figures": _figures(report, folder),
        "tables": page_tables(report),
        "models": models_of(report.meta),
        "versions": versions_of(report.meta),
        "config": config.read_text(encoding="utf-8") if config is not None else "",
        "meta": json.dumps(report.meta, indent=1, ensure_ascii=False),
    }
    write_text(folder / PAGE, rendered("run.html.j2", **{**vars(report), **shown}))
    return folder / PAGE


def models_of(meta: Row) -> list[Mapping[str, Any]]:
    """Name, revision and fingerprint of each model, as far as the report says."""
    models = meta.get("models") or []
    return [
        model
        for model in (models.values() if isinstance(models, dict) else models)
        if isinstance(model, Mapping)
    ]


def _about(report: Report, run: str) -> str:
    """The run, how many of which texts it read, and on what device."""
    meta = report.meta
    parts = [f"Run {run}"]
    text = meta.get("text", {})
    if text.get("source"):
        counts = _texts_read(report)
        parts.append(
            f"texts of {_last_part(text['source'])}" + (f" ({', '.join(counts)})" if counts else "")
        )
    if meta.get("device"):
        parts.append(meta["device"])
    return f"{'; '.join(parts)}."


def _texts_read(report: Report) -> list[str]:
    """How many texts of each split there are and, where fewer were read of one, how many."""
    text, meta = report.meta["text"], report.meta
    there = text.get("n_texts", {})
    read = {
        "fit": meta.get("n_fit"),
        "test": meta.get("n_texts") or largest_known(report.rows, "n_texts"),
    }
    held_out = held_out_name(text)
    source = f" from {_last_part(held_out)}" if held_out else ""
    words = {"fit": "to fit on", "validation": "for validation", "test": f"held out{source}"}
    if meta.get("n_fit") is not None:
        del words["validation"]  # a comparison chooses nothing
    said = []
    for split, what in words.items():
        count, some = there.get(split), read.get(split)
        if not count:
            continue
        fewer = f"{some:,} of " if some is not None and some < count else ""
        said.append(f"{fewer}{count:,} {what}")
    return said


def _last_part(path: object) -> str:
    return str(path).rstrip("/").split("/")[-1]


def _title(report: Report) -> str:
    names = list(short_names(str(model["name"]) for model in models_of(report.meta)).values())
    kind = report.title or report.name.capitalize()
    return f"{kind}: {_listed(names, MOST_NAMES)}" if names else kind


def _figures(report: Report, folder: Path) -> list[Row]:
    """Each image that is there, inlined as long as the page does not become too large; the first for phones, too."""
    figures, room = list[Row](), MOST_BYTES
    for name, draw in report.figures.items():
        path = own_file(folder, f"{name}.png")
        if path is None:
            continue
        image = path.read_bytes()
        title = path.stem.replace("_", " ").replace("fvu", "FVU")
        figures.append({"name": path.stem, "title": title, "png": "", "alt": alt_text(image)})
        if len(image) <= room:
            room -= len(image)
            with Image.open(path) as opened:
                figures[-1] |= {
                    "png": base64.b64encode(image).decode(),
                    "width": opened.width,
                    "height": opened.height,
                }
            if len(figures) <= MOST_NARROW and (narrow := stacked(draw())):
                written = io.BytesIO()
                _without_formulas(narrow)
                narrow.savefig(written, dpi=110, format="png")
                figures[-1]["narrow"] = base64.b64encode(written.getvalue()).decode()
                room -= len(written.getvalue())
    return figures


def versions_of(meta: Row) -> list[str]:
    """The versions and the device of a run, as far as its report says."""
    ranks = meta.get("ranks", 1)
    device = [f"{meta['device']}, {ranks} rank{'s' * (ranks > 1)}"] if meta.get("device") else []
    return [
        *(f"{name} {version}" for name, version in (meta.get("versions") or {}).items()),
        *device,
    ]


class Cell(NamedTuple):
    """A cell as text.

    Attributes:
        value: the number or the words; empty where there is nothing.
        sd: `± sd`, or empty.
        interval: its two ends in brackets, or in braces where they are a mere range; or empty.
        lost: how many pairs are left out, or empty.
        key: what the cell is sorted by, a number where it is one.
    """

    value: str
    sd: str = ""
    interval: str = ""
    lost: str = ""
    key: float | str = ""


class Line(NamedTuple):
    """A row: its cells, and its role, which its look shows."""

    cells: Sequence[Cell]
    role: str = ""


class PageTable(NamedTuple):
    """A table of a page: name of its anchor, title, caption, headings, rows."""

    name: str
    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Line]
    folded: bool = False

    def without_constants(self) -> "PageTable":
        """What is the same in all rows stands in the caption instead, of measured values only in a folded table."""
        columns = (
            list(zip(*(line.cells for line in self.rows), strict=True))
            if len(self.rows) > 1
            else []
        )
        once = {n: each[0] for n, each in enumerate(columns) if len(set(each)) == 1}
        once = {n: cell for n, cell in once.items() if self.folded or isinstance(cell.key, str)}
        known = "; ".join(
            f"{self.headings[n]} {cell.value}" for n, cell in once.items() if cell.value
        )
        headings = [heading for n, heading in enumerate(self.headings) if n not in once]
        rows = [
            Line([cell for n, cell in enumerate(cells) if n not in once], role)
            for cells, role in self.rows
        ]
        caption = f"{self.caption} In all rows: {known}." if known else self.caption
        return self._replace(caption=caption, headings=headings, rows=rows)


def page_tables(report: Report) -> list[PageTable]:
    """Those of the screen, then all rows, with short names of models."""
    titles = [table.title for table in report.screen]
    shown = [
        _of_screen(table, n, titles.count(titles[n - 1]) > 1)
        for n, table in enumerate(report.screen, start=1)
    ]
    return [
        table.without_constants()
        for table in ([*shown, _of_rows(report)] if report.rows else shown)
    ]


def _of_screen(table: SiteTable, number: int, one_of_several: bool) -> PageTable:
    """A table of the screen; where several have one title, the groups of its columns are part of it."""
    columns = (
        [Cell(text, key=_sorted_by(text)) for text in column.cells] for column in table.columns
    )
    styled = zip(zip(*columns, strict=True), table.styles, strict=True)
    lines = [Line(cells, ROLES.get(style, "")) for cells, style in styled]
    caption = "Sort with the headings."
    if any(line.role == "ceiling" for line in lines):
        caption += " Bold: ceilings. Grey: floors."
    if any(cell.value.endswith(MARK) for line in lines for cell in line.cells):
        caption += f" {MARK}: untrained start, or diverged (see the findings)."
    headings = [
        " · ".join(filter(None, (column.group, column.texts[0]))) or "of"
        for column in table.columns
    ]
    groups = ", ".join(dict.fromkeys(column.group for column in table.columns if column.group))
    title = f"{table.title}: {groups}" if one_of_several and groups else table.title
    return PageTable(f"table-{number}", title, caption, headings, lines)


def _sorted_by(text: str) -> float | str:
    """The number that a cell begins with, or its text."""
    first = text.replace(",", "").replace("−", "-").rstrip("*%").split()
    try:
        return float(first[0])
    except (IndexError, ValueError):
        return text


def _of_rows(report: Report) -> PageTable:
    rows = with_short_names(report.rows[:MOST_ROWS])
    every = [key for key in report.rows[0] if any(row.get(key) is not None for row in rows)]
    ends = {f"{key}_{end}" for key in every for end in ("low", "high")}
    keys = [key for key in every if key not in ends]
    held = (
        f"The first {MOST_ROWS} of {len(report.rows):,}" if len(report.rows) > MOST_ROWS else "All"
    )
    caption = f"To four digits, intervals in brackets; {report.name}.csv has all of them. Empty columns are left out."
    roles = [str(row.get("role")) if row.get("role") in ROLES.values() else "" for row in rows]
    lines = [
        Line([cell_of(row, key) for key in keys], role)
        for row, role in zip(rows, roles, strict=True)
    ]
    headings = [WORDS["columns"].get(key, key.replace("_", " ")) for key in keys]
    return PageTable(
        "all-rows", f"{held} rows as they were measured", caption, headings, lines, folded=True
    )


def cell_of(row: Row, key: str) -> Cell:
    """A value of a row to four digits, with its interval if it has one."""
    value, text = row.get(key), four_digits(row.get(key))
    ends = [four_digits(row.get(f"{key}_{end}")) for end in ("low", "high")]
    by = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else text
    return Cell(text, interval=f"[{', '.join(ends)}]" if text and all(ends) else "", key=by)


def stacked(figure: Figure) -> Figure | None:
    """Lay a figure's panels below each other, its legend below them: for narrow screens; None for heat maps."""
    axes = [axis for axis in figure.axes if axis.axison]
    if not axes or any(axis.images or axis.get_label() == "<colorbar>" for axis in axes):
        return None
    down = max(axis.get_subplotspec().get_gridspec().nrows for axis in axes)  # type: ignore[union-attr]
    figure.set_size_inches(NARROW, (0.85 * figure.get_figheight() / down + 0.2) * len(axes) + 0.4)
    grid = figure.add_gridspec(len(axes), 1)
    for number, axis in enumerate(axes):
        axis.set_subplotspec(grid[number])
        axis.tick_params(labelleft=True, labelbottom=True)
        axis.set_xlabel(axis.get_xlabel() or figure.get_supxlabel(), fontsize=9)
    figure.supxlabel("")  # it would stand upon the legend
    for legend in figure.legends[:]:
        title, (handles, names) = legend.get_title().get_text() or None, shown_lines(axes)
        legend.remove()
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=2,
            frameon=False,
            fontsize=8,
            title=title,
        )
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all, with its description."""
    _without_formulas(figure)
    with whole_file(path) as unfinished:
        dpi = min(130.0, MOST_PIXELS / max(figure.get_size_inches()))
        figure.savefig(unfinished, dpi=dpi, format="png", metadata={ENTRY: _described(figure)})


def _without_formulas(figure: Figure) -> None:
    """Draw names as they are: a `$` in one begins no formula. Labels of ticks that hold some are empty yet."""
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_text():
            text.set_parse_math(False)


def alt_text(image: bytes) -> str:
    """The description that an image carries; images of earlier versions carry none."""
    with Image.open(io.BytesIO(image)) as picture:
        return str(
            picture.info.get(ENTRY)
            or "A figure without a description: its values are in the tables."
        )


def _described(figure: Figure) -> str:
    """Say what a figure shows: its panels, what its axes measure, and what is drawn."""
    panels = [axis for axis in figure.axes if axis.has_data() and axis.get_label() != "<colorbar>"]
    titles = list(
        dict.fromkeys(title for axis in panels if (title := axis.get_title().replace("\n", " ")))
    )
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    kind = (
        "Heat map"
        if any(axis.images or (axis.collections and not axis.lines) for axis in panels)
        else "Chart"
    )
    count = "" if len(panels) == 1 else f" of {len(panels)} panels"
    named = {
        "vertical axis": [figure.get_supylabel(), *(axis.get_ylabel() for axis in panels)],
        "horizontal axis": [figure.get_supxlabel(), *(axis.get_xlabel() for axis in panels)],
        "drawn": [
            text.get_text()
            for legend in legends
            if legend is not None
            for text in legend.get_texts()
        ],
    }
    parts = [f"{kind}{count}{f' ({_listed(titles)})' if titles else ''}"]
    parts += [f"{name}: {_listed(what)}" for name, what in named.items() if any(what)]
    return "; ".join(parts) + "."


def _listed(names: Sequence[str], most: int = MOST_DRAWN) -> str:
    every = list(dict.fromkeys(name.replace("\n", " ") for name in names if name))
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")
