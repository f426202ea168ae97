"""What `evaluate.py inject` says before it fits or reads anything."""

from pathlib import Path
from typing import Any

import pytest
from tests.shell import options
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts

from aligners.cli.table import evaluate
from aligners.fitting import read_moments
from aligners.fitting.read_moments import MomentsSoFar


class Begun(Exception):
    """The fitting texts are read."""


@pytest.fixture(autouse=True)
def _stop_at_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise Begun

    monkeypatch.setattr(read_moments, "read_moments", read)


def inject(world: World, run: Path, **changes: Any) -> None:
    usual = {
        "data__model_x": world.model_x, "data__model_y": world.model_y, "data__text__source": world.fit,
        "data__text__held_out": world.test, "data__max_length": 60, "trainer__accelerator": "cpu",
        "trainer__logger": False, "run": str(run),
    }  # fmt: skip
    evaluate(["inject", *options(**usual | changes)])


def labelled(folder: Path, labels: list[int]) -> str:
    """A CSV of held-out texts with these labels in turn."""
    return write_texts(folder / "labelled.csv", sentences(30), [labels[i % len(labels)] for i in range(30)])


@pytest.mark.parametrize(
    ("labels", "said"),
    [([0, 1, 2], "have labels 0..2"), ([0, 1, -1], "10 of 30 texts .* have none")],
    ids=["outside the head", "some missing"],
)
def test_labels_that_no_head_answers_are_refused(labels: list[int], said: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        inject(world, tmp_path / "run", data__text__held_out=labelled(tmp_path, labels))
    assert not (tmp_path / "run" / "aligners.safetensors").exists()
    with pytest.raises(Begun):  # the folder is free again
        inject(world, tmp_path / "run")


def test_an_evaluation_that_is_stopped_keeps_nothing_to_go_on_from(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any) -> None:
        next(each for each in given if isinstance(each, MomentsSoFar)).batches = 1
        raise KeyboardInterrupt

    monkeypatch.setattr(read_moments, "read_moments", stop)
    with pytest.raises(SystemExit):
        inject(world, tmp_path / "run")
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_what_is_not_injected_is_said(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Begun):
        inject(world, tmp_path / "run", data__text__held_out=labelled(tmp_path, [-1]))
    assert "Nothing will be injected forward, only errors are measured: the texts of" in capsys.readouterr().out
    bare = str(tiny_folder(tmp_path / "bare", task=None))
    with pytest.raises(Begun):
        inject(world, tmp_path / "other", data__model_y=bare, both_directions=True)
    assert f"forward, only errors are measured: {bare} has no classification head" in capsys.readouterr().out
