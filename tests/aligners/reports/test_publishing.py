"""A report's files, its page, what it shows, and what it logs."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from PIL import Image

from aligners.reports.page.run_page import MOST_PIXELS, alt_text, page_tables, save_figure, write_page
from aligners.reports.publishing import WriteReport, publish, write
from aligners.reports.report import Report, Row
from aligners.reports.screen import SiteTable
from aligners.reports.templates import GLOSSARY, glossary

META: Row = {
    "models": {"x": {"name": "runs/deep/seed-0", "revision": None, "fingerprint": "f" * 32}},
    "versions": {"torch": "2.8"},
    "text": {"source": "/data/texts.csv", "n_texts": {"validation": 2, "test": 9}},
}
PLACE = {"model_x": "runs/deep/seed-0", "model_y": "seed-1"}
ROWS: list[Row] = [
    {**PLACE, "site_x": 1, "site_y": 2, "role": "floor", "fvu": 0.123456, "empty": None},
    {**PLACE, "site_x": 3, "site_y": 3, "role": None, "fvu": None, "empty": None},
]


def drawn() -> Figure:
    figure = Figure(figsize=(2, 2))
    axis = figure.subplots()
    axis.plot([0, 1], [2, 3], label="linear")
    axis.set(xlabel="site", ylabel="error", title="seed-0 → seed-1")
    axis.legend()
    return figure


def report(**changes: Any) -> Report:
    table = SiteTable("FVU <by> site", ["method"], ["parameters"], {"FVU": ["1", "2"], "acc. %": ["1", "2"]})
    table.add_row("native", "", "", "", "70.0", "71.5*", style="green")
    table.add_row("linear", "1,024", "0.300", "4e+03", "69.9", "9.5")
    given: dict[str, Any] = {
        "tables": {"more": [{"a": 1}], "none": []},
        "columns": {"model_x": "from", "site_x": "site", "fvu": "FVU"},
        "figures": {"fvu": drawn},
        "screen": [table],
        "note": "a note",
        "sentences": ["It `holds` at 0.5. Not <there>."],
        "title": "Fit",
        "lead": "Two maps. FVU is `low`.",
        "captions": {"fv": "what to look at"},
    }
    return Report("summary", META, ROWS, **given | changes)


def trainer(*loggers: Any) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(is_global_zero=True, loggers=list(loggers), strategy=strategy, world_size=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with its page."""
    folder = tmp_path_factory.mktemp("run") / "new"
    assert write(report(), folder) == [folder / "fvu.png"]
    (folder / "config.yaml").write_text("seed: 0 # <resolved>\n")
    write_page(report(), folder)
    return folder


def test_a_folder_holds_all_that_a_report_has(folder: Path) -> None:
    names = {"summary.json", "summary.csv", "summary.md", "more.csv", "fvu.png", "config.yaml", "report.html"}
    assert {path.name for path in folder.iterdir()} == names
    found = json.loads((folder / "summary.json").read_text())
    assert found == {"meta": META, "findings": report().findings, "rows": ROWS, "more": [{"a": 1}], "none": []}
    lines = ["| from | site | FVU |", "|---|---|---|", "| seed-0 | 1→2 | 0.1235 |", "| seed-0 | 3 |  |"]
    lines += [
        "",
        "- Two maps. FVU is `low`.",
        "- It `holds` at 0.5. Not \\<there>.",
        "",
        "- seed-0: `runs/deep/seed-0`",
        "",
    ]
    assert (folder / "summary.md").read_text() == "\n".join(lines)


