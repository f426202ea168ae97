"""The report of stitching: files, figures, tables, and what it says of the numbers."""

from itertools import permutations, product
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tests.aligners.reports.made import Row, cells, curves, printed, stitched

from aligners.reports.drawing import METHODS, MOST_LINES, method_looks
from aligners.reports.finished_runs import make_report
from aligners.reports.report import Report, grouped, where
from aligners.reports.runs.stitching_report import Routes

GRID = list(product((1, 2, 3), repeat=2))
EIGHT = [f"m{i}" for i in range(8)]
FOUR = EIGHT[:4]
GROUPS = {"good": FOUR, "poor": EIGHT[4:]}


def report(rows: list[Row], **more: Any) -> Report:
    return make_report("stitching", {"task": "causal"}, rows, **more)


def figure_of(rows: list[Row], name: str = "penalty", **more: Any) -> Any:
    return report(rows, **more).figures[name]()


def said(rows: list[Row], groups: dict[str, list[str]] | None = None) -> str:
    return "\n".join(report(rows, groups=groups).sentences)


def changed(rows: list[Row], *, where: dict[str, Any], **changes: Any) -> list[Row]:
    return [row | changes if all(row[key] == value for key, value in where.items()) else row for row in rows]


def drawn(axis: Any) -> dict[str, list[float]]:
    """Heights of the lines with a name."""
    return {bars.get_label(): [round(float(y), 6) for y in bars[0].get_ydata()] for bars in axis.containers}


def test_a_grid_gets_a_map_and_many_models_means_over_pairs() -> None:
    rows = stitched()
    made = report(rows, curves=curves(rows))
    assert list(made.figures) == ["penalty", "accuracy", "curves"]
    assert (made.name, made.rows, made.tables) == ("stitching", rows, {"pairs": [], "curves": curves(rows)})
    assert list(report(stitched(sites=GRID)).figures) == ["penalty", "accuracy", "map"]
    pairs = report(stitched(FOUR, (1,))).tables["pairs"]
    assert {(row["group"], row["n_routes"]) for row in pairs} == {("different models", 12), ("same model", 4)}


def test_lines_are_routes_with_their_targets_colours_and_dashed_baselines() -> None:
    rows = stitched()
    axes = figure_of(rows).axes
    assert [axis.get_title() for axis in axes] == ["affine_norm", "linear", "identity"]
    for axis in axes:
        routes = grouped(where(rows, method=axis.get_title()), "model_x", "model_y").items()
        assert drawn(axis) == {f"{x} → {y}": [round(row["penalty"], 6) for row in own] for (x, y), own in routes}
    ends = axes[0].containers[0][2][0].get_segments()[0][:, 1]
    first = where(rows, method="affine_norm", same_model=False)[0]
    assert ends.tolist() == pytest.approx([first["penalty_low"], first["penalty_high"]])
    looks = {bars.get_label(): bars[0] for bars in axes[0].containers}
    assert looks["gelu → gelu"].get_linestyle() == looks["solu → solu"].get_linestyle() == "--"
    assert looks["gelu → solu"].get_linestyle() == looks["solu → gelu"].get_linestyle() == "-"
    assert looks["gelu → gelu"].get_color() == looks["solu → gelu"].get_color()
    assert looks["gelu → gelu"].get_color() != looks["solu → solu"].get_color()
    # no colour of a model is that of a method
    assert not {look.get_color() for look in looks.values()} & {
        look["color"] for look in method_looks(METHODS).values()
    }


def test_no_panel_has_more_than_six_lines_and_none_is_lost() -> None:
    rows = stitched(("a", "b", "c"))
    axes = [axis for axis in figure_of(rows).axes if axis.containers]
    between, alone = ([sorted(drawn(axis)) for axis in axes[place::2]] for place in (0, 1))
    assert between == [sorted(f"{x} → {y}" for x, y in permutations("abc", 2))] * 3
    assert alone == [["a → a", "b → b", "c → c"]] * 3
    assert all(axis.get_title().endswith("each into itself") for axis in axes[1::2])
    training = figure_of(rows, "curves", curves=curves(rows)).axes
    assert all(len(axis.lines) <= MOST_LINES + 1 for axis in training)  # and the line at 0


