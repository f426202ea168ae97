"""Finished runs, read back, and what is said of folders that are none."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.aligners.reports.made import row, stitched

from aligners.cli.table import evaluate
from aligners.errors import UserError
from aligners.reports.finished_runs import KINDS, file_name, finished_run, make_report, maker
from aligners.reports.publishing import write
from aligners.reports.report import Row

ROWS: list[Row] = [
    row(f"{side}/x", "y", "linear", "method", (1, 1), fvu=0.5, training="trained") for side in ("left", "right")
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    write(make_report("fit", {"models": {}}, ROWS), folder)
    (folder / "config.yaml").write_text("seed: 0\n")
    content = json.loads((folder / "summary.json").read_text())
    content["findings"] = ["As it was said then."]
    (folder / "summary.json").write_text(json.dumps(content))
    return folder


def test_a_run_is_read_back_as_it_was_written(run: Path) -> None:
    found = finished_run(run)
    assert (found.kind, found.report.name, found.config) == ("fit", "summary", "seed: 0\n")
    assert found.report.rows == ROWS
    assert found.report.sentences == ["As it was said then."]
    assert found.figures == [run / "fvu.png"]
    assert len(found.report.screen[0].styles) == 2


def test_options_of_the_report_come_from_the_run(tmp_path: Path) -> None:
    groups, rows = {"one": ["a", "b"], "two": ["c", "d"]}, stitched(("a", "b", "c", "d"))
    expected = make_report("stitching", {}, rows, groups=groups)
    write(replace(expected, figures={}), tmp_path)
    (tmp_path / "config.yaml").write_text(f"groups: {json.dumps(groups)}\n")
    assert [table.columns[0].cells for table in finished_run(tmp_path).report.screen] == [
        table.columns[0].cells for table in expected.screen
    ]


def test_every_kind_can_be_made_and_has_the_name_of_its_files() -> None:
    assert all(callable(maker(kind)) for kind in KINDS)
    assert len({file_name(kind) for kind in KINDS}) == len(KINDS)


def test_show_prints_the_run_and_makes_its_page(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    evaluate(["show", str(run)])
    shown = capsys.readouterr().out
    assert "FVU on the validation texts, by site pair" in shown
    assert "left/x → y   linear" in shown
    assert "As it was said then." in shown
    assert (run / "report.html").is_file()
    assert opened == []  # there is no terminal here
    evaluate(["show", str(run), "--open", "true"])
    assert opened == [(run / "report.html").as_uri()]


def test_a_desktop_is_a_display_a_terminal_and_no_ssh(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aligners.reports import screen as opening

    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    assert not opening.open_where_there_is_a_desktop(run)
    monkeypatch.setenv("DISPLAY", ":0")
    assert opening.open_where_there_is_a_desktop(run)
    assert not opening.open_where_there_is_a_desktop(run, "false")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 22")
    assert not opening.open_where_there_is_a_desktop(run)


def test_a_folder_that_is_no_finished_run_is_told_what_it_lacks(run: Path, tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        with pytest.raises(ValueError, match="Expected `run` to be the folder of a finished run, but") as found:
            finished_run(folder)
        return str(found.value)

    assert "is not a folder" in said(tmp_path / "nowhere")
    assert f"holds several: name one of {run}." in said(run.parent)
    (tmp_path / "new").mkdir()
    assert "holds no config.yaml, which every run begins with" in said(tmp_path / "new")
    (tmp_path / "new" / "config.yaml").touch()
    assert "no report: the run is at work, was stopped, or failed" in said(tmp_path / "new")
    (tmp_path / "new" / "last.ckpt").touch()
    assert f"`--ckpt_path {tmp_path / 'new' / 'last.ckpt'}` goes on" in said(tmp_path / "new")
    (tmp_path / "new" / "study.yaml").touch()
    assert "is that of a study: `study.py status" in said(tmp_path / "new")


def test_a_damaged_report_is_refused(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(run / "summary.json", tmp_path))
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(ValueError, match=r"summary\.json to be a report, but it cannot be read"):
        finished_run(tmp_path)
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="to be a report with meta, findings, rows, but it is something else"):
        finished_run(tmp_path)
    path.write_text(whole.replace('"fvu"', '"fvu_elsewhere"'))
    with pytest.raises(ValueError, match="its rows have no 'fvu': another version wrote it"):
        finished_run(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"meta": True},
        {"rows": [{}, *ROWS]},
        {"rows": [ROWS[0] | {"fvu": "much"}]},
        {"rows": [ROWS[0] | {"model_y": None}, ROWS[1]]},
        {"rows": [ROWS[0] | {"site_x": {"a": 1}}, ROWS[1]]},
        {"rows": "none"},
        {"findings": 3},
    ],
)
def test_an_edited_report_is_refused_by_name(run: Path, tmp_path: Path, change: Row) -> None:
    content = json.loads((run / "summary.json").read_text()) | change
    (tmp_path / "summary.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"Expected ({tmp_path}|a fit report).*another version wrote it"):
        evaluate(["show", str(tmp_path), "--open", "false"])


def test_options_that_would_be_python_are_refused(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "summary.json", tmp_path)
    (tmp_path / "config.yaml").write_text("seed: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(UserError, match=r"config\.yaml to be the options of a run, but it cannot be read as one"):
        finished_run(tmp_path)


def test_numbers_that_json_does_not_have_are_missing_ones(run: Path, tmp_path: Path) -> None:
    content = json.loads((run / "summary.json").read_text())
    content["rows"][0]["fvu_low"] = float("nan")
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert finished_run(tmp_path).report.rows[0]["fvu_low"] is None
