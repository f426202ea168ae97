from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from tests.aligners.reports.made import Row, cells, printed, scored
from tests.aligners.reports.made import row as made_row

from aligners.fitting.training_status import BOTH_WAYS, CLOSED, TRAINED
from aligners.reports.drawing import FLOORS, METHODS, lines_by_site, method_looks
from aligners.reports.finished_runs import make_report
from aligners.reports.page.run_page import write_page
from aligners.reports.publishing import write
from aligners.reports.runs.fit_report import report as report_of_fit
from aligners.reports.runs.injection_report import (
    below_chance,
    console_tables,
    fvu_figure,
    price_of_bijectivity,
    reading,
)

report = partial(make_report, "injection")


def row(method: str, site: int | None, fvu: float | None, accuracy: float | None, **changes: Any) -> Row:
    role = "ceiling" if method.startswith("native") else "floor" if site is None or method == "identity" else "method"
    about = {"direction": "forward", "n_texts": 10, "n_rows": 100, "loss": 0.5, "agreement": 0.9, "fvu": fvu}
    answered = {} if accuracy is None else scored(accuracy, 0.05)
    return made_row("first", "second", method, role, (site, site), **about | answered | changes)


def forward() -> list[Row]:
    """Two sites; linear loses nothing, procrustes five points at site 2, the INN is 1.25 to 1.5 times the MLP."""
    inn, mlp = ({"fit": TRAINED, "parameters": size, "bijective": size == 1000} for size in (1000, 1030))
    return [
        row("native_x", None, None, None),
        row("native_y", None, None, 0.8),
        row("random_classifier", None, None, 0.5),
        *(row("identity", site, 2.0, accuracy) for site, accuracy in ((1, 0.5), (2, 0.6))),
        *(row("linear", site, fvu, 0.79, fit=CLOSED) for site, fvu in ((1, 0.4), (2, 0.5))),
        *(row("procrustes", site, 0.7, accuracy, fit=CLOSED) for site, accuracy in ((1, 0.8), (2, 0.75))),
        *(row("inn", site, fvu, 0.8, **inn) for site, fvu in ((1, 0.25), (2, 0.3))),
        *(row("mlp", site, 0.2, 0.8, **mlp) for site in (1, 2)),
        *(row("mlp_wide", site, 0.1, 0.7, fit=TRAINED, parameters=1100, bijective=False) for site in (1, 2)),
    ]


def test_a_model_worse_than_random_labels_is_flagged() -> None:
    chance = row("random_label", None, None, 0.5)
    rows = [row("native_x", None, None, 0.44), row("native_y", None, None, 0.46), chance]
    assert [entry["method"] for entry in below_chance(rows)] == ["native_x"]
    (entry,) = below_chance([*rows, *(r | {"direction": "backward", "model_x": "second", "model_y": "first"} for r in
                                      [row("native_y", None, None, 0.44), chance])])  # fmt: skip
    assert (entry["model"], entry["score"], entry["chance_low"]) == ("first", 0.44, 0.45)
    said = reading([*forward(), chance | {"score_low": 0.81}])
    assert "Caution: second by itself scores 80.0, below what random labels get (from 81.0)" in said
    assert "--data.labels" in said
    assert said.startswith("Caution")
    assert "Caution" not in reading(forward())


def two_ways() -> list[Row]:
    back = [r | {"model_x": "second", "model_y": "first", "direction": "backward"} for r in forward()]
    return forward() + back


def test_a_map_no_better_than_the_mean_is_not_praised() -> None:
    worse = [row("linear", 1, 1.06, 0.7, fit=CLOSED), row("native_y", None, None, 0.8)]
    said = reading(worse)
    assert "The closest map, linear, is no better than the mean: its FVU is 1.06. No better than the mean of" in said
    assert "106" not in said
    ridge = row("ridge", 1, 0.4, 0.7, fit=CLOSED, fvu_other=1.5)
    said = reading([*worse, ridge])
    assert "ridge, leaves 40.0% of the variance unexplained (FVU). No better than the mean of the" in said
    assert "at some site, by its largest FVU: linear 1.06." in said
    assert "On the other text ridge is closest and is no better than the mean: its FVU is 1.5." in said
    inn = row("inn", 1, 0.3, 0.7, fit=TRAINED, bijective=True, parameters=9)
    assert "inn, leaves 30.0% of the variance unexplained (FVU), where ridge leaves 40.0%." in reading(
        [*worse, ridge, inn]
    )
    assert "where linear is no better than the mean: its FVU is 1.06." in reading([*worse, inn])
    assert "No better" not in reading(forward())


def test_cautions_are_among_the_findings_of_every_report() -> None:
    of_data = ["Caution: all alike."]
    found = make_report("injection", {"data_cautions": of_data, "cautions": ["Caution: few.", *of_data]}, forward())
    assert found.lead.startswith("Caution: all alike. ")  # before anything else is said
    assert found.sentences[0] == "Caution: few."
    assert "Caution: all alike." not in found.sentences


