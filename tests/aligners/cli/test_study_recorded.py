"""Studies of recorded states: run, interrupted, gone on with, collected; what needs a model is refused beforehand."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from tests.aligners.cli.small_study import MAPS, kinds
from tests.interrupting import strike

from aligners.cli.table import evaluate, study, train
from aligners.errors import UserError
from aligners.fitting.alignment import Alignment

pytestmark = pytest.mark.usefixtures("cells_here")
N = 160


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Three recordings of the same rows, of two widths."""
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(2, N, 6))
    np.save(tmp_path / "group.npy", np.arange(N) // 2)
    names = []
    for number, width in enumerate((5, 5, 4)):
        states = np.tanh(hidden @ draw.normal(size=(6, width))).astype(np.float32)
        np.save(tmp_path / f"{number}.npy", states)
        names.append(f"states:{tmp_path}/{number}.npy:group=group.npy")
    return names


def study_file(folder: Path, names: list[str], name: str = "recorded", **changes: Any) -> str:
    here = {"accelerator": "cpu", "logger": False}
    content = {
        "name": name,
        "models": {"names": names},
        "tasks": {"rows": {}},
        "data": {"batch_size": 8},
        "fit": {"options": {"model": {"aligners": MAPS}, "trainer": {"max_epochs": 1, **here}}},
        "inject": {"options": {"closed_form": [], "trainer": here}},
        "similarity": {"options": {"measures": ["cka"], "trainer": here}},
        "report": ["errors"],
        **changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return str(folder / f"{name}.yaml")


def test_a_study_of_recorded_states_is_interrupted_goes_on_and_is_collected(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names[1:]  # of two widths
    study(["run", study_file(tmp_path, names)])
    folder = tmp_path / "runs" / "recorded"
    assert kinds(folder) == ["fit", "inject", "similarity"]
    fit = pd.read_parquet(folder / "tables" / "fit.parquet")
    assert {*zip(fit["model_x"], fit["model_y"], strict=True)} == {(names[0], names[1])}
    assert fit["fvu"].between(0, 1).all()
    injected = pd.read_parquet(folder / "tables" / "inject.parquet")
    assert {"linear", "mlp", "mean"} <= {*injected["method"]}

    again = study_file(tmp_path, names, "again")
    resumed, real = [], Alignment.on_load_checkpoint
    monkeypatch.setattr(Alignment, "on_load_checkpoint", lambda *given: resumed.append(1) or real(*given))
    with strike(Alignment, "training_step", 4):  # the study puts the cell back, and it goes on
        study(["run", again])
    assert resumed
    for table in ("fit", "inject", "similarity"):
        one, other = (pd.read_parquet(tmp_path / "runs" / name / "tables" / f"{table}.parquet") for name in
                      ("recorded", "again"))  # fmt: skip
        numbers = one.select_dtypes("number").columns.difference(["seconds"])
        pd.testing.assert_frame_equal(one[numbers], other[numbers], rtol=0, atol=0)


def test_recordings_of_one_width_share_a_bank(tmp_path: Path, names: list[str]) -> None:
    third = tmp_path / "third.npy"
    np.save(third, np.load(tmp_path / "1.npy")[..., ::-1])
    three = [*names[:2], f"states:{third}:group=group.npy"]
    study(["run", study_file(tmp_path, three, similarity=None)])
    folder = tmp_path / "runs" / "recorded"
    assert kinds(folder) == ["fit_pairs", *["inject"] * 3]
    assert len(pd.read_parquet(folder / "tables" / "fit.parquet")) == 3 * 2 * len(MAPS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"probe": {}}, r"This command \(probe\) runs models"),
        ({"stages": ["pretrained", "random"]}, r"`stages` to be pretrained alone"),
        ({"data": {"sites": "0:7"}}, r"`sites` names 7"),
        ({"tasks": {"rows": {"text": {"source": "sst2"}}}}, r"`data\.text\.source` 'sst2' has no meaning for st"),
        ({"data": {"text": {"label_column": "b"}}}, r"so `data\.text\.label_column` 'b' has no meaning"),
        ({"data": {"packed": True}}, r"no `data\.packed` with recorded states, but got True"),
        ({"inject": {"options": {"generate": 4}}}, r"no `generate` with recorded states, but got 4"),
        ({"inject": {"options": {"kl": True}}}, r"no `kl` with recorded states, but got True"),
        ({"similarity": {"texts": {"more": {"text": {"source": "b.csv"}}}}}, r"`data\.text\.source` 'b\.csv' has no"),
    ],
)
def test_what_needs_a_model_is_refused_before_any_cell_runs(
    tmp_path: Path, names: list[str], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        study(["run", study_file(tmp_path, names, **changes)])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        (train, "fit --data.model_x {0} --data.model_y {1} --data.text.source b.csv", r"`data\.text\.source` 'b\.csv'"),
        (train, "universe --data.models {0} {1} {2} --data.text.label_column b", r"`data\.text\.label_column`"),
        (evaluate, "similarity --data.models {0} {1} --data.component mlp", r"no `data\.component` .* but got 'mlp'"),
        (evaluate, "inject --closed_form+ linear --data.model_x {0} --data.model_y {1} --generate 2", r"no `generate`"),
        (evaluate, "inject --closed_form+ linear --data.model_x {0} --data.model_y {1} --kl true", r"no `kl`"),
    ],
)
def test_options_that_need_a_model_are_refused_before_anything_is_written(
    tmp_path: Path, names: list[str], program: Any, words: str, said: str
) -> None:
    command, *options = words.format(*names).split()
    with pytest.raises(UserError, match=said):
        program([command, *options, "--run", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_recordings_beside_models_and_names_without_a_file_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match=r"there is no file or folder"):
        study(["run", study_file(tmp_path, [*names, f"states:{tmp_path}/none.npy"])])
    with pytest.raises(UserError, match=r"models or recorded states, but got 'states:.* beside the model 'embedded:0'"):
        study(["run", study_file(tmp_path, [*names, "embedded:0"])])
