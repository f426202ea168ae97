"""The figure of a fit: a panel for each pair of models, as long as there are few."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from reports.fit import report


def rows(models: int) -> list[dict[str, Any]]:
    return [
        {"model_x": f"m{x}", "model_y": f"m{y}", "method": "linear", "role": "method", "site_x": site, "site_y": site,
         "training": None, "fvu": 0.01 * (x + 1) * site, "fvu_unseen": None}
        for x, y in combinations(range(models), 2) for site in (1, 2)
    ]  # fmt: skip


def test_maps_no_better_than_the_mean_are_named() -> None:
    few = [row | {"fvu": 50 * row["fvu"]} for row in rows(3)]
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
