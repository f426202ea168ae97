"""What a model was fitted on travels with it, and nobody measures it on that."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tests.tiny import tiny_folder
from tests.world import sentences, write_texts

from aligners.datamodules.model_texts import labelled_texts
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import FITTED, FittedTexts, hash_texts, words_on
from aligners.reports.finished_runs import make_report


def table(*texts: str, **columns: list[str]) -> Dataset:
    return Dataset.from_dict({"text": list(texts), **columns})


def test_texts_are_known_again_whatever_their_case_and_white_space(tmp_path: Path) -> None:
    known = FittedTexts.of({"source": "a"}, table("A film", "the plot"), table("Straße"))
    assert known.among(hash_texts(table("a  FILM\n", "a films", "STRASSE", ""))).tolist() == [True, False, True, False]
    assert known.keys.dtype == np.int64
    assert (np.diff(known.keys) > 0).all()
    known.save(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / FITTED]
    loaded = FittedTexts.load(tmp_path)
    for again in (loaded, FittedTexts.from_state(known.state()), known | known, known | None):
        assert again is not None
        assert np.array_equal(again.keys, known.keys)
        assert again.origins == known.origins == [{"source": "a", "n_texts": 3}]
    both = known | FittedTexts.of({"source": "b"}, table("not funny"))
    assert both.among(hash_texts(table("not funny", "a film"))).all()
    assert [origin["source"] for origin in both.origins] == ["a", "b"]
    assert FittedTexts.load(tmp_path / "elsewhere") is None
    (tmp_path / FITTED).write_bytes(b"half of it")
    with pytest.raises(ValueError, match=rf"{FITTED} to say which texts its model was fitted on, but it cannot"):
        FittedTexts.load(tmp_path)


def test_a_sentence_of_a_fitted_pair_was_fitted_on_but_not_another_pair_of_it() -> None:
    assert FittedTexts.of({}, table("a film")).keys.tolist() == [6653181471160607921]  # and tomorrow
    known = FittedTexts.of({}, table("a film", text_pair=["a plot"]))
    assert known.among(hash_texts(table("a film", "a plot", "a joke"))).tolist() == [True, True, False]
    pairs = table("a film", "a film", text_pair=["a plot", "a joke"])
    assert known.among(hash_texts(pairs)).tolist() == [True, False]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.csv", sentences(120))


@pytest.mark.parametrize("made", [pair_states, lambda x, y, **more: labelled_texts(y, bases=x, **more)])
def test_models_are_measured_on_texts_that_they_were_not_trained_on(
    made: Any, source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = (str(tiny_folder(tmp_path / name, seed=seed)) for seed, name in enumerate("xy"))
    trained, measured = TextSource(source), TextSource(source, test_share=0.5, seed=1)
    first, whole = load_texts(trained), load_texts(measured)
    first.fitted("fit").save(Path(x))
    same = made(x, y, text=trained, max_length=60)
    assert same.texts.test["text"][:] == first.test["text"][:]
    assert "left_out" not in same.texts.describe()
    with caplog.at_level(logging.WARNING):
        data = made(x, y, text=measured, max_length=60)
        expected = [text for text in whole.test["text"] if text not in set(first.fit["text"])]
    assert 0 < len(expected) < len(whole.test)
    assert data.texts.test["text"][:] == expected
    assert data.texts.test["id"][:] == list(range(len(expected))) == data.split("test").ids.tolist()
    assert data.texts.fit["text"][:] == whole.fit["text"][:]
    dropped = len(whole.test) - len(expected)
    assert data.describe()["text"]["left_out"] == {
        "texts": dropped, "of": len(whole.test), "fitted_on_them": {x: dropped},
    }  # fmt: skip
    said = f"{dropped} of {len(whole.test)} held-out texts of {source!r} were dropped: "
    said += f"{x} was fitted on {dropped} of them."
    data.leave_out({"a map": FittedTexts.of({}, table("nothing of it"))})
    assert caplog.messages.count(said) == 1
    assert said in make_report("similarity", data.describe(), [], layers=[], distances=[]).sentences


def test_maps_are_measured_on_texts_that_they_were_not_fitted_on(source: str, tmp_path: Path) -> None:
    x, y = (str(tiny_folder(tmp_path / name, seed=seed)) for seed, name in enumerate("xy"))
    data = pair_states(x, y, text=TextSource(source, seed=1), max_length=60)
    data.setup("test")
    before = data.split("test")
    data.leave_out({"a": FittedTexts.of({}, table("nothing of it"))})
    assert data.split("test") is before
    texts = data.texts.test["text"][:]
    known = {"a": FittedTexts.of({}, table(*texts[:3])), "b": FittedTexts.of({}, table(*texts[2:4]))}
    data.leave_out(known)
    assert len(data.split("test")) == len(texts) - 4
    described = data.describe()["text"]
    assert words_on(described, "left_out") == [
        f"4 of {len(texts)} held-out texts of {source!r} were dropped: a was fitted on 3 of them, b was fitted on 2."
    ]
    data.leave_out({})
    assert len(data.split("test")) == len(texts)
    with pytest.raises(ValueError, match=rf"maps were fitted on all {len(texts)} held-out texts.*\(a\)\. Use"):
        data.leave_out({"a": FittedTexts.of({}, data.texts.test)})


def test_an_embedded_model_is_known_by_its_folder_too(source: str, tmp_path: Path) -> None:
    model = "embedded:0:layers=1,width=8,vocabulary=200,epochs=1"
    made = labelled_texts(model, text=TextSource(source), cache=tmp_path)
    made.prepare_data()
    (folder,) = tmp_path.rglob("seed-0")
    known = FittedTexts.load(folder)
    assert known is not None
    assert known.among(hash_texts(made.texts.fit)).all()
    assert not known.among(hash_texts(made.texts.validation)).any()
    assert known.origins[0]["splits"] == ["fit"]
    (folder / FITTED).unlink()  # one that was made before there was such a file
    made = labelled_texts(model, text=TextSource(source), cache=tmp_path)
    made.prepare_data()
    assert (folder / FITTED).is_file()
    other = labelled_texts(str(folder), text=TextSource(source, test_share=0.5, seed=1))
    assert "left_out" in other.texts.describe()


def test_a_classifier_has_seen_what_its_base_has(source: str, tmp_path: Path) -> None:
    base = str(tiny_folder(tmp_path / "base"))
    FittedTexts.of({"source": "before"}, table("a film", "the plot")).save(Path(base))
    data = labelled_texts(base, text=TextSource(source), max_length=60)
    known = data.trained_on(base)
    assert known.among(hash_texts(table("a film", "the plot"))).all()
    assert known.among(hash_texts(data.texts.fit)).all()
    assert not known.among(hash_texts(data.texts.validation)).any()  # they choose nothing
    assert [origin["source"] for origin in known.origins] == [source, "before"]
