"""`evaluate.py similarity` as users type it, in one process and in two."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from aligners.cli.table import evaluate as main
from aligners.similarity.catalogue import DEFAULT
from tests.shell import ROOT, TWO_RANKS, command
from tests.tiny import tiny_folder
from tests.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("similarity")


@pytest.fixture(scope="module")
def options(world: World, folder: Path) -> list[str]:
    other = tiny_folder(folder / "other", "distilbert", seed=2, layers=2, width=12)
    return [
        *("similarity", "--data.models", f"[{world.model_x}, {other}]"),
        *("--data.text.source", world.fit, "--data.text.held_out", world.test),
        *("--data.max_length", "60", "--data.batch_size", "4", "--trainer.accelerator", "cpu"),
        *("--measures", "all", "--data.attention", "true", "--controls", "true", "--groups", "4"),
    ]


@pytest.fixture(scope="module")
def compared(options: list[str], folder: Path) -> Path:
    return command(folder, "evaluate.py", *options)


def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "similarity.json").read_text())


def test_a_comparison_leaves_all_that_a_run_should(compared: Path, world: World) -> None:
    found = report(compared)
    assert compared.name.startswith("similarity-")
    assert found["meta"]["models"][0]["name"] == world.model_x
    assert found["meta"]["refusals"] == {}
    assert set(DEFAULT) < {row["measure"] for row in found["rows"]}
    with (compared / "similarity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(found["rows"])
    assert {row["model"] for row in found["layers"]} == {model["name"] for model in found["meta"]["models"]}
    figures = {"layers_x_other", "layers_x_x", "layers_other_other", "diagonal_x_other"}
    assert {path.stem for path in compared.glob("*.png")} == figures
    screen = (compared / "screen.txt").read_text()
    assert "\nx and other, matching layers\n" in screen  # wherever the models are
    assert "2→1" in screen
    assert "models" in (compared / "config.yaml").read_text()


def test_two_ranks_compare_what_one_does(compared: Path, options: list[str], folder: Path) -> None:
    again = command(folder, "evaluate.py", *options, *TWO_RANKS)
    one, two = report(compared), report(again)
    assert (one["meta"]["ranks"], two["meta"]["ranks"]) == (1, 2)
    assert one["meta"]["n_rows"] == two["meta"]["n_rows"]
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert set(a) == set(b)
        for name, value in a.items():
            if isinstance(value, float):
                assert b[name] == pytest.approx(value, rel=1e-6, abs=1e-8), (a["label"], name)
            else:
                assert b[name] == value, (a["label"], name)


def test_the_config_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(
            ["similarity", "--config", str(ROOT / "aligners" / "configs" / "similarity" / "all.yaml"), "--print_config"]
        )
    assert not done.value.code
    assert "permutations: 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [["--measures", "[ckaa]"], ["--groups", "1"], ["--data.rows", "sentences"], ["--data.layer", "all"]],
    ids=lambda wrong: " ".join(wrong),
)
def test_a_wrong_option_fails_before_a_run_is_made(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError)):
        main(["similarity", *wrong])
    assert list(tmp_path.iterdir()) == []