@pytest.mark.parametrize("models", [("gelu", "solu"), ("embedded-gpt:0", "embedded-gpt:1:activation=solu")])
def test_the_legend_is_in_the_picture_and_on_nothing_else(models: tuple[str, str]) -> None:
    figure = figure_of([row for row in stitched(models) if row["method"] != "linear"])
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.contains(box.x0, box.y0)
    assert figure.bbox.contains(box.x1, box.y1)
    others = [axis.get_tightbbox() for axis in figure.axes]
    others += [text.get_window_extent() for text in (figure._supxlabel, figure._supylabel) if text is not None]
    assert not any(box.overlaps(other) for other in others)


def test_every_penalty_is_in_view_whatever_its_panel() -> None:
    rows = [row for row in stitched() if row["method"] in ("affine_norm", "identity")]
    assert figure_of(rows).axes[0].get_ylim()[1] > max(row["penalty_high"] for row in rows)
    along = changed(curves(rows), where={"site_x": 3}, penalty=100.0)
    assert figure_of(rows, "curves", curves=along).axes[0].get_ylim()[1] > 100


def test_accuracy_stands_below_each_targets_own() -> None:
    rows = changed(stitched(), where={"method": "native", "model_y": "solu"}, score=0.9)
    axes = figure_of(rows, "accuracy").axes
    for axis in axes:
        assert sorted(line.get_ydata()[0] for line in axis.lines if len(line.get_ydata()) == 2) == [80, 90]
    assert drawn(axes[0])["gelu → solu"][0] == pytest.approx(79.4)


def test_what_overflows_is_not_drawn_and_hides_nothing_else() -> None:
    gone = dict.fromkeys(("penalty", "penalty_low", "penalty_high", "accuracy"))
    rows = changed(stitched(), where={"method": "linear", "model_x": "gelu", "model_y": "solu", "site_x": 2}, **gone)
    (heights,) = (drawn(axis)["gelu → solu"] for axis in figure_of(rows).axes if axis.get_title() == "linear")
    assert [str(height) for height in heights] == ["0.12", "nan", "0.207846"]
    assert "overflow" in printed(report(rows).screen)
    assert "linear: the stitched model gives no finite loss at 1 of 12 places (4 routes)." in said(rows)


def test_curves_have_a_panel_for_each_site_and_a_line_for_each_route() -> None:
    rows = stitched()
    axes = figure_of(rows, "curves", curves=curves(rows)[::-1]).axes  # whatever the order of the points
    assert [axis.get_title() for axis in axes] == ["site 1", "site 2", "site 3"]
    line = next(line for line in axes[1].lines if line.get_label() == "solu → gelu")
    assert list(line.get_xdata()) == [0, 50, 100, 150, 200]
    assert list(line.get_ydata()) == sorted(line.get_ydata(), reverse=True)


def test_curves_of_many_models_are_means_even_where_routes_end_at_different_steps() -> None:
    rows = stitched(FOUR, (1,))
    along = [point for point in curves(rows) if point["step"] < 200 or point["model_x"] == "m0"]
    (axis,) = figure_of(rows, "curves", curves=along).axes
    heights = {line.get_label(): len(line.get_xdata()) for line in axis.lines}
    assert heights["different models"] == heights["same model"] == 5


def test_maps_show_each_penalty_at_its_sites() -> None:
    rows = [row for row in stitched(sites=GRID) if row["method"] != "linear"]
    panels = [axis for axis in figure_of(rows, "map").axes if axis.images]
    assert [axis.get_title() for axis in panels[:4]] == ["gelu → solu", "solu → gelu", "gelu → gelu", "solu → solu"]
    shown = where(rows, model_x="solu", model_y="gelu", method="affine_norm")
    assert panels[1].images[0].get_array().ravel().tolist() == pytest.approx([row["penalty"] for row in shown])
    scales = [axis.images[0].get_clim() for axis in panels]
    assert len(set(scales[:4])) == 1  # one scale for a method
    assert scales[0] != scales[-1]


