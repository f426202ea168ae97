"""What a study's report is made of: tables and figures, as values that any format can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aligners.reports.report import Row
from aligners.reports.study.statistics import Estimate

Cell = Estimate | float | int | str | None
Meaning = tuple[str, str]  # what a colour stands for: (kind, name), such as ("stage", "finetuned")


class Missing(Exception):
    """The study has not measured what a table or a figure is made of; says what."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: of the rows.
        heading: for readers.
        form: how a number is written, as `format` takes it.
        scale: factor for numbers, such as 100 for a score in hundredths.
    """

    key: str
    heading: str
    form: str = ".4f"
    scale: float = 1


@dataclass(frozen=True)
class Table:
    """A table of a study's report.

    Attributes:
        name: in the study file, and of its files.
        title: with the paper's number of the table.
        caption: what is measured, on what, and what an interval is.
        columns: in order.
        rows: column's key -> cell.
        notes: lines below the table: the papers' settings, what was left out.
        findings: what it says, in words.
    """

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Cell]]
    notes: Sequence[str] = ()
    findings: Sequence[str] = ()


@dataclass(frozen=True)
class Series:
    """One colour of a panel: values at places across.

    Attributes:
        name: in the legend.
        meaning: what its colour stands for.
        values: at each place, every value (boxes), or one (lines).
        points: what each value is of, for the reader who points at it.
        low, high: ends of the interval of a line at each place; NaN where there is none.
        number: among the series of this meaning in its panel, whose colour is one: they differ in marker and dash.
    """

    name: str
    meaning: Meaning
    values: Sequence[Sequence[float]]
    points: Sequence[Sequence[str]] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    number: int = 0


@dataclass(frozen=True)
class SeriesPanel:
    """Values at places across, a colour for each series.

    Attributes:
        title: above it.
        across: names of the places.
        series: with values of the same length as `across`.
    """

    title: str
    across: Sequence[str]
    series: Sequence[Series]


class BoxPanel(SeriesPanel):
    """Box plots at places across: the series have every value."""


class LinePanel(SeriesPanel):
    """Lines over places across, with their intervals: the series have one value at each place."""


@dataclass(frozen=True)
class HeatPanel:
    """A value for each pair of layers; the first row is at the bottom.

    Attributes:
        title: above it.
        values: (rows, columns); NaN where nothing was measured.
        rows: names of the rows, such as layers.
        columns: names of the columns.
        row_blocks: (name, size) of groups of neighbouring rows, such as models; none: no blocks.
        column_blocks: of the columns.
        cuts: numbers of rows and columns before which a cluster ends, drawn as lines.
        up: label of the vertical axis.
        across: label of the horizontal axis.
    """

    title: str
    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    row_blocks: Sequence[tuple[str, int]] = ()
    column_blocks: Sequence[tuple[str, int]] = ()
    cuts: Sequence[int] = ()
    up: str = "layer"
    across: str = "layer"


Panel = SeriesPanel | HeatPanel


@dataclass(frozen=True)
class Figure:
    """A figure of a study's report: panels of one kind.

    Attributes:
        name: in the study file, and of its files.
        title: with the paper's number of the figure.
        caption: what is shown, and of how many pairs and models.
        alt: what there is to see, for who cannot see it.
        panels: all of one kind.
        scale: what the values are: label of the colour scale or of the vertical axes.
        across: label of the horizontal axes of boxes and lines.
        limits: ends of the scale; None: those of the values.
        values: the values as rows of a table.
        notes: lines below the figure.
        findings: what it says, in words.
    """

    name: str
    title: str
    caption: str
    alt: str
    panels: Sequence[Panel]
    scale: str
    across: str = "layer"
    limits: tuple[float, float] | None = None
    values: Sequence[Row] = ()
    notes: Sequence[str] = ()
    findings: Sequence[str] = field(default=())
