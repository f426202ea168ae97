"""Tables on screens of any width: nothing is cut, and no two rows look alike."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.aligners.reports.every import compared, every_kind
from tests.aligners.reports.made import printed

from aligners.reports.finished_runs import KINDS, make_report
from aligners.reports.names import aligned
from aligners.reports.report import Report
from aligners.reports.screen import SiteTable

LONG = {"x": "/home/me/" + "folder/" * 9 + "a-model-of-a-name-of-forty-letters-or-more-1", "y": "org/" + "b" * 60}


def made(kind: str, given: Any) -> Report:
    parts = dict(given) if isinstance(given, dict) else {"rows": given}
    meta = {"majority_score": 0.5, **compared(3), **parts.pop("meta", {})}
    return make_report(kind, meta, parts.pop("rows"), **parts)


def parts_of(shown: str) -> list[list[str]]:
    """The lines below each rule."""
    parts: list[list[str]] = []
    for line in shown.splitlines():
        if line.startswith("─"):
            parts.append([])
        elif parts:
            parts[-1].append(line)
    return parts


def values_of(tables: Sequence[SiteTable]) -> list[str]:
    return sorted(cell for table in tables for column in table.columns[table.names :] for cell in column.cells)


@pytest.mark.parametrize("names", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("sites", [3, 13])
def test_no_kind_of_report_is_cut_at_any_width(sites: int, names: dict[str, str]) -> None:
    kinds = every_kind(sites, **names)
    assert list(kinds) == sorted(KINDS)
    for kind, given in kinds.items():
        tables = made(kind, given).screen
        for width in (60, 80, 120):
            shown = printed(tables, width)
            assert all(len(line) <= width for line in shown.splitlines()), (kind, width)
            words = shown.replace("\n", " ").split()
            for cell in values_of(tables):
                assert set(cell.split()) <= set(words), (kind, width, cell)
            for part in parts_of(shown):
                rows = [" ".join(part[: n + 1]) for n in range(len(part))]
                assert len(rows) == len(set(rows)), (kind, width)


def test_each_part_names_the_rows_and_what_is_the_same_in_all_stands_once_above() -> None:
    table = SiteTable("a title", ["models", "method"], ["parameters"], {"FVU": map(str, range(9)), "loss": ["0"]})
    table.add_row("x → y", "linear", "16,512", *["0.123"] * 9, "1.5")
    table.add_row("x → y", "native", "", *[""] * 9, "1.4", style="green")
    lines = printed([table], 60).splitlines()
    assert lines[1:3] == ["a title", "models: x → y"]
    assert sum(line.startswith("linear") for line in lines) == 2
    assert sum(line.startswith("native") for line in lines) == 1  # not where it has no value
    assert [line.split()[:2] for line in lines if "FVU" in line] == [["FVU"], ["FVU", "loss"]]
    assert printed([table], 120).count("linear") == 1


def test_a_column_that_no_row_fills_is_left_out() -> None:
    table = SiteTable("a title", ["method"], ["parameters", "\nfloor"], {"FVU": ["1", "2"]})
    for name in ("linear", "cca"):
        table.add_row(name, "", "", "", "0.5")
    lines = printed([table], 60).splitlines()
    assert [line.split() for line in lines[3:5]] == [["FVU"], ["method", "2"]]


def test_names_without_room_stand_on_lines_of_their_own() -> None:
    table = SiteTable("stitched", ["from → into", "map"], [], {"": ["1", "2"]})
    for end in ("0", "1"):
        for name in ("linear", "mlp"):
            table.add_row(f"a-model-of-a-long-name-{end}", name, "0.5", "0.6")
    lines = [line.rstrip() for line in printed([table], 40).splitlines()]
    below = ["linear  0.5  0.6", "mlp     0.5  0.6"]
    assert lines[-6:] == ["a-model-of-a-long-name-0", *below, "a-model-of-a-long-name-1", *below]
    assert "a-model-of-a-long-name-0  linear" in printed([table], 80)


def test_numbers_of_a_column_have_as_many_decimals() -> None:
    numbers = [aligned(value) for value in (0.05, 1.15, 20, 546.2, 60_000, 3e9, None, float("nan"), -0.0001)]
    assert numbers == ["0.050", "1.150", "20.000", "546", "60,000", "3e+09", "", "", "0.000"]


def test_a_fit_says_which_maps_are_closed_forms_and_draws_them_apart() -> None:
    report = made("fit", every_kind(3)["fit"])
    assert "closed form permutation 1.173" in " ".join(printed(report.screen).split())
    axes = report.figures["fvu"]().axes
    assert {axis.get_title().split("\n")[-1] for axis in axes} == {"closed forms", "trained maps", ""}
    for axis in axes:
        low, high = axis.get_ylim()
        assert axis.get_yscale() == "log"  # 1.15 beside 0.05
        assert all(low < value < high for line in axis.lines for value in line.get_ydata())


def test_loss_and_penalty_of_classifiers_stand_beside_accuracy_and_draws_with_their_spread() -> None:
    rows = every_kind(3)["injection"]
    report = made("injection", rows)
    assert all(heading in printed(report.screen) for heading in ("penalty, nats", "loss, nats", "acc. %"))
    assert report.note == (
        "random_classifier (embedded:1): mean of 20 draws, interval from the least to the largest: 28.0 to 51.0 "
        "(accuracy in %)"
    )
    assert report.figures["penalty"]().get_supylabel() == "penalty of injection, nats a text"
    lines = report.figures["accuracy"]().axes[0].lines
    assert {28.0, 49.0, 51.0} <= {round(float(height), 6) for line in lines for height in line.get_ydata()}
    earlier = [row | {"fit": None} if row["method"] == "random_classifier" else row for row in rows]
    assert made("injection", earlier).note == ""  # of one draw