def test_what_a_report_lacks_leaves_no_file(tmp_path: Path) -> None:
    write(report(tables={}, columns={}, figures={}, sentences=[], lead=""), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "summary.csv", "summary.md"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(Report("bad", {"x": float("nan")}, ROWS), tmp_path)
    assert not (tmp_path / "bad.json").exists()


@pytest.fixture
def no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B goes on with a run that an earlier test of this process has left open."""
    monkeypatch.setattr(wandb, "run", None)


@pytest.mark.usefixtures("no_other_run")
def test_a_report_is_shown_in_order_and_wandb_has_its_rows_figures_and_what_holds_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = WandbLogger(save_dir=tmp_path, mode="offline")  # whatever the first run of this process said
    logged: dict[str, Any] = {}
    logger.log_table = lambda key, columns, data: logged.update({key: (columns, data)})  # type: ignore[method-assign]
    logger.log_image = lambda key, images: logged.update({key: images})  # type: ignore[method-assign]
    publish(report(), tmp_path / "run", trainer(logger))
    assert logged["summary"] == (list(ROWS[0]), [list(row.values()) for row in ROWS])
    assert logged["fvu"] == [str(tmp_path / "run" / "fvu.png")]
    assert logger.experiment.config["versions"] == META["versions"]
    assert logger.experiment.summary["findings"] == report().findings
    shown, place = capsys.readouterr().out, Path(logger.experiment.dir).parent
    parts = ["FVU <by> site", "4e+03", "a note", "It `holds`", f"Report and figures: {tmp_path}", f"W&B run: {place}"]
    assert sorted(parts, key=shown.index) == parts
    logger.experiment.finish()


@pytest.mark.usefixtures("no_other_run")
def test_a_wandb_that_is_switched_off_has_no_run_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(report(), tmp_path, trainer(WandbLogger(save_dir=tmp_path, mode="disabled")))
    assert "W&B run" not in capsys.readouterr().out


def test_the_callback_hands_tables_and_options_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    def made(meta: Row, rows: list[Row], curves: list[Row], groups: list[str]) -> Report:
        got.extend((meta["seed"], meta["ranks"], rows, curves, groups))
        return Report("thing", meta, rows)

    monkeypatch.setattr("aligners.reports.finished_runs.maker", lambda kind: made)
    module: Any = SimpleNamespace(meta={"seed": 3}, rows=ROWS, report_tables={"curves": [{"step": 1}]})
    for rank in (1, 0):
        run = trainer()
        run.is_global_zero = rank == 0
        WriteReport("surgery", tmp_path / "new", groups=["a"]).on_test_end(run, module)
        assert (tmp_path / "new" / "surgery.json").exists() == (rank == 0)
    assert got == [3, 1, ROWS, [{"step": 1}], ["a"]]


def test_a_page_needs_nothing_but_itself_and_holds_what_the_run_was(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text) == []
    assert "@import" not in text
    assert "url(" not in text
    (image,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', text)
    assert Image.open(io.BytesIO(base64.b64decode(image))).format == "PNG"
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert set(re.findall(r'data-filters="([^"]+)"', text)) <= set(ids)
    for part in (
        '<h1>Fit: seed-0</h1>\n<p class="lead">Two maps. FVU is <code>low</code>.</p>',
        "<figcaption>what to look at</figcaption>",
        "<dt>FVU</dt><dd>Fraction of variance unexplained",
        "texts of texts.csv (2 for validation, 9 held out)",
        "It <code>holds</code> at 0.5.",
        '<p class="said">Not &lt;there&gt;.</p>',  # a sentence a line, and nothing of it is HTML
        "<h2>FVU &lt;by&gt; site</h2>",
        "seed: 0 # &lt;resolved&gt;",
        f"<td>runs/deep/seed-0</td><td></td><td><code>{'f' * 32}</code></td>",
        "<li>torch 2.8</li>",
    ):
        assert part in text


def test_a_glossary_holds_the_words_of_a_page_and_no_others() -> None:
    found = set(glossary("<p>The Penalties of closed forms, native_x; unseen types.</p>"))
    assert found == {"closed form", "unseen types / unseen"}
    assert set(glossary(" ".join(GLOSSARY))) == set(GLOSSARY)


def test_headings_repeat_what_stands_above_several_columns_and_cells_are_sorted_by_their_numbers() -> None:
    table = page_tables(report())[0]
    assert table.headings == ["method", "parameters", "FVU · 1", "FVU · 2", "acc. % · 1", "acc. % · 2"]
    first, second = table.rows
    assert (first.role, second.role) == ("ceiling", "")
    assert [cell.key for cell in second.cells] == ["linear", 1024.0, 0.3, 4000.0, 69.9, 9.5]
    assert (first.cells[1].key, first.cells[5].key, first.cells[5].value) == ("", 71.5, "71.5*")


def test_all_rows_have_short_names_and_no_empty_columns_and_many_are_cut() -> None:
    table = page_tables(report())[-1]
    assert table.headings == ["site of X", "site of Y", "role", "FVU"]
    assert table.caption.endswith("In all rows: from seed-0; into seed-1.")
    assert [cell.value for cell in table.rows[0].cells] == ["1", "2", "floor", "0.1235"]
    assert [row.role for row in table.rows] == ["floor", ""]
    table = page_tables(Report("summary", META, ROWS * 300))[-1]
    assert len(table.rows) == 400
    assert table.title.startswith("The first 400 of 600 rows")
    ends = {"fvu_low": 0.1, "fvu_high": 0.25}
    (line,) = page_tables(Report("summary", META, [ROWS[0] | ends]))[-1].rows
    assert (line.cells[-1].value, line.cells[-1].interval) == ("0.1235", "[0.1, 0.25]")


def test_tables_of_one_title_are_told_apart() -> None:
    tables = [SiteTable("the same", ["method"], [], {group: ["1"]}) for group in ("FVU", "penalty")]
    titles = [table.title for table in page_tables(Report("thing", {}, [], screen=tables))]
    assert titles == ["the same: FVU", "the same: penalty"]


def test_a_figure_says_what_it_shows(folder: Path, tmp_path: Path) -> None:
    words = "Chart (seed-0 → seed-1); vertical axis: error; horizontal axis: site; drawn: linear."
    assert alt_text((folder / "fvu.png").read_bytes()) == words
    assert f'alt="{words}"' in (folder / "report.html").read_text(encoding="utf-8")
    Image.new("RGB", (2, 2)).save(tmp_path / "old.png")
    assert "without a description" in alt_text((tmp_path / "old.png").read_bytes())


def test_an_image_of_very_many_panels_has_fewer_pixels_an_inch(tmp_path: Path) -> None:
    save_figure(Figure((0.1, 700)), tmp_path / "tall.png")
    with Image.open(tmp_path / "tall.png") as drawn:
        assert MOST_PIXELS - 1 <= drawn.height <= MOST_PIXELS


def test_a_page_holds_every_figure_that_is_there_and_its_heading_stays_short(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Image.new("RGB", (60, 60)).save(tmp_path / f"{name}.png")
    many = {"models": [{"name": f"m{number}"} for number in range(6)]}
    made = replace(report(figures=dict.fromkeys(("one", "two", "three"), Figure)), meta=many)
    text = write_page(made, tmp_path).read_text()
    assert "<h1>Fit: m0, m1, m2, m3 and 2 more</h1>" in text
    assert text.count('<img src="data:image/png') == 2
