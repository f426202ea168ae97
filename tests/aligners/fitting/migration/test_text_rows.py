"""Files of texts, queries and judgements."""

import json
from pathlib import Path
from typing import Any

import pytest

from aligners.errors import UserError
from aligners.fitting.migration.text_rows import read_judged, read_texts


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def beir(folder: Path, judgements: str = "q1\td2\t1\nq1\td1\t2\nq2\td1\t0\n") -> Path:
    lines(folder / "corpus.jsonl", {"_id": "d1", "title": "A", "text": "one"}, {"_id": "d2", "text": "two"})
    queries = [{"_id": name, "text": f"ask {name}", "domain": name} for name in ("q0", "q1", "q2")]
    lines(folder / "queries.jsonl", *queries)
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judgements}")
    return folder


def test_texts_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert read_texts(tmp_path / "a.txt").texts == ["one", "two"]
    rows = read_texts(lines(tmp_path / "a.jsonl", {"_id": 1, "title": "A", "text": "one", "domain": "x"}))
    assert (rows.texts, rows.ids, rows.domains) == (["A one"], ["1"], ["x"])
    (tmp_path / "a.csv").write_text('id,text,kind\n7,"one, and two",x\n')
    rows = read_texts(tmp_path / "a.csv", "kind")
    assert (rows.texts, rows.ids, rows.domains) == (["one, and two"], ["7"], ["x"])
    assert read_texts(tmp_path / "a.csv").domains is None


def test_queries_without_a_relevant_document_are_left_out(tmp_path: Path) -> None:
    judged = read_judged(beir(tmp_path))
    assert judged.queries.texts == ["ask q1"]
    assert judged.queries.domains == ["q1"]
    assert judged.corpus.texts == ["A one", "two"]
    assert judged.relevant == [{1: 1.0, 0: 2.0}]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_texts(tmp_path / "a.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match=r"Expected texts in .*, but got none"):
        read_texts(tmp_path / "empty.txt")
    with pytest.raises(UserError, match="each id once"):
        read_texts(lines(tmp_path / "a.jsonl", {"_id": 1, "text": "a"}, {"_id": 1, "text": "b"}))
    with pytest.raises(UserError, match="cannot be read"):
        read_texts(lines(tmp_path / "b.jsonl", {"words": "a"}))
    with pytest.raises(UserError, match="'d9' is not there"):
        read_judged(beir(tmp_path / "x", "q1\td9\t1\n"))
    with pytest.raises(UserError, match="no query has a relevant document"):
        read_judged(beir(tmp_path / "y", "q1\td1\t0\n"))
    with pytest.raises(UserError, match="cannot be read"):
        read_judged(beir(tmp_path / "z", "q1 d1\n"))
    (tmp_path / "z" / "qrels" / "test.tsv").unlink()
    with pytest.raises(UserError, match="there is neither"):
        read_judged(tmp_path / "z")
