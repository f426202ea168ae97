"""Probes before and after fine-tuning, and RSA between the two: Merchant et al. 2020, Table 1, Figures 1, 2 and 5."""

from collections.abc import Sequence

import pandas as pd
from pandas import DataFrame

from aligners.errors import finite
from aligners.reports.report import Row
from aligners.reports.study.contents import (
    Figure,
    Meaning,
    Table,
    look_of_stage,
    model_lines,
)
from aligners.reports.study.described_tables import figure, paper_value, plain, table
from aligners.reports.study.frames import Frames, Missing, Part, by
from aligners.reports.study.registry import register
from aligners.reports.study.row_selection import of_one_base, present, without_copy
from aligners.reports.study.statistics import Estimate

BASE, TUNED = "pretrained", "finetuned"
PLACE = ("task", "base", "probed")
OWN = "the task's own (in domain)"

# ---------------------------------------------------------------------- tables and figures of probes


def mixed_layers(frames: Frames, name: str) -> Table:
    """Table 1: F1 of edge probes over a learned mix of all layers, before and after fine-tuning."""
    frame = _probed(frames)
    own = frame["source"] == "model"
    mixed = frame["site"].isna()
    present(frame[mixed & own], "no edge probe read a learned mix of layers")
    edge = frame[frame["probe"] == "edge"]
    rows = []
    for place, part in by(edge, *PLACE):
        of_mix = part[part["site"].isna()]
        row = place | _compared(of_mix)
        row["lexical"] = _lexical(part)
        row |= _printed(name, part, place)
        rows.append(row)
    changes = []
    for place, part in _changed(rows):
        ends = part["change"].agg(["mean", "min", "max"])
        change = {**place, **ends}
        change["models"] = len(part)
        changes.append(change)
    return table(name, rows, changes=changes)


def _lexical(part: DataFrame) -> float | None:
    """The score of the embeddings alone, before fine-tuning."""
    embeddings = (part["source"] == "model") & (part["site"] == 0)
    scores = part.loc[embeddings & (part["stage"] == BASE), "score"]
    return finite(scores.mean())


def _printed(name: str, own: DataFrame, place: Row) -> Row:
    """The paper's F1 of the same model, probed on the same corpus, and its change by the same fine-tuning."""
    first = own.iloc[0]
    where = {"model": place["base"], "probed": first["what"], "corpus": first["text"]}
    task = plain(place["task"])
    before = paper_value(name, "before", **where)
    change = paper_value(name, task, **where)
    return {
        "paper_before": before and before.mean,
        "paper_change": change and change.mean,
    }


def codelengths(frames: Frames, name: str) -> Table:
    """Appendix B: bits that the labels take online, by the mix of all layers, before and after, beside its F1."""
    codes = _codes_of_mixes(frames)
    scores = _probed(frames)
    scores = scores[scores["site"].isna()]
    rows = []
    for place, part in by(codes, *PLACE):
        here = scores[list(PLACE)] == pd.Series(place)
        f1 = _compared(scores[here.all(axis=1)])
        row = place | _sent(part)
        row["f1_before"] = f1["before"]
        row["f1_change"] = f1["change"]
        rows.append(row)
    changes = []
    for place, part in _changed(rows):
        mean = part["change"].mean()
        changes.append(place | {"mean": mean})
    return table(name, rows, changes=changes)


def _codes_of_mixes(frames: Frames) -> DataFrame:
    """Codelengths by the mix of all layers, with the column `kilobits`.

    Raises:
        Missing: there are none of a model.
    """
    codes = frames.of("probing_codelengths", "bits", "probed")
    codes = _before_and_after(codes)
    control = codes["control"].astype(bool)
    codes = codes[codes["site"].isna() & ~control]
    sent = codes[codes["source"] == "model"]
    present(sent, "no labels were sent by probes of a learned mix of layers")
    return codes.assign(kilobits=codes["bits"] / 1000)