def test_a_report_holds_every_row_and_what_is_judged_of_them() -> None:
    long = "/tmp/" + "folder/" * 40
    rows = [r | {side: long + r[side] for side in ("model_x", "model_y")} for r in two_ways()]
    made = report({"seed": 3}, rows)
    judged = {"price_of_bijectivity": price_of_bijectivity(rows), "below_chance": below_chance(rows)}
    assert (made.name, made.meta, made.rows) == ("report", {"seed": 3, **judged}, rows)
    assert made.sentences == reading(two_ways(), begun=True).splitlines()  # under short names
    assert [table.title for table in made.screen] == ["first → second", "second → first"]
    assert list(made.figures) == ["fvu", "accuracy"]


@pytest.mark.parametrize("sites", [2, 12])
def test_tables_on_screen_show_each_direction(sites: int) -> None:
    wide = [r | {"site_x": s, "site_y": s} for s in range(sites) for r in forward() if r["site_x"] == 1]
    rows = [r for r in forward() if r["site_x"] is None] + wide
    rows += [r | {"model_x": "second", "model_y": "first"} for r in rows]
    shown = printed(console_tables(rows), width=160)
    assert all(part in shown for part in ("first → second", "second → first", "procrustes", "80.0", "1,030"))
    assert "…" not in shown  # nothing is cut off


def test_price_of_bijectivity_is_asked_of_networks_of_equal_size() -> None:
    prices = price_of_bijectivity(two_ways())
    assert {(price["method"], price["against"]) for price in prices} == {("inn", "mlp")}
    assert [price["ratio"] for price in prices if price["model_x"] == "first"] == pytest.approx([1.25, 1.5])
    assert len(prices) == 4
    closed = [r | {"fit": CLOSED} if r["method"] == "inn" else r for r in forward()]
    assert price_of_bijectivity(closed) == []
    ways = [r | {"fit": BOTH_WAYS} if r["method"] == "inn" else r for r in forward()]
    assert [price["fit"] for price in price_of_bijectivity(ways)] == [BOTH_WAYS, BOTH_WAYS]


def test_reading_says_what_the_numbers_say() -> None:
    for part in (
        "second classifies 80.0% [75.0%, 85.0%] of 10 held-out texts correctly with its own states",
        "50.0% to 60.0% when first's states are put in as they are",
        "mapped by linear, inn and mlp they keep it within 1.5 points",
        "it changes with procrustes by -5.0 to +0.0 points, depending on the site (± 5.0)",
        "and mlp_wide by -10.0 points (± 5.0)",
        "The closest map, mlp_wide, leaves 10.0% of the variance unexplained (FVU)",
        "where linear leaves 40.0% to 50.0%",
        "inn 1.25 to 1.50 times mlp",
    ):
        assert part in reading(forward())
    assert reading(two_ways()).count("classifies") == 2
    unmapped = [r for r in forward() if r["role"] != "method"]
    assert "None of the maps has a finite error at every site" in reading(unmapped)


def test_a_gain_is_not_said_to_be_kept_within_a_margin() -> None:
    rows = [r | {"score": 0.85} if r["method"] == "linear" and r["site_x"] == 2 else r for r in forward()]
    said = reading(rows)
    assert "mapped by inn and mlp they keep it within 1.5 points of that at every site" in said
    assert "with linear by -1.0 to +5.0 points, depending on the site (± 5.0)" in said  # of all sites: none is picked


