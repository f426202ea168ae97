"""Files of separated values as other programs write them: no row is lost, and none is of several, without a word."""

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import Texts
from aligners.errors import UserError

FILMS = [f"film number {number}" for number in range(60)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def lines_of(separator: str, films: list[str] = FILMS) -> list[str]:
    return [f"{film}{separator}{number % 2}" for number, film in enumerate(films)]


def load(path: Path, lines: list[str], **options: Any) -> Texts:
    path.write_text("\n".join([*lines, ""]))
    return load_texts(TextSource(str(path), **options))


def rows_of(texts: Texts) -> dict[str, Any]:
    splits = (texts.fit, texts.validation, texts.test)
    return {row["text"]: row.get("label") for split in splits for row in split}


def cautions(texts: Texts) -> str:
    return " ".join(texts.origin.get("cautions", ()))


EXPECTED = {film: number % 2 for number, film in enumerate(FILMS)}


@pytest.mark.parametrize(
    ("end", "separator", "streaming"),
    [("csv", ";", True), ("csv", "\t", False), ("tsv", ",", False), ("tsv", "\t", True)],
)
def test_another_separator_is_found_and_said(
    tmp_path: Path, end: str, separator: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"text{separator}label", *lines_of(separator)]
    texts = load(tmp_path / f"films.{end}", lines, streaming=streaming, max_texts=60 if streaming else None)
    assert rows_of(texts) == EXPECTED
    assert ("between its columns" in caplog.text) == ((end, separator) != ("tsv", "\t"))


def test_a_separator_within_texts_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    films = [f"{film}; long | short" for film in FILMS]
    texts = load(tmp_path / "films.csv", ["text", *films])
    assert set(rows_of(texts)) == set(films)
    assert "separator" not in caplog.text


@pytest.mark.parametrize("stray", ['"{}', '"{}" again', '{}" he said'])
def test_stray_quotation_marks_of_a_tsv_are_characters(tmp_path: Path, stray: str) -> None:
    films = [stray.format(film) if place in (3, 10) else film for place, film in enumerate(FILMS)]
    texts = load(tmp_path / "films.tsv", ["text\tlabel", *lines_of("\t", films)])
    assert rows_of(texts) == {film: place % 2 for place, film in enumerate(films)}
    assert ("films.tsv, as in line 5, are read as ordinary characters" in cautions(texts)) == stray.startswith('"')


def test_a_pair_of_stray_marks_that_could_be_one_quotation_is_not(tmp_path: Path) -> None:
    films = [*FILMS[:5], '"begins', *FILMS[6:9], 'ends"', *FILMS[10:]]
    lines = [f"{place % 2}\t{film}" for place, film in enumerate(films)]
    texts = load(tmp_path / "films.tsv", ["label\ttext", *lines])
    assert rows_of(texts) == {film: place % 2 for place, film in enumerate(films)}
    assert "as in line 7" in cautions(texts)


def test_texts_of_several_lines_are_read_as_before(tmp_path: Path) -> None:
    films = [f'"{film}, ""said"" he\nand more, indeed"' for film in FILMS]
    texts = load(tmp_path / "films.csv", ["text,label", *lines_of(",", films)])
    assert rows_of(texts) == {f'{film}, "said" he\nand more, indeed': label for film, label in EXPECTED.items()}
    assert cautions(texts) == ""


def test_rows_swallowed_by_a_quotation_among_real_ones_are_said_or_refused(tmp_path: Path) -> None:
    real = [f'"{film}, the second",{place % 2}' for place, film in enumerate(FILMS)]
    swallowing = ['"begins,1', *lines_of(",")[:8], 'ends",1']
    texts = load(tmp_path / "films.csv", ["text,label", *real, *swallowing])
    assert "lines 62 to 71 of" in cautions(texts)
    with pytest.raises(UserError, match=r"films\.csv, but that in line 62 ends before its value does, or never"):
        load(tmp_path / "films.csv", ["text,label", *real, *swallowing[:-1], '"again" he,0'])
    texts = load(tmp_path / "films.csv", ["text,label", *real, '"short" he said,1'])
    assert rows_of(texts)["short he said"] == 1
    assert "a quotation in line 62 of" in cautions(texts)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (lines_of("\t"), r"'0' is a value that other rows have .* Write names above it, such as 'text\\tlabel'"),
        ([f"{film}\t{'pos' if n % 3 else 'neg'}" for n, film in enumerate(FILMS)], "'neg' is a value"),
        ([f"{film}\t{n / 7 + 0.5}" for n, film in enumerate(FILMS)], r"'0\.5' is a value"),
        (["text\tlabel", *lines_of("\t")[:9], "text\tlabel", *lines_of("\t")[9:]], "first line of .* but line 11"),
        (["text\tlabel\tlabel", *[f"{line}\t5" for line in lines_of("\t")]], "its first line has 'label' twice"),
        (["text\tlabel", *[f"a\t{line}" for line in lines_of("\t")]], "line 2 has 3"),
        (["text\tlabel", *lines_of("\t"), "a\tb\t1"], "line 62 has 3"),
        (["text\tlabel"], "it has only one line, which is taken for the names of its columns: text, label"),
        (["text\tlabel", *(f'"{film}\t1' for film in FILMS), "odd"], "line 2 ends before its value does, or never"),
    ],
)
def test_a_table_that_loses_rows_is_refused_with_the_line(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(tmp_path / "films.tsv", lines)


def test_numbers_as_names_of_columns_and_row_names_of_r_are_none_of_that(tmp_path: Path) -> None:
    texts = load(tmp_path / "pandas.csv", [",0,1", *(f"{n},{line}" for n, line in enumerate(lines_of(",")))])
    assert texts.origin["text_columns"] == ["0"]
    texts = load(tmp_path / "r.tsv", ["text\tlabel", *(f'"{n}"\t{line}' for n, line in enumerate(lines_of("\t")))])
    assert rows_of(texts) == EXPECTED


def test_what_may_be_lost_is_said(tmp_path: Path) -> None:
    texts = load(tmp_path / "films.csv", ["this one is a text, not a name"[:18], *FILMS])
    assert "'this one is a text' looks like a text" in cautions(texts)
    texts = load(tmp_path / "films.csv", ["text,label", *lines_of(",")[:-2], *FILMS[-2:]])
    assert "2 rows of" in cautions(texts)
    assert "the first such row is in line 60" in cautions(texts)
    assert Counter(rows_of(texts).values()) == {0: 29, 1: 29, -1: 2}


def test_utf_16_without_a_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "films.tsv").write_bytes("\n".join(["text\tlabel", *lines_of("\t")]).encode("utf-16-le"))
    with pytest.raises(UserError, match=r"in UTF-8, but .*films\.tsv:1 contains null bytes, as UTF-16"):
        load_texts(TextSource(str(tmp_path / "films.tsv")))


def test_files_of_a_split_are_written_alike(tmp_path: Path) -> None:
    for name, separator in (("train-0", ","), ("train-1", ";")):
        (tmp_path / f"{name}.csv").write_text("\n".join([f"text{separator}label", *lines_of(separator)]))
    with pytest.raises(UserError, match=r"train-0\.csv and .*train-1\.csv differ in the separator"):
        load_texts(TextSource(str(tmp_path)))
