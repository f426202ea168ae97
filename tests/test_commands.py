"""The command lines as users type them, in one process and in two."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.shell import TWO_RANKS, command, metrics, options
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World

from aligners.cli.table import evaluate, train
from aligners.fitting.saved_bank import load_bank
from aligners.injection.methods import CLOSED_FORMS

ALIGNERS = {
    "linear": "Linear",
    "mlp": {"class_path": "MLP", "init_args": {"hidden": [8]}},
    "inn": {"class_path": "INN", "init_args": {"couplings": 2, "hidden": 8}},
}


def fit_options(world: World) -> list[str]:
    return options(
        data__model_x=world.model_x, data__model_y=world.model_y, data__text__source=world.fit,
        data__text__held_out=world.test, data__max_length=64, data__batch_size=18, data__sites="1,2:3",
        model__aligners=ALIGNERS, model__both_directions=True, trainer__max_epochs=1, trainer__accelerator="cpu",
    )  # fmt: skip


def inject_options(world: World, fitted: Path) -> list[str]:
    """On the tokens that the maps were fitted on, and on means, whose moments are read first; on other text, too."""
    return options(
        checkpoints=[str(fitted / "aligners.safetensors")], both_directions=True, data__rows="mean",
        other_text__source=world.test, other_text__test_share=0.3, trainer__accelerator="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def fitted(world: World, folder: Path) -> Path:
    return command(folder, "train", "fit", *fit_options(world))


@pytest.fixture(scope="module")
def injected(world: World, fitted: Path, folder: Path) -> Path:
    return command(folder, "evaluate", "inject", *inject_options(world, fitted))


def report(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = json.loads((run / "report.json").read_text())
    return content["meta"], content["rows"]


def test_fit_leaves_all_that_a_run_should(world: World, fitted: Path) -> None:
    assert fitted.name.startswith("fit-")
    assert {path.name for path in fitted.iterdir()} >= {
        *("aligners.safetensors", "last.ckpt", "config.yaml", "metrics.csv", "fvu.png", "wandb")
    }
    stored = load_bank(fitted / "aligners.safetensors")
    assert {route: set(maps) for route, maps in stored.maps.items()} == {
        "0_1": {"linear", "mlp", "inn"},
        "1_0": {"linear", "mlp"},
    }
    assert stored.pairs["0_1"] == [(1, 1), (2, 3)]
    assert world.model_x in str(yaml.safe_load((fitted / "config.yaml").read_text()))
    figures = metrics(fitted)
    screen = (fitted / "screen.txt").read_text()
    assert set(screen.splitlines()) <= set((fitted / "run.log").read_text().splitlines())
    for name, value in figures.items():
        if name.startswith("validation/") and name.endswith("/fvu"):
            assert f"{value:.3f}" in screen, name
    assert {name.split("/")[1] for name in figures if "/" in name} >= {"linear", "mlp", "inn", "linear_backward"}


def test_inject_leaves_a_report(injected: Path, fitted: Path, world: World) -> None:
    assert injected.name.startswith("inject-")
    meta, rows = report(injected)
    assert {(row["site_x"], row["site_y"]) for row in rows if row["direction"] == "forward"} == {
        *((None, None), (1, 1), (2, 3))
    }
    methods = {
        "native_x",
        "native_y",
        "random_classifier",
        "random_label",
        "constant_label",
        "mean",
        "identity",
        "random_embedding",
    }
    assert {row["method"] for row in rows} == methods | set(CLOSED_FORMS) | {"mlp", "inn"}
    assert {row["n_texts"] for row in rows} == {TEST_TEXTS}
    assert {row["rows"] for row in rows} == {"tokens", "mean"}
    sited = [row for row in rows if row["role"] == "method" and row["method"] != "inn"]
    assert all(row["fvu_other"] is not None and row["n_texts_other"] > 0 for row in sited)
    assert meta["models"]["x"]["name"] == world.model_x
    assert meta["text"]["source"] == world.fit  # the checkpoint's data, without naming them again
    assert meta["methods"]["forward.mlp"]["checkpoint"] == str(fitted / "aligners.safetensors")
    assert meta["versions"]["torch"] == torch.__version__
    assert (meta["ranks"], meta["split"], meta["seed"]) == (1, "test", 0)
    with (injected / "report.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert {"report.md", "fvu.png", "accuracy.png"} <= {path.name for path in injected.iterdir()}
    screen = (injected / "screen.txt").read_text()
    assert "The closest map" in screen
    assert "\nx → y\n" in screen  # wherever the models are
    assert world.model_x not in screen
    assert world.model_x in (injected / "report.md").read_text()
    assert str(injected.relative_to(injected.parent.parent)) in screen


@pytest.mark.slow
def test_two_ranks_fit_what_one_does(world: World, fitted: Path, folder: Path) -> None:
    """Lightning starts the second rank; elsewhere, tests start both."""
    again = command(folder, "train", "fit", *fit_options(world), *TWO_RANKS)
    one, two = (load_bank(run / "aligners.safetensors") for run in (fitted, again))
    torch.testing.assert_close(two.moments.xy, one.moments.xy, rtol=1e-5, atol=1e-4)
    assert two.moments.n == one.moments.n
    for direction, maps in one.maps.items():
        for name, aligner in maps.items():
            for key, value in aligner.state_dict().items():
                if key not in ("condition", "weight_back"):  # of a singular map: decided by the last digit
                    found = two.maps[direction][name].state_dict()[key]
                    torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-5, msg=f"{direction} {name} {key}")
    figures = metrics(again)
    for name, value in metrics(fitted).items():
        if name.startswith(("validation/", "step/")) and "linear" not in name and "round_trip" not in name:
            assert figures[name] == pytest.approx(value, rel=1e-3), name


@pytest.mark.slow
def test_two_ranks_report_what_one_does(world: World, injected: Path, fitted: Path, folder: Path) -> None:
    """Up to float32's accuracy, of losses near 1: ranks pad their batches differently."""
    again = command(folder, "evaluate", "inject", *inject_options(world, fitted), ranks=2)
    (meta, rows), (_, expected) = report(again), report(injected)
    assert meta["ranks"] == 2
    assert TEST_TEXTS % 2 == 1
    for a, b in zip(expected, rows, strict=True):
        assert set(a) == set(b)
        for name, value in a.items():
            if name == "round_trip" and value is not None:
                assert b[name] == pytest.approx(value, rel=0.5, abs=1e-6), (a["method"], name)
            elif isinstance(value, float):
                assert b[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (a["method"], name)
            else:
                assert b[name] == value, (a["method"], name)


def test_a_fit_goes_on_and_is_validated(
    world: World, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = ["--trainer.logger", "false"]
    train(["validate", *fit_options(world), *quiet, "--ckpt_path", str(fitted / "aligners.safetensors")])
    table = capsys.readouterr().out
    for name, value in metrics(fitted).items():
        if name.startswith("validation/linear") and name.endswith("/fvu"):
            assert f"{value:.3f}" in table
    more = [*fit_options(world), "--trainer.max_epochs", "2", "--run", "more", *quiet]
    train(["fit", *more, "--ckpt_path", str(fitted / "last.ckpt")])
    steps = [torch.load(run / "last.ckpt", weights_only=True)["global_step"] for run in (fitted, tmp_path / "more")]
    assert steps[1] == 2 * steps[0]


def test_the_command_line_overrules_what_a_checkpoint_says_of_the_data(fitted: Path, tmp_path: Path) -> None:
    fewer = options(data__text__max_texts=11, data__batch_size=4, closed_form=[], trainer__logger=False)
    given = options(checkpoints=[str(fitted / "aligners.safetensors")], run=str(tmp_path / "new"))
    evaluate(["inject", *given, *fewer])
    meta, rows = report(tmp_path / "new")
    assert {row["n_texts"] for row in rows} == {11}
    assert meta["batch_size"] == 4
    assert meta["sites"] == [[1, 1], [2, 3]]


@pytest.mark.slow
def test_a_comparison_leaves_all_that_a_run_should(world: World, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", "distilbert", seed=2, layers=1, width=12)
    measures = ["cka", "minibatch_cka", "rbf_cka", "r2", "attention_cka"]  # of every family, one held out, one directed
    given = options(
        data__models=[world.model_x, str(other)], data__text__source=world.fit, data__text__held_out=world.test,
        data__max_length=60, data__batch_size=8, data__attention=True, trainer__accelerator="cpu",
        measures=measures, controls=True, groups=4,
    )  # fmt: skip
    compared = command(tmp_path, "evaluate", "similarity", *given)
    found = json.loads((compared / "similarity.json").read_text())
    assert compared.name.startswith("similarity-")
    assert found["meta"]["models"][0]["name"] == world.model_x
    assert found["meta"]["refusals"] == {}
    assert {row["measure"] for row in found["rows"]} == {*measures}
    with (compared / "similarity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(found["rows"])
    assert {row["model"] for row in found["layers"]} == {model["name"] for model in found["meta"]["models"]}
    figures = {"layers_x_other", "layers_x_x", "layers_other_other", "diagonal_x_other"}
    assert {path.stem for path in compared.glob("*.png")} == figures
    screen = (compared / "screen.txt").read_text()
    assert "\nx and other, matching layers\n" in screen  # wherever the models are
    assert "3→1" in screen
    assert "models" in (compared / "config.yaml").read_text()
