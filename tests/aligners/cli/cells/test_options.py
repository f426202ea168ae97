"""What the commands say of a study's cells before any of them runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from aligners.cli.cells.checks import model_sizes
from aligners.cli.cells.costs import Costs, choose_banks, plan_study
from aligners.cli.cells.options import CellOptions
from aligners.studies.cells import Cell, expand
from aligners.studies.plan import START, Plan
from aligners.studies.spec import Study, read_study
from tests.processes import ROOT
from tests.world import World

COMMANDS = CellOptions()
CONFIGS = sorted((ROOT / "aligners" / "configs" / "study").glob("*.yaml"))


def study_of(world: World, **changes: Any) -> Study:
    usual = {
        "name": "small",
        "models": {"names": [world.model_x, world.model_y]},
        "tasks": {"t": {"text": {"source": world.fit}}},
        "fit": {"options": {"model": {"aligners": {"linear": "Linear"}}}},
        "inject": {},
        "similarity": {},
    }
    return read_study({**usual, **changes})


def cells_of(world: World, **changes: Any) -> list[Cell]:
    return expand(study_of(world, **changes), COMMANDS)


def test_options_are_parsed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    parsed = CellOptions.parsed
    monkeypatch.setattr(
        CellOptions, "parsed", lambda self, kind, given: asked.append(kind) or parsed(self, kind, given)
    )
    study, commands = study_of(world, models={"names": [f"embedded:{seed}" for seed in range(5)]}), CellOptions()
    for _ in range(2):
        expand(study, commands)
    assert asked == ["fit", "inject", "similarity"]


def ids(world: World, **changes: Any) -> dict[str, str]:
    return {cell.kind: cell.id for cell in cells_of(world, **changes)}


def test_what_changes_no_result_changes_no_id(world: World) -> None:
    usual = ids(world)
    for same in (
        {"data": {"workers": 2, "cache": "elsewhere", "trust_remote_code": True}},
        {"data": {"max_length": 128}},  # the default
        {"fit": {"options": {"model": {"aligners": {"linear": {"class_path": "Linear"}}}, "sites_at_once": 1}}},
        {"similarity": {"options": {"trainer": {"accelerator": "cpu"}}}},
    ):
        assert ids(world, **same) == usual, same
    assert ids(world, similarity={"options": {"groups": 5}})["similarity"] != usual["similarity"]
    assert ids(world, data={"max_length": 64})["fit"] != usual["fit"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"fit": {"options": {"model": {"aligners": {"l": "Nonlinear"}}}}},
            r"`fit` and `data`[\s\S]*`train.py fit`[\s\S]*Nonline",
        ),
        ({"fit": {"options": {"modle": 1}}}, "`train.py fit --help` lists, but: .*modle"),
        ({"fit": {"options": {"trainer": {"max_epochs": 0}}}}, "`fit` of the study: Expected `trainer.max_epochs`"),
        ({"inject": {"options": {"closed_form": ["no"]}}}, "`inject` of the study: Expected `closed_form` out of"),
        ({"similarity": {"options": {"measures": ["no"]}}}, "`similarity` of the study: Expected `measures` out of"),
        ({"data": {"rws": "mean"}}, "data options of fit, inject, similarity, but none of them has rws"),
        ({"data": {"rows": "sentences"}}, "sentences"),
        ({"data": {"batch_size": 0}}, "`batch_size` to be at least 1"),
        ({"tasks": {"t": {"text": {"test_share": 2}}}}, "test_share"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_any_cell_runs(world: World, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cells_of(world, **changes)


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


def test_the_plan_counts_passes(world: World) -> None:
    study = study_of(world, data={"rows": "mean"}, assume={"texts": 320, "held_out": 100, "tokens": 10})
    _, plan = planned(study)
    costs = {cell.kind: cost for cell, cost in plan.costs}
    assert costs["fit"].passes == 2  # a closed form needs the moments alone
    reading, solving = 2 * (2 * 3 * 12 * 16**2) * 320 * 10, 4 * 30 * 16**3  # one closed form at four sites
    assert (costs["fit"].flops, costs["fit"].reading) == (reading + solving, reading)
    assert costs["inject"].passes == 2
    assert plan.stored_passes == 4
    assert plan.stored_flops == 2 * (2 * 3 * 12 * 16**2) * 420 * 10
    assert plan.seconds(1, stored=True) < plan.seconds(1)
    assert plan.store == 2 * 4 * (3 + 1) * 16 * 420 * 10
    trained = {"model": {"aligners": {"mlp": "MLP"}}, "trainer": {"max_epochs": 3}}
    _, plan = planned(study_of(world, data={"rows": "mean"}, fit={"options": trained}))
    assert {cell.kind: cost for cell, cost in plan.costs}["fit"].passes == 2 * 4
    assert plan.seconds(1) > plan.seconds(2) >= plan.seconds(100) > 0


def test_the_plan_counts_what_controls_and_decompositions_take(world: World) -> None:
    """Untrained twins, the fitting texts, five times the products, and 30 d³ for each fitted measure and layer pair."""
    costs = {}
    for name, options in {"alone": {}, "controls": {"controls": True}, "cca": {"measures": ["cka", "cca"]}}.items():
        study = study_of(
            world, models={"names": [world.model_x, world.model_y]}, fit=None, inject=None,
            similarity={"options": {"measures": ["cka"], **options}}, assume={"texts": 320, "held_out": 100},
        )  # fmt: skip
        ((_, costs[name]),) = planned(study)[1].costs
    alone, controls, cca = costs.values()
    assert controls.passes == 3 * alone.passes
    assert controls.reading == pytest.approx(alone.reading * (2 * 100 + 320) / 100)
    assert controls.flops - controls.reading == pytest.approx(5 * (alone.flops - alone.reading))
    assert cca.flops - alone.flops == pytest.approx(4 * 4 * 30 * 16**3)


def test_an_epoch_has_no_more_rows_than_the_texts(world: World) -> None:
    mlp = {"model": {"aligners": {"mlp": "MLP"}}}
    flops = []
    for trainer in ({"max_epochs": 3}, {"max_epochs": 3, "limit_train_batches": 10_000}):
        _, plan = planned(study_of(world, fit={"options": {**mlp, "trainer": trainer}}, inject=None))
        flops.append(sum(cost.flops for _, cost in plan.costs))
    assert flops[0] == flops[1]


def test_the_rate_is_that_of_this_machine_unless_it_is_given(world: World) -> None:
    study = study_of(world)
    cells, given = planned(study)
    costs = Costs(study, COMMANDS, model_sizes(study, assume=True))
    plan, again = (plan_study(costs, cells, None, 1) for _ in range(2))
    assert plan.rate == again.rate > 0  # measured once
    assert "(measured here, cpu; `--rate`)" in plan.words()[0]
    assert "(`--rate`)" in given.words()[0]
    assert plan.seconds(1) >= START * len(cells)  # each has to begin


def chosen(world: World, **fit: Any) -> tuple[int | None, str]:
    study = study_of(world, models={"names": [world.model_x, world.model_y]}, data={"rows": "mean"}, fit=fit)
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


def test_the_plan_stores_no_attention_weights(world: World) -> None:
    attention = study_of(world, fit=None, inject=None, similarity=None, attention={})
    _, plan = planned(attention)
    assert plan.store == 0
    assert plan.stored_passes == round(sum(cost.passes for _, cost in plan.costs)) > 0


NUMBERS = {
    "embedded": {"fit": 10, "inject": 10, "similarity": 1},
    "embedded_probes": {"finetune": 3, "probe": 6, "similarity": 1},
    "ren": dict(untrained=5, finetune=10, fit=40, inject=40, similarity=6, recover=5, attention=20),
    "ren_small": dict(untrained=13, finetune=26, fit=32, inject=32, similarity=48, recover=25, attention=16),
    "wu": {"untrained": 7, "similarity": 2},
    "wu_tuned": {"finetune": 8, "similarity": 1},
    "phang": {"finetune": 15 * 2, "similarity": 5, "surgery": 15},
    "brown": {"similarity": 1, "identity": 1},
    "merchant": {"finetune": 3, "probe": 4, "similarity": 1},
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_study_is_expanded_and_planned_without_a_network(config: Path) -> None:
    spec = yaml.safe_load(config.read_text())
    if config.stem == "ren":
        spec["models"]["seeds"] = 5  # of 25, with 300 pairs
    if config.stem.startswith("ren"):
        spec["tasks"] = dict(list(spec["tasks"].items())[:2])
    study = read_study(spec)
    cells, plan = planned(study, workers=8)
    assert study.name == config.stem
    found = Counter(cell.kind for cell in cells)
    assert {kind: number for kind, number in found.items() if number} == NUMBERS[config.stem]
    assert plan.seconds(1) > plan.seconds(8) > 0 or len(cells) < 8
    compared = [cell.options["data"] for cell in cells if cell.kind == "similarity"]
    assert not any(data.get("rows") == "cls" and data.get("layers") == "all" for data in compared)  # 0 is constant
    assert all(cost.flops > 0 and cost.memory > 0 for cell, cost in plan.costs if cell.kind != "untrained")


def test_ren_is_what_the_paper_wished_for() -> None:
    study = read_study(yaml.safe_load((ROOT / "aligners" / "configs" / "study" / "ren.yaml").read_text()))
    assert len(study.models.listed()) == 25
    assert study.models.listed()[-1] == "google/multiberts-seed_24"
    assert len(study.pairs_at("pretrained")) == 300
    assert len(study.tasks) == 7
