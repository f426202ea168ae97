"""Probes before and after fine-tuning: Merchant et al. 2020, Table 1 and Figure 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from aligners.reports.study.contents import Cell, Column, Figure, LinePanel, Missing, Table
from aligners.reports.study.estimates import Estimate
from aligners.reports.study.frames import STAGES, Frames, by, place_words, stage_words
from aligners.reports.study.papers.choosing import known, scores_line
from aligners.reports.study.papers.numbers import paper_note, paper_value, plain
from aligners.reports.study.papers.phang import without_copy

__all__ = ["mixed_layers", "scores_by_layer", "scores_by_site"]

BASE, TUNED = "pretrained", "finetuned"
PAPERS_TASKS = ("mnli", "squad")  # on which it fine-tunes, where we can
HELD_OUT = "Held out: yes, on test sentences that no probe was trained on."
PLACE = {"task": "fine-tuned on", "base": "model", "probed": "probed"}
SCORE = (
    "The score × 100 on held-out sentences: micro-averaged F1 of edge probes, Spearman's correlation of structural "
    "probes (distance and depth)."
)
TWIN = "untrained: the same probe of the model's twin with fresh weights"


def mixed_layers(frames: Frames) -> Table:
    """Merchant et al., Table 1: F1 of edge probes over a learned mix of all layers, before and after fine-tuning."""
    frame = _probed(frames)
    mixed = frame[frame["site"].isna() & (frame["source"] == "model")]
    if mixed.empty:
        raise Missing("no edge probe read a learned mix of layers")
    rows: list[dict[str, Cell]] = []
    for place, own in _tasks(frame[frame["edges"]]):
        row = _compared(own[own["site"].isna()], place)
        lexical, twins = (own[(own["source"] == source) & own["site"].notna()] for source in ("model", "untrained"))
        first = lexical[(lexical["site"] == 0) & (lexical["stage"] == BASE)]["score"]
        row |= {"lexical": _mean(first), "untrained": _highest(twins[twins["stage"] == BASE])}
        rows.append(row | _printed(own, place))
    columns = [
        *_columns(),
        Column("lexical", "embeddings alone, before", ".1f"),
        Column("untrained", "untrained, best layer", ".1f"),
        Column("paper_before", "paper: before", ".1f"),
        Column("paper_change", "paper: change", "+z.1f"),
    ]
    printed = any(row["paper_before"] is not None for row in rows)
    return Table(
        "merchant_table_1",
        "Edge probes before and after fine-tuning (Merchant et al., Table 1)",
        "Micro-averaged F1 × 100 on held-out sentences, of edge probes over a learned mix of all layers; "
        f"{TWIN}, at its best layer. After: mean over the fine-tunings of a model, ± their standard deviation.",
        known(columns, rows),
        rows,
        notes=[HELD_OUT, *([paper_note("merchant_table_1")] if printed else [])],
        findings=_changes(rows),
    )


def scores_by_site(frames: Frames) -> Table:
    """The same at every layer, structural probes among them (Merchant et al., Figure 1 as a table)."""
    frame = _probed(frames)
    rows = [
        {
            **_compared(line, place),
            "site": int(site),
            "untrained": _mean(own[_twins(own) & (own["site"] == site)]["score"]),
        }
        for place, own in _tasks(frame)
        for site, line in own[own["site"].notna() & (own["source"] == "model")].groupby("site")
    ]
    first, *others = _columns()
    columns = [first, *others[:2], Column("site", "layer", "d"), *others[2:], Column("untrained", "untrained", ".1f")]
    return Table(
        "merchant_layers",
        "Probes of every layer before and after fine-tuning (Merchant et al., Figure 1)",
        f"{SCORE} Layer 0 is the embeddings alone; {TWIN}.",
        known(columns, rows),
        rows,
        notes=[HELD_OUT],
        findings=_largest_changes(rows),
    )


def scores_by_layer(frames: Frames) -> Figure:
    """Merchant et al., Figure 1: the score at every layer, before and after fine-tuning, a panel for each task."""
    frame = _probed(frames)
    panels, values = [], []
    for (task, probed), own in by(frame[frame["site"].notna()], "task", "probed"):
        sites = sorted(int(site) for site in own["site"].unique())
        series = []
        for stage in STAGES:
            line = own[_twins(own) if stage == "random" else (own["source"] == "model") & (own["stage"] == stage)]
            if len(line):
                series.append(scores_line(stage_words(stage), ("stage", stage), line, sites))
                values += [{"task": task, "probed": probed, "stage": stage, "layer": site, "score": value[0]}
                           for site, value in zip(sites, series[-1].values, strict=True)]  # fmt: skip
        panels.append(LinePanel(place_words(task, probed), [str(site) for site in sites], series))
    models = frame["base"].nunique()
    return Figure(
        "merchant_figure_1",
        "Probes by layer before and after fine-tuning (Merchant et al., Figure 1)",
        f"{SCORE} Layer 0 is the embeddings alone; {TWIN}. Mean over {models} model{'s' * (models > 1)} and their "
        "fine-tunings, with their range; of one, with the 95 % interval over sentences.",
        "Lines of the score against the layer, a panel for each probed task: untrained, before and after fine-tuning.",
        panels,
        "score × 100",
        values=values,
        notes=[HELD_OUT],
    )


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


def _tasks(frame: pd.DataFrame) -> Iterator[tuple[dict[str, Cell], pd.DataFrame]]:
    for place, own in by(frame, *PLACE):
        yield dict(zip(PLACE, place, strict=True)), own


def _columns() -> list[Column]:
    places = [Column(key, heading) for key, heading in PLACE.items()]
    return [
        *places,
        Column("before", "before", ".1f"),
        Column("after", "after", ".1f"),
        Column("change", "change", "+z.1f"),
    ]


def _twins(own: pd.DataFrame) -> pd.Series:
    return (own["source"] == "untrained") & (own["stage"] == BASE)


def _compared(line: pd.DataFrame, place: dict[str, Cell]) -> dict[str, Cell]:
    """Scores before and after fine-tuning, and what it changed."""
    own = line[line["source"] == "model"]
    before, after = (own[own["stage"] == stage]["score"] for stage in (BASE, TUNED))
    sd = float(after.std()) if len(after) > 1 else None
    tuned: Cell = Estimate(float(after.mean()), sd, pairs=len(after)) if len(after) else None
    change = None if before.empty or after.empty else float(after.mean() - before.mean())
    return {**place, "before": _mean(before), "after": tuned, "change": change}


def _mean(scores: pd.Series) -> float | None:
    return None if scores.empty else float(scores.mean())


def _highest(own: pd.DataFrame) -> float | None:
    return None if own.empty else float(own.groupby("site")["score"].mean().max())


def _printed(own: pd.DataFrame, place: dict[str, Cell]) -> dict[str, Cell]:
    """The paper's F1 of the same model, probed on the same corpus, and its change by the same fine-tuning."""
    where = {"model": str(place["base"]), "probed": str(place["probed"]), "corpus": _corpus(str(own["corpus"].iloc[0]))}
    task = plain(str(place["task"]))
    before = paper_value("merchant_table_1", "before", **where)
    change = paper_value("merchant_table_1", task, **where) if task in PAPERS_TASKS else None
    return {"paper_before": before and before.mean, "paper_change": change and change.mean}


