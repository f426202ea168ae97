from collections import Counter
from typing import Any

import pytest
from tests.cells import NoCommands, study_of

from aligners.studies.cells import Cell, Instance, Size, sizes_in
from aligners.studies.expansion import expand
from aligners.studies.spec import Models, Pairs


def cells_of(**changes: Any) -> list[Cell]:
    return expand(study_of(**changes), NoCommands())


def of_kind(kind: str, **changes: Any) -> list[Cell]:
    return [cell for cell in cells_of(**changes) if cell.kind == kind]


def counts(cells: list[Cell]) -> dict[str, int]:
    return dict(Counter(cell.kind for cell in cells))


NO_FIT: dict[str, Any] = {"fit": None, "inject": None}
TUNED: dict[str, Any] = {"stages": ["pretrained", "finetuned"], "finetune": {}}
TASKS = {"t": {"text": "a"}, "u": {"text": "b"}}
ALL: dict[str, Any] = {"similarity": {}, "stitch": {}, "identity": {}, "recover": {}, "attention": {}, "finetune": {}}
ALL |= {"surgery": {}, "probe": {}, "compare": {}, "carry": {}}


def test_every_kind_of_cell() -> None:
    cells = cells_of(stages=["random", "pretrained", "finetuned"], tasks=TASKS, **ALL)
    pairs = 3 * 2 * 3  # pairs × tasks × stages
    assert counts(cells) == {
        "untrained": 3,  # the same for both tasks
        "finetune": 3 * 2,
        "fit": pairs,
        "inject": pairs,
        "stitch": pairs,
        "recover": pairs,
        "probe": 3 * 2 * 3,  # models × tasks × stages
        "attention": pairs,
        "compare": pairs,
        "carry": pairs,
        "similarity": 2 * 3,
        "identity": 2 * 3,
        "surgery": 3 * 2,  # of fine-tuned models alone
    }
    assert len({cell.id for cell in cells}) == len(cells)


def test_as_printed_adds_the_papers_own_definitions_where_the_study_has_ours() -> None:
    aligners = {"linear": "Linear", "inn": "INN"}
    fit = {"options": {"model": {"aligners": aligners}}, "pairs_at_once": 3}
    measures = ["minibatch_cka", "svcca", "attention_pwcca"]
    work: dict[str, Any] = {"fit": fit, "recover": {"options": {"model": {"aligners": {"inn": "INN"}}}}}
    work |= {"similarity": {"options": {"measures": measures}}}
    ours, printed = ({cell.kind: cell for cell in cells_of(**work, as_printed=given)} for given in (False, True))
    trained = {"class_path": "AffineLayer", "init_args": {"start": "random"}}
    assert ours["fit_pairs"].options["model"]["aligners"] == aligners
    assert printed["fit_pairs"].options["model"]["aligners"] == {**aligners, "linear_trained": trained}
    assert printed["recover"].options["model"] == ours["recover"].options["model"]  # no linear map
    assert [cell["recover"].options["data"].get("direction") for cell in (ours, printed)] == [None, "both"]
    added = ["mean_minibatch_cka", "attention_pwcca_standardised"]  # SVCCA alone is no localization
    assert printed["similarity"].options["measures"] == [*measures, *added]
    assert ours["similarity"].options["measures"] == measures
    (whole,) = of_kind("similarity", similarity={"options": {"measures": ["svcca", "neuronsim"]}}, as_printed=True)
    assert whole.options["measures"] == ["svcca", "neuronsim", "svcca_standardised"]
    others = {cell.kind for cell in cells_of(as_printed=True) if cell.id not in ids()}
    assert others == {"inject"}  # nothing else to add
    assert all(cell.options["source_pooler"] for cell in of_kind("inject", as_printed=True))


def test_a_cell_comes_after_those_that_it_needs() -> None:
    cells = cells_of(stages=["finetuned", "random"], **ALL)
    before: set[str] = set()
    for cell in cells:
        assert set(cell.needs) <= before, cell.said()
        before.add(cell.id)
    kinds = {cell.id: cell.kind for cell in cells}
    inject = next(cell for cell in cells if cell.kind == "inject" and cell.stage == "finetuned")
    assert Counter(kinds[need] for need in inject.needs) == {"finetune": 2, "fit": 1}
    (need,) = [need for need in inject.needs if kinds[need] == "fit"]
    assert inject.options["checkpoints"] == [f"{{study}}/cells/{need}/run/aligners.safetensors"]


