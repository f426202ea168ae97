from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.cells import study_of

from aligners.models.loading.load_models import load_frozen
from aligners.models.loading.model_files import read_config
from aligners.studies.rehearsal import LIMIT, rehearsed
from aligners.studies.spec import read_study

HUB = {"names": "nobody/m{seed}", "seeds": 9}


def cut(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    plain, lines = rehearsed(asdict(study_of(**changes)), folder)
    read_study(plain)
    return plain, lines


def test_texts_and_steps_are_cut_and_what_is_not_there_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    groups = {"few": ["nobody/m0", "nobody/m8"], "none": ["nobody/m7"]}
    tasks = {
        "here": {"text": {"source": "grammar", "max_texts": 5}},
        "gone": {"text": {"source": "no.csv"}, "labels": {}},
    }
    options = {"trainer": {"val_check_interval": 200, "max_epochs": 3}}
    plain, lines = cut(
        tmp_path, models={**HUB, "groups": groups}, tasks=tasks, fit={"options": options}, pairs={"random": 9}
    )
    names = [str(tmp_path / "models" / f"nobody/m{seed}") for seed in range(3)]
    assert plain["models"]["names"] == names
    assert plain["models"]["groups"] == {"few": names[:1]}
    assert plain["pairs"]["random"] == 3
    assert plain["name"] == "small-rehearsal"
    assert plain["fit"]["options"]["trainer"] == {"val_check_interval": LIMIT // 2, "max_epochs": 3, "max_steps": LIMIT}
    assert plain["tasks"]["here"]["text"] == {"source": "grammar", "max_texts": 5, "max_held_out": LIMIT}
    assert plain["tasks"]["gone"] == {"text": {"source": "grammar", "max_texts": LIMIT, "max_held_out": LIMIT}}
    assert "no.csv: the source grammar, as it cannot be read" in lines
    assert "nobody/m2: a random BERT of width 16" in lines
    config = read_config(names[0], {"revision": None, "trust_remote_code": False})
    assert (config.hidden_size, config.num_hidden_layers) == (16, 12)


@pytest.mark.parametrize("sites", ["norm", "2:norm", [3, 13]])
def test_stand_ins_have_a_final_norm_where_its_output_is_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: str | list[int]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain, lines = cut(tmp_path, models={**HUB, "seeds": 2}, data={"sites": sites})
    assert "nobody/m1: a random BERT of width 16" in lines
    frozen = load_frozen(plain["models"]["names"][1])
    assert (frozen.depth, frozen.last_site, frozen.width, frozen.task) == (12, 13, 16, "masked")


def test_models_of_this_machine_stay_and_the_first_pairs_that_are_given(tmp_path: Path) -> None:
    names = [f"embedded:{seed}" for seed in range(9)]
    plain, _ = cut(tmp_path, models={"names": names}, pairs={"given": [[names[0], name] for name in names[1:]]})
    assert plain["models"]["names"] == names[:4]
    assert len(plain["pairs"]["given"]) == 3
    assert not list(tmp_path.iterdir())
