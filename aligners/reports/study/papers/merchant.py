"""Probes before and after fine-tuning: Merchant et al. 2020, Table 1 and Figure 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study.frames import (
    STAGES,
    Cell,
    Figure,
    Frames,
    LinePanel,
    Missing,
    Table,
    by,
    place_words,
    stage_words,
)
from aligners.reports.study.papers.shared import figure, mean_line, paper_value, plain, table, without_copy
from aligners.reports.study.statistics import Estimate

BASE, TUNED = "pretrained", "finetuned"
PAPERS_TASKS = ("mnli", "squad")  # on which it fine-tunes, where we can
PLACE = ("task", "base", "probed")


def mixed_layers(frames: Frames, name: str) -> Table:
    """Table 1: F1 of edge probes over a learned mix of all layers, before and after fine-tuning."""
    frame = _probed(frames)
    if frame[frame["site"].isna() & (frame["source"] == "model")].empty:
        raise Missing("no edge probe read a learned mix of layers")
    rows: list[dict[str, Cell]] = []
    for place, own in _places(frame[frame["edges"]]):
        base = own[(own["stage"] == BASE) & own["site"].notna()]
        lexical = base[(base["source"] == "model") & (base["site"] == 0)]["score"]
        twins = base[base["source"] == "untrained"].groupby("site")["score"].mean()
        beside = {"lexical": _known(lexical.mean()), "untrained": _known(twins.max())}
        rows.append({**_compared(own[own["site"].isna()], place), **beside, **_printed(name, own, place)})
    return table(name, rows, _changes(rows))


def scores_by_site(frames: Frames, name: str) -> Table:
    """The same at every layer, structural probes among them (Figure 1 as a table)."""
    rows: list[dict[str, Cell]] = []
    for place, own in _places(_probed(frames)):
        for site, line in own[own["site"].notna() & (own["source"] == "model")].groupby("site"):
            twin = own[_twins(own) & (own["site"] == site)]["score"].mean()
            rows.append({**_compared(line, place), "site": int(site), "untrained": _known(twin)})
    return table(name, rows, _largest_changes(rows), models=0)


def scores_by_layer(frames: Frames, name: str) -> Figure:
    """Figure 1: the score at every layer, before and after fine-tuning, a panel for each task."""
    frame = _probed(frames)
    panels, values = [], list[Row]()
    for (task, probed), own in by(frame[frame["site"].notna()], "task", "probed"):
        sites, series = sorted(int(site) for site in own["site"].unique()), []
        for stage in STAGES:
            line = own[_twins(own) if stage == "random" else (own["source"] == "model") & (own["stage"] == stage)]
            if len(line):
                series.append(mean_line(stage_words(stage), ("stage", stage), line, ("site", sites), "score"))
                values += [{"task": task, "probed": probed, "stage": stage, "layer": site, "score": value[0]}
                           for site, value in zip(sites, series[-1].values, strict=True)]  # fmt: skip
        panels.append(LinePanel(place_words(task, probed), [str(site) for site in sites], series))
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


def _places(frame: pd.DataFrame) -> Iterator[tuple[dict[str, Cell], pd.DataFrame]]:
    for place, own in by(frame, *PLACE):
        yield dict(zip(PLACE, place, strict=True)), own


def _twins(own: pd.DataFrame) -> pd.Series:
    return (own["source"] == "untrained") & (own["stage"] == BASE)


def _known(mean: float) -> float | None:
    """A mean; None of nothing."""
    return None if pd.isna(mean) else float(mean)


def _compared(line: pd.DataFrame, place: dict[str, Cell]) -> dict[str, Cell]:
    """Scores before and after fine-tuning, and what it changed."""
    own = line[line["source"] == "model"]
    before, after = (own[own["stage"] == stage]["score"] for stage in (BASE, TUNED))
    tuned = Estimate(float(after.mean()), _known(after.std()), pairs=len(after)) if len(after) else None
    return {**place, "before": _known(before.mean()), "after": tuned, "change": _known(after.mean() - before.mean())}


def _printed(name: str, own: pd.DataFrame, place: dict[str, Cell]) -> dict[str, Cell]:
    """The paper's F1 of the same model, probed on the same corpus, and its change by the same fine-tuning."""
    corpus = str(own["corpus"].iloc[0]).rpartition("/")[2].partition("-")[0]  # en_ewt of data/en_ewt-ud-train.conllu
    where = {"model": str(place["base"]), "probed": str(place["probed"]), "corpus": corpus}
    task = plain(str(place["task"]))
    before = paper_value(name, "before", **where)
    change = paper_value(name, task, **where) if task in PAPERS_TASKS else None
    return {"paper_before": before and before.mean, "paper_change": change and change.mean}


def _changes(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """Say of each task what fine-tuning changes in what probes read."""
    said = []
    for (task, probed), own in by(pd.DataFrame(rows).dropna(subset=["change"]), "task", "probed"):
        changes = own["change"].astype(float)
        mean = f"Fine-tuning on {task} changes what edge probes read of {probed} by {changes.mean():+z.1f} points"
        ends = f", {changes.min():+z.1f} to {changes.max():+z.1f} over {len(changes)} models"
        said.append(f"{mean}{ends if len(changes) > 1 else ''}.")
    return said


def _largest_changes(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """Say of each task at which layer fine-tuning changes most of what probes read, mean over models."""
    said = []
    for (task, probed), own in by(pd.DataFrame(rows).dropna(subset=["change"]), "task", "probed"):
        means = own.groupby("site")["change"].mean()
        site = means.abs().idxmax()
        said.append(f"Of {probed}, fine-tuning on {task} changes most at layer {site}: {means[site]:+z.1f} points.")
    return said
