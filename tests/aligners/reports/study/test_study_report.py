"""The files of a study's report: the page in a real browser, LaTeX, Markdown, CSV, W&B."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.aligners.reports.study.rows import MODELS, Collected, collected, items

from aligners.reports.drawing import short
from aligners.reports.study import study_figures
from aligners.reports.study.contents import Column, Figure, HeatPanel, Table
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make
from aligners.reports.study.statistics import RANGE_OF_PAIRS, Estimate
from aligners.reports.study.study_figures import Palette
from aligners.reports.study.study_report import latex, markdown, plain_cell, provenance, report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAMES = ["ren_table_4", "ren_table_5", "ren_figure_2", "wu_figure_1", "wu_figure_3", "ren_table_3", "ren_figure_4"]
# Sorts Table 4 by its mse, twice, and filters it, as a reader would.
READER = """<script>
const heads = Array.from(document.querySelectorAll("#t-ren_table_4 th"));
const place = heads.findIndex((head) => head.textContent === "mse");
heads[place].querySelector("button").click();
const first = (table) => table.tBodies[0].rows[0].cells[place].dataset.key;
const table = document.getElementById("t-ren_table_4");
const least = first(table);
heads[place].querySelector("button").click();
const most = first(table);
const input = document.querySelector("input[data-filters=t-ren_table_4]");
input.value = "inn fine"; input.dispatchEvent(new Event("input"));
document.title = JSON.stringify({least, most, sorted: heads[place].getAttribute("aria-sort"),
  shown: document.getElementById("n-ren_table_4").textContent,
  images: Array.from(document.images).filter((image) => image.naturalWidth > 0).length,
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth});
</script>"""


@pytest.fixture(scope="module")
def frames() -> Collected:
    return collected(models=MODELS[:5])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, frames: Collected) -> Path:
    """The folder of a study with a report: two cells that finished, and one that failed."""
    folder = tmp_path_factory.mktemp("study")
    meta = {"models": [{"name": "a:0", "revision": None, "fingerprint": "f00d"}], "versions": {"torch": "2.13.0"}}
    meta |= {"device": "cpu (x86_64)", "ranks": 1}
    result = {"kind": "inject", "seconds": 1800, "versions": {}, "meta": meta}
    (folder / "study.yaml").write_text("name: seeds & <friends>\n")
    failures = {"three": "ValueError: <no head>"}
    report(folder, frames, {"name": "seeds & <friends>", "report": NAMES}, 2 * [result], failures)
    return folder


def elements(page: str, tag: str = r"\w+") -> list[dict[str, str]]:
    """The attributes of all elements of a kind; what scripts hold is none."""
    bare = re.sub(r"(?s)(<script\b[^>]*>).*?</script>", r"\1", page)
    return [dict(re.findall(r'([\w-]+)="([^"]*)"', each)) for each in re.findall(rf"<{tag}\b([^>]*)>", bare)]


def test_the_page_needs_nothing_else_and_can_be_heard(study: Path) -> None:
    page = (study / "report" / "report.html").read_text()
    assert not [each for each in elements(page, "(?:script|link)") if {"src", "href"} & set(each)]
    images = elements(page, "img")
    assert len(images) == 3
    assert all(each["src"].startswith("data:image/png;base64,iVBOR") and len(each["alt"]) > 40 for each in images)
    assert len(elements(page, "caption")) == len(elements(page, "table")) > 3
    assert elements(page, "html") == [{"lang": "en"}]
    ids = [each["id"] for each in elements(page) if "id" in each]
    assert len(ids) == len(set(ids))
    assert {each["href"][1:] for each in elements(page, "a") if each.get("href", "").startswith("#")} <= set(ids)


def test_the_page_says_what_the_study_ran_and_what_is_missing(study: Path) -> None:
    text = (study / "report" / "report.html").read_text()
    assert "<h1>Study seeds &amp; &lt;friends&gt;</h1>" in text
    assert "3 cells, 1 of them failed, 1.0 hours of computing in all." in text
    assert "ValueError: &lt;no head&gt;" in text
    assert "(kind <code>attention</code>)" in text
    assert "<code>f00d</code>" in text
    assert "torch 2.13.0, cpu (x86_64), 1 rank (2 cells)" in text
    assert "name: seeds &amp; &lt;friends&gt;" in text
    assert json.loads((study / "report" / "missing.json").read_text()).keys() == {"ren_figure_4"}
    assert "the closest map is mlp" in (study / "report" / "findings.md").read_text()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: install the package `chromium`")
def test_a_reader_sorts_and_filters_in_a_real_browser_without_network(study: Path, tmp_path: Path) -> None:
    text = (study / "report" / "report.html").read_text()
    page = tmp_path / "page.html"
    page.write_text(READER.join(text.rpartition("</body>")[::2]))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    with tempfile.TemporaryDirectory(dir="/tmp") as own:  # it meets itself at sockets, whose paths must be short
        options += ["--window-size=390,844", f"--user-data-dir={own}", "--virtual-time-budget=5000"]
        command, place = [str(BROWSER), *options, page.as_uri()], {**os.environ, "TMPDIR": own}
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=place)
    said = json.loads(re.findall(r"<title>(.*?)</title>", shown.stdout)[0])
    assert 0 < float(said["least"]) < float(said["most"])
    assert (said["sorted"], said["shown"]) == ("descending", "1 of 8 rows")
    assert said["images"] == 3
    assert said["wider"] <= 0  # a phone need not scroll the whole page sideways


def test_tables_are_files_of_every_kind(study: Path) -> None:
    tables, figures = study / "report" / "tables", study / "report" / "figures"
    names = {f"ren_table_{number}.{end}" for number in (3, 4, 5) for end in ("md", "tex", "csv")}
    assert {path.name for path in tables.iterdir()} == names
    row = pd.read_csv(tables / "ren_table_4.csv").iloc[0]
    assert row["mse_low"] < row["mse"] < row["mse_high"]
    assert row["mse_interval"] == "95 % interval over models"
    names = {f"{name}.{end}" for name in ("ren_figure_2", "wu_figure_1", "wu_figure_3") for end in ("png", "csv")}
    assert {path.name for path in figures.iterdir()} == names


def test_the_report_is_one_run_of_the_studys_group(study: Path) -> None:
    (run,) = (study / "report" / "wandb").glob("offline-run-*")
    tables = {path.name.split("_table_")[0] for path in (run / "files" / "media" / "table" / "tables").iterdir()}
    assert len(tables) == 1
    logged = next(run.glob("*.wandb")).read_bytes()
    assert b"seeds & <friends>-report" in logged
    assert b"study report" in logged


def test_nothing_collected_is_refused_and_unknown_names_are_missing(tmp_path: Path, frames: Collected) -> None:
    with pytest.raises(ValueError, match="no cell has finished"):
        report(tmp_path, {"inject": pd.DataFrame()}, {"name": "empty", "report": None}, [], {})
    assert list(tmp_path.iterdir()) == []
    made = make(Frames(frames), ["ren_table_9", "ren_table_4"])  # `study.py run` refuses them before any cell
    assert [table.name for table in made.tables] == ["ren_table_4"]
    assert re.search(r"no figure of this name\. Did you mean ren_table_\d", made.missing["ren_table_9"])


# ---------------------------------------------------------------------- formats


COLUMNS = [Column("name", "map_x"), Column("value", "± & co", ".2f"), Column("count", "n", "d")]
ROWS = [
    {"name": "a|b{c}\\", "value": Estimate(0.123, 0.01, 0.1, 0.2, lost=2, pairs=3), "count": 1200},
    {"name": "none", "value": None, "count": 3},
]
ONE = Table("one", "A title with 100 %", "Caption with $ and _.", COLUMNS, ROWS)


def test_nothing_special_is_unescaped_and_a_mere_range_stands_in_braces() -> None:
    text = latex(ONE)
    for line in (r"\toprule", r"\midrule", r"\bottomrule", r"\label{tab:one}"):
        assert line in text
    assert r"map\_x & $\pm$ \& co & n \\" in text
    estimate = r"\shortstack[r]{0.12 $\pm$ 0.01\\\scriptsize {[}0.10, 0.20{]} (2 of 5 pairs lost)}"
    assert rf"a|b\{{c\}}\textbackslash{{}} & {estimate} & 1200 \\" in text
    assert r"none &  & 3 \\" in text
    assert r"\caption{A title with 100 \%. Caption with \$ and \_.}" in text
    assert text.count("{") == text.count("}")
    lines = markdown(ONE).splitlines()
    assert lines[4] == "| map_x | ± & co | n |"
    assert lines[6] == r"| a\|b{c}\ | 0.12 ± 0.01 [0.10, 0.20] (2 of 5 pairs lost) | 1200 |"
    few = Estimate(0.5, 0.1, 0.4, 0.6, RANGE_OF_PAIRS, 3, 3)
    assert plain_cell(few, Column("v", "v", ".1f", 100)) == "50.0 ± 10.0 {40.0, 60.0}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX: install texlive-latex-recommended")
def test_latex_compiles(study: Path, tmp_path: Path) -> None:
    names = [*sorted((study / "report" / "tables").glob("*.tex")), tmp_path / "one.tex"]
    names[-1].write_text(latex(ONE))
    lines = [r"\documentclass{article}", r"\usepackage{booktabs, graphicx}", r"\begin{document}"]
    lines += [rf"\input{{{name}}}\clearpage" for name in names]
    (tmp_path / "all.tex").write_text("\n".join([*lines, r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout[-2000:]
    assert "Missing character" not in made.stdout
    assert "Overfull" not in made.stdout


def test_a_colour_has_one_meaning_and_models_of_one_family_have_its_colour(frames: Collected) -> None:
    figures = items(frames, "ren_figure_2", "wu_figure_3", "brown_figure_2_cka")
    palette = Palette(figures.values())
    panels = [panel for item in figures.values() for panel in item.panels]
    meanings = {series.meaning for panel in panels for series in getattr(panel, "series", ())}
    assert {("stage", "pretrained"), ("stage", "finetuned"), ("group", "a and b")} <= meanings
    assert len({tuple(palette.look(meaning).values()) for meaning in meanings}) == len(meanings)
    family = [line for line in figures["wu_figure_3"].panels[0].series if line.meaning == ("group", "a")]
    looks = [palette.look(line.meaning, line.number) for line in family]
    assert len({look["color"] for look in looks}) == 1
    assert len({(look["marker"], look["linestyle"]) for look in looks}) == len(looks) == 4


def test_boxes_stand_above_their_names_and_beside_each_other_only_where_a_name_has_several(frames: Collected) -> None:
    figures = items(frames, "ren_figure_2", "brown_figure_8").values()
    palette = Palette(figures)
    of_stages, of_groups = (study_figures.draw(figure, palette) for figure in figures)
    assert len(of_stages.legends[0].get_texts()) == 2
    assert not of_groups.legends[0].get_texts()  # the names stand below the boxes
    assert {round(box.get_path().vertices[:4, 0].mean(), 6) for box in of_groups.axes[0].patches} == {0.0, 1.0}


def test_short_studies_are_counted_in_minutes() -> None:
    result = {"kind": "fit", "seconds": 66, "versions": {}, "meta": {}}
    assert provenance("", [result], {})["about"] == "1 cell, 1 minute of computing in all."


def test_values_are_written_as_they_are() -> None:
    shown = {0.48: ".48", 0.999: "1.0", 50.0: "50.0", 100.0: "100", 5e3: "5e+03", -0.5: "-.50"}
    assert {value: short(value) for value in shown} == shown


@pytest.mark.parametrize(
    ("values", "cells", "scale"),
    [
        ([[0.0012, 0.0034]], ["1.2", "3.4"], "mse; numbers in the cells: times 0.001"),
        ([[0.0012, 0.34]], [".00", ".34"], "mse"),
    ],
)
def test_maps_of_small_values_write_multiples_of_a_power_of_ten(
    values: list[list[float]], cells: list[str], scale: str
) -> None:
    panel = HeatPanel("t", np.array(values), ["1"], ["1", "2"])
    figure = Figure("f", "F", "c", "a", [panel], scale="mse")
    axis, bar = study_figures.draw(figure, Palette([figure])).axes
    assert [text.get_text() for text in axis.texts] == cells
    assert bar.get_ylabel() == scale