def test_a_map_that_is_not_trained_is_marked_and_named_as_such(tmp_path: Path) -> None:
    """The MLPs, which are closest, and at one site only."""
    outcome = "diverged at step 3, set back to step 2"
    rows = [r | {"training": outcome} if r["method"].startswith("mlp") and r["site_x"] == 2 else r for r in forward()]
    assert not price_of_bijectivity([r for r in rows if r["site_x"] == 2])
    headline, *marks = reading(rows).splitlines()
    assert "The closest map, mlp_wide (untrained at site 2), leaves 10.0% of the variance" in headline
    assert headline.count("mlp") == 2  # and the price at site 1, where both are trained
    assert marks[1:] == [f"* {name} at site 2: {outcome}." for name in ("mlp", "mlp_wide")]
    made = report({}, rows)
    write(replace(made, figures={}), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.count(f"| {outcome} |") == 2
    assert f"- \\* mlp at site 2: {outcome}." in text  # no list within a list
    assert "0.200*" in cells(made.screen)
    assert "*" not in cells(made.screen)
    assert "*: untrained start, or diverged (see the findings)." in write_page(made, tmp_path).read_text()
    for draw in made.figures.values():
        assert any(line.get_markerfacecolor() == "white" for axis in draw().axes for line in axis.lines)


@pytest.mark.parametrize(("low", "high"), [(0.2, 1.06), (0.713, 0.714), (0.65, 9.0), (1e-9, 2.0), (1.0, 1.0)])
def test_ticks_are_plain_numbers_and_cover_any_range(low: float, high: float) -> None:
    rows = [row("linear", 1, low, 0.7, fit=CLOSED), row("procrustes", 1, high, 0.7, fit=CLOSED)]
    (axis,) = fvu_figure(rows).axes
    ticks, (bottom, top) = list(axis.get_yticks()), axis.get_ylim()
    assert bottom <= low <= high <= top
    assert 3 <= sum(bottom <= tick <= top for tick in ticks) <= 13
    labels = [label.get_text().replace("−", "-") for label in axis.get_yticklabels()]
    assert labels == [f"{tick:g}" for tick in ticks]
    assert not axis.get_yticklabels(minor=True)


def test_unseen_types_and_other_text_are_shown_where_they_are_known() -> None:
    seen = {"linear": (0.4, 0.6), "mlp": (0.1, 0.9)}
    rows = [
        r | {"fvu_seen": seen[r["method"]][0], "fvu_unseen": seen[r["method"]][1], "fvu_other": 0.7, "n_unseen": 25}
        for r in forward()
        if r["method"] in seen
    ]
    text = reading([*forward()[:2], *rows])
    assert "On types that no map was fitted on, 25.0% of the rows, linear is closest and leaves 60.0%." in text
    assert "Partly memorised words: mlp, 90.0% on these types and 10.0% on types seen in fitting." in text
    assert "On the other text linear is closest and leaves 70.0%." in text
    assert "vocabulary" not in reading(forward())
    assert len(fvu_figure(rows).axes) == 3 * len(fvu_figure(forward()).axes)
    assert {"unseen", "other", "0.900", "0.700"} <= set(printed(console_tables(rows), width=160).split())


def test_methods_and_floors_can_be_told_apart_and_look_the_same_whatever_else_is_drawn() -> None:
    looks = method_looks([*METHODS, *FLOORS, "mine", "yours"])
    assert len({(look["color"], look["marker"], look["linestyle"]) for look in looks.values()}) == len(looks)
    assert len({looks[name]["color"] for name in (*METHODS, *FLOORS)}) == len(METHODS) + len(FLOORS)
    assert all(method_looks([name])[name] == looks[name] for name in (*METHODS, *FLOORS))


def test_no_panel_has_more_lines_than_can_be_told_apart() -> None:
    rows = [row(name, 1, 0.5, 0.7, fit=CLOSED) for name in ("cca", "linear", "procrustes", "permutation")]
    rows += [row(name, 1, 0.5, 0.7, fit=TRAINED) for name in ("inn", "mlp", "one", "two", "three")]
    figure = fvu_figure([*rows, row("identity", 1, 2.0, 0.5)])
    drawn = [axis.get_legend_handles_labels()[1] for axis in figure.axes]
    assert [len(names) for names in drawn] == [4, 5, 1]
    kinds = ["closed forms", "trained maps", "floors"]
    assert [axis.get_title().split("\n")[1] for axis in figure.axes] == kinds
    further = ("ridge", "svcca", "pwcca")  # seven closed forms, of which one stood among the floors
    rows += [row(name, 1, 0.5, 0.7, fit=CLOSED) for name in further]
    figure = fvu_figure([*rows, row("identity", 1, 2.0, 0.5)])
    drawn = [sorted(axis.get_legend_handles_labels()[1]) for axis in figure.axes]
    assert [len(names) for names in drawn] == [4, 3, 5, 1]
    assert sorted(drawn[0] + drawn[1]) == sorted(["cca", "linear", "procrustes", "permutation", *further])
    assert drawn[-1] == ["identity"]
    (together,) = fvu_figure(forward()).axes
    assert together.get_title() == "first → second"


@pytest.mark.parametrize("count", [2, 6, 12])
def test_points_stay_at_their_site(count: int) -> None:
    axis = Figure().subplots()
    rows = [{"score": 0.1, "score_low": 0.0, "score_high": 0.2, "training": None} for _ in range(3)]
    lines_by_site(axis, [(f"map {n}", {}, rows) for n in range(count)], "score")
    places = [place for line in axis.lines for place in line.get_xdata()]
    assert max(abs(place - round(place)) for place in places) <= 0.05


def test_one_site_is_drawn_in_the_middle_and_many_are_named_sparsely() -> None:
    rows = [row("linear", site, 0.5, 0.7) for site in range(40)]
    one, many = (fvu_figure(rows[:count]).axes[0] for count in (1, 40))
    assert one.get_xlim() == (-1.5, 1.5)
    assert len(many.get_xticks()) < 20
    assert [label.get_text() for label in many.get_xticklabels()][:2] == ["0", f"{many.get_xticks()[1]:g}"]


def fits(models: int) -> list[Row]:
    return [
        made_row(f"m{x}", f"m{y}", "linear", "method", (site, site), fvu=0.01 * (x + 1) * site)
        for x, y in combinations(range(models), 2)
        for site in (1, 2)
    ]


def test_maps_no_better_than_the_mean_are_named() -> None:
    few = [r | {"fvu": 50 * r["fvu"]} for r in fits(3)]
    (said,) = report_of_fit({}, few).sentences
    assert said.endswith("by its largest FVU: linear 2.")
    assert report_of_fit({}, fits(3)).sentences == []


def test_more_than_a_dozen_pairs_are_drawn_as_their_median_which_keeps_what_did_not_train() -> None:
    each = fits(6)
    each[0]["training"] = "untrained start (linear)"
    few, many = (report_of_fit({}, rows).figures["fvu"]().axes for rows in (fits(5), each))
    assert len([axis for axis in few if axis.axison]) == 10
    (axis,) = (axis for axis in many if axis.axison)
    assert axis.get_title() == "X → Y, median of 15 pairs"
    assert list(axis.get_lines()[0].get_ydata()) == pytest.approx([0.02, 0.04])
    hollow = [line for line in axis.get_lines() if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow if len(line.get_xdata())] == [[0]]


def test_the_map_that_recovers_best_is_that_of_the_table() -> None:
    known: dict[str, Row] = {"linear": {"fvu": 0.2}, "inn": {"fvu": 0.1, "training": "diverged at step 2"}}
    each = [made_row("x", "target", name, "method", (1, 1), strength=0.3, **about) for name, about in known.items()]
    made = make_report("recovery", {}, each)
    assert "(strength 0.3) the closest map, inn (untrained), leaves 10% of the variance" in made.lead
    assert "0.1000*" in cells(made.screen)


def test_the_closest_map_of_a_fit_is_that_of_its_table() -> None:
    """A map that kept its start at a site stood below a sentence that called another one the closest."""
    errors = {"linear": (0.425, 0.43), "mlp": (0.607, 0.676), "inn": (0.695, 0.81)}
    rows = [
        made_row("x", "y", name, "method", (site, site), fvu=fvu, fvu_unseen=fvu)
        for name, both in errors.items()
        for site, fvu in enumerate(both, start=1)
    ]
    rows[3]["training"] = "untrained start (linear)"
    lead = make_report("fit", {}, rows[2:]).lead
    assert "The closest, mlp (untrained at site 2), leaves 60.7% to 67.6% of the target's variance" in lead
    assert "the closest that was trained at every site, inn, 69.5% to 81.0%, and mlp 60.7% to 67.6% on types" in lead
    lead = make_report("fit", {}, rows).lead
    assert "The closest, linear, leaves 42.5% to 43.0% of the target's variance unexplained (FVU), and 42.5%" in lead
    assert lead.count("linear") == 1
    alike = [r | {"method": "ridge", "fvu": r["fvu"] - 1e-5} for r in rows[:2]]
    lead = make_report("fit", {}, [*rows, *alike]).lead
    assert "The closest, ridge, leaves 42.5% to 43.0% of the target's variance" in lead
    assert "(FVU), linear as much, and" in lead


def itself(tokens: bool) -> list[Row]:
    """A model put into itself: nothing is lost, and nothing is worth a sentence."""
    about: Row = {"perplexity": 20.0} if tokens else {}
    exact = {"penalty": -4e-8, "penalty_low": -1e-7, "penalty_high": 3e-8, "fvu_seen": 1e-12, "fvu_unseen": 9e-12}
    rows = [row("native_y", None, None, 0.8, **about)]
    for site in (1, 2):
        rows.append(row("identity", site, 0.0, 0.8, **exact, **about))
        rows += [row(name, site, 1e-9, 0.8, fit=CLOSED, n_unseen=25, **exact, **about) for name in ("ridge", "linear")]
    return rows


@pytest.mark.parametrize("tokens", [False, True])
def test_what_reads_as_nothing_is_not_said(tokens: bool) -> None:
    said = " ".join(report({}, itself(tokens)).findings)
    for part in ("-0.000", "0.00 nats", "0.000", " 0.0%", "memorised", "costs the least", "depending on the site"):
        assert part not in said
    assert "leaves less than 0.1% of the variance unexplained (FVU)" in said
    if tokens:
        assert "The states of first as they are change the loss by less than 0.001 nats at any site." in said
        assert "Mapped states of first raise the loss by (nats): less than 0.001 with ridge and linear." in said
    else:
        assert "mapped by ridge and linear they keep it within 1.5 points" in said
