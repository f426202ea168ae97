"""Wu et al. 2020: untrained models, localization, fine-tuned models beside their bases, freezing."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from pandas import DataFrame

from aligners.reports.report import Row
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.blocks import (
    A,
    B,
    block_map,
    block_panel,
    block_values,
    entries_of,
    of_stages,
)
from aligners.reports.study.contents import (
    Figure,
    LinePanel,
    Meaning,
    Table,
    model_lines,
)
from aligners.reports.study.frames import (
    STAGES,
    Frames,
    Groups,
    Names,
    by,
    place_words,
    stage_words,
)
from aligners.reports.study.registry import register

BASES = re.compile(
    r"(?:^|/)(bert|xlnet)-base(?:-|$)"
)  # the paper's two models, and no RoBERTa
MOST_LINES = 8  # models with a line each; of more, groups have one
STANDARDISED = "svcca_standardised"
LOCALIZED = ("neuronsim", "svcca", STANDARDISED)

# ---------------------------------------------------------------------- maps of all layers


def untrained_map(frames: Frames, name: str) -> Figure:
    """Figure 2: trained models beside untrained ones, by CKA.

    Untrained are the models of stage `random`, or the untrained twins among the controls.
    """
    frame = of_stages(frames, ["cka"], STAGES)
    if "random" in set(frame["stage_x"]):
        return block_map(frames, name, ["cka"], ("random", "pretrained"))
    frames.of("similarity", "untrained")
    panels = []
    for place, part in by(row_selection.of_one_stage(frame), "task", "stage"):
        twins = part.assign(value=part["untrained"])
        trained = stage_words(place["stage"]) or "trained"
        for rows, label in ((part, trained), (twins, "untrained twins")):
            title = place_words(place["task"], label)
            panels.append(block_panel(rows, title, frames.groups))
    return replace(described_tables.figure(f"{name}_twins", panels), name=name)


def tuned_map(frames: Frames, name: str, measure: str) -> Figure:
    """Figures 5 and 6: every layer of a model and of its fine-tunings against every other, a panel for each model.

    Raises:
        Missing: no model was compared with its own fine-tunings.
    """
    panels, values = [], list[Row]()
    for place, part in by(_of_one_base(frames, [measure]), "task", "base"):
        title = place_words(place["base"], f"texts of {place['task']}")
        panels.append(block_panel(part, title, {}))
        about = {"texts": place["task"], "model": place["base"], "measure": measure}
        for row in block_values(part):
            values.append({**about, **row})
    return described_tables.figure(name, panels, values, measure=measure)


def _of_one_base(frames: Frames, measures: Names) -> DataFrame:
    """Rows of two models of one base, each named after what it was fine-tuned on, with the column `base`."""
    frame = row_selection.of_one_base(frames, measures)
    lacking = f"no {measures[0]} between a model and its fine-tunings: `similarity.across_stages` compares them"
    row_selection.present(frame[frame["stage_x"] != frame["stage_y"]], lacking)
    x, y = _tuned_on(frame, "x"), _tuned_on(frame, "y")
    return frame.assign(model_x=x, model_y=y, stage_x=None, stage_y=None)


def _tuned_on(frame: DataFrame, side: str) -> pd.Series:
    """What each model was fine-tuned on, with the number of a further fine-tuning; `base` where it was not."""
    number = frame[f"model_{side}"].str.extract("(#.*)", expand=False).fillna("")
    tuned = frame[f"tuned_{side}"].fillna("fine-tuned").astype(str) + number
    return tuned.where(frame[f"stage_{side}"] == "finetuned", "base")


# ---------------------------------------------------------------------- localization


def localization(frames: Frames, name: str, *, printed: bool = False) -> Figure:
    """Figure 3: localization by layer, a line for each model, or for each family of many.

    Args:
        frames: frames of the study.
        name: name of the figure.
        printed: as the notebooks released with the paper have it; see `_localizations`.
    """
    frame = row_selection.of_one_stage(of_stages(frames, LOCALIZED, STAGES))
    scores = _localizations(frame, ["task", "stage"], printed)
    groups = frames.groups
    models = scores.groupby(["task", "stage"], dropna=False)["model"].transform(
        "nunique"
    )
    families = scores["model"].replace(groups)
    lines = scores.assign(line=families.where(models > MOST_LINES, scores["model"]))
    panels = _panels(lines, ["task", "stage"], "line", groups)
    return _localized(name, scores, panels, frame, "all models")


def tuned_localization(frames: Frames, name: str, *, printed: bool = False) -> Figure:
    """Figure 7: localization by layer of a model and of each of its fine-tunings, a panel for each model.

    Args:
        frames: frames of the study.
        name: name of the figure.
        printed: as in `localization`.

    Raises:
        Missing: no model was compared with its own fine-tunings.
    """
    frame = _of_one_base(frames, LOCALIZED)
    scores = _localizations(frame, ["task", "base"], printed)
    panels = _panels(scores, ["base", "task"], "model", {})
    return _localized(
        name, scores, panels, frame, "the model (base) and of its fine-tunings"
    )


def _panels(
    scores: DataFrame, places: Names, line: str, groups: Groups
) -> list[LinePanel]:
    """Lines over layers; that of a model has the colour of its family."""

    def look(name: str) -> tuple[str, Meaning]:
        if name in groups.values():
            return name, ("group", name)
        if name in groups:
            return name, ("group", groups[name])
        return name, ("model", name)

    return model_lines(scores, places, line, "layer", "localization", look)[1]


def _localized(
    name: str,
    scores: DataFrame,
    panels: Sequence[LinePanel],
    frame: DataFrame,
    whose: str,
) -> Figure:
    values = scores.to_dict("records")
    measures = set(frame["measure"])
    return described_tables.figure(name, panels, values, measures=measures, whose=whose)


def _localizations(frame: DataFrame, places: Names, printed: bool) -> DataFrame:
    """Model, layer and score of each layer, over all layers that both measures compared it with.

    Ours is what §5.1 says: the mean similarity of the layer *to* all others, by `neuronsim` less by `svcca`. The
    released notebooks (`analysis-14`, `analysis-fine-4`) take the similarity of all others *to the layer*, z-score both
    means over all layers of all models, and have SVCCA of standardised features.

    Args:
        frame: similarities.
        places: columns that tell comparisons apart.
        printed: as in the notebooks.

    Raises:
        Missing: no pair of models has both measures.
    """
    parts = []
    for place, part in by(frame, *places):
        means = _means_over_others(part, printed)
        if printed:
            means = (means - means.mean()) / means.std()
        scores = means["value"] - means["value_svcca"]
        scores = scores.rename_axis(["model", "layer"]).rename("localization")
        parts.append(scores.reset_index().assign(**place))
    lacking = (
        "localization needs both `neuronsim` and `svcca` of the same pairs of models"
    )
    return row_selection.present(pd.concat(parts, ignore_index=True), lacking)


def _means_over_others(part: DataFrame, printed: bool) -> DataFrame:
    """For each layer the mean similarity to all others, or of all others to it, by both measures."""
    subspaces, layer = "svcca", ["model_a", "layer_a"]
    if printed:
        layer = ["model_b", "layer_b"]
        if STANDARDISED in set(part["measure"]):
            subspaces = STANDARDISED
    by_neurons = entries_of(part[part["measure"] == "neuronsim"])
    by_subspaces = entries_of(part[part["measure"] == subspaces])
    both = by_neurons.merge(by_subspaces, on=[*A, *B], suffixes=("", "_svcca"))
    same = (both["model_a"] == both["model_b"]) & (both["layer_a"] == both["layer_b"])
    values = ["value", "value_svcca"]
    both[values] = both[values].mask(same)
    return both.groupby(layer, sort=False)[values].mean().dropna()


# ---------------------------------------------------------------------- frozen layers


def freezing(frames: Frames, name: str) -> Table:
    """Table 1: the score after fine-tuning with the top or bottom layers frozen."""
    frame = frames.of("finetune", "score", "variant")
    frozen = set(frame["variant"]) != {"none"}
    metric = described_tables.printed_metric(name, frame)
    rows = []
    for place, part in by(frame, "base", "variant", "task"):
        scores = 100 * part["score"].dropna()
        row: Row = {
            **place,
            "variant": place["variant"] if frozen else None,
            "score": scores.mean(),
            "seeds": len(scores),
            "sd": scores.std() if len(scores) > 1 else None,
        }
        for column in metric:
            row[column] = 100 * part[column].mean()
        row["paper"] = _printed(name, place)
        rows.append(row)
    return described_tables.table(name, rows, frozen=frozen)


def _printed(name: str, place: Row) -> float | None:
    """The paper's score of the same model, variant and task."""
    family = BASES.search(str(place["base"]).lower())
    where = {"model": family and family[1], "variant": place["variant"]}
    task = described_tables.plain(place["task"] or "")
    printed = described_tables.paper_value(name, task, **where)
    return printed and printed.mean


register(__name__)
