"""What a study's report is made of: tables and figures, as values that any format can show."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame

from aligners.reports.report import Row
from aligners.reports.study.frames import Names, by, place_words, stage_words

Meaning = tuple[
    str, str
]  # what a colour stands for: (kind, name), such as ("stage", "finetuned")
Look = Callable[
    [Any], tuple[str, Meaning]
]  # value that tells series apart -> name and meaning


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: key of the rows.
        heading: for readers.
        form: how a number is written, as `format` takes it.
        scale: factor for numbers, such as 100 for a score in hundredths.
    """

    key: str
    heading: str
    form: str = ".4f"
    scale: float = 1


@dataclass(frozen=True)
class Content:
    """A table or a figure of a study's report.

    Attributes:
        name: in the study file, and of its files.
        title: with the paper's number of it.
        caption: what is measured or shown, on what, of how many pairs and models, and what an interval is.
        notes: lines below it: the papers' settings, what was left out.
        findings: what it says, in words.
    """

    name: str
    title: str
    caption: str
    _: KW_ONLY
    notes: Sequence[str] = ()
    findings: Sequence[str] = ()


@dataclass(frozen=True)
class Table(Content):
    """A table of a study's report.

    Attributes:
        columns: in order.
        rows: column's key -> cell.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Series:
    """One colour of a panel: values at places across.

    Attributes:
        name: in the legend.
        meaning: what its colour stands for.
        values: at each place, every value (boxes), or one (lines).
        low, high: ends of the interval of a line at each place; NaN where there is none.
        number: among the series of this meaning in its panel, whose colour is one: they differ in marker and dash.
    """

    name: str
    meaning: Meaning
    values: Sequence[Sequence[float]]
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
        blocks: (name, size) of groups of neighbouring rows and columns, such as models; none: no blocks.
        cuts: numbers of rows and columns before which a cluster ends, drawn as lines.
        up: label of the vertical axis.
        across: label of the horizontal axis.
    """

    title: str
    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    blocks: Sequence[tuple[str, int]] = ()
    cuts: Sequence[int] = ()
    up: str = "layer"
    across: str = "layer"


Panel = SeriesPanel | HeatPanel


@dataclass(frozen=True)
class Figure(Content):
    """A figure of a study's report: panels of one kind.

    Attributes:
        alt: what there is to see, for those who cannot see it.
        panels: all of one kind.
        scale: what the values are: label of the colour scale or of the vertical axes.
        across: label of the horizontal axes of boxes and lines.
        limits: ends of the colour scale of maps; None: those of the values.
        values: the values as rows of a table.
    """

    alt: str
    panels: Sequence[Panel]
    scale: str
    across: str = "layer"
    limits: tuple[float, float] | None = None
    values: Sequence[Row] = ()


# ---------------------------------------------------------------------- panels of rows


def look_of_stage(stage: str | None, of_none: str = "all pairs") -> tuple[str, Meaning]:
    """Return name and meaning of the look of a stage."""
    return stage_words(stage) or of_none, ("stage", str(stage))


def model_lines(
    frame: DataFrame,
    places: Names,
    line: str,
    across: str,
    value: str,
    look: Look,
    scale: float = 1,
) -> tuple[list[Row], list[LinePanel]]:
    """Return means over models with the models' range; for one model, with its interval if it has one.

    Args:
        frame: rows with `model`.
        places: columns that tell panels apart.
        line: the column that tells lines apart.
        across: a column of numbers; a line has a row for each that its panel has.
        value: the column that is averaged.
        look: from a value of `line` to the line's name and meaning.
        scale: factor for all values.

    Returns:
        A row for each mean, and the panels of them.
    """
    rows = []
    for place, panel in by(frame, *places):
        ticks = sorted(panel[across].astype(int).unique())
        for name, part in by(panel, line):
            means = scale * _means(part, across, value).reindex(ticks)
            for tick, mean in means.to_dict("index").items():
                rows.append({**place, **name, across: tick, **mean})
    return rows, line_panels(rows, places, line, across, look)


def _means(part: DataFrame, across: str, value: str) -> DataFrame:
    """Return columns `mean`, `low` and `high` of one line, by place across."""
    at = part.groupby(across)
    low, high = at[value].min(), at[value].max()
    if part["model"].nunique() == 1 and f"{value}_low" in part.columns:
        low, high = at[f"{value}_low"].mean(), at[f"{value}_high"].mean()
    return DataFrame({"mean": at[value].mean(), "low": low, "high": high})


def line_panels(
    rows: Sequence[Row], places: Names, line: str, across: str, look: Look
) -> list[LinePanel]:
    """Make a panel for each place, and in it lines over numbers.

    Args:
        rows: with `mean`, and with `low` and `high`, the ends of its interval or None.
        places: columns that tell panels apart.
        line: the column that tells lines apart.
        across: the column of the numbers.
        look: from a value of `line` to the line's name and meaning.
    """
    panels = []
    for place, panel in by(DataFrame(rows), *places):
        ticks = sorted(panel[across].unique())
        lines = list[Series]()
        for name, part in by(panel, line):
            title, meaning = look(name[line])
            number = [other.meaning for other in lines].count(meaning)
            at = (
                part.set_index(across)[["mean", "low", "high"]]
                .astype(float)
                .reindex(ticks)
            )
            means = at[["mean"]].to_numpy().tolist()
            low, high = at["low"].tolist(), at["high"].tolist()
            lines.append(Series(title, meaning, means, low, high, number))
        names = [str(tick) for tick in ticks]
        panels.append(LinePanel(place_words(*place.values()), names, lines))
    return panels


def box_panel(
    title: str,
    boxes: DataFrame,
    line: str,
    across: str,
    names: Names,
    look: Look = look_of_stage,
) -> BoxPanel:
    """Make a panel of boxes over pairs of models.

    Args:
        title: title of the panel.
        boxes: a row for each pair of models, with `value`.
        line: the column that tells colours apart.
        across: the column of places across.
        names: names of these, in order.
        look: from a value of `line` to its name and meaning.
    """
    series = []
    for name, part in by(boxes, line):
        values = [part.loc[part[across] == place, "value"].tolist() for place in names]
        series.append(Series(*look(name[line]), values))
    return BoxPanel(title, names, series)


def heat_panel(
    title: str,
    means: pd.Series,
    up: str,
    across: str,
    layers: Sequence[int] | None = None,
) -> HeatPanel:
    """Make a map of means by (row, column).

    Args:
        title: title of the panel.
        means: indexed by row and column.
        up: label of the vertical axis.
        across: label of the horizontal axis.
        layers: rows and columns to show; default: all that there are, sorted.
    """
    grid = means.unstack().sort_index().sort_index(axis=1)
    if layers is not None:
        grid = grid.reindex(index=layers, columns=layers)
    rows, columns = list(map(str, grid.index)), list(map(str, grid.columns))
    values = grid.to_numpy(dtype=np.float64)
    return HeatPanel(title, values, rows, columns, up=up, across=across)
