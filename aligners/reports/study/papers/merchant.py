"""Probes before and after fine-tuning: Merchant et al. 2020, Table 1 and Figure 1."""

from collections.abc import Sequence

import pandas as pd

from aligners.errors import finite
from aligners.reports.report import Row
from aligners.reports.study.contents import Figure, Table, look_of_stage, model_lines
from aligners.reports.study.frames import Frames, Missing, by
from aligners.reports.study.papers.shared import figure, paper_value, plain, table, without_copy
from aligners.reports.study.statistics import Estimate

BASE, TUNED = "pretrained", "finetuned"
PLACE = ("task", "base", "probed")


def mixed_layers(frames: Frames, name: str) -> Table:
    """Table 1: F1 of edge probes over a learned mix of all layers, before and after fine-tuning."""
    frame = _probed(frames)
    if frame[frame["site"].isna() & (frame["source"] == "model")].empty:
        raise Missing("no edge probe read a learned mix of layers")
    rows = []
    for place, part in by(frame[frame["edges"]], *PLACE):
        base = part[(part["stage"] == BASE) & part["site"].notna()]
        lexical = base[(base["source"] == "model") & (base["site"] == 0)]["score"].mean()
        twin = part[(part["stage"] == BASE) & part["site"].isna() & (part["source"] == "untrained")]["score"].mean()
        beside = {"lexical": finite(lexical), "untrained": finite(twin)}
        rows.append({**place, **_compared(part[part["site"].isna()]), **beside, **_printed(name, part, place)})
    ends = ["mean", "min", "max"]
    changes = [{**place, **part["change"].agg(ends), "models": len(part)} for place, part in _changed(rows)]
    return table(name, rows, changes=changes)


def scores_by_site(frames: Frames, name: str) -> Table:
    """The same at every layer, structural probes among them (Figure 1 as a table)."""
    rows = []
    for place, df in by(_probed(frames), *PLACE):
        for site, line in df[df["site"].notna() & (df["source"] == "model")].groupby("site"):
            twin = df[(df["source"] == "untrained") & (df["stage"] == BASE) & (df["site"] == site)]["score"].mean()
            rows.append({**place, **_compared(line), "site": int(site), "untrained": finite(twin)})
    changes = []
    for place, df in _changed(rows):
        means = df.groupby("site")["change"].mean()
        site = means.abs().idxmax()
        changes.append({**place, "site": site, "change": means[site]})
    return table(name, rows, changes=changes, models=0)


def scores_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 1: the score at every layer, before and after fine-tuning, a panel for each task."""
    frame = _probed(frames)
    twins = (frame["source"] == "untrained") & (frame["stage"] == BASE)
    trained = (frame["source"] == "model") & frame["stage"].isin((BASE, TUNED))
    drawn = frame[frame["site"].notna() & (trained | twins)]
    drawn = drawn.assign(stage=drawn["stage"].where(~twins, "random"), layer=drawn["site"])
    means, panels = model_lines(drawn, ["task", "probed"], "stage", "layer", "score", look_of_stage)
    values = [
        {**{key: row[key] for key in ("task", "probed", "stage", "layer")}, "score": row["mean"]} for row in means
    ]
    return figure(name, panels, values, models=frame["base"].nunique())


def _probed(frames: Frames) -> pd.DataFrame:
    """Scores in hundredths of the model's and its twin's probes, with `base`, `probed` and `edges`.

    Raises:
        Missing: no model was probed both before and after it was fine-tuned.
    """
    frame = frames.of("probing", "score", "probed")
    frame = frame[frame["source"].isin(("model", "untrained")) & frame["score"].notna()]
    frame = frame.assign(base=without_copy(frame["model"]), edges=frame["probe"] == "edge")
    both = frame.groupby(["task", "base"])["stage"].transform(lambda stages: {BASE, TUNED} <= set(stages))
    frame = frame[both]
    if frame.empty:
        raise Missing("no model was probed both before and after fine-tuning: `stages` [pretrained, finetuned]")
    ends = {f"score{end}": 100 * frame[f"score{end}"] for end in ("", "_low", "_high")}
    ranks = frame["rank"].map(lambda rank: "" if pd.isna(rank) else f", rank {rank:.0f}")
    several = frame.groupby("probed")["rank"].transform("nunique") > 1
    return frame.assign(probed=frame["probed"] + ranks.where(several, ""), **ends)


def _compared(line: pd.DataFrame) -> Row:
    """Scores before and after fine-tuning, and what it changed."""
    trained = line[line["source"] == "model"]
    before, after = (trained[trained["stage"] == stage]["score"] for stage in (BASE, TUNED))
    tuned = Estimate(float(after.mean()), finite(after.std()), pairs=len(after)) if len(after) else None
    return {"before": finite(before.mean()), "after": tuned, "change": finite(after.mean() - before.mean())}


def _printed(name: str, own: pd.DataFrame, place: Row) -> Row:
    """The paper's F1 of the same model, probed on the same corpus, and its change by the same fine-tuning."""
    corpus = str(own["corpus"].iloc[0]).rpartition("/")[2].partition("-")[0]  # en_ewt of data/en_ewt-ud-train.conllu
    where = {"model": place["base"], "probed": place["probed"], "corpus": corpus}
    before, change = (paper_value(name, quantity, **where) for quantity in ("before", plain(place["task"])))
    return {"paper_before": before and before.mean, "paper_change": change and change.mean}


def _changed(rows: Sequence[Row]) -> list[tuple[Row, pd.DataFrame]]:
    """Rows whose change is known, by task and by what is probed."""
    known = pd.DataFrame(rows).dropna(subset=["change"]).astype({"change": float})
    return by(known, "task", "probed")
