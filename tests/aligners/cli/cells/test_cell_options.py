"""What the commands say of a study's cells, and what is refused, before any of them runs."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.processes import ROOT
from tests.tiny import tiny_folder
from tests.world import World

from aligners.cli.cells.cell_checks import check_cells, not_injected
from aligners.cli.cells.cell_options import CellOptions, choose_banks, keep_rows, model_sizes
from aligners.studies.cells import GUESS
from aligners.studies.expansion import expand
from aligners.studies.spec import Study, read_study

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
        {"data": {"workers": 2, "trust_remote_code": True}},
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


def test_a_model_that_cannot_be_reached_is_refused_or_guessed(world: World) -> None:
    study = study_of(world, models={"names": ["nobody/nothing", world.model_y]})
    with pytest.raises(ValueError, match="nobody/nothing"):
        model_sizes(study, guess=False)
    assert model_sizes(study, guess=True)["nobody/nothing"] is GUESS
    assert not GUESS.known


def test_a_store_keeps_one_row_a_text_where_no_cell_reads_more_of_the_same_texts(world: World) -> None:
    def kept(**changes: Any) -> dict[str, str | None]:
        study = study_of(world, **{"data": {"rows": "mean"}, "store": "own", "attention": {}, **changes})
        cells = keep_rows(expand(study, COMMANDS), COMMANDS)
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


def chosen(world: World, **fit: Any) -> tuple[int | None, str]:
    study = study_of(world, data={"rows": "mean"}, fit=fit)
    study, said = choose_banks(study, COMMANDS, model_sizes(study, guess=False))
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
def test_every_study_is_expanded_without_a_network(config: Path) -> None:
    spec = yaml.safe_load(config.read_text())
    name = spec["name"]
    if name in ("ren", "ren_small"):
        whole = read_study(spec)
        sizes = len(whole.models.listed()), len(whole.pairs_at("pretrained")), len(whole.tasks)
        assert sizes == ((25, 300, 7) if name == "ren" else (25, 8, 3))
        spec["models"]["seeds"], spec["tasks"] = 3, dict(list(spec["tasks"].items())[:2])
        spec["pairs"] = {}
    study = read_study(spec)
    cells = expand(study, COMMANDS)
    check_cells(cells, COMMANDS, model_sizes(study, guess=True))
    assert config.parent.name != "study" or name == config.stem
    found = Counter(cell.kind for cell in cells)
    assert {kind: number for kind, number in found.items() if number} == NUMBERS[name]
    compared = [cell.options["data"] for cell in cells if cell.kind == "similarity"]
    assert not any(data.get("rows") == "cls" and data.get("layers") == "all" for data in compared)  # 0 is constant


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
    check_cells(expand(study, COMMANDS), COMMANDS, model_sizes(study, guess=False))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, causal: list[str]) -> dict[str, str]:
    """Models of the same size: one without a head, and one that predicts the next token."""
    return {"bare": str(tiny_folder(tmp_path_factory.mktemp("bare") / "model", n_labels=None)), "causal": causal[1]}


def test_the_site_after_a_final_norm_is_known_of_encoders_too(world: World, tmp_path: Path) -> None:
    names = [str(tiny_folder(tmp_path / f"modern{seed}", "modernbert", seed=seed)) for seed in range(2)]
    study = partial(study_of, world, models={"names": names}, fit={}, inject=None, similarity=None)
    check(study(data={"sites": "2:norm"}))
    check(study(data={"sites": "4"}))
    with pytest.raises(ValueError, match=r"`sites` names 5, but .* has L = 3 blocks and a final norm: from 0 to 4"):
        check(study(data={"sites": "5"}))
    with pytest.raises(ValueError, match=r"`sites` names 4, but .* has L = 3 blocks and no final norm: from 0 to 3"):
        check(bare_study(world, fit={}, data={"sites": "norm"}))


@pytest.mark.parametrize(
    ("other", "work", "said"),
    [
        (WIDE, {"fit": INN}, f"`fit` .* fit {{x}} – {WIDE}, t, pretrained: .*equal widths"),
        (WIDE, {"stitch": STITCHING_INN}, f"stitch {{x}} – {WIDE}.*equal widths"),
        (WIDE, {"identity": {}}, f"identity {{x}} – {WIDE}.* widths 16 of {{x}} and 96 of {WIDE} differ"),
        (DEEP, {"identity": {}}, "`sites` 'blocks' pairs equal sites, but the last ones are 3 and 4"),
        (DEEP, {"fit": {}, "data": {"sites": "all"}}, "`sites` 'all' pairs equal sites, but the last ones are 3"),
        (
            DEEP,
            {"fit": {}, "data": {"sites": "4"}},
            r"`sites` names 4, but {x} has L = 3 blocks and no final norm: from 0 to 3",
        ),
        (
            DEEP,
            {"attention": {}, "data": {"sites": "0"}},
            r"`sites` names 0, but {x} has L = 3 blocks and no final norm: from 1 to 3",
        ),
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
        (said,) = not_injected(expand(study, COMMANDS), model_sizes(study, guess=False))
        assert said == (
            f"Nothing will be injected into {others['bare']}, which has no head: {count} cells with the errors of maps "
            "only."
        )
