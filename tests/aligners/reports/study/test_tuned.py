"""What is made of fine-tuned models alone: surgery, and base models beside their fine-tunings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from aligners.reports.drawing import short
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make

TASKS = ("mnli", "sst2")
DEPTH = 3
SITES = range(DEPTH + 1)


def surgery(models: Sequence[str] = ("bert", "bert#2")) -> Iterator[dict[str, Any]]:
    """Two fine-tunings of one model: the score is .5 + .1 a layer, .02 more in the second; a block less costs .1."""
    none = dict.fromkeys(("site", "first", "last"))
    for task, (copy, model) in product(TASKS, enumerate(models)):
        base = {**none, "task": task, "stage": "finetuned", "model": model, "majority_score": 0.4}
        for condition, site in product(("untuned", "tuned"), SITES):
            score = 0.5 + 0.1 * site + 0.02 * copy
            ends = {"score": score, "score_low": score - 0.05, "score_high": score + 0.05}
            yield {**base, "condition": condition, "site": site, **ends}
        yield {**base, "condition": "native", "score": 0.8 + 0.02 * copy}
        for first, last in combinations_with_replacement(SITES[1:], 2):
            span = {"first": first, "last": last, "score": 0.8 - 0.1 * (last - first + 1)}
            yield {**base, **span, "condition": "skip"}
        yield {**base, "model": "mean of the models", "stage": None, "condition": "untuned", "site": 1, "score": 9.0}


def similarity() -> Iterator[dict[str, Any]]:
    """A model and its fine-tunings on both tasks: 1 less .1 for every task by which two differ."""
    models = [("pretrained", None), *(("finetuned", task) for task in TASKS)]
    about = {"model_x": "bert", "model_y": "bert", "measure": "cka", "direction": "both", "features": "raw"}
    for task, (x, y), a, b in product(TASKS, combinations_with_replacement(models, 2), SITES, SITES):
        stages = {"stage": x[0] if x[0] == y[0] else None, "stage_x": x[0], "stage_y": y[0]}
        apart = (x[1] != y[1]) * 0.1 * (1 + (x[1] is not None)) + 0.01 * abs(a - b)
        place = {"task": task, **stages, "tuned_x": x[1], "tuned_y": y[1], "layer_x": a, "layer_y": b}
        yield {**about, **place, "value": 1 - apart}


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
    one = Frames({"surgery": pd.DataFrame(surgery(["bert"]))})
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