def test_a_fine_tuned_model_is_the_folder_that_its_cell_leaves() -> None:
    cells = cells_of(stages=["finetuned"], finetune={"copies": 2}, inject=None)
    fit = next(cell for cell in cells if cell.kind == "fit" and cell.models[0].name == "m1#2")
    assert fit.options["data"]["model_x"] == f"{{study}}/cells/{fit.models[0].cell}/run/none/seed-1"
    assert {tuple(cell.options["seeds"]) for cell in cells if cell.kind == "finetune"} == {(0,), (1,)}


def test_each_variant_of_a_fine_tuning_is_a_cell_and_the_first_is_what_others_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = NoCommands.resolve
    given = lambda kind, options: options.get("variants", ["none"])  # noqa: E731
    monkeypatch.setattr(NoCommands, "resolve", lambda *a: {**resolve(*a), "variants": given(*a[1:])})
    tuned: dict[str, Any] = {**NO_FIT, "stages": ["finetuned"], "similarity": {}}
    several = cells_of(**tuned, finetune={"options": {"variants": ["none", "top:4"]}})
    tunings = [cell for cell in several if cell.kind == "finetune" and cell.models[0].name == "m0"]
    cells = {tuple(cell.options["variants"]): cell for cell in tunings}
    assert counts(several) == {"finetune": 3 * 2, "similarity": 1}
    (compared,) = [cell for cell in several if cell.kind == "similarity"]
    assert compared.models[0].path == f"{{study}}/cells/{cells['none',].id}/run/none/seed-0"
    assert cells["top:4",].id not in compared.needs
    usual, alone = (cells_of(**tuned, finetune=options) for options in ({}, {"options": {"variants": ["none"]}}))
    assert [cell.id for cell in alone] == [cell.id for cell in usual]  # as before


def ids(**changes: Any) -> set[str]:
    return {cell.id for cell in cells_of(**changes)}


def test_an_id_is_the_hash_of_what_decides_the_result() -> None:
    same = {"name": "other", "keep": "results", "report": ["ren_table_4"]}
    usual = ids()
    assert ids(**same) == usual
    assert ids(models={"names": ["m0", "m1", "m2"], "groups": {"g": ["m0"]}}) == usual
    assert ids(pairs={"given": [["m0", "m1"]]}) < usual
    assert ids(tasks={"renamed": {}}) == usual
    for other in ({"fit": {"options": {"seed": 1}}}, {"data": {"rows": "mean"}}, {"tasks": {"t": {"text": "a"}}}):
        assert not ids(**other) & usual, other
    # What was fitted in another way is another map to inject, and a fine-tuned model another model.
    assert ids(inject={"options": {"seed": 1}}) & usual == {c.id for c in cells_of() if c.kind == "fit"}
    tuned = {"stages": ["finetuned"], "finetune": {}}
    assert not ids(**tuned) & ids(**{**tuned, "finetune": {"options": {"rate": 1}}})


def test_tasks_and_kinds_take_precedence_over_what_is_shared() -> None:
    work = {"options": {"data": {"sites": "1"}}}
    cells = cells_of(data={"rows": "mean", "sites": "all"}, tasks={"t": {"rows": "cls"}}, fit=work)
    fit, inject = (next(cell for cell in cells if cell.kind == kind) for kind in ("fit", "inject"))
    assert fit.options["data"] == {"rows": "cls", "sites": "1", "model_x": "m0", "model_y": "m1"}
    assert set(inject.options["data"]) == {"model_x", "model_y"}  # its checkpoint has the data options


def test_similarity_is_one_cell_of_all_models_or_one_of_each_pair() -> None:
    (every,) = cells_of(**NO_FIT, similarity={})
    assert [model.name for model in every.models] == ["m0", "m1", "m2"]
    assert [len(cell.models) for cell in cells_of(**NO_FIT, similarity={}, pairs={"random": 2})] == [2, 2]
    (across,) = of_kind("similarity", **NO_FIT, **TUNED, similarity={"across_stages": True})
    assert (len(across.models), across.stage) == (6, None)


def test_models_tuned_on_all_tasks_are_compared_on_the_texts_of_each() -> None:
    compared = {"across_stages": True, "across_tasks": True, "tasks": ["u"]}
    (cell,) = of_kind("similarity", **NO_FIT, **TUNED, tasks=TASKS, similarity=compared)
    assert cell.task == "u"
    tuned = [(model.name, model.tuned_on) for model in cell.models[:5]]
    assert tuned == [("m0", None), ("m1", None), ("m2", None), ("m0", "t"), ("m0", "u")]
    assert len({model.path for model in cell.models}) == 3 + 3 * 2


