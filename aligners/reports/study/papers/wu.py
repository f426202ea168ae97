"""The figures and the table of Wu et al. 2020: block heat maps over models, localization, freezing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study.contents import Cell, Column, Figure, LinePanel, Missing, Series, Table
from aligners.reports.study.frames import STAGES, Frames, by, place_words, stage_words
from aligners.reports.study.papers.block_maps import MOST_MODELS, block_panel, block_values, entries_of
from aligners.reports.study.papers.choosing import known
from aligners.reports.study.papers.numbers import paper_note, paper_value, plain

__all__ = ["block_map", "freezing", "localization", "untrained_map"]

TASKS = ("sst2", "mnli", "qnli", "qqp")
BASES = re.compile(r"(?:^|/)(bert|xlnet)-base(?:-|$)")  # the paper's two models, and no RoBERTa
BLOCKS = (
    "Where a measure is not symmetric, the entry is that of the row's layer to the column's. On held-out texts, "
    "features as they are."
)
UNTRAINED_TITLE = "Untrained and trained models (Wu et al., Figure 2)"
UNTRAINED = (
    "Linear CKA of each layer (up) to each other layer (across) of all models, trained and with freshly drawn weights. "
    "Untrained models were compared with each other, not with trained ones; within a model there is none."
)
LOCALIZATION = (
    "Mean neuronsim less mean svsim (SVCCA) of each layer to all other layers of all models: higher where similarity "
    "sits in single neurons."
)
FAMILIES = "Colours are families; a line is a model, or the mean of a family."
TUNING = ("pretrained", "finetuned")
MOST_LINES = 8  # models with a line each; of more, groups have one


def block_map(frames: Frames, name: str, title: str, measures: Sequence[str], stages: Sequence[str] = STAGES) -> Figure:
    """Wu et al., Figures 1, 4, 5, 8 and 10: every layer of every model against every other, a panel for each measure.

    Args:
        frames: of the study.
        name: of the figure.
        title: with the paper's number.
        measures: which to show, as far as they were measured.
        stages: of the models; those of one stage have panels of their own where stages were not compared.

    Raises:
        Missing: none of the measures is there, or no two models were compared.
    """
    frame = _raw(frames, measures, stages)
    panels, values = [], []
    for (task, measure), own in by(frame, "task", "measure"):
        for part in _compared(own):
            stages_of = {stage for side in "xy" for stage in part[f"stage_{side}"].dropna()}
            said = place_words(task, *(stages_of if len(stages_of) == 1 else []))
            panels.append(block_panel(part, f"{measure}{', ' + said if said else ''}", frames.groups))
            values += [{"task": task, "measure": measure, **row} for row in block_values(part)]
    models = len(set(frame["model_x"]) | set(frame["model_y"]))
    order = f"grouped by family ({', '.join(dict.fromkeys(frames.groups.values()))})"
    families = order if frames.groups else "in the order of the study"
    families += f"; as there are more than {MOST_MODELS}, blocks are means over pairs" if models > MOST_MODELS else ""
    what = ", ".join(dict.fromkeys(frame["measure"]))
    return Figure(
        name,
        title,
        f"Similarity of each layer (up) to each other layer (across) of {models} models, {families}. {BLOCKS}",
        f"Heat maps of {what} between all layers of {models} models, a block for each pair of models.",
        panels,
        "similarity",
        limits=(0.0, 1.0),
        values=values,
        findings=_families_said(values, frames.groups),
    )


def untrained_map(frames: Frames) -> Figure:
    """Wu et al., Figure 2: trained models beside untrained ones, by CKA.

    Untrained are the models of stage `random`, or the untrained twins among the controls.
    """
    of_both = ("random", "pretrained")
    whole = _raw(frames, ["cka"], STAGES)
    if "random" in set(whole["stage_x"]):
        return block_map(frames, "wu_figure_2", UNTRAINED_TITLE, ["cka"], of_both)
    frames.of("similarity", "untrained")
    panels = []
    for (task, stage), own in by(whole[whole["stage_x"].fillna("") == whole["stage_y"].fillna("")], "task", "stage"):
        for column, said in (("value", stage_words(stage) or "trained"), ("untrained", "untrained twins")):
            panels.append(block_panel(own.assign(value=own[column]), place_words(task, said), frames.groups))
    return Figure(
        "wu_figure_2",
        UNTRAINED_TITLE,
        UNTRAINED,
        "Two heat maps of CKA between all layers of all models: trained, and untrained.",
        panels,
        "CKA",
        limits=(0.0, 1.0),
    )


def localization(frames: Frames, name: str = "wu_figure_3") -> Figure:
    """Wu et al., Figures 3 and 7: localization by layer, model by model, or stage by stage (`wu_figure_7`)."""
    scores, staged = _localizations(frames), name == "wu_figure_7"
    if staged:
        scores = scores[scores["stage"].isin(TUNING)]
        if scores["stage"].nunique() < len(TUNING):
            raise Missing("the study has not both pretrained and fine-tuned models")
    panels = _stage_panels(scores) if staged else _model_panels(scores, frames.groups)
    lines = "Lines are means over models, intervals their range." if staged else FAMILIES
    return Figure(
        name,
        f"Localization by layer{', before and after fine-tuning' if staged else ''} (Wu et al., Figure {name[-1]})",
        f"{LOCALIZATION} {lines}",
        "Lines of the localization score against the layer.",
        panels,
        "localization score",
        values=scores.to_dict("records"),
    )


def _localizations(frames: Frames) -> pd.DataFrame:
    """Task, stage, model, layer and localization score of every layer."""
    frame = _raw(frames, ["neuronsim", "svcca"], STAGES)
    frame = frame[frame["stage_x"].fillna("") == frame["stage_y"].fillna("")]
    parts = [_localization(own).assign(task=task, stage=stage) for (task, stage), own in by(frame, "task", "stage")]
    scores = pd.concat(parts, ignore_index=True)
    if scores.empty:
        raise Missing("localization needs both `neuronsim` and `svcca` of the same pairs of models")
    return scores


def freezing(frames: Frames) -> Table:
    """Wu et al., Table 1: the score after fine-tuning with the top or bottom layers frozen."""
    frame = frames.of("finetune", "score", "variant")
    rows: list[dict[str, Cell]] = []
    for (base, variant, task), own in by(frame, "base", "variant", "task"):
        scores = 100 * own["score"].dropna()
        score: dict[str, Cell] = {"score": scores.mean(), "sd": scores.std() if len(scores) > 1 else None}
        place: dict[str, Cell] = {"base": base, "variant": variant, "task": task, "seeds": len(scores)}
        rows.append({**place, **score, "paper": _printed(str(base), variant, task)})
    heading = {"base": "model", "variant": "frozen", "task": "task", "score": "score × 100", "sd": "sd over seeds"}
    columns = [Column(key, said, ".2f") for key, said in heading.items()]
    columns += [Column("seeds", "classifiers", "d"), Column("paper", "paper", ".2f")]
    frozen = set(frame["variant"]) != {"none"}
    printed = any(row["paper"] is not None for row in rows)
    return Table(
        "wu_table_1",
        "Fine-tuning with layers frozen (Wu et al., Table 1)" if frozen else "Scores after fine-tuning",
        "The task's score on held-out texts, mean and standard deviation over seeds.",
        known(columns if frozen else [column for column in columns if column.key != "variant"], rows),
        rows,
        notes=["Held out: yes, on test texts.", *([paper_note("wu_table_1")] if frozen or printed else [])],
    )


def _printed(base: str, variant: str | None, task: str | None) -> float | None:
    """The paper's accuracy of the same model, variant and task."""
    family = BASES.search(base.lower())
    if family is None or task is None or plain(task) not in TASKS:
        return None
    found = paper_value("wu_table_1", plain(task), model=family[1], variant=variant)
    return None if found is None else found.mean


