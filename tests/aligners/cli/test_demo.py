"""The demo says what it will do, how long is left, and what it has found, in few words."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aligners.cli import demo
from aligners.cli.table import COMMANDS, CONFIGS
from aligners.reports.runs.demo import demo_words
from tests.processes import ROOT

Row = dict[str, Any]


def row(method: str, site: int | None, **values: Any) -> Row:
    empty = dict.fromkeys(("loss", "penalty", "accuracy", "fvu_seen", "fvu_unseen"))
    return {"method": method, "site_x": site, "site_y": site, **empty, **values}


LANGUAGE = [
    row("native_y", None, loss=4.94),
    *(row("identity", site, penalty=3 + site / 10) for site in (1, 2)),
    row("procrustes", 1, penalty=0.3),
    *(row("inn", site, penalty=0.07, fvu_seen=0.06, fvu_unseen=0.28 + site / 100) for site in (1, 2)),
]
CLASSIFIERS = [
    row("native_y", None, accuracy=0.718),
    *(row("identity", site, accuracy=0.34 + site / 50) for site in (1, 2)),
    *(row("linear", site, accuracy=0.73) for site in (1, 2)),
]


def test_the_words_are_few_and_have_the_runs_numbers() -> None:
    words = demo_words(LANGUAGE, CLASSIFIERS)
    assert len(words) <= 9  # and a line with the places
    assert all(len(line) <= 140 for line in words)
    said = "\n".join(words)
    for number in ("4.94", "3.10 to 3.20", "0.30\n", "0.07\n", "0.29 to 0.30", "72%", "36% to 38%", "73% mapped"):
        assert number in said
    untrained = [r | {"training": "untrained start (linear)"} if r["method"] == "inn" else r for r in LANGUAGE]
    words = demo_words(untrained, CLASSIFIERS)
    assert any(line.endswith("0.07*") for line in words)
    assert words[-1].endswith("untrained start (linear).")


@pytest.mark.parametrize(
    ("planned", "done", "taken", "said"),
    [(5, 0, 0, "5 minutes"), (2, 3, 6, "4 minutes"), (1, 4, 4, "1 minute"), (1, 4, 0.1, "1 minute")],
)
def test_the_time_left_follows_the_pace_so_far(planned: float, done: float, taken: float, said: str) -> None:
    assert demo.minutes_left(planned, done, taken) == said


def test_the_demo_from_first_to_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(words: list[str]) -> subprocess.CompletedProcess[str]:
        folder = Path(words[words.index("--run") + 1])
        folder.mkdir(parents=True)
        rows = CLASSIFIERS if folder.name == "classifiers" else LANGUAGE
        (folder / "report.json").write_text(json.dumps({"rows": rows}))
        return subprocess.CompletedProcess(words, status)

    opened: list[Path] = []
    status = 0
    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(demo, "open_where_there_is_a_desktop", opened.append)
    demo.run_demo(tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Maps two small language models")
    assert "minutes with two free cores" in lines[0]
    assert [line[:11] for line in lines if line.startswith("Step")] == ["Step 1 of 3", "Step 2 of 3", "Step 3 of 3"]
    assert len(lines[lines.index("", lines.index("") + 1) :]) <= 20
    assert lines[-1].startswith("The picture: ")
    assert opened == [tmp_path / "run" / "report" / "penalty.png"]

    status = 2
    with pytest.raises(SystemExit) as ended:
        demo.run_demo(tmp_path / "failed")
    assert ended.value.code == 2
    assert not (tmp_path / "failed" / "report").exists()


def test_the_demos_commands_and_files_are_there(tmp_path: Path) -> None:
    for step in demo.steps_in(tmp_path):
        script, command = step.words[:2]
        assert command in COMMANDS[script.removesuffix(".py")]
        if "--config" in step.words:
            name = step.words[step.words.index("--config") + 1]
            assert (CONFIGS / script.removesuffix(".py") / f"{name}.yaml").is_file()
    assert "-m aligners.cli.demo" in (ROOT / "Makefile").read_text()
