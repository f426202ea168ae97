"""Probes before and after fine-tuning, of scores that are known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pandas as pd
import pytest

from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make
from tests.aligners.reports.study.rows import items

BERT = "google-bert/bert-base-uncased"


def rows(model: str = BERT, task: str = "mnli", corpus: str = "en_ewt-ud-train.conllu") -> Iterator[dict[str, Any]]:
    """A site more is .1 more, two fine-tunings take .01 and .03 from it; a twin reads .3; the mix .9, then .88."""
    stages = [("pretrained", model, 0.0), ("finetuned", model, 0.01), ("finetuned", f"{model}#2", 0.03)]
    probes = [("dependencies", "edge", None), ("depth", "depth", 64)]
    for stage, name, loss in stages:
        own = {"task": task, "corpus": corpus, "stage": stage, "model": name, "source": "model"}
        own["tuned"] = task if stage == "finetuned" else None
        for (probed, probe, rank), site in product(probes, (0, 1, 2)):
            each, score = {**own, "probed": probed, "probe": probe, "site": site, "rank": rank}, 0.6 + 0.1 * site - loss
            yield {**each, "score": score, "score_low": score - 0.02, "score_high": score + 0.02}
            yield {**each, "source": "untrained", "score": 0.3, "score_low": 0.3, "score_high": 0.3}
        mix = {**own, "probed": "dependencies", "probe": "edge", "site": None, "rank": None}
        yield {**mix, "score": 0.9 - loss, "score_low": 0.8, "score_high": 0.9}
        yield {**mix, "source": "majority", "score": 0.1}


def made(*models: dict[str, str]) -> dict[str, Any]:
    frame = pd.DataFrame([row for model in models or ({},) for row in rows(**model)])
    return items({"probing": frame}, "merchant_table_1", "merchant_layers", "merchant_figure_1")


def test_the_mix_stands_beside_the_papers() -> None:
    found = made()["merchant_table_1"]
    (row,) = found.rows
    assert row["base"] == "bert-base-uncased"
    assert row["before"] == pytest.approx(90)
    assert (row["after"].mean, row["after"].sd) == (pytest.approx(88), pytest.approx(2**0.5))
    assert (row["change"], row["lexical"], row["untrained"]) == tuple(map(pytest.approx, (-2, 60, 30)))
    assert (row["paper_before"], row["paper_change"]) == (95.5, -0.5)
    assert "Merchant et al. 2020, Table 1" in found.notes[-1]
    assert found.findings == ["Fine-tuning on mnli changes what edge probes read of dependencies by -2.0 points."]


@pytest.mark.parametrize("other", [{"model": "roberta-base"}, {"corpus": "grammar"}])
def test_the_paper_is_not_beside_another_model_or_corpus(other: dict[str, str]) -> None:
    found = made(other)["merchant_table_1"]
    assert found.rows[0]["paper_before"] is None
    assert not any(column.key.startswith("paper") for column in found.columns)
    assert not any("Merchant" in note for note in found.notes)


def test_a_fine_tuning_that_the_paper_lacks_has_no_change_of_its() -> None:
    (row,) = made({"task": "sst2"})["merchant_table_1"].rows
    assert (row["paper_before"], row["paper_change"]) == (95.5, None)


def test_every_layer_before_and_after() -> None:
    layers = made()["merchant_layers"]
    found = layers.rows
    assert "Of depth, fine-tuning on mnli changes most at layer" in layers.findings[1]
    assert layers.findings[1].endswith(": -2.0 points.")
    assert [(row["probed"], row["site"]) for row in found] == [
        (probed, site) for probed in ("dependencies", "depth") for site in (0, 1, 2)
    ]
    assert [row["before"] for row in found] == pytest.approx(2 * [60, 70, 80])
    assert [row["change"] for row in found] == pytest.approx(6 * [-2])
    assert [row["untrained"] for row in found] == pytest.approx(6 * [30])


def test_lines_of_one_model_and_of_several() -> None:
    one, several = made()["merchant_figure_1"], made({}, {"model": "b"})["merchant_figure_1"]
    assert [panel.title for panel in one.panels] == ["mnli, dependencies", "mnli, depth"]
    first = one.panels[0]
    assert [series.name for series in first.series] == ["untrained", "pretrained", "fine-tuned"]
    assert [list(value) for value in first.series[1].values] == [pytest.approx([value]) for value in (60, 70, 80)]
    assert list(first.series[1].low) == pytest.approx([58, 68, 78])  # over sentences
    assert list(first.series[2].low) == pytest.approx([57, 67, 77])  # over fine-tunings
    assert "Mean over 2 models" in several.caption


def test_models_that_are_not_fine_tuned_have_no_such_table() -> None:
    frame = pd.DataFrame([row for row in rows() if row["stage"] == "pretrained"])
    missing = make(Frames({"probing": frame})).missing
    assert "no model was probed both before and after" in missing["merchant_table_1"]


def test_names_say_the_rank_where_there_are_several() -> None:
    frame = pd.DataFrame([*rows(), *(row | {"rank": 8} for row in rows() if row["rank"])])
    (table,) = items({"probing": frame}, "merchant_layers").values()
    assert {row["probed"] for row in table.rows} == {"dependencies", "depth, rank 8", "depth, rank 64"}
