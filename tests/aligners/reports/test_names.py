import io
from typing import Any

import pytest
from rich.console import Console

from aligners.reports.names import MOST_LETTERS, file_names, names_in_full, short_names, with_short_names
from aligners.reports.screen import TitledTable, say

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


def test_a_title_may_be_wider_than_its_table() -> None:
    table = TitledTable("a title of many more letters than the table has")
    table.add_column("n")
    table.add_row("1")
    shown = io.StringIO()
    Console(width=60, file=shown).print(table)
    assert "a title of many more letters than the table has\n" in shown.getvalue()


def test_words_are_whole_in_a_file() -> None:
    shown = io.StringIO()
    say(Console(width=60, file=shown), DEEP)
    assert shown.getvalue() == DEEP + "\n"
