import io
import math
from typing import Any

import pytest
from rich.console import Console

from aligners.reports.drawing import short
from aligners.reports.names import (
    MOST_LETTERS,
    file_names,
    fixed,
    four_digits,
    names_in_full,
    plain_number,
    short_names,
    value_range,
    with_short_names,
)
from aligners.reports.screen import SiteTable, say
from aligners.reports.study.contents import Column
from aligners.reports.study.statistics import Estimate
from aligners.reports.study.study_report import plain_cell

DEEP = "/tmp/" + "folder/" * 40


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["a/x", "b/y", "a/x"], ["x", "y"]),
        (["google/bert", "embedded-gpt:0:activation=solu"], ["bert", "embedded-gpt:0:activation=solu"]),
        (["a/x", "b/x", "b/y"], ["a/x", "b/x", "y"]),
        (["run/none/seed-0", "run/none/seed-1"], ["seed-0", "seed-1"]),
        (["run/none/seed-0", "run/top-2/seed-0"], ["none/seed-0", "top-2/seed-0"]),
        (["x", "a/x"], ["x", "a/x"]),
        (["x", "/x"], ["x", "/x"]),
        (["a/x/", "a/x"], ["a/x/", "a/x"]),
        ([DEEP + "x", DEEP + "y/"], ["x", "y"]),
        (["states:a/x.npy:group=b/g.npy", "states:a/y.npy:group=b/g.npy"], ["x.npy", "y.npy"]),
        (["states:a/x.pt:column=l1", "states:a/x.pt:column=l2"], ["x.pt:column=l1", "x.pt:column=l2"]),
        (["states:a/x.npy", "b/x.npy"], ["a/x.npy", "b/x.npy"]),
    ],
)
def test_a_name_is_as_short_as_tells_it_from_all_others(models: list[str], expected: list[str]) -> None:
    assert list(short_names(models).values()) == expected


def test_long_names_keep_their_ends_unless_two_would_be_the_same() -> None:
    (short,) = short_names(["first" + "-" * 200 + "last"]).values()
    assert len(short) == MOST_LETTERS
    assert short.startswith("first")
    assert short.endswith("last")
    alike = [f"{'a' * 50}{middle}{'b' * 50}" for middle in "xy"]
    assert list(short_names(alike).values()) == alike


def test_no_two_models_share_a_file_name() -> None:
    names = file_names(["embedded:0", "a b", "a/a-b", "/", "x" * 300])
    assert list(names.values())[:4] == ["embedded-0", "a-b", "a-b-2", "model"]
    assert all(len(name) <= MOST_LETTERS + 1 for name in names.values())


def test_rows_to_show_are_copies_and_the_rest_of_them_stays() -> None:
    rows: list[dict[str, Any]] = [{"model_x": DEEP + "x", "model_y": "y", "fvu": 1.0}, {"model": DEEP + "x"}]
    shown = with_short_names(rows)
    assert shown == [{"model_x": "x", "model_y": "y", "fvu": 1.0}, {"model": "x"}]
    assert rows[1] == {"model": DEEP + "x"}
    assert names_in_full(rows) == f"\n- x: `{DEEP}x`\n"
    assert names_in_full([{"model_x": "x", "model_y": "y"}]) == ""


def test_a_title_may_be_wider_than_its_table_and_words_are_whole_in_a_file() -> None:
    table = SiteTable("a title of many more letters than the table has", ["n"], [], {})
    table.add_row("1")
    console = Console(width=60, file=io.StringIO())
    console.print(table)
    say(console, DEEP)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a title of many more letters than the table has\n" in shown
    assert shown.endswith(f"\n{DEEP}\n")


def test_a_rounding_to_zero_has_no_sign() -> None:
    assert [fixed(-0.0001, form) for form in (".3f", "+.3f", ".1%", ",.2f", "+z.1f")] == [
        "0.000", "+0.000", "0.0%", "0.00", "+0.0"
    ]  # fmt: skip
    assert (fixed(-3, "d"), value_range([-0.0001, 0.0002], ".3f"), short(-0.001)) == ("-3", "0.000", ".00")
    assert plain_cell(Estimate(-0.00001, low=-0.00002, high=0.1), Column("x", "x", ".3f")) == "0.000 [0.000, 0.100]"


@pytest.mark.parametrize(
    ("value", "three", "four"),
    [
        (546.2, "546", "546.2"),
        (12345.6, "12,346", "12,346"),
        (1250, "1,250", "1,250"),
        (0.0712, "0.0712", "0.0712"),
        (0.5, "0.5", "0.5"),
        (1.2345, "1.23", "1.234"),
        (-0.0, "0", "0"),
        (1.26e-6, "1.26e-06", "1.26e-06"),
    ],
)
def test_numbers_are_as_people_write_them(value: float, three: str, four: str) -> None:
    assert (plain_number(value), four_digits(value)) == (three, four)
    assert (four_digits(None), four_digits(math.nan), four_digits(True)) == ("", "", "True")
