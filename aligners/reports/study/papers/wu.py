"""Wu et al. 2020: block heat maps over models, localization, fine-tuned models beside their bases, freezing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study.contents import Figure, HeatPanel, Meaning, Table, model_lines
from aligners.reports.study.frames import STAGES, Frames, by, in_order, place_words, stage_words
from aligners.reports.study.papers import shared

BASES = re.compile(r"(?:^|/)(bert|xlnet)-base(?:-|$)")  # the paper's two models, and no RoBERTa
TUNING = ("pretrained", "finetuned")
MOST_LINES = 8  # models with a line each; of more, groups have one
MOST_MODELS = 16  # with a block each; of more, blocks are means over pairs of the models of a family
ALL = "all models"
STANDARDISED = "svcca_standardised"
LOCALIZED = ("neuronsim", "svcca", STANDARDISED)
A, B = ["model_a", "stage_a", "layer_a"], ["model_b", "stage_b", "layer_b"]


def block_map(frames: Frames, name: str, measures: Sequence[str], stages: Sequence[str] = STAGES) -> Figure:
    """Figures 1, 4, 8 and 10: every layer of every model against every other, a panel for each measure.

    Args:
        frames: of the study.
        name: of the figure.
        measures: which to show, as far as they were measured.
        stages: of the models; those of one stage have panels of their own where stages were not compared. By default
            untrained models that were compared with trained ones are left out.

    Raises:
        Missing: none of the measures is there, or no two models were compared.
    """
    frame = _of_stages(frames, measures, stages)
    if stages == STAGES and len(shared.of_one_stage(frame)) < len(frame):
        frame = _of_stages(frames, measures, TUNING)  # untrained models beside trained ones are Figure 2
    panels, values = [], list[Row]()
    for place, group in by(frame, "task", "measure"):
        crossed = len(shared.of_one_stage(group)) < len(group)  # stages were compared with each other
        for part in [group] if crossed else [part for _, part in by(group, "stage_x")]:
            stages_of = {stage for side in "xy" for stage in part[f"stage_{side}"].dropna()}
            title = place_words(place["measure"], place["task"], *(stages_of if len(stages_of) == 1 else []))
            panels.append(block_panel(part, title, frames.groups))
            values += [{**place, **row} for row in block_values(part)]
    families, measured = (", ".join(dict.fromkeys(names)) for names in (frames.groups.values(), frame["measure"]))
    about = {"models": shared.models_in(frame), "most_models": MOST_MODELS, "families": families, "measured": measured}
    return shared.figure(name, panels, values, alike=_families(values, frames.groups), **about)


def untrained_map(frames: Frames, name: str) -> Figure:
    """Figure 2: trained models beside untrained ones, by CKA.

    Untrained are the models of stage `random`, or the untrained twins among the controls.
    """
    frame = _of_stages(frames, ["cka"], STAGES)
    if "random" in set(frame["stage_x"]):
        return block_map(frames, name, ["cka"], ("random", "pretrained"))
    frames.of("similarity", "untrained")
    panels = []
    for place, part in by(shared.of_one_stage(frame), "task", "stage"):
        for column, label in (("value", stage_words(place["stage"]) or "trained"), ("untrained", "untrained twins")):
            title = place_words(place["task"], label)
            panels.append(block_panel(part.assign(value=part[column]), title, frames.groups))
    return replace(shared.figure(f"{name}_twins", panels), name=name)


def tuned_map(frames: Frames, name: str, measure: str) -> Figure:
    """Figures 5 and 6: every layer of a model and of its fine-tunings against every other, a panel for each model.

    Raises:
        Missing: no model was compared with its own fine-tunings.
    """
    panels, values = [], list[Row]()
    for place, part in by(_of_one_base(frames, [measure]), "task", "base"):
        panels.append(block_panel(part, place_words(place["base"], f"texts of {place['task']}"), {}))
        about = {"texts": place["task"], "model": place["base"], "measure": measure}
        values += [{**about, **row} for row in block_values(part)]
    return shared.figure(name, panels, values, measure=measure)


def localization(frames: Frames, name: str, *, printed: bool = False) -> Figure:
    """Figure 3: localization by layer, a line for each model, or for each family of many.

    Args:
        frames: of the study.
        name: of the figure.
        printed: as the notebooks released with the paper have it; see `_localizations`.
    """
    frame = shared.of_one_stage(_of_stages(frames, LOCALIZED, STAGES))
    scores, groups = _localizations(frame, ["task", "stage"], printed), frames.groups
    models = scores.groupby(["task", "stage"], dropna=False)["model"].transform("nunique")
    families = scores["model"].map(lambda model: groups.get(model, model))
    lines = scores.assign(line=scores["model"].where(models <= MOST_LINES, families))
    _, panels = model_lines(lines, ["task", "stage"], "line", "layer", "localization", partial(_look, groups))
    return shared.figure(name, panels, scores.to_dict("records"), measures=set(frame["measure"]), whose="all models")


def tuned_localization(frames: Frames, name: str, *, printed: bool = False) -> Figure:
    """Figure 7: localization by layer of a model and of each of its fine-tunings, a panel for each model.

    Args:
        frames: of the study.
        name: of the figure.
        printed: as in `localization`.

    Raises:
        Missing: no model was compared with its own fine-tunings.
    """
    frame = _of_one_base(frames, LOCALIZED)
    scores = _localizations(frame, ["task", "base"], printed)
    _, panels = model_lines(scores, ["base", "task"], "model", "layer", "localization", partial(_look, {}))
    whose = "the model (base) and of its fine-tunings"
    return shared.figure(name, panels, scores.to_dict("records"), measures=set(frame["measure"]), whose=whose)


def freezing(frames: Frames, name: str) -> Table:
    """Table 1: the score after fine-tuning with the top or bottom layers frozen."""
    frame = frames.of("finetune", "score", "variant")
    frozen, metric = set(frame["variant"]) != {"none"}, shared.printed_metric(name, frame)
    rows = []
    for place, part in by(frame, "base", "variant", "task"):
        scores, family = 100 * part["score"].dropna(), BASES.search(str(place["base"]).lower())
        same = {"model": family and family[1], "variant": place["variant"]}
        printed = shared.paper_value(name, shared.plain(place["task"] or ""), **same)
        cells = {"score": scores.mean(), "sd": scores.std() if len(scores) > 1 else None, "seeds": len(scores)}
        cells |= {column: 100 * part[column].mean() for column in metric}
        frozen_layers = {"variant": place["variant"] if frozen else None}
        rows.append({**place, **frozen_layers, **cells, "paper": printed and printed.mean})
    return shared.table(name, rows, frozen=frozen)


def _of_stages(frames: Frames, measures: Sequence[str], stages: Sequence[str]) -> pd.DataFrame:
    """Similarities of models that are both of some stages, or of none; by measure, in the order that is asked for."""
    frame = shared.similarities(frames, measures)
    frame = frame[(frame[["stage_x", "stage_y"]].isin(stages) | frame[["stage_x", "stage_y"]].isna()).all(axis=1)]
    shared.present(frame, f"the study has no similarity of {' or '.join(map(stage_words, stages))} models")
    return frame.sort_values("measure", key=lambda names: names.map(list(measures).index), kind="stable")


def _families(values: Sequence[Row], groups: dict[str, str]) -> list[Row]:
    """The mean of each measure within and between families, where there are both."""
    frame = pd.DataFrame(values)
    families = [frame[f"model_{side}"].map(groups) for side in "ab"]
    other = (frame["model_a"] != frame["model_b"]) & (frame["stage_a"] == frame["stage_b"])
    pairs = frame.assign(alike=families[0] == families[1])[other & families[0].notna() & families[1].notna()]
    means = [(place, part.groupby("alike")["value"].mean().dropna()) for place, part in by(pairs, "measure")]
    return [{**place, "within": mean[True], "between": mean[False]} for place, mean in means if len(mean) == 2]


def _of_one_base(frames: Frames, measures: Sequence[str]) -> pd.DataFrame:
    """Rows of two models of one base, each named after what it was fine-tuned on, with the column `base`."""
    frame = shared.of_one_base(frames, measures)
    lacking = f"no {measures[0]} between a model and its fine-tunings: `similarity.across_stages` compares them"
    shared.present(frame[frame["stage_x"] != frame["stage_y"]], lacking)
    named = {}
    for side in "xy":
        number = frame[f"model_{side}"].str.extract("(#.*)", expand=False).fillna("")  # of a further fine-tuning
        tuned = frame[f"tuned_{side}"].fillna("fine-tuned").astype(str) + number
        named[f"model_{side}"] = tuned.where(frame[f"stage_{side}"] == "finetuned", "base")
    return frame.assign(**named, stage_x=None, stage_y=None)


# ---------------------------------------------------------------------- a block for each pair of models


def entries_of(frame: pd.DataFrame) -> pd.DataFrame:
    """The similarity of each layer a to each layer b, whichever of them was X.

    Args:
        frame: rows of one measure; those of direction `both` count both ways.

    Returns:
        Columns model_a, stage_a, layer_a, model_b, stage_b, layer_b and value; each pair of layers once.
    """
    sides = [[f"{name}_{side}" for name in ("model", "stage", "layer")] for side in "xy"]
    parts = []
    for skipped, (a, b) in (("backward", sides), ("forward", sides[::-1])):
        rows = frame.loc[frame["direction"] != skipped, [*a, *b, "value"]]
        parts.append(rows.set_axis([*A, *B, "value"], axis=1))
    entries = pd.concat(parts, ignore_index=True)
    entries[["stage_a", "stage_b"]] = entries[["stage_a", "stage_b"]].fillna("")
    return entries.groupby([*A, *B], sort=False, as_index=False)["value"].mean()


def block_panel(frame: pd.DataFrame, title: str, groups: Mapping[str, str]) -> HeatPanel:
    """Draw up the map of all models; of many models, that of their families.

    Args:
        frame: rows of one measure.
        title: of the panel.
        groups: model -> its family; models of one family stand side by side.
    """
    entries = entries_of(frame)
    if entries["model_a"].nunique() > MOST_MODELS:
        entries = entries[entries["model_a"] != entries["model_b"]]
        families = {name: entries[name].map(lambda model: groups.get(model, ALL)) for name in ("model_a", "model_b")}
        entries, groups = entries.assign(**families), {}
    ends = pd.concat([entries[side].set_axis(["model", "stage", "layer"], axis=1) for side in (A, B)])
    layers = {(str(model), str(stage)): sorted(rows["layer"].unique())
              for (model, stage), rows in ends.groupby(["model", "stage"], sort=False)}  # fmt: skip
    stages = in_order([stage for _, stage in layers])
    place = {family: number for number, family in enumerate(dict.fromkeys(groups.values()))}
    parts = sorted(layers, key=lambda part: (stages.index(part[1]), place.get(groups.get(part[0], ""), -1)))
    staged = len(stages) > 1
    names = {part: part[0] + (f", {stage_words(part[1])}" if staged else "") for part in parts}
    sizes = [(names[part], len(layers[part])) for part in parts]
    every = [(*part, layer) for part in parts for layer in layers[part]]
    grid = entries.groupby([*A, *B])["value"].mean().unstack(B).reindex(index=every, columns=every)
    numbers = [f"{names[model, stage]} {int(layer)}" for model, stage, layer in every]
    return HeatPanel(title, grid.to_numpy(dtype=float), numbers, numbers, sizes, up="", across="")


def block_values(frame: pd.DataFrame) -> list[Row]:
    """The mean of every block: of each model with each, a layer with itself left out."""
    entries = entries_of(frame)
    same = (entries[A].to_numpy() == entries[B].to_numpy()).all(1)
    keys = ["model_a", "stage_a", "model_b", "stage_b"]
    return entries[~same].groupby(keys, sort=False, as_index=False)["value"].mean().to_dict("records")


# ---------------------------------------------------------------------- localization


def _localizations(frame: pd.DataFrame, places: Sequence[str], printed: bool) -> pd.DataFrame:
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
        subspace = STANDARDISED if printed and STANDARDISED in set(part["measure"]) else "svcca"
        neurons, subspaces = (entries_of(part[part["measure"] == name]) for name in ("neuronsim", subspace))
        both = neurons.merge(subspaces, on=[*A, *B], suffixes=("", "_svcca"))
        other = (both["model_a"] != both["model_b"]) | (both["layer_a"] != both["layer_b"])
        layer = ["model_b", "layer_b"] if printed else ["model_a", "layer_a"]
        values = both[["value", "value_svcca"]].where(other)
        means = values.groupby([both[name] for name in layer], sort=False).mean().dropna()
        means = (means - means.mean()) / means.std() if printed else means
        scores = (means["value"] - means["value_svcca"]).rename_axis(["model", "layer"]).rename("localization")
        parts.append(scores.reset_index().assign(**place))
    lacking = "localization needs both `neuronsim` and `svcca` of the same pairs of models"
    return shared.present(pd.concat(parts, ignore_index=True), lacking)


def _look(groups: Mapping[str, str], name: str) -> tuple[str, Meaning]:
    """Name and meaning of the line of a model, which has the colour of its family, or of a family."""
    family = name if name in groups.values() else groups.get(name)
    return name, ("model", name) if family is None else ("group", family)
