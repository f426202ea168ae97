"""What the commands say of a study's cells, and what is refused, before any of them runs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.processes import ROOT
from tests.tiny import tiny_folder
from tests.world import World

from aligners.cli.cells.cell_options import CellOptions, check_cells, model_sizes, not_injected, with_kept_rows
from aligners.cli.cells.costs import Costs, choose_banks, plan_study
from aligners.datamodules.text.sources import TextSource
from aligners.similarity.passes.work import EIGEN, VALUES
from aligners.studies.cells import Cell, expand
from aligners.studies.spec import Assumed, Study, read_study
from aligners.studies.study_plan import START, Cost, Plan, text_sizes

COMMANDS = CellOptions()
CONFIGS = [
    *sorted((ROOT / "aligners" / "configs" / "study").glob("*.yaml")),
    *sorted(file for file in (ROOT / "papers").glob("*/*.yaml") if file.stem not in ("tables", "numbers")),
]


def study_of(world: World, **changes: Any) -> Study:
    usual = {"name": "small", "models": {"names": [world.model_x, world.model_y]}, "inject": {}, "similarity": {}}
    usual |= {"tasks": {"t": {"text": {"source": world.fit}}}}
    usual |= {"fit": {"options": {"model": {"aligners": {"linear": "Linear"}}}}}
    return read_study({**usual, **changes})


def test_what_changes_no_result_changes_no_id(world: World) -> None:
    def ids(**changes: Any) -> dict[str, str]:
        return {cell.kind: cell.id for cell in expand(study_of(world, **changes), COMMANDS)}

    usual = ids()
    for same in (
        {"data": {"workers": 2, "cache": "elsewhere", "trust_remote_code": True}},
        {"data": {"max_length": 128}},  # the default
        {"fit": {"options": {"model": {"aligners": {"linear": {"class_path": "Linear"}}}, "sites_at_once": 1}}},
        {"similarity": {"options": {"trainer": {"accelerator": "cpu"}}}},
    ):
        assert ids(**same) == usual, same
    assert ids(similarity={"options": {"groups": 5}})["similarity"] != usual["similarity"]
    assert ids(data={"max_length": 64})["fit"] != usual["fit"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fit": {"options": {"modle": 1}}}, "`fit` and `data`.*`train.py fit --help` lists, but: .*modle"),
        ({"fit": {"options": {"trainer": {"max_epochs": 0}}}}, "`fit` of the study: Expected `trainer.max_epochs`"),
        ({"inject": {"options": {"closed_form": ["no"]}}}, "`inject` of the study: Expected `closed_form` out of"),
        ({"similarity": {"options": {"measures": ["no"]}}}, "`similarity` of the study: Expected `measures` out of"),
        ({"data": {"rows": "sentences"}}, "sentences"),
        ({"data": {"batch_size": 0}}, "`batch_size` to be at least 1"),
        ({"tasks": {"t": {"text": {"test_share": 2}}}}, "test_share"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_any_cell_runs(world: World, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        expand(study_of(world, **changes), COMMANDS)


def test_a_model_that_cannot_be_reached_is_refused_or_assumed(world: World) -> None:
    study = study_of(world, models={"names": ["nobody/nothing", world.model_y]}, assume={"layers": 7, "width": 70})
    with pytest.raises(ValueError, match="nobody/nothing"):
        model_sizes(study, assume=False)
    size = model_sizes(study, assume=True)["nobody/nothing"]
    assert (size.layers, size.width, size.known) == (7, 70, False)


def planned(study: Study, workers: int = 1) -> tuple[list[Cell], Plan]:
    cells = expand(study, COMMANDS)
    costs = Costs(study, COMMANDS, model_sizes(study, assume=True))
    return cells, plan_study(costs, cells, 1e13, workers)


def costs_of(study: Study) -> dict[str, Cost]:
    return {cell.kind: cost for cell, cost in planned(study)[1].costs}


def test_the_plan_counts_passes(world: World) -> None:
    study = study_of(world, data={"rows": "mean"}, assume={"tokens": 10})
    _, plan = planned(study)
    fit, watched, held_out, _ = text_sizes(TextSource(world.fit), study.assume)
    costs = {cell.kind: cost for cell, cost in plan.costs}
    # a closed form needs the moments and one validation, on as many fitting texts, too
    assert costs["fit"].passes == pytest.approx(2 * (1 + 2 * watched / fit))
    a_text = 2 * (2 * 3 * 12 * 16**2) * 10  # of both models
    assert costs["fit"].reading == pytest.approx((fit + 2 * watched) * a_text)
    moments = 4 * 2 * 2.0 * fit * 3 * 16**2  # at four sites, in double precision
    assert costs["fit"].flops == pytest.approx(costs["fit"].reading + moments)
    assert costs["fit"].solved == 4 * 30 * 16**3  # one closed form
    assert costs["inject"].passes == 2
    assert plan.stored_passes == 2 * 3  # of three splits
    assert plan.stored_flops == (fit + watched + held_out) * a_text
    assert plan.seconds(1, stored=True) < plan.seconds(1)
    assert plan.store == 2 * 4 * (3 + 1) * 16 * (fit + watched + held_out) * 10
    trained = {"model": {"aligners": {"mlp": "MLP"}}, "trainer": {"max_epochs": 3}}
    several = study_of(world, data={"rows": "mean"}, fit={"options": trained})
    assert costs_of(several)["fit"].passes == pytest.approx(2 * (4 + 4 * 2 * watched / fit))
    _, plan = planned(several)
    assert plan.seconds(1) > plan.seconds(2) >= plan.seconds(100) > 0
    _, plan = planned(study_of(world, fit=None, inject=None, similarity=None, attention={}))  # no store has its weights
    assert plan.store == 0
    assert plan.stored_passes == round(sum(cost.passes for _, cost in plan.costs)) > 0


def test_a_store_keeps_one_row_a_text_where_no_cell_reads_more_of_the_same_texts(world: World) -> None:
    def kept(**changes: Any) -> dict[str, str | None]:
        study = study_of(world, **{"data": {"rows": "mean"}, "store": "own", "attention": {}, **changes})
        cells = with_kept_rows(expand(study, COMMANDS), COMMANDS)
        assert [cell.id for cell in cells] == [cell.id for cell in expand(study, COMMANDS)]
        return {cell.kind: cell.options["data"].get("store_rows") for cell in cells}

    of_texts = {"fit": "texts", "inject": "texts", "similarity": "texts", "attention": None}
    assert kept() == kept(store=None) == of_texts
    assert kept(data={"rows": "cls"}) == of_texts
    grammar = {"options": {"data": {"rows": "words", "text": {"source": "grammar"}}}}
    assert kept(probe=grammar) == {**of_texts, "probe": None}  # other texts
    words = {"options": {"data": {"rows": "words"}}}
    for more in ({"stitch": {}}, {"similarity": words}, {"fit": {**words, "pairs_at_once": 1}}, {"data": {}}):
        assert set(kept(**more).values()) == {None}, more
    attention = {"options": {"data": {"attention": True}}}
    assert kept(similarity=attention) == {**of_texts, "similarity": None}  # not stored
    assert kept(similarity={"options": {"data": {"attention": True, "rows": "words"}}})["fit"] == "texts"


def test_the_plan_has_the_size_of_what_is_kept(world: World) -> None:
    study = study_of(world, data={"rows": "mean"}, assume={"tokens": 10})
    costs = Costs(study, COMMANDS, model_sizes(study, assume=True))
    cells, whole = planned(study)
    kept = plan_study(costs, with_kept_rows(cells, COMMANDS), 1e13, 1)
    assert (kept.store, kept.stored_flops) == (whole.store / 10, whole.stored_flops)
    read = {cell.kind: cost.reading for cell, cost in kept.costs}
    assert read["fit"] > 0 == read["inject"]  # which replaces tokens


def test_a_bank_in_parts_reads_the_texts_for_each_part_and_takes_the_memory_of_one(world: World) -> None:
    whole, parts = (
        planned(study_of(world, fit={"options": {"sites_at_once": at_once}}, inject=None, similarity=None))[1].costs[0][
            1
        ]
        for at_once in (None, 2)
    )
    assert parts.passes == 2 * whole.passes  # of four sites
    assert parts.reading == 2 * whole.reading
    assert parts.memory < whole.memory


def test_recovery_in_both_directions_costs_two_banks(world: World) -> None:
    aligners = {"model": {"aligners": {"linear": "Linear"}}}
    one, both = (
        planned(study_of(world, fit=None, inject=None, similarity=None,
                         recover={"options": {**aligners, "data": {"direction": way}}}))[1].costs[0][1]
        for way in ("backward", "both")
    )  # fmt: skip
    assert both.flops - both.reading == 2 * (one.flops - one.reading)


def test_validations_and_checkpoints_are_counted_as_often_as_they_are_made(world: World) -> None:
    def fit(checkpoint: dict[str, Any], **trainer: Any) -> Cost:
        options = {"model": {"aligners": {"mlp": "MLP"}}, "trainer": {"max_epochs": 6, **trainer}}
        study = study_of(world, inject=None, fit={"options": {**options, "checkpoint": checkpoint}})
        return costs_of(study)["fit"]

    sizes = text_sizes(TextSource(world.fit), Assumed())
    a_validation = 4 * sizes.validation / sizes.fit  # by two models, of these and as many fitting texts
    often, seldom, never = fit({}), fit({}, check_val_every_n_epoch=3), fit({}, limit_val_batches=0)
    assert often.passes - seldom.passes == pytest.approx(4 * a_validation)
    assert seldom.passes - never.passes == pytest.approx(3 * a_validation)  # and one before training
    each, third = fit({"every_n_epochs": 1}), fit({"every_n_epochs": 3})
    assert each.saves - third.saves == 4
    weights = 4 * 16 * 16 * 4  # bytes of one matrix at four sites: a checkpoint has at least four of each trained one
    assert each.saved > 4 * weights
    # an hour at this rate renews it six times
    plan = Plan(
        [], rate=each.flops / 3600, solving=1.0, workers=1, store=0, stored_passes=0, stored_flops=0, assumed=[]
    )
    assert plan.written(each) == each.saved * (each.saves + 6)


def test_fine_tuning_is_on_all_texts_of_the_task(world: World) -> None:
    """MNLI has 392,702, of which 5 % are watched; the limits of other cells are not those of fine-tuning."""
    text = {"source": "mnli", "max_texts": 1600, "max_held_out": 1600}
    options = {"data": {"text": {"max_texts": None, "max_held_out": None}}, "trainer": {"max_epochs": 3}}
    changes: dict[str, Any] = {"fit": None, "inject": None, "similarity": None, "stages": ["finetuned"]}
    study = study_of(world, tasks={"mnli": {"text": text}}, finetune={"options": options}, **changes)
    cost = costs_of(study)["finetune"]
    a_text = 2.0 * 3 * 12 * 16**2 * study.assume.tokens
    assert cost.flops == pytest.approx((3 * (3 * 373067 + 19635) + 9815) * a_text)
    few = {"data": {"text": {"max_texts": 400}}, "trainer": {"max_epochs": 3}}
    study = study_of(world, tasks={"mnli": {"text": text}}, finetune={"options": few}, **changes)
    assert costs_of(study)["finetune"].flops == pytest.approx((3 * (3 * 400 + 400) + 400) * a_text)


def test_a_step_of_multiple_choice_reads_all_answers_to_its_questions(world: World) -> None:
    """HellaSwag has four: 10 steps of 32 questions read 1,280 texts, in as many calls as 10 steps of 32 texts."""
    changes: dict[str, Any] = {"fit": None, "inject": None, "similarity": None, "stages": ["finetuned"]}
    limits = {"max_texts": 400, "max_held_out": 40}
    trainer = {"max_epochs": -1, "max_steps": 10, "limit_val_batches": 0}
    costs = []
    for source in ("hellaswag", "yelp_polarity"):
        options = {"data": {"batch_size": 32}, "trainer": trainer}
        tasks = {source: {"text": {"source": source, **limits}}}
        study = study_of(world, tasks=tasks, finetune={"options": options}, **changes)
        costs.append(costs_of(study)["finetune"])
    a_text = 2.0 * 3 * 12 * 16**2 * study.assume.tokens
    assert costs[0].flops == pytest.approx((3 * 1280 + 40) * a_text)
    assert costs[1].flops == pytest.approx((3 * 320 + 40) * a_text)
    assert costs[0].calls == pytest.approx(3 * (3 * 1280 + 40) / 32 / 4)  # three blocks


def test_the_plan_counts_what_controls_and_decompositions_take(world: World) -> None:
    """Untrained twins and the fitting texts are read; CCA decomposes every layer and every pair of layers."""
    sizes, costs = text_sizes(TextSource(world.fit), Assumed()), {}
    for name, options in {
        "alone": {},
        "controls": {"controls": True},
        "cca": {"measures": ["cka", "cca"]},
        "both": {"measures": ["cka", "cca", "r2_cca"]},
        "pwcca": {"measures": ["cka", "svcca", "pwcca"]},
        "scaled": {"measures": ["cka", "pwcca", "svcca_standardised", "pwcca_standardised"]},
    }.items():
        similarity = {"options": {"measures": ["cka"], **options}}
        costs[name] = costs_of(study_of(world, fit=None, inject=None, similarity=similarity))["similarity"]
    alone, controls, cca, both, pwcca, scaled = costs.values()
    assert controls.passes == 3 * alone.passes
    assert controls.reading == pytest.approx(alone.reading * (2 * sizes.test + sizes.fit) / sizes.test)
    assert controls.flops - controls.reading > 4 * (alone.flops - alone.reading)
    assert cca.solved - alone.solved == pytest.approx((2 * 4 * EIGEN + 4 * 4 * VALUES) * 16**3)
    assert both.solved == cca.solved  # which r2_cca shares
    assert scaled.solved - alone.solved == pytest.approx(2 * (pwcca.solved - alone.solved))


def test_nothing_runs_again_where_nothing_is_injected(world: World) -> None:
    """A model without a head has errors only; once it is fine-tuned it has one."""
    study = study_of(world, similarity=None)
    sizes, (_, cell) = model_sizes(study, assume=True), expand(study, COMMANDS)
    with_heads, without = (
        Costs(study, COMMANDS, {name: replace(size, head=head) for name, size in sizes.items()})
        for head in ("classification", None)
    )
    assert without.of(cell).flops == without.of(cell).reading < with_heads.of(cell).flops
    tuned = replace(cell, models=tuple(replace(model, stage="finetuned") for model in cell.models))
    assert without.of(tuned) == with_heads.of(cell)


def test_stitching_is_planned_with_the_texts_that_it_is_watched_and_measured_on(world: World) -> None:
    def stitch(**trainer: Any) -> Cost:
        changes = {"fit": None, "inject": None, "similarity": None}
        options = {"data": {"batch_size": 10}, "trainer": {"max_steps": 20, "val_check_interval": 10, **trainer}}
        return costs_of(study_of(world, **changes, stitch={"options": options}))["stitch"]

    sizes, a_text = text_sizes(TextSource(world.fit), Assumed()), 2.0 * 3 * 12 * 16**2 * Assumed().tokens
    often, never = stitch(), stitch(limit_val_batches=0)
    # two fronts; at three sites of four routes half of Y, three times in training, held out for the layer and identity
    expected = 2 * (200 + sizes.test) + 4 * 3 / 2 * (3 * 200 + 2 * sizes.test)
    assert never.flops == pytest.approx(expected * a_text)
    assert often.flops - never.flops == pytest.approx(3 * sizes.validation * (2 + 4 * 3 / 2) * a_text)  # and one before
    assert often.calls > never.calls > 0
    assert stitch(max_steps=2000, max_epochs=1).flops == stitch(max_steps=-1, max_epochs=1).flops < stitch().flops


def test_an_epoch_has_no_more_rows_than_the_texts(world: World) -> None:
    mlp = {"model": {"aligners": {"mlp": "MLP"}}}
    flops = []
    for trainer in ({"max_epochs": 3}, {"max_epochs": 3, "limit_train_batches": 10_000}):
        _, plan = planned(study_of(world, fit={"options": {**mlp, "trainer": trainer}}, inject=None))
        flops.append(sum(cost.flops for _, cost in plan.costs))
    assert flops[0] == flops[1]


def test_the_rate_is_that_of_this_machine_unless_it_is_given(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.studies.study_plan.MEASURING", 0.01)
    study = study_of(world)
    cells, given = planned(study)
    costs = Costs(study, COMMANDS, model_sizes(study, assume=True))
    plan, again = (plan_study(costs, cells, None, 1) for _ in range(2))
    assert plan.rate == again.rate > 0  # measured once
    assert "(measured here, cpu; `--rate`)" in plan.words()[0]
    assert "(`--rate`)" in given.words()[0]
    assert plan.seconds(1) >= START * len(cells)  # each has to begin


def chosen(world: World, **fit: Any) -> tuple[int | None, str]:
    study = study_of(world, data={"rows": "mean"}, fit=fit)
    study, said = choose_banks(study, COMMANDS, model_sizes(study, assume=False))
    assert study.fit is not None
    return study.fit.pairs_at_once, " ".join(said)


def test_pairs_share_a_bank_as_far_as_the_studys_memory_goes(world: World) -> None:
    few, said = chosen(world, memory=1e-4)
    many, _ = chosen(world, memory=0.01)
    assert few == 1
    assert said.startswith("A bank holds 1 pair of models within 100 kB (`fit.memory`): 4 sites of ")
    assert many == 3
    one_map = {"options": {"model": {"aligners": {"mlp": "MLP"}}}}
    assert (chosen(world, memory=0.01, **one_map)[0] or 0) > many  # of less than the maps of a fit by default
    assert chosen(world, pairs_at_once=3, memory=1e-4) == (3, "")


NUMBERS = {
    "embedded": {"fit": 10, "inject": 10, "similarity": 1},
    "embedded_probes": {"finetune": 3, "probe": 6, "similarity": 1},
    "ren": dict(untrained=3, finetune=6, fit=12, inject=12, similarity=6, recover=3, attention=6),
    "ren_small": dict(untrained=3, finetune=6, fit=12, inject=12, similarity=6, recover=3, attention=6),
    "ren_layers": dict(finetune=6, fit=18, inject=18, attention=6),
    "wu": {"untrained": 7, "similarity": 1},
    "wu_tuned": {"finetune": 40, "similarity": 1},
    "phang": {"finetune": 36 * 2, "similarity": 12, "surgery": 36},
    "brown": {"similarity": 2, "identity": 4},
    "brown_scaling": {"similarity": 1},
    "updates": {"compare": 12, "carry": 12},
    "merchant": {"finetune": 9, "probe": 11 * 8, "similarity": 4},  # squad has a length of its own, pretrained too
}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_study_is_expanded_and_planned_without_a_network(config: Path) -> None:
    spec = yaml.safe_load(config.read_text())
    name = spec["name"]
    if name in ("ren", "ren_small"):
        whole = read_study(spec)
        sizes = len(whole.models.listed()), len(whole.pairs_at("pretrained")), len(whole.tasks)
        assert sizes == ((25, 300, 7) if name == "ren" else (25, 8, 3))
        spec["models"]["seeds"], spec["tasks"] = 3, dict(list(spec["tasks"].items())[:2])
        spec["pairs"] = {}
    study = read_study(spec)
    cells, plan = planned(study, workers=8)
    assert config.parent.name != "study" or name == config.stem
    found = Counter(cell.kind for cell in cells)
    assert {kind: number for kind, number in found.items() if number} == NUMBERS[name]
    assert plan.seconds(1) > plan.seconds(8) > 0 or len(cells) < 8
    compared = [cell.options["data"] for cell in cells if cell.kind == "similarity"]
    assert not any(data.get("rows") == "cls" and data.get("layers") == "all" for data in compared)  # 0 is constant
    assert all(cost.flops > 0 and cost.memory > 0 for cell, cost in plan.costs if cell.kind != "untrained")


# ---------------------------------------------------------------------- what cells can do with their models


WIDE, DEEP = "embedded:0:width=96,layers=3", "embedded:0:width=16,layers=4"
HEADS = "embedded:0:width=16,layers=3,heads=4"
INN: dict[str, Any] = {"options": {"model": {"aligners": {"inn": "INN"}}}}
STITCHING_INN: dict[str, Any] = {"options": {"model": {"layers": {"inn": "INN"}}}}


def bare_study(world: World, *more: str, **work: Any) -> Study:
    """Of two tiny models (3 blocks, width 16, 2 heads), or of the first of them and others; nothing but `work`."""
    models = {"names": [world.model_x, *(more or [world.model_y])]}
    return study_of(world, **{"models": models, "fit": None, "inject": None, "similarity": None, **work})


def check(study: Study) -> None:
    check_cells(expand(study, COMMANDS), COMMANDS, model_sizes(study, assume=False))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, causal: list[str]) -> dict[str, str]:
    """Models of the same size: one without a head, and one that predicts the next token."""
    return {"bare": str(tiny_folder(tmp_path_factory.mktemp("bare") / "model", n_labels=None)), "causal": causal[1]}


@pytest.mark.parametrize(
    ("other", "work", "said"),
    [
        (WIDE, {"fit": INN}, f"`fit` .* fit {{x}} – {WIDE}, t, pretrained: .*equal widths"),
        (WIDE, {"stitch": STITCHING_INN}, f"stitch {{x}} – {WIDE}.*equal widths"),
        (WIDE, {"identity": {}}, f"identity {{x}} – {WIDE}.* widths 16 of {{x}} and 96 of {WIDE} differ"),
        (DEEP, {"identity": {}}, "`sites` 'blocks' pairs equal layers, but the models have 3 and 4"),
        (DEEP, {"fit": {}, "data": {"sites": "all"}}, "`sites` 'all' pairs equal layers, but the models have 3"),
        (DEEP, {"fit": {}, "data": {"sites": "4"}}, r"`sites` names 4, but {x} has L = 3 blocks: from 0 to 3"),
        (DEEP, {"attention": {}, "data": {"sites": "0"}}, r"`sites` names 0, but {x} has L = 3 blocks: from 1 to 3"),
        (HEADS, {"attention": INN}, f"attention {{x}} – {HEADS}.*equal widths"),
        (DEEP, {"similarity": {"options": {"data": {"layers": [4]}}}}, "`layers` names 4, but {x} has L = 3"),
        ("bare", {"identity": {}}, "identity {x} – {bare}, t, pretrained: there is no head to stitch into in {bare}"),
        ("bare", {"stitch": {}}, "stitch {x} – {bare}, t, pretrained: there is no head to stitch into in {bare}"),
        ("causal", {"identity": {}}, "heads are of different tasks.*{causal}: causal, {x}: classification"),
    ],
    ids=str,
)
def test_what_a_cell_cannot_do_with_its_models_is_refused_with_the_cell(
    world: World, others: dict[str, str], other: str, work: dict[str, Any], said: str
) -> None:
    study = bare_study(world, others.get(other, other), **work)
    with pytest.raises(ValueError, match=said.format(x=world.model_x, **others) + r"[\s\S]*`pairs.given`"):
        check(study)
    check(bare_study(world, **{**work, "data": {}, **({"similarity": {}} if "similarity" in work else {})}))


def test_a_bank_needs_equal_widths_and_pairs_that_are_given_may_leave_such_models_out(world: World) -> None:
    models = {"names": [world.model_x, world.model_y, WIDE]}
    with pytest.raises(ValueError, match=r"one bank.* but theirs are 16, 16, 96\. Set it to 1"):
        check(bare_study(world, models=models, fit={"pairs_at_once": 3}))
    check(bare_study(world, models=models, fit=INN, identity={}, pairs={"given": [[world.model_x, world.model_y]]}))


def test_only_what_is_stitched_into_needs_a_head(world: World, others: dict[str, str]) -> None:
    models = {"names": [others["bare"], world.model_y]}
    check(bare_study(world, models=models, identity={"options": {"routes": "forward"}}))
    tuned = {"stages": ["finetuned"], "finetune": {}}  # which gives every model a head
    check(bare_study(world, models=models, identity={}, **tuned))


def test_a_model_without_a_head_is_said_at_the_start(world: World, others: dict[str, str]) -> None:
    models = {"names": [world.model_x, world.model_y, others["bare"]]}
    for stages, count in ((["pretrained"], 2), (["random", "pretrained", "finetuned"], 4)):
        study = bare_study(world, models=models, fit={}, inject={}, stages=stages, finetune={})
        (said,) = not_injected(expand(study, COMMANDS), model_sizes(study, assume=False))
        assert said == (
            f"Nothing will be injected into {others['bare']}, which has no head: {count} cells with the errors of maps "
            "only."
        )
