from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from datamodules.text.annotated.files import read_conllu
from datamodules.text.annotated.sentence import Sentence, Target, check_tree

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


def write(folder: Path, text: str) -> Path:
    path = folder / "bank.conllu"
    path.write_text(text, encoding="utf-8")
    return path


def test_words_trees_and_labels_are_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    first, second = read_conllu(write(tmp_path, TREEBANK), counts)
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
    assert counts == {
        "sentences": 2,
        "words": 4,
        "sentences without a tree": 1,
        "multiword tokens left out": 1,
        "empty nodes left out": 1,
        "words with blanks inside": 1,
    }


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
        list(read_conllu(write(tmp_path, TREEBANK.replace(old, new, 1))))


def test_long_cycles_are_found_and_trees_are_not_taken_for_them() -> None:
    with pytest.raises(ValueError, match=r"the words \[2, 3, 4\] are in a cycle"):
        check_tree([0, 3, 4, 2, 2])
    check_tree([2, 0, 2, 3, 4])
    check_tree([0])


def test_marks_of_byte_order_and_of_other_systems_are_no_part_of_the_lines(tmp_path: Path) -> None:
    expected, path = list(read_conllu(write(tmp_path, TREEBANK))), tmp_path / "bank.conllu"
    first = TREEBANK.split("\n", 1)[1]  # a word in the first line
    for text in (TREEBANK, first):
        path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
        assert list(read_conllu(path)) == expected


def test_another_encoding_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bank.conllu"
    path.write_bytes(TREEBANK.replace("vámonos", "vamonos", 1).encode("latin-1"))
    with pytest.raises(ValueError, match=r"Expected text in UTF-8, but .*bank\.conllu:2 is not: .*0xe1"):
        list(read_conllu(path))
