"""The demo says what it will do, how long is left, and what it has found, in few words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.processes import ROOT

from aligners.cli import demo, table
from aligners.cli.endings import goes_on_with
from aligners.cli.table import COMMANDS
from aligners.cli.words import CONFIGS
from aligners.reports.runs.demo_report import demo_words

Row = dict[str, Any]


def row(method: str, site: int | None, **values: Any) -> Row:
    empty = dict.fromkeys(("loss", "penalty", "accuracy", "fvu_seen", "fvu_unseen"))
    return {"method": method, "site_x": site, "site_y": site, **empty, **values}


LANGUAGE = [
    row("native_y", None, loss=4.94),
    *(row("identity", site, penalty=3 + site / 10) for site in (1, 2)),
    row("procrustes", 1, penalty=0.3),
    *(row("linear", site, penalty=0.25, fvu_seen=0.21, fvu_unseen=0.3) for site in (1, 2)),
    *(row("mlp", site, penalty=0.05, fvu_seen=0.04, fvu_unseen=0.27) for site in (1, 2)),
    *(row("inn", site, penalty=0.07, fvu_seen=0.06, fvu_unseen=0.28 + site / 100) for site in (1, 2)),
]
CLASSIFIERS = [
    row("native_y", None, accuracy=0.718),
    *(row("identity", site, accuracy=0.34 + site / 50) for site in (1, 2)),
    *(row("linear", site, accuracy=0.73) for site in (1, 2)),
]


def test_the_words_are_few_and_have_the_runs_numbers() -> None:
    words = demo_words(LANGUAGE)
    assert len(words) <= 11  # and the lines with the places
    assert all(len(line) <= 84 for line in words)
    said = "\n".join(words)
    assert "a loss of 4.94 nats a token" in said
    lines = [line.strip() for line in words]
    linear, mlp, inn = (next(line for line in lines if name in line) for name in ("linearly", "MLP", "INN"))
    assert linear.split()[-3:] == ["0.25", "0.21", "0.30"]
    assert mlp.split()[-3:] == ["0.05", "0.04", "0.27"]
    assert inn.split()[-5:] == ["0.07", "0.06", "0.29", "to", "0.30"]
    assert "3.10 to 3.20" in next(line for line in lines if line.startswith("not mapped"))
    assert words[-1].startswith("FVU: fraction of variance")
    more = "\n".join(demo_words(LANGUAGE, CLASSIFIERS)[len(words) :])
    for number in ("72%", "36% to 38%", "73%"):
        assert number in more
    untrained = [r | {"training": "untrained start (linear)"} if r["method"] == "inn" else r for r in LANGUAGE]
    words = demo_words(untrained)
    assert any("0.07*" in line for line in words)
    assert words[-1].endswith("untrained start (linear).")


@pytest.mark.parametrize(
    ("planned", "done", "taken", "said"),
    [(100, 10, 10, "1:40 min"), (120, 30, 60, "4:00 min"), (20, 100, 100, "20 seconds"),
     (1, 100, 1, "10 seconds")],
)  # fmt: skip
def test_the_time_left_follows_the_pace_so_far(planned: float, done: float, taken: float, said: str) -> None:
    assert demo.time_left(planned, done, taken) == said


@pytest.mark.parametrize("kind", ["quick", "full"])
def test_the_demo_from_first_to_last_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Path] = []
    ended: list[str] = []

    def ran(script: str, words: list[str]) -> None:
        assert len(ended) == len(list((tmp_path / "run").glob("*")))  # the run before is over
        folder = Path(words[-1])
        folder.mkdir(parents=True)
        rows = CLASSIFIERS if folder.name == "classifiers" else LANGUAGE
        if script == "evaluate":
            (folder / "report.json").write_text(json.dumps({"rows": rows}))
            if rows is LANGUAGE:
                (folder / "penalty.png").touch()

    monkeypatch.setattr("aligners.cli.cells.running.end_run", lambda run: ended.append(run.name))
    monkeypatch.setattr("aligners.reports.screen.open_where_there_is_a_desktop", opened.append)
    monkeypatch.setattr(table, "run_script", ran)
    demo.run_demo(tmp_path / "run", kind)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Maps the hidden states of one small language model")
    assert [line[:11] for line in lines if line.startswith("Step")] == ["Step 1 of 3", "Step 2 of 3", "Step 3 of 3"]
    assert all(re.search(r"About (\d+:\d\d min|\d+ seconds) left in all", line) for line in lines if line[:4] == "Step")
    assert ended == [step["run"] for step in demo.STEPS[kind]]
    pictures = ["report"] if kind == "full" else ["closed_forms", "report"]  # the first before anything is trained
    assert opened == [tmp_path / "run" / name / "penalty.png" for name in pictures]
    assert [line for line in lines if line.startswith("The picture")] == [f"The picture: {path}" for path in opened]
    assert any("classifies 72% of the texts correctly" in line for line in lines) == (kind == "full")
    assert lines[-1].endswith("report.html")


@pytest.mark.parametrize(("kind", "target"), [("quick", "demo"), ("full", "demo-full")])
def test_ctrl_c_names_what_was_typed(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> None:
        with goes_on_with(lambda: {"ckpt_path": "x"}):  # as a step's command says it
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", stopped)
    with pytest.raises(SystemExit) as ended:
        demo.main(kind, tmp_path)
    assert ended.value.code == 130
    said = capsys.readouterr().err
    assert said == f"Stopped by Ctrl-C.\nWhat is finished is in {tmp_path}. To begin again, run\n  make {target}\n"
    assert (tmp_path / "demo.log").read_text() == said


def test_the_demos_commands_and_configs_are_there() -> None:
    for kind, steps in demo.STEPS.items():
        for step in steps:
            script, command, *words = step["command"].split()
            assert command in COMMANDS[script]
            if "--config" in words:
                name = words[words.index("--config") + 1]
                assert any((CONFIGS / folder / f"{name}.yaml").is_file() for folder in (command, script))
        assert f"-m aligners.cli.demo {kind} " in (ROOT / "Makefile").read_text()
