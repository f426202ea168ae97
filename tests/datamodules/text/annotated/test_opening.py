from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from datamodules.text.annotated.grammar import sentences
from datamodules.text.annotated.sentence import ANNOTATION, Sentence
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource

LINE = "{n}\t{word}\t_\tNOUN\t_\t_\t{head}\tdep\t_\t_\n"


def treebank(path: Path, first: int, count: int) -> None:
    """Sentences of two words, the second of which is the root."""
    chosen = range(first, first + count)
    path.write_text(
        "".join(LINE.format(n=1, word=f"w{n}", head=2) + LINE.format(n=2, word="is", head=0) + "\n" for n in chosen)
    )


def test_a_folder_of_a_treebank_is_text_with_trees_in_its_own_splits(tmp_path: Path) -> None:
    for name, first, count in (("train", 0, 90), ("dev", 100, 10), ("test", 200, 20)):
        treebank(tmp_path / f"xx_own-ud-{name}.conllu", first, count)
    texts = load_texts(TextSource(str(tmp_path), held_out="test"))
    assert texts.test["text"][:2] == ["w200 is", "w201 is"]
    assert (len(texts.fit) + len(texts.validation), len(texts.test)) == (90, 20)
    row = texts.test[3]
    assert Sentence.of(row["text"], row[ANNOTATION]).heads == (2, 0)
    assert texts.describe()["annotated"] == ["90 sentences, 180 words", "20 sentences, 40 words"]


def test_lines_with_spans_are_text_with_labels(tmp_path: Path) -> None:
    rows = [{"text": f"a{n}  cat", "targets": [{"span1": [0, 2], "label": "NP"}]} for n in range(40)]
    (tmp_path / "np.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = load_texts(TextSource(str(tmp_path / "np.jsonl")))
    row = texts.fit[0]
    (target,) = Sentence.of(row["text"], row[ANNOTATION]).targets
    assert row["text"] in {f"a{n} cat" for n in range(40)}  # one blank between two words
    assert (target.task, target.labels) == ("np", ("NP",))


def test_the_held_out_file_is_about_the_task_of_the_fitting_file(tmp_path: Path) -> None:
    for name in "ab":
        rows = [{"text": f"{name}{n} cat", "targets": [{"span1": [0, 1], "label": "N"}]} for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = load_texts(TextSource(str(tmp_path / "a.jsonl"), held_out=str(tmp_path / "b.jsonl")))
    found = {
        target.task for row in (*texts.fit, *texts.test) for target in Sentence.of(row["text"], row[ANNOTATION]).targets
    }
    assert found == {"a"}


@pytest.mark.parametrize("content", ["", "\n \n", "# only a comment\n\n"])
def test_a_treebank_without_sentences_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bank.conllu").write_text(content)
    with pytest.raises(ValueError, match=r"Expected sentences in .*bank\.conllu, but there is none"):
        load_texts(TextSource(str(tmp_path / "bank.conllu")))


def test_annotations_decide_what_the_texts_are(tmp_path: Path) -> None:
    path, hashes = tmp_path / "bank.conllu", []
    treebank(path, 0, 60)
    for change in ("NOUN", "VERB"):
        path.write_text(path.read_text().replace("NOUN", change))
        hashes.append(load_texts(TextSource(str(path))).origin["hashes"])
    assert hashes[0] != hashes[1]


def test_the_grammar_is_a_source_of_text() -> None:
    texts = load_texts(TextSource("grammar", max_texts=50, max_held_out=20))
    known = {sentence.text: sentence for sentence in sentences(6_000)}
    for row in texts.test:
        sentence = known[row["text"]]
        assert Sentence.of(row["text"], row[ANNOTATION]) == replace(sentence, label="")
        assert texts.label_names is not None
        assert texts.label_names[row["label"]] == sentence.label


def test_annotated_sentences_are_not_streamed(tmp_path: Path) -> None:
    treebank(tmp_path / "bank.conllu", 0, 60)
    with pytest.raises(ValueError, match="`streaming` is not for annotated sentences"):
        load_texts(TextSource(str(tmp_path / "bank.conllu"), streaming=True, max_texts=5))


def test_a_file_without_spans_may_have_a_column_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("".join(f'{{"annotation": "said {n}"}}\n' for n in range(40)))
    assert load_texts(TextSource(str(tmp_path / "plain.jsonl"))).fit["text"][0].startswith("said ")
