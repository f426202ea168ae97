from collections import Counter
from hashlib import blake2b

import pytest

from aligners.datamodules.text.annotated.grammar import PAST, PRESENT, sentences
from aligners.datamodules.text.annotated.sentence import Sentence, check_tree


@pytest.fixture(scope="module")
def drawn() -> list[Sentence]:
    return list(sentences(1500))


def of(sentence: Sentence, task: str) -> dict[tuple[int, ...], tuple[str, ...]]:
    return {(*each.span1, *each.span2): each.labels for each in sentence.targets if each.task == task}


def test_every_sentence_is_a_projective_tree_with_labels_for_each_word(drawn: list[Sentence]) -> None:
    for sentence in drawn:
        check_tree(sentence.heads)
        words = range(len(sentence.words))
        assert set(of(sentence, "pos")) == set(of(sentence, "morphology")) == {(n, n + 1) for n in words}
        arcs = {(span[0], span[2] + 1) for span in of(sentence, "dependencies")}
        assert arcs == {(n, head) for n, head in enumerate(sentence.heads) if head}
        spans = [sorted((n, head - 1)) for n, head in enumerate(sentence.heads) if head]
        assert not any(a < c < b < d for a, b in spans for c, d in spans)


def test_roles_are_what_hangs_from_the_verb_whatever_the_voice(drawn: list[Sentence]) -> None:
    passive = 0
    for sentence in drawn:
        relations = {(word, verb): label for (word, _, verb, _), (label,) in of(sentence, "dependencies").items()}
        for (verb, _, first, end), (role,) in of(sentence, "roles").items():
            (head,) = [n for n in range(first, end) if sentence.heads[n] == verb + 1]
            below = {n for n in range(len(sentence.words)) if head in path(sentence, n)}
            assert below == set(range(first, end))
            assert role != "agent" or relations[(head, verb)] in ("nsubj", "obl:agent")
            passive += (role, relations[(head, verb)]) == ("patient", "nsubj:pass")
    assert passive > 50


def path(sentence: Sentence, word: int) -> list[int]:
    """The word and what it hangs from."""
    found = [word]
    while sentence.heads[found[-1]]:
        found.append(sentence.heads[found[-1]] - 1)
    return found


def test_the_sentences_are_the_same_in_every_process(drawn: list[Sentence]) -> None:
    assert drawn[0].text == "every kubalt noneeds this greex"
    every = "".join(sentence.text + sentence.annotation() for sentence in drawn)
    assert blake2b(every.encode(), digest_size=8).hexdigest() == "fbf72ed4966eec51"
    assert next(sentences(1, seed=1)) != drawn[0]


def test_the_label_is_the_tense_of_the_main_verb_not_of_the_first(drawn: list[Sentence]) -> None:
    said = {"past": PAST, "present": PRESENT}
    others = 0
    for sentence in drawn:
        root, features = sentence.heads.index(0), of(sentence, "morphology")
        arcs = of(sentence, "dependencies").items()
        auxiliaries = [span[0] for span, label in arcs if label == ("aux:pass",) and span[2] == root]
        finite = auxiliaries[0] if auxiliaries else root
        assert said[sentence.label] in features[(finite, finite + 1)]
        (first, *_) = filter(None, (set(features[n, n + 1]) & {PAST, PRESENT} for n in range(len(sentence.words))))
        others += said[sentence.label] not in first
    shares = Counter(sentence.label for sentence in drawn)
    assert min(shares.values()) > 0.4 * len(drawn)
    assert others > 0.05 * len(drawn)
