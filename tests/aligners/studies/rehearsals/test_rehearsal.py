"""Rehearsals: what stands in for models and data sets, what is cut, and what is said of it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.aligners.cli.small_study import stand_ins_here

from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import KNOWN, TextSource
from aligners.models.loading.load_models import load_frozen
from aligners.studies.rehearsals.cuts import cut, layers_named
from aligners.studies.rehearsals.notes import words
from aligners.studies.rehearsals.rehearsal import ABOUT, environment, prepare
from aligners.studies.rehearsals.stand_ins import generated
from aligners.studies.spec import read_study

EVERY = {"names": "org/m{seed}", "seeds": 9}


def plain(**changes: Any) -> dict[str, Any]:
    """The content of a study file with all its keys."""
    usual = {"name": "s", "models": dict(EVERY), "tasks": {"t": {"text": {"source": "rte"}}}}
    return asdict(read_study({**usual, **changes}))


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """Prepare a rehearsal, take what stands in, and read its study."""
    file = prepare({"rate": 1.0, "rehearse": True}, plain(**changes), folder)
    stand_ins_here(monkeypatch, environment(folder))
    return yaml.safe_load(file.read_text())


def test_a_study_is_cut_to_a_few_seeds_of_each_group_and_few_tasks_texts_and_steps() -> None:
    options = {"trainer": {"max_epochs": 60, "val_check_interval": 0.5}, "data": {"text": {"max_texts": None}}}
    study, words = cut(
        plain(
            models={**EVERY, "groups": {"a": ["org/m1", "org/m2"], "b": [f"org/m{seed}" for seed in range(3, 9)]}},
            tasks={name: {"text": {"source": name, "max_held_out": 7}} for name in ("rte", "mrpc", "sst2")},
            pairs={"random": 30},
            fit={"options": options},
            similarity={"options": {"data": {"layers": [9]}}},
        ),
        ABOUT,
    )
    assert study["models"]["names"] == [f"org/m{seed}" for seed in range(6)]
    assert study["models"]["groups"] == {"a": ["org/m1", "org/m2"], "b": ["org/m3", "org/m4", "org/m5"]}
    assert study["pairs"]["random"] == 15
    assert study["fit"]["tasks"] == ["rte", "mrpc"]
    assert study["similarity"]["tasks"] is None
    assert study["fit"]["options"]["trainer"] == {"max_epochs": 2, "val_check_interval": 0.5, "max_steps": 6}
    assert study["fit"]["options"]["data"]["text"] == {"max_texts": 160, "max_held_out": 120}
    assert study["tasks"]["rte"]["text"] == {"source": "rte", "max_texts": 160, "max_held_out": 7}
    assert {"6 of 9 models", "fit on 2 of 3 tasks", "max_epochs at most 2"} <= set(words)
    assert layers_named(study) == 9
    read_study(study)


def test_what_is_not_known_is_assumed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "known": {"text": {"source": "stsb"}},
        "own": {"text": {"source": "org/texts", "text_columns": ["a", "b"], "held_out": "dev"}},
        "trees": {"text": {"source": "none-train.conllu", "held_out": "none-test.conllu"}},
        "there": {"text": {"source": "rotten_tomatoes"}},
    }
    study = prepared(
        tmp_path / "r", monkeypatch, models={"names": ["org/new-gpt2", "xlnet/xlnet-large-cased"]}, tasks=texts
    )
    assert (study["name"], study["rate"], "rehearse" in study) == ("s-rehearsal", 1.0, False)
    for name in ("known", "own", "trees"):
        read = load_texts(TextSource(**study["tasks"][name]["text"]))
        assert len(read.test) <= 120 < len(read.fit) <= 160
    assert load_texts(TextSource(**study["tasks"]["known"]["text"])).regression
    first, second = (load_frozen(name) for name in study["models"]["names"])
    assert (first.model.config.model_type, first.model.config.num_hidden_layers) == ("gpt2", 4)
    assert (second.model.config.model_type, second.model.config.hidden_size) == ("xlnet", 24)
    assert second.tokenizer is not None
    assert second.tokenizer("the")["input_ids"][-1] == second.tokenizer.cls_token_id  # a tokenizer of the family
    said = "\n".join(words(tmp_path / "r"))
    unknown = said[said.index("Nothing is known") : said.index("What was cut")]
    assert "org/new-gpt2" in unknown
    assert "org/texts: generated texts (train, dev; a, b, label); assumed: splits and columns" in unknown
    assert "xlnet" not in unknown
    assert "none-test.conllu: generated .conllu" in said
    assert "rotten_tomatoes" not in said


def test_columns_are_those_of_the_data_set_and_not_those_that_a_study_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"t": {"text": {"source": "nyu-mll/glue", "subset": "qnli", "text_columns": ["questoin"]}}}
    study = prepared(tmp_path / "r", monkeypatch, tasks=wrong)
    with pytest.raises(ValueError, match="questoin"):
        load_texts(TextSource(**study["tasks"]["t"]["text"]))


@pytest.mark.parametrize("name", KNOWN["hub"])
def test_data_sets_with_a_name_of_their_own_have_stand_ins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = prepared(tmp_path / "r", monkeypatch, tasks={"t": {"text": {"source": name}}})
    texts = load_texts(TextSource(**study["tasks"]["t"]["text"]))
    assert set(texts.test["label"]) == {0, 1}
    assert len(texts.fit) == 160
    (note,) = [
        note for note in json.loads((tmp_path / "r/rehearsal.json").read_text())["stood_in"] if "set" in note["what"]
    ]
    assert note["name"].endswith(name)


def test_a_data_set_that_can_be_reached_gives_its_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = generated({"mine": "text", "label": ["no", "yes"]}, 400, seed=7).to_iterable_dataset()
    monkeypatch.setattr("aligners.studies.rehearsals.stand_ins.load_dataset", lambda *_, **__: {"train": real})
    study = prepared(tmp_path / "r", monkeypatch, tasks={"t": {"text": {"source": "org/real"}}})
    assert load_texts(TextSource(**{**study["tasks"]["t"]["text"], "max_texts": None})).origin["rows_read"] == [240]
    notes = json.loads((tmp_path / "r" / "rehearsal.json").read_text())
    assert notes["stood_in"][-1]["by"] == "its first rows (train)"


def test_only_an_earlier_rehearsal_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path / "r", monkeypatch)
    (tmp_path / "r" / "cells").mkdir()
    prepared(tmp_path / "r", monkeypatch)
    assert not (tmp_path / "r" / "cells").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.csv").touch()
    with pytest.raises(ValueError, match="free for a rehearsal"):
        prepared(tmp_path / "other", monkeypatch)
    assert (tmp_path / "other" / "results.csv").exists()
