"""The collected results of a study, and how tables and figures select from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame

from aligners.fitting.training_status import INVERSE_OF_ONE_WAY
from aligners.reports.names import short_names
from aligners.reports.study.printed import beside

Names = Sequence[str]
Groups = Mapping[str, str]  # model -> its group
Part = tuple[dict[str, Any], DataFrame]  # the values of columns, and their rows
STAGES = (
    "random",
    "pretrained",
    "finetuned",
)  # in this order, wherever they stand side by side
STAGE_WORDS = {
    "random": "untrained",
    "pretrained": "pretrained",
    "finetuned": "fine-tuned",
}
KIND_WORDS = {"tokens": "token", "words": "word", "mean": "mean", "cls": "CLS"}
STATES, ATTENTION = "states", "attention weights"  # what is mapped
# what was mapped -> kinds of cells with its errors, the preferred first, and whether their texts are held out
ERRORS = {STATES: {"inject": True, "fit": False}, ATTENTION: {"attention": True}}
LEAST_SITE = (
    1  # of the papers' means over layers: the first block, without the embeddings
)
NAMED = ("model_x", "model_y", "model")  # columns that name a model
TUNED = ("tuned", "tuned_x", "tuned_y")  # the task that a model was fine-tuned on
# None where a kind of cell does not have it: it is then not told apart
EVERYWHERE = (
    "task",
    "stage",
    "stage_x",
    "stage_y",
    "group_x",
    "group_y",
    "rows",
    "direction",
    *TUNED,
    "role",
    "training",
    "overflow",
)


class Missing(Exception):
    """Raised where the study has not measured what a table or a figure needs; the message says what."""


class Frames:
    """The collected tables of a study.

    Args:
        collected: kind -> rows with the key columns model_x, model_y, task, stage, group_x, group_y, then what the
            command reports.

    Attributes:
        groups: model -> its group, of all models that have one.
    """

    def __init__(self, collected: Mapping[str, DataFrame]) -> None:
        frames = {}
        for kind, frame in collected.items():
            if len(frame):
                frames[kind] = _with_keys(frame)
        models = list[str]()
        for frame in frames.values():
            for column in frame.columns.intersection(NAMED, sort=False):
                models += map(str, frame[column].dropna().unique())
        short = short_names(models)
        for frame in frames.values():
            for column in frame.columns.intersection([*NAMED, "base"]):
                frame[column] = [short.get(name, name) for name in frame[column]]
        self._collected = frames
        self.groups = _groups(frames.values())

    def of(self, kind: str, *columns: str, other_tasks: bool = False) -> DataFrame:
        """Return the rows of a kind.

        Args:
            kind: kind of the cells.
            columns: that the rows must have, with at least one value each.
            other_tasks: whether rows of models that were fine-tuned on another task than that of the row are among
                them.

        Raises:
            Missing: there are no such rows.
        """
        if kind not in self._collected:
            raise Missing(f"the study has no rows of kind `{kind}`")
        frame = self._collected[kind]
        if not other_tasks:
            for tuned in TUNED:
                frame = frame[frame[tuned].isna() | (frame[tuned] == frame["task"])]
        lacking = []
        for name in columns:
            if name not in frame.columns or frame[name].isna().all():
                lacking.append(f"`{name}`")
        if lacking:
            raise Missing(f"the rows of kind `{kind}` have no {', '.join(lacking)}")
        return frame

    def errors(self, component: str = STATES) -> DataFrame:
        """Return errors of maps between models, by site pair, with the column `held_out`.

        Those of states are of `inject`, on texts that nothing was fitted on. Where a study has none, they are those of
        `fit`, on the validation texts that chose each map's best step, and `held_out` is false.

        Args:
            component: what was mapped: "states" or "attention weights".

        Raises:
            Missing: nothing was fitted.
        """
        for kind, held_out in ERRORS[component].items():
            if kind not in self._collected:
                continue
            frame = self.of(kind, "mse")
            # a map that overflowed has no error, and counts as lost
            lost = frame["overflow"].eq(True) & frame["site_x"].notna()
            frame = frame[frame["mse"].notna() | lost].assign(held_out=held_out)
            if component == ATTENTION:  # of one kind of rows, which titles name
                frame["rows"] = None
            return frame
        kinds = " or ".join(f"`{kind}`" for kind in ERRORS[component])
        raise Missing(
            f"the study has no errors of maps between {component} (kind {kinds})"
        )


def _with_keys(frame: DataFrame) -> DataFrame:
    """Add the columns of `EVERYWHERE` that are not there; maps that stand beside others are columns of these."""
    added = {name: None for name in EVERYWHERE if name not in frame.columns}
    frame = frame.assign(**added)
    for stage in ("stage_x", "stage_y"):
        frame[stage] = frame[stage].where(frame[stage].notna(), frame["stage"])
    if "method" not in frame.columns:
        return frame.reset_index(drop=True)
    if (
        "fit" in frame.columns
    ):  # the inverse is another map than the one that was trained
        turned = frame["fit"] == INVERSE_OF_ONE_WAY
        frame["method"] = frame["method"].mask(turned, frame["method"] + ", inverted")
    return beside(frame)


def _groups(frames: Any) -> dict[str, str]:
    groups: dict[str, str] = {}
    for frame in frames:
        for side in "xy":
            if f"model_{side}" not in frame:
                continue
            ends = frame[[f"model_{side}", f"group_{side}"]].drop_duplicates().dropna()
            groups |= dict(ends.itertuples(index=False, name=None))
    return groups


def by(frame: DataFrame, *keys: str) -> list[Part]:
    """Split rows by the values of columns; yield values by column, None where missing, and rows; see `in_order`."""
    parts = []
    for values, rows in frame.groupby(list(keys), sort=False, dropna=False):
        place = {}
        for key, value in zip(keys, values, strict=True):
            place[key] = value
            if pd.isna(value):
                place[key] = None
        parts.append((place, rows))
    orders = {}
    for key in keys:
        values = [place[key] for place, _ in parts]
        orders[key] = in_order(values)

    def order(part: Part) -> list[int]:
        return [orders[key].index(value) for key, value in part[0].items()]

    return sorted(parts, key=order)


def in_order(names: Sequence[str | None]) -> list[Any]:
    """Return each name once: stages in the order of training, other names in the order of the study."""

    def order(name: str | None) -> int:
        if name in STAGES:
            return STAGES.index(name)
        return len(STAGES)

    return sorted(dict.fromkeys(names), key=order)


def stage_words(stage: str | None) -> str:
    """Name a stage for readers."""
    if stage is None:
        return ""
    return STAGE_WORDS.get(stage, stage)


def kind_words(kind: str | None) -> str | None:
    """Name a kind of rows for readers."""
    if kind not in KIND_WORDS:
        return kind
    return f"{KIND_WORDS[kind]} rows"


def place_words(*names: str | None) -> str:
    """Return the title of a panel: task, stage, kind of rows, as far as there are any."""
    return ", ".join(stage_words(name) for name in names if name is not None)
