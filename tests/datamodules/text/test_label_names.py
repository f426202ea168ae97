import json
from typing import Any

import pytest

from aligners.datamodules.text.labels import by_number, class_map, in_words

NLI = ["entailment", "neutral", "contradiction"]


def matched(head: list[str], names: list[str] | None, classes: int | None = None, given: Any = None) -> Any:
    return class_map(head, names, classes or len(names or head), given=given, model="a model", source="some texts")


@pytest.mark.parametrize(
    ("head", "names", "expected"),
    [
        (["negative", "positive"], ["negative", "positive"], None),
        (["POSITIVE", "Negative"], ["negative", "positive"], ((1,), (0,))),
        (["contradiction", "Entailment ", "neutral"], NLI, ((1,), (2,), (0,))),
        (["not entailment", "entailment"], ["entailment", "not-entailment"], ((1,), (0,))),
        (["LABEL_0", "LABEL_1"], ["negative", "positive"], None),
        (["LABEL_1", "LABEL_0"], ["negative", "positive"], ((1,), (0,))),
        (["1", "0"], None, ((1,), (0,))),
        (["negative", "positive"], None, None),
        (["negative", "positive"], ["0", "1"], None),
        (["LABEL_0", "LABEL_1", "LABEL_2"], ["1", "2", "3"], None),
    ],
)
def test_classes_are_matched_by_their_names(head: list[str], names: list[str] | None, expected: Any) -> None:
    assert matched(head, names) == expected


@pytest.mark.parametrize(
    ("head", "names", "taken"),
    [
        (["negative", "positive"], None, '{"0": "negative", "1": "positive"}'),
        (NLI, ["0", "1", "2"], '{"0": "entailment", "1": "neutral", "2": "contradiction"}'),
        (["LABEL_1", "LABEL_0"], ["negative", "positive"], '{"negative": "LABEL_0", "positive": "LABEL_1"}'),
        (["LABEL_0", "LABEL_1", "LABEL_2"], ["1", "2", "3"], '{"1": "LABEL_0", "2": "LABEL_1", "3": "LABEL_2"}'),
        (NLI, NLI, None),  # no doubt where both sides have names, or neither
        (["LABEL_0", "LABEL_1"], None, None),
        (["b", "a"], ["a", "b"], None),
        (["1", "0"], ["0", "1"], None),
    ],
)
def test_classes_matched_by_number_are_a_caution(head: list[str], names: list[str] | None, taken: str | None) -> None:
    said = by_number(head, names, len(head), model="a model", source="some texts")
    assert (said is None) is (taken is None)
    if said is not None and taken is not None:
        assert f"if it is right, confirm it: --data.labels '{taken}'." in said
        named = "the texts name" if head[0].startswith("LABEL") else "the head names"
        assert f"as only {named} them: {next(iter(json.loads(taken)))} is " in said
        assert matched(head, names, given=json.loads(taken)) == matched(head, names)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"entailment": 0, "not_entailment": [1, 2]}, ((0,), (1, 2))),
        ({"not_entailment": ["CONTRADICTION", "neutral"], "Entailment": "entailment"}, ((0,), (2, 1))),
        ({"0": 0, "1": 2}, ((0,), (2,))),  # neutral is no answer
        ({"1": "LABEL_0", "0": [2]}, ((2,), (0,))),
    ],
)
def test_a_given_map_goes_before_the_names(given: Any, expected: Any) -> None:
    assert matched(NLI, ["entailment", "not_entailment"], given=given) == expected
    assert matched(["b", "a"], ["a", "b"], given={"a": 0, "b": 1}) is None


@pytest.mark.parametrize(
    ("head", "names", "classes", "example"),
    [
        (NLI, ["entailment", "not_entailment"], 2, '{"entailment": 0, "not_entailment": [1, 2]}'),
        (["bad", "good"], ["negative", "positive"], 2, '{"negative": 0, "positive": 1}'),
        (NLI, None, 2, '{"0": 0, "1": [1, 2]}'),
        (["negative", "neutral", "positive"], ["positive", "negative"], 2, '{"positive": 2, "negative": 0}'),
    ],
)
def test_unknown_names_are_refused_with_both_sets_and_the_option(
    head: list[str], names: list[str] | None, classes: int, example: str
) -> None:
    with pytest.raises(ValueError, match=r"the head of a model .* 'some texts'") as error:
        matched(head, names, classes)
    said = str(error.value)
    assert f"--data.labels '{example}'" in said
    assert all(f"{k}: {name}" in said for given in (head, names or []) for k, name in enumerate(given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"entailment": 0}, "every class of the texts once, 0: entailment, 1: not_entailment, but got"),
        ({"entailment": 0, "not_entailment": 1, "0": 2}, "every class of the texts once"),
        ({"entailment": 0, "neutral": 1}, "every class of the texts once"),
        ({"entailment": 0, "not_entailment": [0, 1]}, "1: neutral, 2: contradiction, none of them twice"),
        ({"entailment": 0, "not_entailment": 3}, "the head of a model"),
        ({"entailment": 0, "not_entailment": []}, "one or more classes"),
        ({"entailment": 0, "not_entailment": "no"}, "one or more classes"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        matched(NLI, ["entailment", "not_entailment"], given=given)


def test_a_map_in_words() -> None:
    assert in_words(((0,), (1, 2)), NLI, ["yes", "no"]) == {"yes": ["entailment"], "no": ["neutral", "contradiction"]}
    assert in_words(None, ["a", "b"], None) == {"0": ["a"], "1": ["b"]}
