"""Studies as users run them: cells of real commands, on tiny models."""

import json
from pathlib import Path

import pandas as pd
import pytest
from tests.aligners.cli.small_study import kinds, study_file
from tests.tiny import tiny_folder
from tests.world import World

from aligners.cli.table import study
from aligners.datamodules.store.keeping import kept_in
from aligners.errors import UserError
from aligners.studies.study_folder import ERROR, RESULT, StudyFolder

pytestmark = pytest.mark.usefixtures("cells_here")


@pytest.mark.slow
def test_a_study_of_sentence_vectors_keeps_one_row_a_text_and_finds_the_same(world: World, tmp_path: Path) -> None:
    work = {"similarity": {"options": {"measures": ["cka"]}}, "report": ["errors"]}
    work["fit"] = {"options": {"model": {"aligners": {"procrustes": "Procrustes"}}, "data": {"sites": [1, 2]}}}
    data = {"max_length": 60, "batch_size": 18, "rows": "mean"}
    for folder, rows in (("texts", {}), ("tokens", {"store_rows": "tokens"})):
        file = study_file(world, tmp_path, data=data | rows, store="own", **work)
        study(["run", file, "--folder", folder])
    texts, tokens = ([entry.manifest for entry in kept_in(Path(name, "store")) if entry.folder.is_dir()] for name in
                     ("texts", "tokens"))  # fmt: skip
    assert {store.identity.rows for store in tokens} == {""}
    assert {store.identity.rows for store in texts} == {"mean", "mean, special tokens left out"}
    assert all(sum(store.rows) == store.about["texts"] for store in texts)
    for table, off in (("fit", 0), ("similarity", 0), ("inject", 1e-4)):  # which runs the models
        found, expected = (pd.read_parquet(f"{name}/tables/{table}.parquet") for name in ("texts", "tokens"))
        numbers = found.select_dtypes("number").columns.difference(["seconds"])
        pd.testing.assert_frame_equal(found[numbers], expected[numbers], rtol=off, atol=off)


@pytest.mark.slow
def test_several_pairs_in_a_bank(world: World, tmp_path: Path) -> None:

    third = str(tiny_folder(tmp_path / "third", seed=2))
    fit = {"pairs_at_once": 3, "options": {"model": {"aligners": {"linear": "Linear"}}, "data": {"sites": [2]}}}
    pairs = {"given": [[world.model_x, world.model_y], [world.model_x, third]]}
    models = {"names": [world.model_x, world.model_y, third]}
    study(["run", study_file(world, tmp_path, models=models, pairs=pairs, fit=fit)])
    folder = tmp_path / "runs" / "small"
    assert kinds(folder) == ["fit_pairs", "inject", "inject"]
    injected = pd.read_parquet(folder / "tables" / "inject.parquet")
    linear = injected[injected["method"] == "linear"]
    found = set(zip(linear["model_x"], linear["model_y"], linear["site_x"], strict=True))
    assert found == {(world.model_x, other, 2) for other in (world.model_y, third)}
    assert len(pd.read_parquet(folder / "tables" / "fit.parquet")) == 2


@pytest.mark.slow
def test_cells_that_fail_are_shown_and_tried_again_and_interrupted_ones_go_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"options": {"measures": ["cka"], "controls": True, "groups": 99}}
    file = study_file(world, tmp_path, inject=None, similarity=wrong)
    with pytest.raises(SystemExit) as end:
        study(["run", file])
    assert end.value.code == 1
    folder = StudyFolder(tmp_path / "runs" / "small")
    (error,) = folder.path.glob(f"cells/*/{ERROR}")
    assert "Traceback" in error.read_text()
    (result,) = folder.path.glob(f"cells/*/{RESULT}")
    shown = capsys.readouterr().out
    assert "similarity" in shown
    assert f"runs/small/cells/{error.parent.name}/{ERROR}" in shown
    study(["status", str(folder.path)])
    assert "The jackknife leaves out `groups` = 99" in capsys.readouterr().out
    page = (folder.path / "report" / "report.html").read_text()
    assert "2 cells, 1 of them failed, " in page
    assert "The jackknife leaves out" in page
    first, place = json.loads(result.read_text()), result.parent
    assert not (place / "run" / "last.ckpt").exists()  # of no use any more
    result.unlink()
    (place / "run" / "last.ckpt").write_bytes(b"what a killed worker left")
    with pytest.raises(SystemExit):
        study(["run", file])
    assert "last.ckpt" in (place / ERROR).read_text()  # it tried to go on
    capsys.readouterr()
    with pytest.raises(SystemExit):
        study(["retry", str(folder.path)])
    assert "0 of 2 cells are done" in capsys.readouterr().out
    assert json.loads(result.read_text())["rows"] == first["rows"]  # from its beginning
    for table in (folder.path / "tables").iterdir():
        table.unlink()
    study(["collect", str(folder.path)])
    assert "fit.parquet" in capsys.readouterr().out
    fit = pd.read_parquet(folder.path / "tables" / "fit.parquet")
    assert list(pd.read_csv(folder.path / "tables" / "fit.csv")["fvu"]) == pytest.approx(list(fit["fvu"]))


def test_the_plan_alone_writes_nothing(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(["run", study_file(world, tmp_path), "--plan", "true"])
    shown = capsys.readouterr().out
    assert "small: 2 cells" in shown
    assert "inject" in shown
    assert not (tmp_path / "runs").exists()


def test_wrong_files_and_options(world: World, tmp_path: Path) -> None:
    misspelt = study_file(world, tmp_path, modles=[])
    for wrong, said in (("nothing.yaml", "no nothing.yaml"), (misspelt, r"got --modles\. Did you mean --models")):
        with pytest.raises(UserError, match=said):
            study(["run", wrong])
    for changes, words, said in (
        ({"report": ["erors"]}, [], r"got erors\. Did you mean errors\?.* `--imports FILE\.py`"),
        ({"similarity": {"options": {"data": {"layers": [9]}}}}, [], "`layers` names 9"),
        ({}, ["--workers", "-1"], "`workers` to be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            study(["run", study_file(world, tmp_path, **changes), *words])
    with pytest.raises(ValueError, match="the folder of a study"):
        study(["status", str(tmp_path)])
    assert not (tmp_path / "runs").exists()