def _corpus(source: str) -> str:
    """The corpus of a file that is called as its treebank calls it: `en_ewt` of `data/en_ewt-ud-train.conllu`."""
    return source.rpartition("/")[2].partition("-")[0]


def _changes(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """Say of each task what fine-tuning changes in what probes read."""
    said = []
    for task, probed in dict.fromkeys((row["task"], row["probed"]) for row in rows):
        own = [row["change"] for row in rows if (row["task"], row["probed"]) == (task, probed)]
        changes = [change for change in own if isinstance(change, float)]
        if changes:
            each = (
                f", {min(changes):+z.1f} to {max(changes):+z.1f} over {len(changes)} models" if len(changes) > 1 else ""
            )
            mean = sum(changes) / len(changes)
            said.append(
                f"Fine-tuning on {task} changes what edge probes read of {probed} by {mean:+z.1f} points{each}."
            )
    return said


def _largest_changes(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """Say of each task at which layer fine-tuning changes most of what probes read, mean over models."""
    changes = pd.DataFrame(rows).dropna(subset=["change"])
    said = []
    for (task, probed), own in by(changes, "task", "probed"):
        means = own.groupby("site")["change"].mean()
        site = means.abs().idxmax()
        said.append(f"Of {probed}, fine-tuning on {task} changes most at layer {site}: {means[site]:+z.1f} points.")
    return said