def test_surgery_is_of_all_fine_tunings_of_a_model_with_the_model_beside_them() -> None:
    cell = of_kind("surgery", **NO_FIT, stages=["finetuned"], finetune={"copies": 2}, surgery={})[0]
    assert [model.name for model in cell.models] == ["m0", "m0#2", "m0"]
    assert cell.options["data"] == {"models": [model.path for model in cell.models[:2]], "bases": ["m0"]}
    assert len(cell.needs) == 2


def test_several_pairs_share_a_cell_and_each_has_maps_of_its_own() -> None:
    cells = cells_of(models={"names": "m{seed}", "seeds": 4}, fit={"pairs_at_once": 4}, pairs={"same": True})
    first, second = (cell for cell in cells if cell.kind == "fit_pairs")
    assert first.options["data"] == {"models": ["m0", "m1", "m2", "m3"], "pairs": [[0, 1], [0, 2], [0, 3], [1, 2]]}
    assert second.options["data"] == {"models": ["m1", "m3", "m2"], "pairs": [[0, 1], [2, 1]]}
    assert counts(cells) == {"fit_pairs": 2, "fit": 4, "inject": 10}  # with itself, each is fitted alone
    files = {
        tuple(model.name for model in cell.models): cell.options["checkpoints"][0].removeprefix("{study}/cells/")
        for cell in cells
        if cell.kind == "inject"
    }
    assert files["m1", "m2"] == f"{first.id}/run/pairs/m1--m2/aligners.safetensors"
    assert files["m2", "m3"] == f"{second.id}/run/pairs/m2--m3/aligners.safetensors"


@pytest.mark.parametrize("place", [{"data": {"wrong": 1}}, {"tasks": {"t": {"wrong": 1}}}])
def test_a_data_option_that_no_command_has_is_refused(place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"data options of fit, inject, but none of them has wrong"):
        cells_of(**place)


def test_a_text_of_a_works_own_takes_nothing_of_the_tasks_and_is_read_once() -> None:
    tasks = {name: {"text": {"source": f"{name}.csv", "label_column": "kind"}} for name in "tu"}
    own = cells_of(tasks=tasks, **NO_FIT, probe={"options": {"data": {"text": {"source": "trees"}}}})
    assert [cell.options["data"] for cell in own] == [
        {"text": {"source": "trees"}, "models": [f"m{n}"]} for n in range(3)
    ]


def test_embedded_models_are_the_same_before_and_after_fine_tuning() -> None:
    own = {"options": {"data": {"text": {"source": "grammar"}}}}
    changes: dict[str, Any] = {"models": {"names": ["embedded-mlm:0"]}, **NO_FIT, **TUNED, "probe": own}
    with pytest.raises(ValueError, match=r"no `data.text` in `probe.options`.*another model there"):
        cells_of(tasks={"t": {"text": {"source": "rotten_tomatoes"}}}, **changes)
    assert counts(cells_of(tasks={"t": {"text": {"source": "grammar"}}}, **changes))["probe"] == 2
    further = {**changes, "probe": {"texts": {"more": {"text": {"source": "other"}}}}}
    with pytest.raises(ValueError, match=r"`probe.texts`, but got {'source': 'other'}.*another model there"):
        cells_of(tasks={"t": {"text": {"source": "grammar"}}}, **further)
    assert cells_of(**{**changes, "stages": ["pretrained"], "finetune": None})  # each text has models of its own


def test_further_texts_are_read_beside_those_of_the_tasks() -> None:
    """Models that were fine-tuned on any task are compared there, and each model is probed there once."""
    file = {"text": {"source": "edges/srl-train.jsonl"}}
    own: dict[str, Any] = {
        "options": {"data": {"text": {"source": "trees", "held_out": "more"}}},
        "texts": {"srl": file},
    }
    similarity = {"across_stages": True, "texts": {"wikipedia": {"text": {"source": "wiki"}}}}
    cells = cells_of(**NO_FIT, **TUNED, tasks=TASKS, probe=own, similarity=similarity)
    compared = {cell.task: cell for cell in cells if cell.kind == "similarity"}
    assert set(compared) == {*TASKS, "wikipedia"}
    wikipedia = compared["wikipedia"]
    assert wikipedia.options["data"]["text"] == {"source": "wiki"}
    assert Counter(model.tuned_on for model in wikipedia.models) == {None: 3, "t": 3, "u": 3}
    probed = Counter(cell.options["data"]["text"]["source"] for cell in cells if cell.kind == "probe")
    assert probed == {"trees": 3 * 3, "edges/srl-train.jsonl": 3 * 3}  # models: before, and after either task
    assert [cell.options["data"]["text"] for cell in cells if cell.kind == "probe"][1] == file["text"]  # no `held_out`


