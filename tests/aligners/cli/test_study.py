"""Studies as users run them: cells of real commands, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from aligners.cli.study import run as running
from aligners.cli.table import study
from aligners.studies.folder import ERROR, RESULT, StudyFolder
from tests.aligners.cli.small_study import MAPS, study_file
from tests.cells import Inline
from tests.processes import ROOT
from tests.world import TEST_TEXTS, World


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cells run here, one after another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "make_executor", lambda *_: Inline())


def kinds(folder: Path) -> list[str]:
    return [StudyFolder(folder).described(number)["kind"] for number in StudyFolder(folder).cells]


def test_a_study_of_every_stage(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models are fine-tuned and drawn at random, pairs fitted in one bank, maps injected, layers compared."""
    file = study_file(
        world, tmp_path,
        stages=["random", "pretrained", "finetuned"],
        models={"names": [world.model_x, world.model_y], "groups": {"one": [world.model_x]}},
        finetune={"options": {"trainer": {"max_epochs": 1}}},
        fit={"stages": ["finetuned"], "options": {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 1}}},
        inject={"stages": ["finetuned"], "options": {"closed_form": []}},
        similarity={"across_stages": True, "options": {"measures": ["cka"], "data": {"layers": [1, 2]}}},
        keep="results",
    )  # fmt: skip
    study(["run", file])
    folder = tmp_path / "runs" / "small"
    assert sorted(kinds(folder)) == ["finetune", "finetune", "fit", "inject", "similarity", "untrained", "untrained"]
    injected = pd.read_parquet(folder / "tables" / "inject.parquet")
    assert set(injected["stage"]) == {"finetuned"}
    assert set(injected["model_x"]) == {world.model_x}
    assert set(injected["group_x"]) == {"one"}
    assert {"linear", "mlp", "native_y"} <= set(injected["method"])
    assert set(injected["n_texts"]) == {TEST_TEXTS}
    compared = pd.read_parquet(folder / "tables" / "similarity.parquet")
    assert {("random", "pretrained"), ("pretrained", "finetuned")} <= set(
        zip(compared["stage_x"], compared["stage_y"], strict=True)
    )
    assert list(folder.glob("cells/*/run/aligners.ckpt")) == []  # only results are kept
    assert (folder / "report" / "report.html").is_file()
    groups = [next(folder.glob("cells/*/run/wandb/offline-run-*/*.wandb")).read_bytes()]
    assert all(b"small" in content for content in groups)  # the group of the study's runs
    shown = capsys.readouterr().out
    assert "What it will cost" in shown
    assert "0 of 7 cells are done" in shown
    study(["run", file])
    shown = capsys.readouterr().out
    assert "7 of 7 cells are done" in shown
    assert shown.splitlines()[-1] == f"Report: {Path('runs', 'small', 'report', 'report.html')}"


def test_the_papers_study_on_tiny_models(world: World, tmp_path: Path) -> None:
    """Ren et al.'s own file, with other models and texts, and shorter training."""
    config = yaml.safe_load((ROOT / "aligners" / "configs" / "study" / "ren_small.yaml").read_text())
    config["fit"]["options"]["trainer"] = {"max_epochs": 1, "limit_train_batches": 2}
    config["finetune"]["options"]["trainer"] = {"max_epochs": 1}
    config["fit"]["stages"] = config["inject"]["stages"] = ["finetuned"]
    for kind in ("recover", "attention"):
        config[kind]["tasks"] = None
        config[kind]["options"]["trainer"] = {"max_epochs": 1, "limit_train_batches": 2}
    config["data"] |= {"max_length": 60, "sites": [1]}
    (tmp_path / "ren.yaml").write_text(yaml.safe_dump(config))
    models = ["--models.names", json.dumps([world.model_x, world.model_y]), "--models.seeds", "null"]
    text = {"source": world.fit, "held_out": world.test}
    wanted = ["ren_table_2", "ren_table_3", "ren_table_4", "ren_table_5", "ren_figure_4"]
    models += ["--report", json.dumps(wanted)]
    study(["run", "ren.yaml", *models, "--pairs.random", "1", "--tasks", json.dumps({"t": {"text": text}})])
    folder = tmp_path / "runs" / "ren_small"
    injected = pd.read_parquet(folder / "tables" / "inject.parquet")
    assert {"linear", "cca", "svcca", "pwcca", "mlp_paper", "inn_paper", "inn"} <= set(injected["method"])
    assert set(pd.read_parquet(folder / "tables" / "similarity.parquet")["stage"]) == {
        "random",
        "pretrained",
        "finetuned",
    }
    assert list((folder / "store").iterdir())
    made = {path.stem for path in (folder / "report" / "tables").glob("*.md")}
    assert made == set(wanted[:4])
    assert (folder / "report" / "figures" / "ren_figure_4.png").is_file()


