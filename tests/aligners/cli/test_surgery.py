import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from rich.console import Console
from tests.shell import printed
from tests.world import World

from aligners.cli.table import evaluate as main
from aligners.finetuning.truncating import MEAN, conditions
from aligners.reports.publishing import write
from aligners.reports.runs.surgery_report import report, skipping_figure, surgery_table, truncation_figure

QUIET = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]


def rows(models: list[str], bases: list[str]) -> list[dict[str, Any]]:
    found = []
    for model in [*models, *bases, *([MEAN] if len(models) > 1 else [])]:
        for number, condition in enumerate(conditions(4, base=model in bases, heads=True)):
            accuracy = 0.5 + 0.02 * number
            found.append(
                {
                    "model": model, **vars(condition), "accuracy": accuracy, "accuracy_low": accuracy - 0.05,
                    "accuracy_high": accuracy + 0.05, "loss": 0.5, "n_texts": 25,
                    "score": accuracy, "score_low": accuracy - 0.05, "score_high": accuracy + 0.05,
                    "score_name": "accuracy",
                }
            )  # fmt: skip
    return found


def test_files_hold_every_row_and_figures_can_be_read(tmp_path: Path) -> None:
    every = rows(["a/x", "a/y"], ["b"])
    figures = write(report({"majority_score": 0.5}, every), tmp_path)
    assert json.loads((tmp_path / "surgery.json").read_text())["rows"] == every
    assert [figure.name for figure in figures] == ["truncation.png", "skipping.png"]
    assert all(image.imread(figure).std() > 0 for figure in figures)


def test_the_mean_of_several_models_or_the_only_one_is_drawn_thick() -> None:
    for models, thick in ((["a", "b"], 3), (["a"], 3)):
        (axis,) = truncation_figure(rows(models, ["c"]), 0.5).axes
        assert sum(line.get_linewidth() > 1.5 for line in axis.lines) == thick  # one for each kind of head
        assert sum(line.get_linewidth() == 0.7 for line in axis.lines) == (4 if len(models) == 2 else 0)
        labels = [line.get_label() for line in axis.lines if not str(line.get_label()).startswith("_")]
        assert [label.split(":")[0] for label in labels] == ["untuned", "tuned", "tuned_orig", "majority class"]


def test_spans_have_their_first_block_up_and_their_last_across() -> None:
    figure = skipping_figure(rows(["a"], []), 0.5)
    grid = figure.axes[0].images[0].get_array()
    spans = {(row["first"], row["last"]): row["accuracy"] for row in rows(["a"], []) if row["kind"] == "skip"}
    assert grid[1, 3] == spans[2, 4]
    assert bool(grid.mask[3, 1])
    assert len(skipping_figure(rows(["a", "b"], []), 0.5).axes) >= 3


def test_what_overflowed_is_left_out() -> None:
    broken = rows(["a"], [])
    for row in broken:
        if row["kind"] == "native" or row["first"] == 2:
            row |= dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high", "loss"))
    truncation_figure(broken, 0.5)
    skipping_figure(broken, 0.5)
    surgery_table(broken, 0.5)
    everywhere = [row | {"score": None} if row["model"] == "a" else row for row in rows(["a", "b"], [])]
    (axis,) = truncation_figure([row for row in everywhere if row["model"] != MEAN], 0.5).axes
    assert {text.get_text() for text in axis.texts} == {"b"}


def test_the_table_shows_every_site_of_every_head(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(surgery_table(rows(["a", "b"], ["c"]), 0.55))
    screen = capsys.readouterr().out
    assert "majority class: 55.0" in screen
    for said in ("untuned", "tuned_orig", MEAN):
        assert said in screen


@pytest.fixture(scope="module")
def options(world: World) -> list[str]:
    return [
        *("surgery", "--data.models", f"[{world.model_x}, {world.model_y}]", "--data.bases", world.model_x),
        *("--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "60"),
        *("--data.batch_size", "9", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"),
    ]


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(options: list[str], tmp_path: Path) -> None:
    main([*options, *QUIET, "--run", str(tmp_path / "one")])
    printed(tmp_path, "evaluate", *options, *QUIET, "--run", str(tmp_path / "two"), ranks=2)
    one, two = (json.loads((tmp_path / run / "surgery.json").read_text()) for run in ("one", "two"))
    assert (one["meta"]["ranks"], two["meta"]["ranks"]) == (1, 2)
    for a, b in zip(one["rows"], two["rows"], strict=True):
        for name, value in a.items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert b[name] == expected, (a["model"], a["kind"], a["site"], name)


def test_no_epochs_train_no_heads(
    options: list[str], world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run", str(tmp_path / "here"), "--trainer.max_epochs", "0"]
    main([*options, *QUIET, "--data.bases", "null", *run])
    found = json.loads((tmp_path / "here" / "surgery.json").read_text())["rows"]
    assert {row["kind"] for row in found} == {"native", "untuned", "skip"}
    assert {row["model"] for row in found} == {world.model_x, world.model_y, MEAN}
    assert world.model_x not in capsys.readouterr().out  # it is shown as x