def test_a_task_may_be_fine_tuned_in_its_own_way() -> None:
    finetune = {"options": {"a": 1, "b": 1}, "tasks": {"u": {"b": 2}}}
    tuned = of_kind("finetune", **NO_FIT, stages=["finetuned"], tasks=TASKS, finetune=finetune)
    assert {cell.task: (cell.options["a"], cell.options["b"]) for cell in tuned} == {"t": (1, 1), "u": (1, 2)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"similarity": {"texts": {"t": {}}}}, r"`similarity.texts` to be named unlike `tasks`, but got t"),
        ({"finetune": {"tasks": {"v": {}}}}, r"`finetune.tasks` out of t, but got v"),
        ({"probe": {"texts": {"srl": {"wrong": 1}}}}, r"`probe.texts.srl` to hold data options .* has wrong"),
    ],
)
def test_texts_and_tasks_of_a_works_own_are_checked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cells_of(**changes)


# ---------------------------------------------------------------------- study files


def test_seeds_are_filled_in() -> None:
    assert Models("m-{seed}", 3).listed() == ["m-0", "m-1", "m-2"]
    assert Models(["a{seed}", "b{seed}"], [4, 7]).listed() == ["a4", "a7", "b4", "b7"]
    assert Models(["a", "b"]).listed() == ["a", "b"]


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
        ({"models": {"names": "m", "seeds": 2}}, "`models.seeds` if a name"),
        ({"models": {"names": "m{seed}"}}, "`models.seeds` if a name"),
        ({"models": {"names": ["a", "a"]}}, "got a twice"),
        ({"pairs": {"random": 4}}, "`pairs.random` to be at least 1 and at most 3, but got 4"),
        ({"pairs": {"given": [["m0", "m9"]]}}, r"two of m0, m1, m2, but got \['m0', 'm9'\]"),
        ({"pairs": {"given": [["m0"]]}}, r"but got \['m0'\]"),
        ({"name": "a/b"}, "`name` to be the name of a folder"),
        ({"tasks": {}}, "`tasks` to name at least one"),
        ({"stages": ["finetuned"]}, "`finetune` to say how"),
        ({"fit": {"stages": ["random"]}}, "`fit.stages` out of pretrained, but got random"),
        ({"inject": {"tasks": ["u"]}}, "`inject.tasks` out of t, .* got u"),
        ({"models": {"names": ["a"], "groups": {"g": ["b"]}}}, "`models.groups.g` out of a, but got b"),
        ({"finetune": {"copies": 0}}, "`finetune.copies` to be at least 1"),
        ({"fit": {"memory": 0}}, "`fit.memory` to be above 0"),
        ({"surgery": {}}, "`stages` to include finetuned, as `surgery`"),
        ({"modles": []}, "keys of a study file out of name, models, tasks.*but got modles"),
        ({"pairs": {"randm": 3}}, "keys of `pairs` out of random, seed, given, same, but got randm"),
        ({"similarity": {"across": True}}, "keys of `similarity` out of .*across_tasks, texts, but got across"),
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


def test_folders_with_a_number_sign_are_no_copies() -> None:
    names = ["run#1", "run#2", "a#b/c"]
    groups = {"first": ["run#1"], "second": ["run#2", "a#b/c"]}
    study = study_of(
        models={"names": names, "groups": groups, "bases": {"run": ["run#1"]}},
        stages=["pretrained", "finetuned"], finetune={"copies": 2},
    )  # fmt: skip
    tuned = [model.name for model in study.models_at("finetuned")]
    found = {name: study.models.group(name) for name in tuned}
    assert found == {
        "run#1": "first", "run#1#2": "first", "run#2": "second", "run#2#2": "second",
        "a#b/c": "second", "a#b/c#2": "second",
    }  # fmt: skip
    assert [study.models.group(name, "bases") for name in tuned] == ["run"] * 2 + [None] * 4
    assert study.models.group("run") is None
    sizes = {name: Size(layers=1, width=place, vocabulary=3) for place, name in enumerate(names)}
    instances = tuple(Instance(name, "finetuned", name) for name in tuned)
    widths = [size.width for size in sizes_in(Cell("0", "similarity", None, instances, {}), sizes)]
    assert widths == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"without names of copies that `finetune` makes, but got m#2\. Rename"):
        study_of(models={"names": ["m", "m#2"]}, stages=["finetuned"], finetune={"copies": 2})
    assert study_of(models={"names": ["m", "m#2"]}).models.group("m#2") is None
