"""Probes before and after fine-tuning, and RSA between the two: Merchant et al. 2020, Table 1, Figures 1, 2 and 5."""

from collections.abc import Sequence

import pandas as pd

from aligners.errors import finite
from aligners.reports.report import Row
from aligners.reports.study.contents import Figure, Table, look_of_stage, model_lines
from aligners.reports.study.described_tables import figure, paper_value, plain, table
from aligners.reports.study.frames import Frames, Missing, by
from aligners.reports.study.registry import register
from aligners.reports.study.row_selection import of_one_base, present, without_copy
from aligners.reports.study.statistics import Estimate

BASE, TUNED = "pretrained", "finetuned"
PLACE = ("task", "base", "probed")
OWN = "the task's own (in domain)"


def mixed_layers(frames: Frames, name: str) -> Table:
    """Table 1: F1 of edge probes over a learned mix of all layers, before and after fine-tuning."""
    frame = _probed(frames)
    present(
        frame[frame["site"].isna() & (frame["source"] == "model")],
        "no edge probe read a learned mix of layers",
    )
    rows = []
    for place, part in by(frame[frame["edges"]], *PLACE):
        base = part[(part["stage"] == BASE) & part["site"].notna()]
        lexical = base[(base["source"] == "model") & (base["site"] == 0)]["score"].mean()
        compared = _compared(part[part["site"].isna()])
        rows.append(
            {**place, **compared, "lexical": finite(lexical), **_printed(name, part, place)}
        )
    ends = ["mean", "min", "max"]
    changes = [
        {**place, **part["change"].agg(ends), "models": len(part)} for place, part in _changed(rows)
    ]
    return table(name, rows, changes=changes)


def codelengths(frames: Frames, name: str) -> Table:
    """Appendix B: bits that the labels take online, by the mix of all layers, before and after, beside its F1."""
    rows = []
    codes, scores = (
        _before_and_after(frames.of("probing_codelengths", "bits", "probed")),
        _probed(frames),
    )
    codes = codes[codes["site"].isna() & ~codes["control"].astype(bool)]
    present(
        codes[codes["source"] == "model"],
        "no labels were sent by probes of a learned mix of layers",
    )
    for place, part in by(codes.assign(kilobits=codes["bits"] / 1000), *PLACE):
        bits, compression = _compared(part, "kilobits"), _compared(part, "compression")
        of_place = (scores[list(PLACE)] == pd.Series(place)).all(axis=1) & scores["site"].isna()
        f1 = _compared(scores[of_place])
        saved = 100 * bits["change"] / bits["before"] if bits["change"] is not None else None
        beside = {"uniform": part["uniform_bits"].iloc[0] / 1000, "f1_change": f1["change"]}
        times = {
            "compression_before": compression["before"],
            "compression_after": compression["after"],
        }
        rows.append(
            {**place, **bits, **times, **beside, "f1_before": f1["before"], "change": saved}
        )
    changes = [{**place, "mean": part["change"].mean()} for place, part in _changed(rows)]
    return table(name, rows, changes=changes)


def rsa_by_layer(frames: Frames, name: str, panel: str) -> Figure:
    """Figures 2 and 5: RSA of a model with its fine-tunings at the same layer, in and out of their domain.

    Args:
        frames: of the study.
        name: of the figure.
        panel: `text`: one for each text that no task is about, with a line for each task (Figure 2); `tuned`: one for
            each task, with a line for each text (Figure 5).
    """
    frame = of_one_base(frames, ["rsa"])
    frame = frame[(frame["layer_x"] == frame["layer_y"]) & (frame["stage_x"] != frame["stage_y"])]
    model = frame["model_x"].where(frame["stage_x"] == TUNED, frame["model_y"])
    tuned = frame["tuned_x"].fillna(frame["tuned_y"])
    frame = frame.assign(model=model, tuned=tuned, layer=frame["layer_x"])
    outside = ~frame["task"].isin(set(frame["tuned"]))
    text = frame["task"].mask(frame["task"] == frame["tuned"], OWN)
    frame = frame.assign(text=text, tuned="fine-tuned on " + frame["tuned"].astype(str))[
        outside | (panel == "tuned")
    ]
    lacking = (
        "no RSA between a model and its fine-tunings: `similarity.across_stages` compares them"
    )
    present(
        frame,
        lacking + (" on texts of no task, which are `similarity.texts`" if panel == "text" else ""),
    )
    line, places = (
        "text" if panel == "tuned" else "tuned",
        ["base", panel] if frame["base"].nunique() > 1 else [panel],
    )
    means, panels = model_lines(
        frame, places, line, "layer", "value", lambda key: (key, (line, key))
    )
    last = [row for row in means if row["layer"] == frame["layer"].max()]
    return figure(name, panels, means, last=last, tunings=frame["model"].nunique())


