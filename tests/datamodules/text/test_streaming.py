from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest

from datamodules.text.loading import load_texts, split_of, split_shares, text_key
from datamodules.text.sources import TextSource
from datamodules.text.texts import Texts


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


def films(n: int) -> list[dict[str, Any]]:
    return [{"text": f"a film, number {i}", "label": i % 2, "year": 1900 + i} for i in range(n)]


def write(path: Path, rows: list[dict[str, Any]], ending: str = "") -> str:
    table = datasets.Dataset.from_list(rows)
    {".csv": table.to_csv, ".jsonl": table.to_json, ".parquet": table.to_parquet}[path.suffix](path)
    with path.open("a") as file:
        file.write(ending)
    return str(path)


def texts_of(texts: Texts) -> dict[str, list[str]]:
    return {name: list(getattr(texts, name)["text"]) for name in ("fit", "validation", "test")}


def first_of_each(rows: list[dict[str, Any]], source: TextSource, sizes: dict[str, int]) -> dict[str, list[str]]:
    """What each split should take, by walking over the whole list."""
    shares = split_shares(source, draw_test=source.held_out is None)
    every: dict[str, list[str]] = {name: [] for name in sizes}
    for row in rows:
        every[split_of(text_key([row["text"]], source.seed), shares)].append(row["text"])
    return {name: every[name][:size] for name, size in sizes.items()}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_every_split_takes_the_first_texts_that_are_its_own(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"films{suffix}", films(3000))
    source = TextSource(path, text_columns=["text"], max_texts=60, streaming=True)
    texts = load_texts(source)
    sizes = {"fit": 60, "validation": math.ceil(60 * 0.05 / 0.75), "test": 16}
    assert texts_of(texts) == first_of_each(films(3000), source, sizes)
    for split in (texts.fit, texts.validation, texts.test):
        assert all(int(row["text"].split()[-1]) % 2 == row["label"] for row in split)
        assert split["id"][:] == list(range(len(split)))
    again = load_texts(source)
    assert again.fit._fingerprint == texts.fit._fingerprint
    whole = load_texts(TextSource(path, text_columns=["text"]))  # the same split as without streaming
    assert all(set(texts_of(texts)[name]) <= set(texts_of(whole)[name]) for name in sizes)


def test_no_more_is_read_than_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    write(folder / "train-1.jsonl", films(3000))
    (folder / "train-2.jsonl").write_text("{this file is never opened")
    source = TextSource(str(folder), text_columns=["text"], max_texts=60, streaming=True)
    texts = load_texts(source)
    read = texts.describe()["streamed_rows_read"]["fit"]
    last = max(int(text.split()[-1]) for texts in texts_of(texts).values() for text in texts)
    assert read == last + 1 < 300
    with pytest.raises(ValueError, match=r"`source`.*cannot be read to where `max_texts` asks"):
        load_texts(TextSource(str(folder), text_columns=["text"], max_texts=3000, streaming=True))


def test_a_stream_that_ends_gives_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "films.csv", films(200))
    streamed = load_texts(TextSource(path, max_texts=10_000, streaming=True))
    assert texts_of(streamed) == texts_of(load_texts(TextSource(path)))
    assert streamed.describe()["streamed_rows_read"] == {"fit": 200}


def test_an_official_split_is_streamed_and_its_texts_leave_the_others(tmp_path: Path) -> None:
    held = [{**row, "text": row["text"].upper()} for row in films(500)]
    test = write(tmp_path / "test.csv", held)
    path = write(tmp_path / "films.csv", films(3000))
    source = TextSource(path, held_out=test, max_texts=20, streaming=True)
    texts = load_texts(source)
    assert texts_of(texts)["test"] == [row["text"] for row in held[:20]]
    taken = first_of_each(films(3000)[20:], source, {"fit": 20, "validation": 2})
    assert texts_of(texts)["fit"] == taken["fit"]
    assert texts_of(texts)["validation"] == taken["validation"]
    said = texts.describe()
    assert said["streamed_rows_read"]["test"] == said["dropped_as_held_out"] == 20


def test_copies_count_once_and_are_said(tmp_path: Path) -> None:
    rows = [row for row in films(600) for _ in (0, 1)]
    source = TextSource(write(tmp_path / "films.jsonl", rows), text_columns=["text"], max_texts=30, streaming=True)
    texts = load_texts(source)
    assert texts_of(texts) == first_of_each(films(600), source, {"fit": 30, "validation": 2, "test": 8})
    assert texts.describe()["duplicates_dropped"] >= 30


def test_copies_count_like_others_without_deduplicating(tmp_path: Path) -> None:
    rows = [row for row in films(600) for _ in (0, 1)]
    source = TextSource(
        write(tmp_path / "films.jsonl", rows), text_columns=["text"], max_texts=30, streaming=True, deduplicate=False
    )
    assert texts_of(load_texts(source)) == first_of_each(rows, source, {"fit": 30, "validation": 2, "test": 8})


def test_names_of_classes_are_kept(tmp_path: Path) -> None:
    rows = [{**row, "label": ("bad", "good")[row["label"]]} for row in films(400)]
    source = TextSource(write(tmp_path / "films.jsonl", rows), text_columns=["text"], max_texts=30, streaming=True)
    texts = load_texts(source)
    assert texts.label_names == ["bad", "good"]
    assert set(texts.fit["label"]) == {0, 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"streaming": True}, r"`streaming`.*`max_texts` is not set"),
        ({"source": "imdb", "streaming": True, "max_texts": 5}, r"`streaming`.*'imdb' is at hand"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TextSource(**{"source": "films.csv"} | options)


def test_a_column_that_is_not_there_is_refused_before_the_stream_is_read(tmp_path: Path) -> None:
    path = tmp_path / "films.jsonl"
    path.write_text(json.dumps({"text": "a", "title": "b"}) + "\n")
    for columns, says in ((["body"], "`text_columns`.*body"), (None, "2 of its columns hold text")):
        with pytest.raises(ValueError, match=says):
            load_texts(TextSource(str(path), text_columns=columns, max_texts=5, streaming=True))
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"`source`"):
        load_texts(TextSource(str(path), max_texts=5, streaming=True))
