from __future__ import annotations

from itertools import combinations_with_replacement, product
from typing import Any

import pytest

from aligners.reports.runs.similarity import block_map, heat_maps, layer_lines, report


def rows(layers_x: int, layers_y: int, controls: bool) -> list[dict[str, Any]]:
    """Two measures over all layer pairs; the value is ten times X's layer and Y's layer, in hundredths."""
    found = []
    for label, features, i, j in product("ab", ("raw", "standardised"), range(layers_x), range(layers_y)):
        value = (10 * i + j) / 100
        row = {"model_x": "X", "model_y": "Y", "layer_x": i, "layer_y": j, "label": label, "features": features}
        extra = dict.fromkeys(("low", "high", "held_out", "null", "untrained", "ceiling"), value / 2)
        found.append({**row, "value": value, **(extra if controls else dict.fromkeys(extra))})
    return found


def test_a_heat_map_shows_each_value_at_its_layers_on_one_scale() -> None:
    figure = heat_maps([row for row in rows(2, 3, False) if row["features"] == "raw"])
    panels = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in panels] == ["a", "b"]
    for axis in panels:
        image = axis.images[0]
        assert image.get_clim() == (0, 1)
        assert image.get_array().tolist() == [[0.0, 0.01, 0.02], [0.1, 0.11, 0.12]]
        cells = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axis.texts}
        assert cells[1, 2] == ".12"
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0", "1", "2"]
        assert [tick.get_text() for tick in axis.get_yticklabels()] == ["0", "1"]


@pytest.mark.parametrize("controls", [False, True])
def test_lines_follow_the_matching_layers_and_show_the_controls_there_are(controls: bool) -> None:
    figure = layer_lines(rows(3, 3, controls))
    panel = next(axis for axis in figure.axes if axis.get_title() == "a")
    heights = [list(line.get_ydata()) for line in panel.lines if len(line.get_xdata()) == 3]
    assert [0.0, 0.11, 0.22] in heights
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert ("null: texts permuted" in said) == controls
    assert "features standardised" in said
    assert bool(panel.collections) == controls  # the band of the interval


def test_blocks_of_all_models_hold_both_directions() -> None:
    found = []
    for (x, y), direction in product([("A", "A"), ("A", "B"), ("B", "B")], ("forward", "backward")):
        for i, j in product(range(2), repeat=2):
            value = (ord(x) - 64 + 0.1 * i if direction == "forward" else ord(y) - 64 + 0.1 * j) / 10
            head = {"model_x": x, "model_y": y, "measure": "r2", "direction": direction, "features": "raw"}
            found.append({**head, "layer_x": i, "layer_y": j, "value": value})
    axis = block_map(found).axes[0]
    # every entry says of which model and layer its row is
    expected = [[0.1 * model + 0.01 * layer] * 4 for model in (1, 2) for layer in (0, 1)]
    assert axis.images[0].get_array().round(6).tolist() == [[round(v, 6) for v in row] for row in expected]
    assert axis.images[0].get_clim() == (0, 1)
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0", "1", "0", "1"]


def test_many_pairs_share_one_figure_and_each_has_its_own_where_that_is_asked_for() -> None:
    names = [f"m{number}" for number in range(6)]  # 15 pairs
    found = [
        {**row, "model_x": x, "model_y": y, "measure": row["label"], "direction": "both", "n_rows": 9}
        for x, y in combinations_with_replacement(names, 2)
        for row in rows(3 if "m5" not in (x, y) else 2, 3 if "m5" not in (x, y) else 2, False)
    ]
    few, many = (report({}, found, [], [], each_pair=wanted) for wanted in (None, True))
    assert set(few.figures) == {"diagonal_all", "all_a", "all_b"}
    assert few.screen == []
    assert "15 pairs of models" in few.sentences[0]
    assert len(many.figures) == 21 + 15 + 2
    assert len(many.screen) == 15
    panel = few.figures["diagonal_all"]().axes[0]
    heights = [line.get_ydata() for line in panel.lines if len(line.get_xdata()) == 3]
    assert len(heights) == 16
    assert heights[-1].tolist() == pytest.approx([0.0, 0.11, 0.22])  # the median
    assert any(one.tolist() == pytest.approx([0.0, 0.055, 0.11]) for one in heights)  # two layers, stretched
