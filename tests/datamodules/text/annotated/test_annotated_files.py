"""Treebanks, labelled spans and the grammar, read from files and opened as sources of text."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aligners.datamodules.text.annotated import annotated_files
from aligners.datamodules.text.annotated.annotated_files import holds_spans, read_conllu, read_spans, task_name
from aligners.datamodules.text.annotated.grammar import sentences
from aligners.datamodules.text.annotated.sentence import ANNOTATION, Sentence, Target, check_tree
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError

TREEBANK = """\
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\tMood=Imp|Number=Plur\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3\tal mar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_
3.1\tx\t_\t_\t_\t_\t_\t_\t_\t_

# a sentence without a tree
1\tno\tno\t_\t_\t_\t_\t_\t_\t_


"""


def bank(folder: Path, text: str) -> Path:
    path = folder / "bank.conllu"
    path.write_text(text, encoding="utf-8")
    return path


def test_words_trees_and_labels_are_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    first, second = read_conllu(bank(tmp_path, TREEBANK), counts)
    assert (first.text, first.heads) == ("vamos nos al_mar", (0, 1, 1))
    assert first.targets == (
        Target("pos", (0, 1), labels=("VERB",)),
        Target("morphology", (0, 1), labels=("Mood=Imp", "Number=Plur")),
        Target("dependencies", (0, 1), (0, 1), ("root",)),
        Target("pos", (1, 2), labels=("PRON",)),
        Target("morphology", (1, 2)),
        Target("dependencies", (1, 2), (0, 1), ("obj",)),
        Target("pos", (2, 3), labels=("NOUN",)),
        Target("morphology", (2, 3)),
        Target("dependencies", (2, 3), (0, 1), ("obl",)),
    )
    assert second == Sentence(("no",), (), (Target("morphology", (0, 1)),))
    of_one_kind = ("sentences without a tree", "multiword tokens left out", "empty nodes left out")
    assert counts == {"sentences": 2, "words": 4, "words with blanks inside": 1, **dict.fromkeys(of_one_kind, 1)}
    for text in (TREEBANK, TREEBANK.split("\n", 1)[1]):  # with a mark of byte order, and endings of another system
        (tmp_path / "bank.conllu").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
        assert list(read_conllu(tmp_path / "bank.conllu", Counter())) == [first, second]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("\tobj\t_\t_", "\tobj", r"10 fields with tabs between them, but got 8: .*bank\.conllu:4\."),
        ("2\tnos", "2\t", r"Expected a word in the second field, FORM, but it is empty: .*bank\.conllu:4\."),
        ("2\tnos", "2\t \u00a0", r"FORM, but it is empty: .*bank\.conllu:4\."),
        ("PRON\t_\t_\t1", "PRON\t_\t_\tone", r"bank\.conllu:4 cannot be read: Failed parsing field 'head'"),
        ("2\tnos", "x\tnos", r"bank\.conllu:4 cannot be read: Failed parsing field 'id'"),
        ("2\tnos", "4\tnos", r"numbered 1, 2, \.\.\., but those at .*bank\.conllu:2 are not"),
        ("PRON\t_\t_\t1", "PRON\t_\t_\t4", r"heads between 0 and 3, the number of words, but got 4.*conllu:2\."),
        ("PRON\t_\t_\t1", "PRON\t_\t_\t0", r"one root, a word with the head 0, but got 2.*conllu:2\."),
        ("PRON\t_\t_\t1", "PRON\t_\t_\t2", r"the words \[2\] are in a cycle.*conllu:2\."),
    ],
)
def test_what_is_malformed_is_refused_with_file_and_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        list(read_conllu(bank(tmp_path, TREEBANK.replace(old, new, 1)), Counter()))


def test_long_cycles_are_found_and_trees_are_not_taken_for_them() -> None:
    with pytest.raises(ValueError, match=r"the words \[2, 3, 4\] are in a cycle"):
        check_tree([0, 3, 4, 2, 2])
    check_tree([2, 0, 2, 3, 4])


# ---------------------------------------------------------------------- labelled spans

TARGETS = [
    {"span1": [0, 2], "label": "NP", "info": {}},
    {"span1": [2, 3], "span2": [0, 2], "label": ["agent", "animate"]},
]
ROW = {"text": "The  cat sat", "info": {"source": "x"}, "targets": TARGETS}


def spans(path: Path, *rows: Any) -> Path:
    path = path / "srl.train.jsonl" if path.is_dir() else path
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_spans_are_read(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    path = spans(tmp_path, ROW, "")
    (found,) = read_spans(path, counts)
    targets = Target("srl", (0, 2), (), ("NP",)), Target("srl", (2, 3), (0, 2), ("agent", "animate"))
    assert found == Sentence(("The", "cat", "sat"), targets=targets)
    assert counts == {"sentences": 1, "words": 3, "spans": 2}
    path.write_bytes(path.read_text().encode("utf-8-sig"))
    assert holds_spans(path)
    assert list(read_spans(path, Counter())) == [found]


def spoilt(**target: Any) -> dict[str, Any]:
    return {"targets": [target]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoilt(span1=[0, 4], label="x"), r"expected `span1` to be within the 3 words, but got \[0, 4\]"),
        (spoilt(span1=[1, 1], label="x"), "expected `span1` to be within"),
        (spoilt(span1=[0, 1], span2=[-1, 2], label="x"), "expected `span2` to be within"),
        (spoilt(span1=[0, 1, 2], label="x"), r"expected `span1` to be two whole numbers, but got \[0, 1, 2\]"),
        (spoilt(span1=[0, 1], span2=["0", "1"], label="x"), "expected `span2` to be two whole numbers"),
        (spoilt(span2=[0, 1], label="x"), "there is no 'span1'"),
        (spoilt(span1=[0, 1]), "there is no 'label'"),
        (spoilt(span1=[0, 1], label=3), "expected `label` to be a string or a list of strings, but got 3"),
        ({"text": " ", "targets": []}, "expected words in `text` and a named `task`"),
        ({"task": 3, "targets": []}, "expected words in `text` and a named `task`"),
        ({"task": "", "targets": []}, "expected words in `text` and a named `task`"),
    ],
)
def test_lines_that_make_no_sense_are_refused_with_file_and_line(change: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"srl\.train\.jsonl:2 cannot be read as a sentence with spans: {says}"):
        list(read_spans(spans(tmp_path, ROW, ROW | change), Counter()))


def test_only_files_with_targets_hold_spans(tmp_path: Path) -> None:
    assert holds_spans(spans(tmp_path, "", ROW))
    for other in ({"text": "a"}, {"text": "a", "targets": 3}, "no JSON", []):
        assert not holds_spans(spans(tmp_path, other))


@pytest.mark.parametrize(
    ("file", "task"),
    [
        ("ner.en.jsonl", "ner"),
        ("ner_ontonotes_en_train.json", "ner_ontonotes_en"),
        ("ner-test-00000-of-00002.jsonl", "ner"),
        ("train.edges.json", "edges"),
        ("conll-2003_dev.json", "conll-2003"),
        ("train.0.85.json", "spr"),
        ("trained.json", "trained"),
    ],
)
def test_files_of_all_splits_are_about_one_task(file: str, task: str) -> None:
    assert task_name(Path("tasks") / "spr" / file) == task


def test_a_line_may_name_its_task_and_a_file_that_of_another(tmp_path: Path) -> None:
    path = spans(tmp_path, ROW, ROW | {"task": "roles"})
    assert [{target.task for target in found.targets} for found in read_spans(path, Counter())] == [{"srl"}, {"roles"}]
    like = tmp_path / "ner.train.json"
    other = [target.task for found in read_spans(path, Counter(), like) for target in found.targets]
    assert other == ["ner", "ner", "roles", "roles"]


# ---------------------------------------------------------------------- as sources of text

LINE = "{}\t{}\t_\tNOUN\t_\t_\t{}\tdep\t_\t_\n"


def treebank(path: Path, first: int, count: int) -> None:
    """Sentences of two words, the second of which is the root."""
    words = (f"w{n}" for n in range(first, first + count))
    path.write_text("".join(LINE.format(1, word, 2) + LINE.format(2, "is", 0) + "\n" for word in words))


def test_a_folder_of_a_treebank_is_text_with_trees_in_its_own_splits(tmp_path: Path) -> None:
    for name, first, count in (("train", 0, 90), ("dev", 100, 10), ("test", 200, 20)):
        treebank(tmp_path / f"xx_own-ud-{name}.conllu", first, count)
    texts = load_texts(TextSource(str(tmp_path), held_out="test"))
    assert texts.test["text"][:2] == ["w200 is", "w201 is"]
    assert (len(texts.fit) + len(texts.validation), len(texts.test)) == (90, 20)
    row = texts.test[3]
    assert Sentence.of(row["text"], row[ANNOTATION]).heads == (2, 0)
    assert texts.describe()["annotated"] == ["90 sentences, 180 words", "20 sentences, 40 words"]


def test_lines_with_spans_are_text_about_the_task_of_the_fitting_file(tmp_path: Path) -> None:
    for name in "ab":
        rows = [{"text": f"{name}{n}  cat", "targets": [{"span1": [0, 1], "label": "N"}]} for n in range(40)]
        spans(tmp_path / f"{name}.jsonl", *rows)
    texts = load_texts(TextSource(str(tmp_path / "a.jsonl"), held_out=str(tmp_path / "b.jsonl")))
    targets = {Sentence.of(row["text"], row[ANNOTATION]).targets for row in (*texts.fit, *texts.test)}
    assert targets == {(Target("a", (0, 1), (), ("N",)),)}
    assert set(texts.test["text"]) == {f"b{n} cat" for n in range(40)}  # one blank between two words
    spans(tmp_path / "plain.jsonl", *({"annotation": f"said {n}"} for n in range(40)))  # a column of that name
    assert load_texts(TextSource(str(tmp_path / "plain.jsonl"))).fit["text"][0].startswith("said ")


@pytest.mark.parametrize("content", ["", "\n \n", "# only a comment\n\n"])
def test_a_treebank_without_sentences_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match=r"Expected sentences in .*bank\.conllu, but found none"):
        load_texts(TextSource(str(bank(tmp_path, content))))


def test_annotations_decide_what_the_texts_are_and_are_not_streamed(tmp_path: Path) -> None:
    path, hashes = tmp_path / "bank.conllu", []
    treebank(path, 0, 60)
    for change in ("NOUN", "VERB"):
        path.write_text(path.read_text().replace("NOUN", change))
        hashes.append(load_texts(TextSource(str(path))).origin["hashes"])
    assert hashes[0] != hashes[1]
    with pytest.raises(ValueError, match="`streaming` does not work with annotated sentences"):
        load_texts(TextSource(str(path), streaming=True, max_texts=5))


def test_the_grammar_is_a_source_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotated_files, "OF_THE_GRAMMAR", 300)
    texts = load_texts(TextSource("grammar", max_texts=50, max_held_out=20))
    known = {sentence.text: sentence for sentence in sentences(300)}
    assert texts.label_names is not None
    for row in texts.test:
        sentence = known[row["text"]]
        assert Sentence.of(row["text"], row[ANNOTATION]) == replace(sentence, label="")
        assert texts.label_names[row["label"]] == sentence.label


def test_a_treebank_needs_conllu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "conllu", None)
    with pytest.raises(UserError, match=r"needs the package conllu.*pip install 'aligners\[trees\]'"):
        load_texts(TextSource(str(bank(tmp_path, TREEBANK))))
