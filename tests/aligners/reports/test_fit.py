"""The figure of a fit: a panel for each pair of models, as long as there are few."""

from itertools import combinations

import numpy as np
import pytest

from aligners.reports.finished import make_report
from aligners.reports.runs.fit import report
from tests.aligners.reports.made import Row, cells, row


def rows(models: int) -> list[Row]:
    return [
        row(f"m{x}", f"m{y}", "linear", "method", (site, site), fvu=0.01 * (x + 1) * site)
        for x, y in combinations(range(models), 2)
        for site in (1, 2)
    ]


def test_maps_no_better_than_the_mean_are_named() -> None:
    few = [r | {"fvu": 50 * r["fvu"]} for r in rows(3)]
    (said,) = report({}, few).sentences
    assert said.endswith("by its largest FVU: linear 2.")
    assert report({}, rows(3)).sentences == []


@pytest.mark.parametrize(("models", "panels"), [(5, 10), (6, 1)])
def test_more_than_a_dozen_pairs_are_drawn_as_their_median(models: int, panels: int) -> None:
    figure = report({}, rows(models)).figures["fvu"]()
    drawn = [axis for axis in figure.axes if axis.axison]
    assert len(drawn) == panels
    if panels == 1:
        assert drawn[0].get_title() == "X → Y, median of 15 pairs"
        assert np.asarray(drawn[0].get_lines()[0].get_ydata()) == pytest.approx([0.02, 0.04])


def test_a_median_over_pairs_keeps_what_did_not_train() -> None:
    each = rows(6)
    each[0]["training"] = "untrained start (linear)"
    (axis,) = (axis for axis in report({}, each).figures["fvu"]().axes if axis.axison)
    hollow = [line for line in axis.get_lines() if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow if len(line.get_xdata())] == [[0]]


def test_the_map_that_recovers_best_is_one_that_is_trained() -> None:
    known: dict[str, Row] = {"linear": {"fvu": 0.2}, "inn": {"fvu": 0.1, "training": "diverged at step 2"}}
    each = [row("x", "target", name, "method", (1, 1), strength=0.3, **about) for name, about in known.items()]
    made = make_report("recovery", {}, each)
    assert made.sentences[0].startswith("Closest to the target, of its variance: at strength 0.3 linear leaves 20 %")
    assert "0.1000*" in cells(made.screen)
