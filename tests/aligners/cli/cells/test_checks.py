"""What is refused, or said, before any cell of a study runs."""

from typing import Any

import pytest

from aligners.cli.cells.checks import check_cells, model_sizes, not_injected
from aligners.cli.cells.options import CellOptions
from aligners.studies.cells import expand
from aligners.studies.spec import Study, read_study
from tests.tiny import tiny_folder
from tests.world import World

COMMANDS = CellOptions()
WIDE, DEEP, HEADS = (
    "embedded:0:width=96,layers=3",
    "embedded:0:width=16,layers=4",
    "embedded:0:width=16,layers=3,heads=4",
)
INN: dict[str, Any] = {"options": {"model": {"aligners": {"inn": "INN"}}}}
STITCHING_INN: dict[str, Any] = {"options": {"model": {"layers": {"inn": "INN"}}}}


def study_of(world: World, *more: str, **work: Any) -> Study:
    """Of two tiny models (3 blocks, width 16, 2 heads), or of the first of them and others."""
    models = [world.model_x, *(more or [world.model_y])]
    return read_study(
        {"name": "s", "models": {"names": models}, "tasks": {"t": {"text": {"source": world.fit}}}, **work}
    )


def check(study: Study) -> None:
    check_cells(expand(study, COMMANDS), COMMANDS, model_sizes(study, assume=False))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of the same size: one without a head, and one that predicts the next token."""
    folder = tmp_path_factory.mktemp("others")
    return {
        "bare": str(tiny_folder(folder / "bare", n_labels=None)),
        "causal": str(tiny_folder(folder / "causal", "gpt2", task="causal")),
    }


@pytest.mark.parametrize(
    ("other", "work", "said"),
    [
        (WIDE, {"fit": INN}, f"`fit` .* fit {{x}} – {WIDE}, t, pretrained: .*equal widths"),
        (WIDE, {"stitch": STITCHING_INN}, f"stitch {{x}} – {WIDE}.*equal widths"),
        (WIDE, {"identity": {}}, f"identity {{x}} – {WIDE}.* widths 16 of {{x}} and 96 of {WIDE} differ"),
        (DEEP, {"identity": {}}, "`sites` 'blocks' pairs equal layers, but X has 3 blocks and Y has 4"),
        (DEEP, {"fit": {}, "data": {"sites": "all"}}, "`sites` 'all' pairs equal layers, but X has 3 blocks"),
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
    study = study_of(world, others.get(other, other), **work)
    with pytest.raises(ValueError, match=said.format(x=world.model_x, **others) + r"[\s\S]*`pairs.given`"):
        check(study)
    check(study_of(world, **{**work, "data": {}, **({"similarity": {}} if "similarity" in work else {})}))


def test_a_bank_needs_equal_widths(world: World) -> None:
    study = study_of(world, models={"names": [world.model_x, world.model_y, WIDE]}, fit={"pairs_at_once": 3})
    with pytest.raises(ValueError, match=r"one bank.* but theirs are 16, 16, 96\. Set it to 1"):
        check(study)


def test_pairs_that_are_given_may_leave_such_models_out(world: World) -> None:
    models = {"models": {"names": [world.model_x, world.model_y, WIDE]}, "fit": INN, "identity": {}}
    with pytest.raises(ValueError, match=r"pairs\.given"):
        check(study_of(world, **models))
    check(study_of(world, **models, pairs={"given": [[world.model_x, world.model_y]]}))


def test_only_what_is_stitched_into_needs_a_head(world: World, others: dict[str, str]) -> None:
    models = {"names": [others["bare"], world.model_y]}
    check(study_of(world, models=models, identity={"options": {"routes": "forward"}}))
    tuned = {"stages": ["finetuned"], "finetune": {}}  # which gives every model a head
    check(study_of(world, models=models, identity={}, **tuned))


def test_a_model_without_a_head_is_said_at_the_start(world: World, others: dict[str, str]) -> None:
    models = {"names": [world.model_x, world.model_y, others["bare"]]}
    for stages, count in ((["pretrained"], 2), (["random", "pretrained", "finetuned"], 4)):
        study = study_of(world, models=models, fit={}, inject={}, stages=stages, finetune={})
        (said,) = not_injected(expand(study, COMMANDS), model_sizes(study, assume=False))
        assert said == (
            f"Nothing will be injected into {others['bare']}, which has no head: {count} cells with errors alone."
        )
