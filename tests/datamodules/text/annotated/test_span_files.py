from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from datamodules.text.annotated.files import holds_spans, read_spans, task_name
from datamodules.text.annotated.sentence import Target

ROW = {
    "text": "The  cat sat",
    "info": {"source": "x"},
    "targets": [
        {"span1": [0, 2], "label": "NP", "info": {}},
        {"span1": [2, 3], "span2": [0, 2], "label": ["agent", "animate"]},
    ],
}


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "srl.train.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_spans_are_read(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    (found,) = read_spans(write(tmp_path, ROW, ""), counts)
    assert found.words == ("The", "cat", "sat")
    assert found.heads == ()
    assert found.targets == (
        Target("srl", (0, 2), (), ("NP",)),
        Target("srl", (2, 3), (0, 2), ("agent", "animate")),
    )
    assert counts == {"sentences": 1, "words": 3, "spans": 2}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"span1": [0, 4], "label": "x"}, r"expected `span1` to be within the 3 words, but got \[0, 4\]"),
        ({"span1": [1, 1], "label": "x"}, r"expected `span1` to be within"),
        ({"span1": [0, 1], "span2": [-1, 2], "label": "x"}, r"expected `span2` to be within"),
        ({"span1": [0.0, 1.5], "label": "x"}, r"expected `span1` to be two whole numbers, but got \[0\.0, 1\.5\]"),
        ({"span1": [0, 1, 2], "label": "x"}, r"expected `span1` to be two whole numbers"),
        ({"span1": [0, 1], "span2": ["0", "1"], "label": "x"}, r"expected `span2` to be two whole numbers"),
        ({"span2": [0, 1], "label": "x"}, r"there is no 'span1'"),
        ({"span1": [0, 1]}, r"there is no 'label'"),
        ({"span1": [0, 1], "label": 3}, r"expected `label` to be a string or a list of strings, but got 3"),
    ],
)
def test_targets_that_make_no_sense_are_refused_with_file_and_line(target: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"srl\.train\.jsonl:2 cannot be read as a sentence with spans: {says}"):
        list(read_spans(write(tmp_path, ROW, ROW | {"targets": [target]})))


def test_only_files_with_targets_hold_spans(tmp_path: Path) -> None:
    assert holds_spans(write(tmp_path, "", ROW))
    for other in ({"text": "a"}, {"text": "a", "targets": 3}, "no JSON", []):
        assert not holds_spans(write(tmp_path, other))


@pytest.mark.parametrize(
    ("file", "task"),
    [
        ("ner.jsonl", "ner"),
        ("ner.en.jsonl", "ner"),
        ("ner.train.jsonl", "ner"),
        ("ner_ontonotes_en_train.json", "ner_ontonotes_en"),
        ("ner-test-00000-of-00002.jsonl", "ner"),
        ("train.edges.json", "edges"),
        ("conll-2003_dev.json", "conll-2003"),
        ("test.json", "spr"),
        ("train.0.85.json", "spr"),
        ("trained.json", "trained"),
    ],
)
def test_files_of_all_splits_are_about_one_task(file: str, task: str) -> None:
    assert task_name(Path("tasks") / "spr" / file) == task


def test_a_line_may_name_its_task_and_a_file_that_of_another(tmp_path: Path) -> None:
    path = write(tmp_path, ROW, ROW | {"task": "roles"})
    assert [{target.task for target in found.targets} for found in read_spans(path)] == [{"srl"}, {"roles"}]
    other = [target.task for found in read_spans(path, like=tmp_path / "ner.train.json") for target in found.targets]
    assert other == ["ner", "ner", "roles", "roles"]


@pytest.mark.parametrize("change", [{"text": " "}, {"task": 3}, {"task": ""}])
def test_a_line_without_words_or_with_a_task_that_is_no_name_is_refused(change: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"srl\.train\.jsonl:2 cannot be read.*expected words in `text` and a named"):
        list(read_spans(write(tmp_path, ROW, ROW | {"targets": []} | change)))


def test_a_mark_of_byte_order_hides_no_spans(tmp_path: Path) -> None:
    path = write(tmp_path, ROW)
    path.write_bytes(path.read_text().encode("utf-8-sig"))
    assert holds_spans(path)
    assert len(list(read_spans(path))) == 1
