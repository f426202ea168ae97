"""Heat maps, lines along matching layers, and tables of a comparison of models."""

import re
from io import StringIO
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
from matplotlib.text import Text
from rich.console import Console
from tests.aligners.reports.made import printed

from aligners.reports.drawing import ON_QUIET
from aligners.reports.page.run_page import page_tables
from aligners.reports.runs.similarity_report import block_map, layer_lines, pair_map, report

CONTROLS = ("low", "high", "held_out", "null", "null_high", "untrained", "ceiling")
PAIR = [("X", "Y")]


def rows(pairs: list[tuple[str, str]], *layers: int, controls: bool = False) -> list[dict[str, Any]]:
    """Two measures over all layer pairs; in hundredths ten times X's layer and Y's layer, and 1 if standardised."""
    found = []
    for (x, y), label, features in product(pairs, ("cka", "r2 of X"), ("raw", "standardised")):
        direction = "both" if label == "cka" else "forward"
        about = {"model_x": x, "model_y": y, "measure": label.split()[0], "label": label, "direction": direction}
        about["n_rows"] = 100
        for i, j in product(*map(range, layers or (3, 3))):
            value = (10 * i + j + (features != "raw")) / 100
            place = {"features": features, "layer_x": i, "layer_y": j, "value": value}
            found.append(about | place | dict.fromkeys(CONTROLS, value / 2 if controls else None))
    return found


def test_a_heat_map_shows_each_value_at_its_layers_on_one_scale() -> None:
    figure = pair_map([row for row in rows(PAIR, 2, 3) if row["features"] == "raw"])
    panels = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in panels] == ["cka", "r2 of X"]
    for axis in panels:
        assert axis.images[0].get_clim() == (0, 1)
        assert axis.images[0].get_array().tolist() == [[0.0, 0.01, 0.02], [0.1, 0.11, 0.12]]
        cells = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axis.texts}
        assert cells[1, 2] == ".12"
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0", "1", "2"]
        assert [tick.get_text() for tick in axis.get_yticklabels()] == ["0", "1"]


@pytest.mark.parametrize("controls", [False, True])
def test_lines_follow_the_matching_layers_and_show_the_controls_there_are(controls: bool) -> None:
    figure = layer_lines(rows(PAIR, controls=controls))
    panel = next(axis for axis in figure.axes if axis.get_title() == "cka")
    assert [0.0, 0.11, 0.22] in [list(line.get_ydata()) for line in panel.lines if len(line.get_xdata()) == 3]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "value" + ", 95 % interval" * controls
    assert ("null: texts permuted" in names) == controls
    assert "features standardised" in names
    assert bool(panel.collections) == controls  # the band of the interval


def test_blocks_of_all_models_hold_both_directions() -> None:
    found = []
    for (x, y), direction in product([("A", "A"), ("A", "B"), ("B", "B")], ("forward", "backward")):
        for i, j in product(range(2), repeat=2):
            value = (ord(x) - 64 + 0.1 * i if direction == "forward" else ord(y) - 64 + 0.1 * j) / 10
            about = {"model_x": x, "model_y": y, "measure": "r2", "direction": direction}
            found.append({**about, "layer_x": i, "layer_y": j, "value": value})
    axis = block_map(found).axes[0]
    # every entry says of which model and layer its row is
    expected = [[0.1 * model + 0.01 * layer] * 4 for model in (1, 2) for layer in (0, 1)]
    assert axis.images[0].get_array().tolist() == [pytest.approx(row) for row in expected]
    assert axis.images[0].get_clim() == (0, 1)
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0", "1", "0", "1"]


def test_many_pairs_share_one_figure_and_each_has_its_own_where_that_is_asked_for() -> None:
    pairs = combinations_with_replacement([f"m{number}" for number in range(6)], 2)  # 15 of different models
    found = [row for pair in pairs for row in rows([pair], *([3, 3] if "m5" not in pair else [2, 2]))]
    few, many = (report({}, found, [], [], each_pair=wanted) for wanted in (None, True))
    assert set(few.figures) == {"all_cka", "all_r2"}
    assert few.screen == []
    assert "15 pairs of models" in few.sentences[0]
    assert len(many.figures) == 21 + 15 + 2
    assert len(many.screen) == 15


def test_tables_hold_every_row_and_models_in_deep_folders_make_files_that_a_disk_takes() -> None:
    long = "/tmp/" + "folder/" * 40
    every = rows([(f"{long}a/x", f"{long}b/x"), (f"{long}b/x", f"{long}b/x")], controls=True)
    layers = [{"model": "b", "layer": 0, "nuclear_norm": 2.5, "localization": None}]
    made = report({"seed": 3}, every, layers, [])
    assert (made.name, made.rows, made.tables) == ("similarity", every, {"layers": layers, "distances": []})
    assert list(made.figures) == ["diagonal_a-x_b-x", "layers_a-x_b-x", "layers_b-x_b-x"]


def test_the_table_shows_matching_layers_of_different_models() -> None:
    screen = printed(report({}, rows([("a", "b"), ("b", "b")], controls=True), [], []).screen)
    assert "a and b, matching layers" in screen
    assert "0.110" in screen  # layer 1 with layer 1
    assert "0.120" not in screen  # layer 1 with layer 2
    assert "null" in screen
    (plain,) = report({}, rows(PAIR), [], []).screen
    assert len(plain.styles) == 2


def test_a_value_no_higher_than_its_null_is_grey() -> None:
    found = rows(PAIR, 3, 3, controls=True)
    for row in found:
        low = row["layer_x"] == 1
        row |= {
            "effect": 0.1,
            "p": 0.5 if low else 0.25,
            "p_family": 0.5,
            "null_high": row["value"] + (0.1 if low else -0.1),
        }
    made = report({"permutations": 3}, found, [], [])
    (table,) = made.screen
    by_row = [sorted(quiet) for quiet in table.quiet if quiet]
    assert by_row == [[3], [3]]  # the second layer, of both measures
    assert "p, all pairs" in table.columns[1].cells
    said = " ".join(made.sentences)
    assert "4 pairings of the texts" in said
    assert "at least 0.25" in said
    assert "cka (3 of 9) and r2 of X (3 of 9)" in said
    assert "no similarity" not in " ".join(report({}, rows(PAIR), [], []).sentences)
    console = Console(width=120, force_terminal=True, color_system="standard", file=StringIO())
    console.print(table)
    grey = re.findall(r"\x1b\[90m *([\d.]+)\x1b\[0m", console.file.getvalue())
    assert grey == ["0.110", "0.110"]
    (page, *_) = page_tables(made)
    assert [cell.value for line in page.rows for cell in line.cells if cell.quiet] == ["0.110", "0.110"]
    assert "Grey values: no higher than the null." in page.caption
    (line,) = made.figures["diagonal_X_Y"]().axes[0].lines[-1:]
    assert (line.get_color(), line.get_xdata().tolist()) == ("0.6", [1])
    cells = [row for row in found if row["label"] == "cka" and row["features"] == "raw"]
    for figure, count in ((made.figures["layers_X_Y"](), 3), (block_map(cells), 6)):
        axis = figure.axes[0]
        grey = [text.get_text() for text in axis.texts if text.get_color() == ON_QUIET]
        assert sorted({*grey}) == [".10", ".11", ".12"]  # all of the second layer of X
        assert len(grey) == axis.images[1].get_array().count() == count
        assert any("no higher than its null" in text.get_text() for text in figure.findobj(Text))
    assert pair_map(rows(PAIR)[:9]).axes[0].images[1].get_array().count() == 0
