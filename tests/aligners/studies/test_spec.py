from typing import Any

import pytest

from aligners.studies.spec import Models, Pairs
from tests.cells import study_of


def test_seeds_are_filled_in() -> None:
    assert Models("m-{seed}", 3).listed() == ["m-0", "m-1", "m-2"]
    assert Models(["a{seed}", "b{seed}"], [4, 7]).listed() == ["a4", "a7", "b4", "b7"]
    assert Models(["a", "b"]).listed() == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "seeds", "said"),
    [("m", 2, r"`models.seeds` with a name"), ("m{seed}", None, r"`models.seeds`"), (["a", "a"], None, "got a twice")],
)
def test_models_that_cannot_be_are_refused(names: Any, seeds: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Models(names, seeds).listed()


def test_pairs() -> None:
    names = ["a", "b", "c", "d"]
    assert len(Pairs().of(names)) == 6
    drawn = Pairs(random=3, seed=1).of(names)
    assert drawn == Pairs(random=3, seed=1).of(names)
    assert len(set(drawn)) == 3
    assert len({tuple(Pairs(random=3, seed=seed).of(names)) for seed in range(8)}) > 1
    assert Pairs(given=[["c", "a"]]).of(names) == [("c", "a")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pairs": {"random": 4}}, "`pairs.random` to be at least 1 and at most 3, but got 4"),
        ({"pairs": {"given": [["m0", "m9"]]}}, r"two of the models m0, m1, m2, but got \['m0', 'm9'\]"),
        ({"pairs": {"given": [["m0"]]}}, r"but got \['m0'\]"),
        ({"name": "a/b"}, "`name` to be the name of a folder"),
        ({"tasks": {}}, "`tasks` to name at least one"),
        ({"stages": ["finetuned"]}, "`finetune` to say how"),
        ({"fit": {"stages": ["random"]}}, "`fit.stages` out of pretrained, but got random"),
        ({"inject": {"tasks": ["u"]}}, "`inject.tasks` out of t, .* got u"),
        ({"models": {"names": ["a"], "groups": {"g": ["b"]}}}, "`models.groups.g` out of a, but got b"),
        ({"finetune": {"copies": 0}}, "`finetune.copies` to be at least 1"),
        ({"fit": {"memory": 0}}, "`fit.memory` to be above 0"),
        ({"surgery": {}}, "`stages` to have finetuned, as `surgery`"),
        ({"modles": []}, "keys of a study file out of name, models, tasks.*but got modles"),
        ({"pairs": {"randm": 3}}, "keys of `pairs` out of random, seed, given, same, but got randm"),
        ({"similarity": {"across": True}}, "keys of `similarity` out of .*across_stages, across_tasks, but got across"),
        ({"models": {"name": "a"}}, "keys of `models` out of names, seeds, groups"),
    ],
    ids=str,
)
def test_a_study_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        study_of(**changes)


def test_copies_are_models_of_the_fine_tuned_stage_alone() -> None:
    study = study_of(stages=["pretrained", "finetuned"], finetune={"copies": 2})
    assert [model.name for model in study.models_at("pretrained")] == ["m0", "m1", "m2"]
    names = [model.name for model in study.models_at("finetuned")]
    assert names == ["m0", "m0#2", "m1", "m1#2", "m2", "m2#2"]
    assert len(study.pairs_at("finetuned")) == 15
    assert Models(["m0"], groups={"g": ["m0"]}).group("m0#2") == "g"