def scores_by_site(frames: Frames, name: str) -> Table:
    """The same at every layer, structural probes among them (Figure 1 as a table)."""
    rows = []
    for place, df in by(_probed(frames), *PLACE):
        for site, line in df[df["site"].notna()].groupby("site"):
            rows.append({**place, **_compared(line), "site": int(site)})
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
        {key: row[key] for key in ("task", "probed", "stage", "layer")} | {"score": row["mean"]}
        for row in means
    ]
    return figure(name, panels, values, models=frame["base"].nunique())


def _probed(frames: Frames) -> pd.DataFrame:
    """Scores in hundredths of the model's and its twin's probes, with `edges` and what `_before_and_after` adds."""
    frame = frames.of("probing", "score", "probed")
    frame = _before_and_after(frame[frame["score"].notna()]).assign(
        edges=lambda rows: rows["probe"] == "edge"
    )
    ends = {f"score{end}": 100 * frame[f"score{end}"] for end in ("", "_low", "_high")}
    ranks = frame["rank"].map(lambda rank: "" if pd.isna(rank) else f", rank {rank:.0f}")
    several = frame.groupby("probed")["rank"].transform("nunique") > 1
    return frame.assign(probed=frame["probed"] + ranks.where(several, ""), **ends)


def _before_and_after(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of models that were probed both before and after fine-tuning, and of their twins, with `base` and `text`.

    A model that is read on the same texts for several tasks is probed once before it is fine-tuned: its rows count for
    each of them. `text` is the file of the sentences, which `probed` says as well where several have one task.

    Raises:
        Missing: no model was probed both before and after.
    """
    frame = frame[frame["source"].isin(("model", "untrained"))]
    names = (
        frame["corpus"].str.rpartition("/")[2].str.partition("-")[0]
    )  # en_ewt of data/en_ewt-ud-train.conllu
    several = names.groupby(frame["probed"]).transform("nunique") > 1
    probed = frame["probed"] + (", " + names).where(several, "")
    frame = frame.assign(
        base=without_copy(frame["model"]), text=names, what=frame["probed"], probed=probed
    )
    keys = ["base", "probed", "corpus"]
    before, after = (frame[frame["stage"] == stage] for stage in (BASE, TUNED))
    if before.empty or after.empty:
        raise Missing(
            "no model was probed both before and after fine-tuning: `stages` [pretrained, finetuned]"
        )
    tasks, there = (rows[[*keys, "task"]].drop_duplicates() for rows in (after, before))
    lacking = (
        tasks.merge(there, how="left", indicator="where")
        .query("where == 'left_only'")
        .drop(columns="where")
    )
    first = before[before["task"] == before.groupby(keys)["task"].transform("first")].drop(
        columns="task"
    )
    frame = pd.concat([frame, lacking.merge(first, on=keys)], ignore_index=True)
    both = frame.groupby(["task", *keys])["stage"].transform(
        lambda stages: {BASE, TUNED} <= set(stages)
    )
    return frame[both]


def _compared(line: pd.DataFrame, column: str = "score") -> Row:
    """Values before and after fine-tuning, what it changed, and the value of the twin with fresh random weights."""
    columns = (("model", BASE), ("model", TUNED), ("untrained", BASE))
    before, after, twin = (
        line[(line["source"] == of) & (line["stage"] == at)][column] for of, at in columns
    )
    tuned = (
        Estimate(float(after.mean()), finite(after.std()), pairs=len(after)) if len(after) else None
    )
    means = {"before": finite(before.mean()), "untrained": finite(twin.mean())}
    return {**means, "after": tuned, "change": finite(after.mean() - before.mean())}


def _printed(name: str, own: pd.DataFrame, place: Row) -> Row:
    """The paper's F1 of the same model, probed on the same corpus, and its change by the same fine-tuning."""
    first = own.iloc[0]
    where = {"model": place["base"], "probed": first["what"], "corpus": first["text"]}
    before, change = (
        paper_value(name, quantity, **where) for quantity in ("before", plain(place["task"]))
    )
    return {"paper_before": before and before.mean, "paper_change": change and change.mean}


def _changed(rows: Sequence[Row]) -> list[tuple[Row, pd.DataFrame]]:
    """Rows whose change is known, by task and by what is probed."""
    known = pd.DataFrame(rows).dropna(subset=["change"]).astype({"change": float})
    return by(known, "task", "probed")


register(__name__)