def test_several_pairs_in_a_bank(world: World, tmp_path: Path) -> None:
    from tests.tiny import tiny_folder

    third = str(tiny_folder(tmp_path / "third", seed=2))
    fit = {"pairs_at_once": 3, "options": {"model": {"aligners": {"linear": "Linear"}}, "data": {"sites": "1,2"}}}
    study(["run", study_file(world, tmp_path, models={"names": [world.model_x, world.model_y, third]}, fit=fit)])
    folder = tmp_path / "runs" / "small"
    assert sorted(kinds(folder)) == ["fit_pairs", "inject", "inject", "inject"]
    injected = pd.read_parquet(folder / "tables" / "inject.parquet")
    linear = injected[injected["method"] == "linear"]
    assert set(zip(linear["model_x"], linear["model_y"], linear["site_x"], strict=True)) == {
        (x, y, site)
        for x, y in ((world.model_x, world.model_y), (world.model_x, third), (world.model_y, third))
        for site in (1, 2)
    }
    assert len(pd.read_parquet(folder / "tables" / "fit.parquet")) == 6


def test_a_cell_that_fails_is_shown_and_tried_again(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"options": {"measures": ["cka"], "controls": True, "groups": 99}}
    file = study_file(world, tmp_path, inject=None, similarity=wrong)
    with pytest.raises(SystemExit) as end:
        study(["run", file])
    assert end.value.code == 1
    folder = tmp_path / "runs" / "small"
    (error,) = folder.glob(f"cells/*/{ERROR}")
    assert "Traceback" in error.read_text()
    assert len(list(folder.glob(f"cells/*/{RESULT}"))) == 1
    shown = capsys.readouterr().out
    assert "similarity" in shown
    assert f"runs/small/cells/{error.parent.name}/{ERROR}" in shown
    study(["status", str(folder)])
    assert "The jackknife leaves out `groups` = 99" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        study(["retry", str(folder)])
    assert "1 of 2 cells are done" in capsys.readouterr().out
    study(["collect", str(folder)])
    assert "fit.parquet" in capsys.readouterr().out


def test_an_interrupted_fit_goes_on_from_its_checkpoint(world: World, tmp_path: Path) -> None:
    file = study_file(world, tmp_path, inject=None)
    study(["run", file])
    folder = StudyFolder(tmp_path / "runs" / "small")
    place = folder.cell(folder.cells[0])
    first = json.loads((place / RESULT).read_text())
    assert not (place / "run" / "last.ckpt").exists()  # of no use any more
    (place / RESULT).unlink()
    (place / "run" / "last.ckpt").write_bytes(b"what a killed worker left")
    with pytest.raises(SystemExit):
        study(["run", file])
    assert "last.ckpt" in (place / ERROR).read_text()  # it tried to go on
    study(["retry", str(folder.path)])  # from the beginning
    again = json.loads((place / RESULT).read_text())
    assert again["rows"] == first["rows"]


def test_the_plan_alone_writes_nothing(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(["run", study_file(world, tmp_path), "--plan", "true", "--rate", "2e12", "--workers", "4"])
    shown = capsys.readouterr().out
    assert "An estimate, at 2.0e+12 FLOP/s a worker (`--rate`)" in shown
    assert "FLOP a token" in shown
    assert "on 8 workers" in shown
    assert not (tmp_path / "runs").exists()


def test_wrong_files_and_options(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = study_file(world, tmp_path)
    for wrong, said in (("nothing.yaml", "nothing.yaml"), (study_file(world, tmp_path, modles=[]), "'modles'")):
        with pytest.raises(SystemExit):
            study(["run", wrong])
        assert said in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(ValueError, match=r"got ren_tabel_4\. Did you mean ren_table_4"):
        study(["run", study_file(world, tmp_path, report=["ren_tabel_4"])])
    with pytest.raises(ValueError, match="`layers` names 9"):
        study(["run", study_file(world, tmp_path, similarity={"options": {"data": {"layers": [9]}}})])
    with pytest.raises(ValueError, match="`workers` to be at least 1"):
        study(["run", study_file(world, tmp_path), "--workers", "-1"])
    with pytest.raises(ValueError, match="the folder of a study"):
        study(["status", str(tmp_path)])
    assert not (tmp_path / "runs").exists()
    assert file
