"""`--imports`: maps and measures from a file of the user's own."""

import gc
import json
import sys
from pathlib import Path

import pytest
from tests.processes import ROOT, Started
from tests.shell import options
from tests.test_adding_things import example
from tests.world import World

from aligners.cli.endings import what_to_mend
from aligners.cli.evaluate.similarity import similarity
from aligners.cli.table import evaluate, train
from aligners.datamodules.rows.policies import POLICIES
from aligners.errors import UserError
from aligners.fitting.saved_bank import load_bank
from aligners.maps.base import Aligner


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my_map", "my_measure", "my_rows", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    gc.collect()  # classes of other tests, which have the same names


def text_of(world: World) -> list[str]:
    own = options(data__text__source=world.fit, data__text__held_out=world.test, data__max_length=64)
    return [*own, *options(trainer__accelerator="cpu", trainer__logger=False)]


def test_a_map_of_a_users_file_is_fitted_and_injected(world: World) -> None:
    Path("my_map.py").write_text(example("# a map"))
    models = options(data__model_x=world.model_x, data__model_y=world.model_y)
    train(["fit", "--imports+", "my_map.py", "--model.aligners.scale", "Scale", *models, *text_of(world), "--run", "a"])
    del sys.modules["my_map"], Aligner.registry["Scale"]  # as in another process
    stored = ["inject", "--checkpoints+", "a/aligners.safetensors", "--closed_form", "[]", "--trainer.logger", "false"]
    with pytest.raises(ValueError, match="class 'Scale'"):
        evaluate([*stored, "--run", "b"])
    evaluate([*stored, "--imports+", "my_map.py", "--run", "c"])
    assert "scale" in Path("c/report.json").read_text()


LINEAR = '''
from aligners.maps import Linear as Ours


class Linear(Ours):
    """Ours, twice as large."""

    def forward(self, x):
        return 2 * super().forward(x)
'''


@pytest.mark.slow
def test_a_map_may_have_the_name_of_one_of_ours(world: World, tmp_path: Path) -> None:
    Path("my_map.py").write_text(LINEAR)
    models = options(data__model_x=world.model_x, data__model_y=world.model_y)
    words = ["fit", "--imports", "my_map.py", *models, *text_of(world), "--run", "g"]
    unclear = Started(tmp_path, "train", *words, "--model.aligners", "{mine: Linear}")
    both = Started(tmp_path, "train", *words, "--model.aligners", "{mine: my_map.Linear, ours: aligners.Linear}")
    assert unclear.end() == 2
    assert "give the full path of a class, as several are called Linear: " in unclear.said()
    assert both.end() == 0, both.said()
    with pytest.raises(UserError, match=r"class 'my_map\.Linear'.*Import the module"):  # not taken for ours
        load_bank(tmp_path / "g/aligners.safetensors")
    stored = ["inject", "--checkpoints+", "g/aligners.safetensors", "--closed_form", "[]", "--run", "h"]
    injected = Started(tmp_path, "evaluate", *stored, "--imports", "my_map.py")
    assert injected.end() == 0, injected.said()
    rows = json.loads((tmp_path / "h/report.json").read_text())["rows"]
    fvu = {row["method"]: row["fvu"] for row in rows if row["method"] in ("mine", "ours")}
    assert fvu["mine"] > fvu["ours"]


def test_a_map_of_contributing_is_fitted(world: World) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    Path("my_map.py").write_text(example("# aligners/maps/shift.py", page))
    models = options(data__model_x=world.model_x, data__model_y=world.model_x)
    words = ["--imports", "my_map.py", "--model.aligners", "{shift: Shift}", "--run", "e"]
    train(["fit", *words, *models, *text_of(world)])
    assert Path("e/aligners.safetensors").is_file()


def test_a_row_policy_of_a_users_file(world: World) -> None:
    Path("my_rows.py").write_text(example("# a row policy"))
    models = options(data__model_x=world.model_x, data__model_y=world.model_y)
    words = ["--imports", "my_rows.py", "--data.rows", "middle", "--model.aligners", "linear"]
    try:
        train(["fit", *words, *models, *text_of(world), "--run", "f"])
    finally:
        POLICIES.pop("middle", None)
    assert "rows: middle" in Path("f/config.yaml").read_text()


def test_a_measure_of_a_users_file_that_a_config_names_too(world: World) -> None:
    Path("my_measure.py").write_text(example("# a measure"))
    Path("own.yaml").write_text("imports: [my_measure.py]\nmeasures: [cka, covariance]\n")
    models = options(data__models=[world.model_x, world.model_y])
    words = ["similarity", "--imports", "my_measure.py", "--config", "own.yaml", *models, *text_of(world)]
    evaluate([*words, "--run", "d"])
    assert "covariance" in Path("d/similarity.json").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.py", "there is no file"), ("json.py", "no other module has"), ("no.such", "there is no module")],
)
def test_what_cannot_be_imported_is_refused(name: str, said: str) -> None:
    Path("json.py").write_text("")
    with pytest.raises(UserError, match=rf"^Expected .*{said}"):
        similarity.parser().parse_args(["--imports+", name])


def test_an_error_of_the_file_is_shown_with_its_place() -> None:
    Path("broken.py").write_text("raise KeyError('mine')")
    with pytest.raises(RuntimeError, match="raised an error when it was imported") as raised:
        similarity.parser().parse_args(["--imports+", "broken.py"])
    assert isinstance(raised.value.__cause__, KeyError)
    assert what_to_mend(raised.value) is None
    assert "broken" not in sys.modules
