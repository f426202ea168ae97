"""What is made of fine-tuned models alone: surgery, and base models beside their fine-tunings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pandas as pd
import pytest

from aligners.reports.drawing import short
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make

TASKS = ("mnli", "sst2")
DEPTH = 3


def surgery() -> Iterator[dict[str, Any]]:
    """Two fine-tunings of one model: the score is .5 + .1 a layer, .02 more in the second; a block less costs .1."""
    for task in TASKS:
        for copy, model in enumerate(("bert", "bert#2")):
            base = {"kind": "surgery", "task": task, "stage": "finetuned", "model": model, "majority_score": 0.4}
            none = {"site": None, "first": None, "last": None}
            for condition in ("untuned", "tuned"):
                for site in range(DEPTH + 1):
                    score = 0.5 + 0.1 * site + 0.02 * copy
                    yield {**base, **none, "condition": condition, "site": site, "score": score,
                           "score_low": score - 0.05, "score_high": score + 0.05}  # fmt: skip
            yield {**base, **none, "condition": "native", "score": 0.8 + 0.02 * copy}
            for first in range(1, DEPTH + 1):
                for last in range(first, DEPTH + 1):
                    span = {"site": None, "first": first, "last": last, "score": 0.8 - 0.1 * (last - first + 1)}
                    yield {**base, **span, "condition": "skip"}
        yield {**base, **none, "model": "mean of the models", "stage": None, "condition": "untuned", "site": 1,
               "score": 9.0}  # fmt: skip


def similarity() -> Iterator[dict[str, Any]]:
    """A model and its fine-tunings on both tasks: 1 less .1 for every task by which two differ."""
    models = [("pretrained", None), *(("finetuned", task) for task in TASKS)]
    for task in TASKS:
        for (stage_x, tuned_x), (stage_y, tuned_y) in combinations_with_replacement(models, 2):
            for a in range(DEPTH + 1):
                for b in range(DEPTH + 1):
                    apart = (tuned_x != tuned_y) * 0.1 * (1 + (tuned_x is not None)) + 0.01 * abs(a - b)
                    yield {"kind": "similarity", "task": task, "stage": stage_x if stage_x == stage_y else None,
                           "stage_x": stage_x, "stage_y": stage_y, "tuned_x": tuned_x, "tuned_y": tuned_y,
                           "model_x": "bert", "model_y": "bert", "measure": "cka", "direction": "both",
                           "features": "raw", "layer_x": a, "layer_y": b, "value": 1 - apart}  # fmt: skip


@pytest.fixture(scope="module")
def frames() -> Frames:
    return Frames({"surgery": pd.DataFrame(surgery()), "similarity": pd.DataFrame(similarity())})


def panels(frames: Frames, name: str) -> list[Any]:
    (figure,) = make(frames, [name]).figures
    return list(figure.panels)


def test_truncation_is_the_mean_of_a_models_fine_tunings_with_their_range(frames: Frames) -> None:
    first, second = panels(frames, "phang_figure_3")
    assert (first.title, second.title) == ("mnli, bert", "sst2, bert")
    assert [series.name for series in first.series] == ["majority class", "untuned", "tuned"]  # no base model here
    majority, untuned, _ = first.series
    assert [value[0] for value in untuned.values] == pytest.approx([51, 61, 71, 81])
    assert (untuned.low[0], untuned.high[0]) == (pytest.approx(50), pytest.approx(52))
    assert majority.values == [[40.0]] * 4
    one = Frames({"surgery": pd.DataFrame(row for row in surgery() if row["model"] == "bert")})
    untuned = panels(one, "phang_figure_3")[0].series[1]
    assert untuned.low[0] == pytest.approx(45)  # of a single one, over texts


def test_skipping_is_a_map_of_first_and_last_block(frames: Frames) -> None:
    panel = panels(frames, "phang_figure_4")[0]
    assert panel.title == "mnli, bert (whole: 81.0)"
    assert panel.values[0].tolist() == pytest.approx([70, 60, 50])
    assert np.isnan(panel.values[1, 0])  # the last block is not before the first


def test_values_are_written_as_they_are() -> None:
    shown = [short(value) for value in (0.48, 0.999, 50.0, 100.0, 5e3, -0.5)]
    assert shown == [".48", "1.0", "50.0", "100", "5e+03", "-.50"]


def test_a_model_stands_beside_its_fine_tunings_on_all_tasks(frames: Frames) -> None:
    first, _ = panels(frames, "wu_figure_5")
    assert first.title == "bert, texts of mnli"
    assert [name for name, _ in first.row_blocks] == ["base", "mnli", "sst2"]
    assert first.values[0, DEPTH + 1] == pytest.approx(0.9)
    assert first.values[DEPTH + 1, 2 * (DEPTH + 1)] == pytest.approx(0.8)
    assert "wu_figure_6" in make(frames, ["wu_figure_6"]).missing  # no attention was compared


def test_without_stages_compared_it_says_what_is_missing() -> None:
    rows = pd.DataFrame(row for row in similarity() if row["stage"] is not None)
    missing = make(Frames({"similarity": rows}), ["wu_figure_5"]).missing
    assert "`similarity.across_stages`" in missing["wu_figure_5"]


def test_everything_else_is_of_models_tuned_on_the_task_of_the_texts(frames: Frames) -> None:
    assert len(frames.of("similarity", other_tasks=True)) == 2 * 6 * (DEPTH + 1) ** 2
    kept = frames.of("similarity")
    assert set(zip(kept["task"], kept["tuned_x"].fillna(""), kept["tuned_y"].fillna(""), strict=True)) == {
        (task, *ends) for task in TASKS for ends in (("", ""), ("", task), (task, task))
    }
    titles = [panel.title for panel in panels(frames, "phang_figure_1")]
    assert titles == [f"{task}, {which}" for task in TASKS for which in ("ORIG–ORIG", "FT–ORIG", "FT–FT")]