def _sent(part: DataFrame) -> Row:
    """Kilobits before and after fine-tuning, their change in per cent, and the compressions."""
    row = _compared(part, "kilobits")
    compression = _compared(part, "compression")
    change = row["change"]
    if change is not None:
        row["change"] = 100 * change / row["before"]
    row["uniform"] = part["uniform_bits"].iloc[0] / 1000
    row["compression_before"] = compression["before"]
    row["compression_after"] = compression["after"]
    return row


def scores_by_site(frames: Frames, name: str) -> Table:
    """The same at every layer, structural probes among them (Figure 1 as a table)."""
    frame = _probed(frames)
    layers = frame[frame["site"].notna()]
    rows = []
    for place, part in by(layers, *PLACE):
        for site, line in part.groupby("site"):
            row = place | _compared(line)
            row["site"] = int(site)
            rows.append(row)
    changes = []
    for place, part in _changed(rows):
        means = part.groupby("site")["change"].mean()
        site = means.abs().idxmax()
        largest = {"site": site, "change": means[site]}
        changes.append(place | largest)
    return table(name, rows, changes=changes, models=0)


def scores_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 1: the score at every layer, before and after fine-tuning, a panel for each task."""
    frame = _probed(frames)
    layers = frame[frame["site"].notna()]
    layers = layers.assign(layer=layers["site"])
    stage = layers["stage"]
    own = layers["source"] == "model"
    untrained = layers["source"] == "untrained"
    trained = layers[own & stage.isin((BASE, TUNED))]
    twins = layers[untrained & (stage == BASE)]
    twins = twins.assign(stage="random")
    drawn = pd.concat([trained, twins]).sort_index()
    means, panels = model_lines(
        drawn, ["task", "probed"], "stage", "layer", "score", look_of_stage
    )
    values = []
    for row in means:
        value = {key: row[key] for key in ("task", "probed", "stage", "layer")}
        value["score"] = row["mean"]
        values.append(value)
    models = frame["base"].nunique()
    return figure(name, panels, values, models=models)


# ---------------------------------------------------------------------- rows of probes


def _probed(frames: Frames) -> DataFrame:
    """Scores in hundredths of the model's and its twin's probes, with what `_before_and_after` adds."""
    frame = frames.of("probing", "score", "probed")
    frame = _before_and_after(frame[frame["score"].notna()])
    several = frame.groupby("probed")["rank"].transform("nunique") > 1
    ranks = frame["rank"].map(", rank {:.0f}".format, na_action="ignore")
    named = ranks.fillna("").where(several, "")
    frame = frame.assign(probed=frame["probed"] + named)
    for column in ("score", "score_low", "score_high"):
        frame[column] = 100 * frame[column]
    return frame


def _before_and_after(frame: DataFrame) -> DataFrame:
    """Rows of models that were probed both before and after fine-tuning, and of their twins, with `base` and `text`.

    `text` is the file of the sentences, such as en_ewt of data/en_ewt-ud-train.conllu; where several have one task,
    `probed` says it as well, and `what` is the task alone.

    Raises:
        Missing: no model was probed both before and after.
    """
    frame = frame[frame["source"].isin(("model", "untrained"))]
    stages = set(frame["stage"])
    if BASE not in stages or TUNED not in stages:
        raise Missing(
            "no model was probed both before and after fine-tuning: `stages` [pretrained, finetuned]"
        )
    files = frame["corpus"].str.rpartition("/")[2]
    text = files.str.partition("-")[0]
    task = frame["probed"]
    several = text.groupby(task).transform("nunique") > 1
    named = (", " + text).where(several, "")
    frame = frame.assign(
        base=without_copy(frame["model"]), text=text, what=task, probed=task + named
    )
    return _in_both_stages(_for_each_task(frame))


def _in_both_stages(frame: DataFrame) -> DataFrame:
    """Rows of what was probed both before and after fine-tuning."""
    groups = frame.groupby(["task", "base", "probed", "corpus"], sort=False)
    kept = []
    for _, rows in groups:
        if {BASE, TUNED} <= set(rows["stage"]):
            kept.append(rows)
    if not kept:
        return frame.iloc[:0]
    return pd.concat(kept).sort_index()


def _for_each_task(frame: DataFrame) -> DataFrame:
    """Rows before fine-tuning count for each task.

    A model that is read on the same texts for several tasks is probed once before it is fine-tuned.
    """
    keys = ["base", "probed", "corpus"]
    columns = [*keys, "task"]
    before = frame[frame["stage"] == BASE]
    after = frame[frame["stage"] == TUNED]
    tasks = after[columns].drop_duplicates()
    there = before[columns].drop_duplicates()
    joined = tasks.merge(there, how="left", indicator="where")
    lacking = joined.loc[joined["where"] == "left_only", columns]
    first_task = before.groupby(keys)["task"].transform("first")
    first = before[before["task"] == first_task]
    first = first.drop(columns="task")
    added = lacking.merge(first, on=keys)
    return pd.concat([frame, added], ignore_index=True)


def _compared(line: DataFrame, column: str = "score") -> Row:
    """Values before and after fine-tuning, what it changed, and the value of the twin with fresh random weights."""
    values, stage = line[column], line["stage"]
    own = line["source"] == "model"
    untrained = line["source"] == "untrained"
    before = values[own & (stage == BASE)].mean()
    after = values[own & (stage == TUNED)]
    twins = values[untrained & (stage == BASE)]
    mean = after.mean()
    tuned = None
    if len(after):
        sd = finite(after.std())
        tuned = Estimate(float(mean), sd, pairs=len(after))
    return {
        "before": finite(before),
        "untrained": finite(twins.mean()),
        "after": tuned,
        "change": finite(mean - before),
    }


def _changed(rows: Sequence[Row]) -> list[Part]:
    """Rows whose change is known, by task and by what is probed."""
    known = DataFrame(rows).dropna(subset=["change"])
    known = known.astype({"change": float})
    return by(known, "task", "probed")


# ---------------------------------------------------------------------- RSA


def rsa_by_layer(frames: Frames, name: str, panel: str) -> Figure:
    """Figures 2 and 5: RSA of a model with its fine-tunings at the same layer, in and out of their domain.

    Args:
        frames: frames of the study.
        name: name of the figure.
        panel: `text`: one for each text that no task is about, with a line for each task (Figure 2); `tuned`: one for
            each task, with a line for each text (Figure 5).
    """
    frame = _rsa(frames)
    lacking = "no RSA between a model and its fine-tunings: `similarity.across_stages` compares them"
    line = "text"
    if panel == "text":
        line = "tuned"
        lacking += " on texts of no task, which are `similarity.texts`"
        frame = frame[frame["outside"]]
    present(frame, lacking)
    places = [panel]
    if frame["base"].nunique() > 1:
        places.insert(0, "base")

    def look(key: str) -> tuple[str, Meaning]:
        return key, (line, key)

    means, panels = model_lines(frame, places, line, "layer", "value", look)
    top = frame["layer"].max()
    last = [row for row in means if row["layer"] == top]
    tunings = frame["model"].nunique()
    return figure(name, panels, means, last=last, tunings=tunings)


def _rsa(frames: Frames) -> DataFrame:
    """RSA of fine-tuned models with their bases at the same layer, by `model`, what it was `tuned` on, and `text`.

    `outside` says whether a text is that of no task.
    """
    frame = of_one_base(frames, ["rsa"])
    same_layer = frame["layer_x"] == frame["layer_y"]
    frame = frame[same_layer & (frame["stage_x"] != frame["stage_y"])]
    x_is_tuned = frame["stage_x"] == TUNED
    tuned = frame["tuned_x"].fillna(frame["tuned_y"])
    task = frame["task"]
    return frame.assign(
        model=frame["model_x"].where(x_is_tuned, frame["model_y"]),
        tuned="fine-tuned on " + tuned.astype(str),
        layer=frame["layer_x"],
        text=task.mask(task == tuned, OWN),
        outside=~task.isin(set(tuned)),
    )


register(__name__)