def _raw(frames: Frames, measures: Sequence[str], stages: Sequence[str]) -> pd.DataFrame:
    frame = frames.of("similarity", "value")
    missing = [name for name in measures if name not in set(frame["measure"])]
    if len(missing) == len(measures):
        raise Missing(f"none of {', '.join(measures)} was measured")
    frame = frame[(frame["features"] == "raw") & frame["measure"].isin(measures)]
    frame = frame[_of_stages(frame, stages)]
    if frame.empty:
        raise Missing(f"the study has no similarity of {' or '.join(stage_words(stage) for stage in stages)} models")
    order = pd.Categorical(frame["measure"], [name for name in measures if name not in missing], ordered=True)
    return frame.iloc[order.argsort(kind="stable")]


def _of_stages(frame: pd.DataFrame, stages: Sequence[str]) -> pd.Series:
    """Rows whose models are both of these stages, or of none."""
    known_x, known_y = (frame[f"stage_{side}"].isin(stages) | frame[f"stage_{side}"].isna() for side in "xy")
    return known_x & known_y


def _compared(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The frame whole where stages were compared with each other, else one for each stage."""
    if (frame["stage_x"].fillna("") != frame["stage_y"].fillna("")).any():
        return [frame]
    return [own for _, own in by(frame, "stage_x")]


def _families_said(values: Sequence[Row], groups: dict[str, str]) -> list[str]:
    """Compare models of one family with those of different families."""
    means: dict[tuple[str, bool], list[float]] = {}
    for row in values:
        a, b = row["model_a"], row["model_b"]
        if a != b and row["stage_a"] == row["stage_b"] and {a, b} <= set(groups):
            means.setdefault((row["measure"], groups[a] == groups[b]), []).append(row["value"])
    both = [measure for measure in dict.fromkeys(row["measure"] for row in values)
            if {(measure, True), (measure, False)} <= set(means)]  # fmt: skip
    return [
        f"{measure}: {np.mean(means[measure, True]):.3f} between models of one family, "
        f"{np.mean(means[measure, False]):.3f} between families."
        for measure in both
    ]


def _localization(frame: pd.DataFrame) -> pd.DataFrame:
    """Model, layer and score of each layer, over all other layers that it was compared with by both measures."""
    neurons, subspaces = (entries_of(frame[frame["measure"] == name]) for name in ("neuronsim", "svcca"))
    keys = [name for name in neurons.columns if name != "value"]
    both = neurons.merge(subspaces, on=keys, suffixes=("", "_svcca"))
    both = both[(both["model_a"] != both["model_b"]) | (both["layer_a"] != both["layer_b"])]
    scores = both.assign(localization=both["value"] - both["value_svcca"])
    means = scores.groupby(["model_a", "layer_a"], sort=False, as_index=False)["localization"].mean()
    return means.rename(columns={"model_a": "model", "layer_a": "layer"})


def _model_panels(scores: pd.DataFrame, groups: dict[str, str]) -> list[LinePanel]:
    """A panel for each task and stage: a line for each model, coloured by family, or for each family of many."""
    panels = []
    for (task, stage), own in by(scores, "task", "stage"):
        many = own["model"].nunique() > MOST_LINES and bool(groups)
        key: Callable[[str], str] = (lambda model: groups.get(model, model)) if many else (lambda model: model)
        series: list[Series] = []
        for line_name in dict.fromkeys(key(model) for model in own["model"]):
            line = own[[key(model) == line_name for model in own["model"]]]
            first = line["model"].iloc[0]
            meaning = ("group", groups[first]) if first in groups else ("model", line_name)
            number = sum(other.meaning == meaning for other in series)
            series.append(replace(_mean_line(line_name, meaning, line, own), number=number))
        panels.append(LinePanel(place_words(task, stage), _numbers(own), series))
    return panels


def _stage_panels(scores: pd.DataFrame) -> list[LinePanel]:
    return [
        LinePanel(
            place_words(task),
            _numbers(own),
            [_mean_line(stage_words(stage), ("stage", str(stage)), line, own) for (stage,), line in by(own, "stage")],
        )
        for (task,), own in by(scores, "task")
    ]


def _numbers(own: pd.DataFrame) -> list[str]:
    return [str(layer) for layer in sorted(own["layer"].unique())]


def _mean_line(name: str, meaning: tuple[str, str], line: pd.DataFrame, own: pd.DataFrame) -> Series:
    """The mean over models at each layer, with their range."""

    def along(how: str) -> list[float]:
        found = line.groupby("layer")["localization"].agg(how).reindex(sorted(own["layer"].unique()))
        return [float(value) for value in found]

    return Series(name, meaning, [[value] for value in along("mean")], low=along("min"), high=along("max"))
