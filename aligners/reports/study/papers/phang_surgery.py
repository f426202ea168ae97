"""The surgery of Phang et al. 2021: fine-tuned models truncated, and without spans of their layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study.contents import Figure, HeatPanel, LinePanel, Missing, Series
from aligners.reports.study.frames import Frames, by, place_words
from aligners.reports.study.papers.choosing import scores_line
from aligners.reports.study.papers.phang import without_copy

__all__ = ["skipping", "truncation"]

HEADS = {"untuned": "untuned", "tuned": "tuned", "tuned_orig": "tuned, original model"}
MAJORITY = "majority class"
HELD_OUT = "Held out: yes, on test texts that neither model nor head was trained on."


def truncation(frames: Frames) -> Figure:
    """Phang et al., Figure 3: the score of a head on the state of every layer, model by model and task by task."""
    panels, values = [], []
    for title, own, place in _models(frames, list(HEADS)):
        sites = sorted(int(site) for site in own["site"].unique())
        floor = 100 * float(own["majority_score"].iloc[0])
        series = [Series(MAJORITY, ("head", MAJORITY), [[floor]] * len(sites))]
        for kind, name in HEADS.items():
            line = own[own["condition"] == kind]
            if len(line):
                series.append(scores_line(name, ("head", name), line, sites, scale=100))
                values += [{**place, "head": kind, "site": site, "score": value[0]}
                           for site, value in zip(sites, series[-1].values, strict=True)]  # fmt: skip
        panels.append(LinePanel(title, [str(site) for site in sites], series))
    return Figure(
        "phang_figure_3",
        "Truncated models (Phang et al., Figure 3)",
        "The task's score × 100 where a head reads the state of a layer in place of the last one: the model's own head "
        "(untuned), one trained further there (tuned), and one trained on the model before fine-tuning. Mean over the "
        "fine-tunings of a model, with their range; of one, with the interval over texts. The last layer is the whole "
        "model.",
        "Lines of the score against the layer, one panel for each task and model.",
        panels,
        "score × 100",
        values=values,
        notes=[HELD_OUT],
    )


def skipping(frames: Frames) -> Figure:
    """Phang et al., Figure 4: the score without each span of layers, model by model and task by task."""
    panels, values = [], []
    for title, own, place in _models(frames, ["skip", "native"]):
        spans = own[own["condition"] == "skip"]
        blocks = list(range(1, int(spans["last"].max()) + 1))
        means = 100 * spans.groupby(["first", "last"])["score"].mean()
        grid = np.array([[means.get((i, j), np.nan) for j in blocks] for i in blocks], dtype=float)
        whole = 100 * own.loc[own["condition"] == "native", "score"].mean()
        names = [str(block) for block in blocks]
        panels.append(HeatPanel(f"{title} (whole: {whole:.1f})", grid, names, names, up="first block skipped",
                                across="last block skipped"))  # fmt: skip
        values += [{**place, "first": int(i), "last": int(j), "score": float(value)} for (i, j), value in means.items()]
    return Figure(
        "phang_figure_4",
        "Models without a span of layers (Phang et al., Figure 4)",
        "The task's score × 100 when the blocks from the first (up) to the last (across) are left out and nothing is "
        "trained again, mean over the fine-tunings of a model.",
        "Heat maps of the score by the first and the last block skipped, one for each task and model.",
        panels,
        "score × 100",
        values=values,
        notes=[HELD_OUT],
    )


def _models(frames: Frames, kinds: list[str]) -> Iterator[tuple[str, pd.DataFrame, Row]]:
    """Title, rows and place of each task and model, all of its fine-tunings together.

    Raises:
        Missing: there are no such rows.
    """
    frame = frames.of("surgery", "score", "condition")
    frame = frame[frame["condition"].isin(kinds) & frame["stage"].notna()]  # without means over models
    if frame.empty:
        raise Missing(f"the rows of kind `surgery` have none of {', '.join(kinds)}")
    for (task, base), own in by(frame.assign(base=without_copy(frame["model"])), "task", "base"):
        yield place_words(task, base), own, {"task": task, "model": base}
