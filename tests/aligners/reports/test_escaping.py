"""Names that try to be more than text, in each kind of output."""

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from aligners.errors import UserError, check_file_names, visible
from aligners.progress import tell
from aligners.reports.escaping import csv_cell, csv_text, in_cell, in_markdown, markdown_table
from aligners.reports.page.run_page import save_figure
from aligners.reports.publishing import show, write
from aligners.reports.report import Report, Row
from aligners.reports.screen import SiteTable, say

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
NAMES = ["=1+1", ESCAPE, "[x](javascript:alert(1))", "[/q]", "<script>", "a|b", "@cmd", ":smile:", "\u202eevil"]


def report(name: str) -> Report:
    """A report about a model of this name."""
    row: Row = {"model_x": name, "model_y": "y", "site_x": 1, "site_y": 1, "method": name, "fvu": -0.5}
    table = SiteTable(name, ["method"], [], {"FVU": ["1"]})
    table.add_row(name, "0.5")
    columns = {"model_x": "from", "method": "method", "fvu": "FVU"}
    lead = f"{name} is the closest."
    return Report("summary", {}, [row], columns=columns, screen=[table], note=name, lead=lead)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_text_in_every_file_and_on_screen(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(report(name), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["rows"][0]["method"] == name  # as it is
    cell = pd.read_csv(tmp_path / "summary.csv")
    assert cell["method"][0] in (f"'{name}", visible(name))
    assert not str(cell["method"][0]).startswith(("=", "+", "-", "@"))
    assert cell["fvu"][0] == -0.5
    written = (tmp_path / "summary.md").read_text()
    assert "](javascript:" not in written
    assert "<script" not in written.replace("\\<", "")
    assert len(written.splitlines()[2].replace("\\|", "").split("|")) == 5
    show(report(name))
    shown = capsys.readouterr().out
    assert visible(f"{name} is the closest.") in shown
    for text in (written, shown, (tmp_path / "summary.csv").read_text()):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}


def test_what_is_told_and_said_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell(f"Saved {ESCAPE}", "p[/q]/run\tand\nmore")
    assert capsys.readouterr().out == "Saved \\x1b]0;owned\\x07\\x1b[2J\np[/q]/run\tand\nmore\n"
    file = io.StringIO()
    say(Console(file=file, force_terminal=True, width=200, color_system=None), f"p[/q]/run :warning: {ESCAPE}")
    assert file.getvalue() == "p[/q]/run :warning: \\x1b]0;owned\\x07\\x1b[2J\n"


@pytest.mark.parametrize(
    ("value", "right"),
    [("=1+1", "'=1+1"), ("-x", "'-x"), ("-0.5", "-0.5"), ("+1e3", "+1e3"), (-2, -2), (None, None), ("a=b", "a=b"),
     ("\tx", "'\tx"), ("@SUM(A1)", "'@SUM(A1)"), ("a\x1b", "a\\x1b")],
)  # fmt: skip
def test_cells_of_csv(value: Any, right: Any) -> None:
    assert csv_cell(value) == right


def test_headings_of_csv_are_cells_too() -> None:
    assert csv_text([{"=1+1": 1.5, "b": "x"}]) == "'=1+1,b\r\n1.5,x\r\n"


def test_markdown_keeps_code_emphasis_and_intervals() -> None:
    plain = "The closest, `inn`, leaves *0.1* [0.05, 0.15] (n = 3)."
    assert in_markdown(plain) == plain
    assert in_markdown("![a](b)<img>") == "![a]\\(b)\\<img>"
    assert in_cell("a\nb|c") == "a b\\|c"
    assert markdown_table(["a|b"], [["c"]], "|---|") == ["| a\\|b |", "|---|", "| c |"]


@pytest.mark.parametrize("name", [r"$\undefined{x$", r"a$b$c", "$x"])
def test_names_with_dollars_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    figure = Figure(figsize=(2, 2))
    axis = figure.subplots()
    axis.plot([1, 1000], [0, 1], label=name)
    axis.set(title=name, xscale="log")
    axis.legend()
    save_figure(figure, tmp_path / "f.png")
    tick = axis.get_xticklabels()[0]
    assert tick.get_text().startswith("$")
    assert tick.get_parse_math()  # ticks keep their powers
    assert not axis.title.get_parse_math()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\x1b", "a\nb", " "])
def test_names_that_are_no_files(name: str) -> None:
    with pytest.raises(UserError, match="`name` to be a name as of a file"):
        check_file_names(name=name)


def test_names_that_are_files() -> None:
    check_file_names(name="länge-1 (a).b")
