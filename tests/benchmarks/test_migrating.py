"""What migrations are measured on: files of texts, and Cranfield in BEIR's form."""

import json
from pathlib import Path

import pytest
from benchmarks.cranfield import write
from benchmarks.migrating import ASKED, copy_judged, query_of, write_texts

from aligners.fitting.migration.text_rows import read_judged, read_texts
from benchmarks import migrating


def test_cranfield_is_read_as_its_readme_says(tmp_path: Path) -> None:
    (tmp_path / "cran.all.1400").write_text(
        ".I 1\n.T\nlift of\na wing .\n.A\nme\n.B\nj. 1958\n.W\nlift of\na wing .\n  the text\nof it .\n"
        ".I 2\n.T\n\n.A\n.B\n.W\n.I 3\n.T\nheat .\n.A\n.B\n.W\nanother text .\n"
    )
    (tmp_path / "cran.qry").write_text(".I 001\n.W\nwhat of\nlift .\n.I 004\n.W\nand heat\n")
    (tmp_path / "cranqrel").write_text("1 1 2\n1 3 -1\n1 2 1\n2 3 4 \n2 1  5\n")
    write(tmp_path, tmp_path / "beir")
    judged = read_judged(tmp_path / "beir")
    assert judged.corpus.texts == ["lift of a wing . the text of it .", "", "heat . another text ."]
    assert judged.queries.texts == ["what of lift .", "and heat"]
    assert judged.queries.ids == ["1", "2"]
    assert judged.relevant == [{0: 3.0}, {2: 1.0}]
    copy_judged(tmp_path / "beir", tmp_path / "study")
    assert read_texts(tmp_path / "study" / "texts.jsonl").ids == ["1", "2", "3"]


def test_no_text_is_fitted_on_and_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{'long' * place}{text}" for text in range(60) for place in range(7)]
    every = [" ".join(words[7 * text : 7 * text + 7]) for text in range(60)]
    monkeypatch.setattr(migrating, "documents_of", lambda domain: [f"{domain} {text}" for text in every])
    write_texts(tmp_path, 20, 15)
    judged, texts = read_judged(tmp_path), read_texts(tmp_path / "texts.jsonl")
    assert (len(judged.corpus), len(judged.queries), len(texts)) == (30, 15, 15)
    assert set(texts.domains or []) == {"reviews"}
    assert not set(texts.texts) & set(judged.corpus.texts)
    for query, relevant in zip(judged.queries.texts, judged.relevant, strict=True):
        (place,) = relevant
        document = judged.corpus.texts[place]
        assert query == query_of(document)
        assert len(query.split()) == ASKED
        assert set(query.split()) < set(document.split())
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["_id"] == "reviews-0"
