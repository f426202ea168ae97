"""Base and fine-tuned models side by side: Wu et al. 2020, Figures 5 and 6."""

from __future__ import annotations

import pandas as pd

from aligners.reports.study.contents import Figure, Missing
from aligners.reports.study.frames import Frames, by, place_words
from aligners.reports.study.papers.block_maps import block_panel, block_values
from aligners.reports.study.papers.phang import without_copy

__all__ = ["tuned_map"]

BASE = "base"
STAGES = ("pretrained", "finetuned")
SIDES = "xy"


def tuned_map(frames: Frames, name: str, measure: str, paper: str) -> Figure:
    """Every layer of a model and of its fine-tunings against every other, a panel for each model.

    Args:
        frames: of the study.
        name: of the figure.
        measure: of similarity.
        paper: which figure of the paper.

    Raises:
        Missing: no model was compared with its own fine-tunings.
    """
    panels, values = [], []
    for (task, base), own in by(_of_one_base(frames, measure), "task", "base"):
        title = place_words(base, f"texts of {task}")
        panels.append(block_panel(own, title, {}))
        values += [{"texts": task, "model": base, "measure": measure, **row} for row in block_values(own)]
    return Figure(
        name,
        f"Base and fine-tuned models, {measure} (Wu et al., {paper})",
        f"{measure} of each layer (up) to each other layer (across) of a model before fine-tuning (base) and of its "
        "fine-tunings, named after their tasks. On held-out texts, which are those of one task for all.",
        f"Heat maps of {measure} between all layers of a model and its fine-tunings, one for each model.",
        panels,
        measure,
        limits=(0.0, 1.0),
        values=values,
    )


def _of_one_base(frames: Frames, measure: str) -> pd.DataFrame:
    """Rows of two models of one base, each named after what it was fine-tuned on, with the column `base`."""
    frame = frames.of("similarity", "value", other_tasks=True)
    frame = frame[(frame["measure"] == measure) & (frame["features"] == "raw")]
    frame = frame[frame["stage_x"].isin(STAGES) & frame["stage_y"].isin(STAGES)]
    bases = [without_copy(frame[f"model_{side}"]) for side in SIDES]
    frame = frame.assign(base=bases[0])[bases[0] == bases[1]]
    if not (frame["stage_x"] != frame["stage_y"]).any():
        raise Missing(f"no {measure} between a model and its fine-tunings: `similarity.across_stages` compares them")
    named = {f"model_{side}": [_named(row) for row in _ends(frame, side)] for side in SIDES}
    return frame.assign(**named, stage_x=None, stage_y=None)


def _ends(frame: pd.DataFrame, side: str) -> list[tuple[str, str, str | None]]:
    columns = [frame[f"{name}_{side}"] for name in ("model", "stage", "tuned")]
    return list(zip(*columns, strict=True))


def _named(end: tuple[str, str, str | None]) -> str:
    """`base`, or the task, with the number of a further fine-tuning."""
    model, stage, task = end
    if stage == "pretrained":
        return BASE
    _, copy, number = model.partition("#")
    return f"{'fine-tuned' if pd.isna(task) else task}{copy}{number}"
