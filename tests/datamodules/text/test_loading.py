"""Splits are made once, and are never stale."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from aligners.datamodules.text import loading
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.splitting import RawTexts
from aligners.datamodules.text.texts import Texts
from aligners.models.embedded import cache_folder

SPLITS = ("fit", "validation", "test")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TextSource]:
    """What was drawn, and not taken from the cache, which is empty."""
    drawn, divide = list[TextSource](), loading.divide

    def count(source: TextSource, raw: RawTexts) -> Texts:
        drawn.append(source)
        return divide(source, raw)

    monkeypatch.setattr(loading, "divide", count)
    monkeypatch.setenv("ALIGNERS_CACHE", str(tmp_path / "cache"))
    return drawn


def written(path: Path, word: str = "films", when: float = 1e9) -> TextSource:
    """A file of sentences with classes, of that date; its size does not depend on the word if that has five letters."""
    lines = [f"{word} number {number},{('good', 'bad')[number % 2]}" for number in range(200)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    os.utime(path, (when, when))
    return TextSource(str(path))


def content(texts: Texts) -> list[object]:
    splits = [(getattr(texts, name)[:], getattr(texts, name).features) for name in SPLITS]
    return [splits, texts.label_names, texts.origin]


def test_texts_of_one_setting_are_drawn_once_and_stay_the_same(drawn: list[TextSource], tmp_path: Path) -> None:
    source = written(tmp_path / "films.csv")
    first, again = load_texts(source), load_texts(source)
    assert len(drawn) == 1
    assert content(first) == content(again) == content(loading.divide(source, loading.read_source(source)))
    assert [split._fingerprint for split in (first.fit, first.test)] == [
        again.fit._fingerprint,
        again.test._fingerprint,
    ]
    for number, other in zip((3, 5), (replace(source, seed=1), replace(source, validation_share=0.0)), strict=True):
        texts = load_texts(other)
        assert (len(drawn), content(texts) == content(first)) == (number, False)
        assert content(texts) == content(loading.divide(other, loading.read_source(other)))


def test_texts_of_a_file_that_has_changed_are_drawn_again(
    drawn: list[TextSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_texts(written(tmp_path / "films.csv"))
    texts = load_texts(written(tmp_path / "films.csv", "books", when=1e9 + 1))
    assert (len(drawn), texts.fit["text"][0].split()[0]) == (2, "books")
    monkeypatch.setattr(loading, "_code", lambda: "another version")
    load_texts(TextSource(str(tmp_path / "films.csv")))
    assert len(drawn) == 3


def test_what_could_not_be_written_whole_is_drawn_again(
    drawn: list[TextSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, save = written(tmp_path / "films.csv"), datasets.Dataset.save_to_disk
    calls = iter([True, False])

    def fail(self: datasets.Dataset, path: Path) -> None:
        if not next(calls):
            raise OSError(28, "No space left on device")
        save(self, path)

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", fail)
    with pytest.raises(OSError, match="No space"):
        load_texts(source)
    assert not [place for place in (cache_folder() / "texts").iterdir() if place.is_dir()]
    monkeypatch.setattr(datasets.Dataset, "save_to_disk", save)
    assert len(load_texts(source).fit) > 100
    assert len(drawn) == 2


def test_of_cells_that_begin_together_one_draws(drawn: list[TextSource], tmp_path: Path) -> None:
    source = written(tmp_path / "films.csv")

    def load(_: int) -> object:
        return content(load_texts(source))

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(load, range(4))
    assert all(other == first for other in others)
    assert len(drawn) == 1


def test_without_a_place_to_keep_them_texts_are_drawn(drawn: list[TextSource], tmp_path: Path) -> None:
    (tmp_path / "cache").touch()  # where a folder would be
    source = written(tmp_path / "films.csv")
    assert content(load_texts(source)) == content(load_texts(source))
    assert len(drawn) == 2


def test_a_split_without_texts_is_empty_again(drawn: list[TextSource], tmp_path: Path) -> None:
    source = replace(written(tmp_path / "films.csv"), validation_share=0.0)
    first, again = load_texts(source), load_texts(source)
    assert (len(drawn), len(first.validation)) == (1, 0)
    assert content(first) == content(again) == content(loading.divide(source, loading.read_source(source)))