def test_sites_of_unequal_models_and_of_grids_come_in_order_of_depth() -> None:
    uneven = [row | {"site_y": row["site_x"] and min(row["site_x"], 2)} for row in stitched()]
    assert Routes(uneven).pairs == [(1, 1), (2, 2), (3, 2)]
    assert Routes(stitched(sites=GRID)).pairs == [(1, 1), (2, 2), (3, 3)]


def test_tables_show_routes_down_and_sites_across() -> None:
    shown = printed(report(stitched()).screen)
    assert "affine_norm, task loss, 1,000 parameters a site" in shown
    (line,) = [line for line in shown.split("linear")[0].splitlines() if "solu → gelu" in line]
    expected = "solu → gelu 80.0 0.120 ±0.013 0.170 ±0.018 0.208 ±0.022 78.8 78.3 77.9"
    assert line.split() == expected.split()


def test_of_many_sites_nothing_is_cut_off() -> None:
    for models, groups, route in ((["deep/one", "deep/two"], None, "one → two"), (EIGHT, GROUPS, "good-to-poor")):
        shown = printed(report(stitched(models, range(1, 13)), groups=groups).screen)
        assert route in shown
        assert "…" not in shown


def wide(row: Row) -> Row:
    return row | {"penalty_low": row["penalty"] - 1, "penalty_high": row["penalty"] + 1}


def test_findings_say_what_the_numbers_say() -> None:
    for part in (
        "affine_norm: solu → gelu costs more than gelu → solu at 3 of 3 sites, beyond the intervals over texts of both",
        "affine_norm: stitched to themselves, models have no penalty above 0.01 nats.",
        "at 6 of 6 places (2 routes) a different model costs more than the target stitched to itself",
        "from a different model the target keeps its accuracy within 1 point at 2 of 6 places",
        "most is lost from solu to gelu at 3, 2.1 points.",
        "identity: between different models the penalty is 2.400 to 8.314 nats.",
    ):
        assert part in said(stitched())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # no direction that the intervals do not show; either interval alone may be too wide
        (list(map(wide, stitched())), "gelu → solu at 3 of 3 sites, beyond the intervals over texts of both at 0."),
        ([row if row["same_model"] else wide(row) for row in stitched()], "at 0 of 6 places (2 routes) a different"),
        ([wide(row) if row["same_model"] else row for row in stitched()], "at 0 of 6 places (2 routes) a different"),
        (changed(stitched(), where={"model_x": "gelu", "model_y": "solu", "site_x": 1}, penalty=0.5, penalty_low=0.4,
                 penalty_high=0.6), "at 2 of 3 sites, beyond the intervals over texts of both at 2; the reverse costs "
                                    "more beyond both at 1."),
        ([row | {"penalty": 0.1, "penalty_low": 0.1, "penalty_high": 0.1} for row in stitched()],
         "gelu → solu costs more than solu → gelu at 0 of 3 sites."),
        (changed(stitched(), where={"same_model": True, "site_x": 2, "method": "affine_norm"}, penalty=0.03),
         "themselves, models have a penalty above 0.01 nats at 2 of 6 places (2 routes)."),
    ],
)  # fmt: skip
def test_findings_say_no_more_than_the_numbers(rows: list[Row], expected: str) -> None:
    assert expected in said(rows)


def test_without_baselines_or_other_models_nothing_is_said_of_them() -> None:
    forward = said(where(stitched(), model_x="gelu", model_y="solu"))
    assert "themselves" not in forward
    assert "→" not in forward
    assert all("themselves" in sentence for sentence in said(where(stitched(), same_model=True)).splitlines())


def test_a_layer_that_is_not_trained_is_marked_and_no_finding_speaks_of_it() -> None:
    rows = [r | {"training": "untrained start (linear)"} if r["method"] == "affine_norm" else r for r in stitched()]
    made = report(rows)
    assert not any(sentence.startswith("affine_norm") for sentence in made.sentences)
    assert any(sentence.startswith("* affine_norm at sites") for sentence in made.sentences)
    assert any("* ±" in cell for cell in cells(made.screen))
