"""A cell that failed or was stopped goes on from what is good."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.cells import begun

from aligners.cli.cells import running
from aligners.errors import UserError
from aligners.studies.study_folder import ERROR, LOG, StudyFolder


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """The folder of a fit."""
    folder, cells = begun(tmp_path, inject=None)
    return folder.cell(cells[0].id)


def run(cell: Path, monkeypatch: pytest.MonkeyPatch, how: Any) -> tuple[str, list[str]]:
    """Run a cell whose command does this with its folder; returns how it ended, and with which words."""
    typed: list[str] = []

    def command(_: str, words: list[str]) -> None:
        typed.extend(words)
        (cell / "run").mkdir()
        how(cell / "run")

    monkeypatch.setattr(running, "run_script", command)
    return running.run_cell(str(cell.parents[1]), cell.name), typed


def fails(error: BaseException, *files: str) -> Any:
    """A command that leaves files and raises."""

    def how(folder: Path) -> None:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("its state")
        raise error

    return how


def test_a_cell_that_failed_goes_on_from_its_last_state(cell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = cell / "before" / "last.ckpt"
    end, words = run(cell, monkeypatch, fails(RuntimeError("out of memory"), "last.ckpt"))
    assert (end, "--ckpt_path" in words) == ("failed", False)
    for error in (OSError("no space left"), UserError("the Hub cannot be reached"), UserError(f"{last} is damaged")):
        end, words = run(cell, monkeypatch, fails(error))
        assert words[-4:-2] == ["--ckpt_path", str(last)]
    assert not last.exists()  # it was refused
    end, words = run(cell, monkeypatch, fails(RuntimeError("again")))
    assert "--ckpt_path" not in words
    assert "again" in (cell / ERROR).read_text()


@pytest.mark.parametrize(
    ("refused", "gone"),
    [
        ("passes/00001.safetensors", "passes/00001.safetensors"),
        ("passes/plan.json", "passes"),
        ("none/seed-0/finetuned.json", "none/seed-0"),
    ],
)
def test_only_what_is_refused_is_removed(cell: Path, monkeypatch: pytest.MonkeyPatch, refused: str, gone: str) -> None:
    good = {"passes/00000.safetensors", "passes/00001.safetensors", "passes/plan.json", "none/seed-0/finetuned.json"}
    run(cell, monkeypatch, fails(UserError(f"{cell / 'run' / refused} is damaged"), *good, "last.ckpt"))
    left = {str(file.relative_to(cell / "run")) for file in (cell / "run").rglob("*") if file.is_file()}
    assert left == {name for name in good if not name.startswith(gone)} | {"last.ckpt"}


def test_a_logger_of_an_earlier_cell_writes_to_the_log_of_the_one_that_runs(
    cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = list[logging.Handler]()

    def keeps(_: Path) -> None:
        handlers.append(logging.StreamHandler())
        raise RuntimeError

    def logs(_: Path) -> None:
        handlers[0].emit(logging.makeLogRecord({"msg": "a warning"}))
        raise RuntimeError

    for how in (keeps, logs):
        run(cell, monkeypatch, how)
    assert (cell / LOG).read_text() == "a warning\n"


def test_a_fit_in_parts_goes_on_with_its_parts(cell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for files in (["part-1-1/last.ckpt"], []):
        with pytest.raises(SystemExit):
            run(cell, monkeypatch, fails(SystemExit(143), *files))
    _, words = run(cell, monkeypatch, fails(RuntimeError("failed")))
    assert words[-4:-2] == ["--ckpt_path", str(cell / "before")]


def test_how_far_a_cell_is_follows_its_state_wherever_it_lies(cell: Path) -> None:
    folder, number = StudyFolder(cell.parents[1]), cell.name
    assert folder.reached(number) == []
    files = ("last.ckpt", "part-2-1/last.ckpt", "part-1-1/aligners.safetensors", "passes/00001.safetensors")
    for count, name in enumerate((*files, "top-4/seed-0/finetuned.json"), start=1):
        (cell / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (cell / "run" / name).write_text(name)
        assert len(folder.reached(number)) == count
    reached = folder.reached(number)
    for name in ("aligners.safetensors", "metrics.csv", "pairs/x--y/aligners.safetensors"):  # begun again without them
        (cell / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (cell / "run" / name).touch()
    (cell / "run").rename(cell / "before")
    assert folder.reached(number) == reached
