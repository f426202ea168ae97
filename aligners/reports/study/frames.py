"""What a study has collected, how tables and figures choose from it, and both as values that any format can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from aligners.injection.methods import INVERSE_OF_ONE_WAY
from aligners.reports.names import short_names
from aligners.reports.report import Row
from aligners.reports.study.statistics import Estimate

STAGES = ("random", "pretrained", "finetuned")  # in this order, wherever they stand side by side


STAGE_WORDS = {"random": "untrained", "pretrained": "pretrained", "finetuned": "fine-tuned"}


KIND_WORDS = {"tokens": "token", "words": "word", "mean": "mean", "cls": "CLS"}


STATES, ATTENTION = "states", "attention weights"  # what is mapped


ERRORS = {STATES: {"inject": True, "fit": False}, ATTENTION: {"attention": True}}  # kind -> whether texts are held out


LEAST_SITE = 1  # of the papers' means over layers: the first block, without the embeddings


KEYS = ("task", "stage", "stage_x", "stage_y", "group_x", "group_y", "rows")  # missing: not told apart


NAMED = ("model_x", "model_y", "model")  # columns that name a model


TUNED = ("tuned", "tuned_x", "tuned_y")  # the task that a model was fine-tuned on


class Frames:
    """The collected tables of a study.

    Args:
        collected: kind -> rows with the key columns model_x, model_y, task, stage, group_x, group_y, then what the
            command reports.
    """

    def __init__(self, collected: Mapping[str, pd.DataFrame]) -> None:
        frames = {kind: _with_keys(frame) for kind, frame in collected.items() if len(frame)}
        models = (frame[column].dropna().unique() for frame in frames.values() for column in NAMED if column in frame)
        short = short_names(str(name) for names in models for name in names)
        self._collected = {
            kind: frame.assign(**{
                column: frame[column].map(lambda name: short.get(name, name))
                for column in (*NAMED, "base") if column in frame
            })
            for kind, frame in frames.items()
        }  # fmt: skip

    @property
    def groups(self) -> dict[str, str]:
        """Model -> its group, of all models that have one."""
        groups: dict[str, str] = {}
        for frame in self._collected.values():
            for side in "xy":
                if f"model_{side}" in frame:
                    known = frame[[f"model_{side}", f"group_{side}"]].dropna()
                    groups |= dict(known.itertuples(index=False, name=None))
        return groups

    def of(self, kind: str, *columns: str, other_tasks: bool = False) -> pd.DataFrame:
        """The rows of a kind.

        Args:
            kind: of the cells.
            columns: that the rows must have, with at least one value each.
            other_tasks: whether rows of models that were fine-tuned on another task than that of the row are among
                them.

        Raises:
            Missing: there are no such rows.
        """
        if kind not in self._collected:
            raise Missing(f"the study has no rows of kind `{kind}`")
        frame = self._collected[kind]
        frame = frame if other_tasks else _of_their_task(frame)
        lacking = [name for name in columns if name not in frame.columns or bool(frame[name].isna().all())]
        if lacking:
            raise Missing(f"the rows of kind `{kind}` have no {', '.join(f'`{name}`' for name in lacking)}")
        return frame

    def errors(self, component: str = STATES) -> pd.DataFrame:
        """Errors of maps between models, by site pair, with the column `held_out`.

        Those of states are of `inject`, on texts that nothing was fitted on. Where a study has none, they are those of
        `fit`, on the validation texts that chose each map's best step, and `held_out` is false.

        Args:
            component: what was mapped: "states" or "attention weights".

        Raises:
            Missing: nothing was fitted.
        """
        for kind, held_out in ERRORS[component].items():
            if kind in self._collected:
                frame = self.of(kind, "mse")
                known = frame["mse"].notna()
                if "overflow" in frame:  # a map that overflowed has no error, and counts as lost
                    known |= frame["overflow"].fillna(False).astype(bool) & frame["site_x"].notna()
                return frame[known].assign(held_out=held_out)
        kinds = " or ".join(f"`{kind}`" for kind in ERRORS[component])
        raise Missing(f"the study has no errors of maps between {component} (kind {kinds})")


def by(frame: pd.DataFrame, *keys: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Split rows by the values of columns, in the order of `in_order`; a missing value is None."""
    groups = frame.groupby(list(keys), sort=False, dropna=False)
    parts = {tuple(None if pd.isna(value) else value for value in place): own for place, own in groups}
    orders = [in_order([place[n] for place in parts]) for n in range(len(keys))]
    for place in sorted(parts, key=lambda place: [order.index(v) for order, v in zip(orders, place, strict=True)]):
        yield place, parts[place]


def in_order(names: Sequence[str | None]) -> list[str | None]:
    """Each name once: stages as training goes, other names in the order of the study."""
    found = list(dict.fromkeys(names))
    return sorted(found, key=lambda name: STAGES.index(name) if name in STAGES else len(STAGES))


def stage_words(stage: str | None) -> str:
    """Name a stage for readers."""
    return "" if stage is None else STAGE_WORDS.get(stage, stage)


def kind_words(kind: str | None) -> str | None:
    """Name a kind of rows for readers."""
    return f"{KIND_WORDS[kind]} rows" if kind in KIND_WORDS else kind


def place_words(*names: str | None) -> str:
    """Title of a panel: task, stage, kind of rows, as far as there are any."""
    return ", ".join(stage_words(name) for name in names if name is not None)


def _with_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the key columns that are not there: nothing is told apart by them."""
    added = {name: None for name in KEYS if name not in frame.columns}
    frame = frame.assign(**added)
    for side in "xy":
        frame[f"stage_{side}"] = frame[f"stage_{side}"].where(frame[f"stage_{side}"].notna(), frame["stage"])
    if "fit" in frame.columns and "method" in frame.columns:  # another map than the one that was trained
        turned = frame["fit"] == INVERSE_OF_ONE_WAY
        frame["method"] = frame["method"].where(~turned, frame["method"] + ", inverted")
    return frame.reset_index(drop=True)


def _of_their_task(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows whose models, if they are fine-tuned, are so on the task of the row."""
    for side in TUNED:
        if side in frame.columns:
            frame = frame[frame[side].isna() | (frame[side] == frame["task"])]
    return frame


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
