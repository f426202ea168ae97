"""What an evaluation says where maps cannot be fitted, were fitted on other rows, or leave the range of numbers."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligners.injection.test_injecting import evaluate, fit, rows_of
from tests.runs import activations
from tests.shell import options
from tests.world import TEST_TEXTS, World, sentences, write_texts

from aligners.cli.table import evaluate as main
from aligners.datamodules.rows.read_rows import PairedBatch
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.saved_bank import DIRECTIONS, StoredBank, load_bank
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import CLOSED_FORMS
from aligners.maps.linear import Linear
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.reports.runs.injection_report import console_tables, left_out, reading

report = partial(make_report, "injection")

SITES = [1, 3]
WIDTH = 16
FEW = 12  # fitting rows: enough for a rotation, too few for least squares


@pytest.fixture(scope="module")
def means(world: World, tmp_path_factory: pytest.TempPathFactory) -> StoredBank:
    return fit(world, tmp_path_factory.mktemp("means"), {"linear": Linear}, rows="mean", sites=SITES)


def test_floors_are_of_the_rows_that_are_injected(world: World, means: StoredBank, tmp_path: Path) -> None:
    on_tokens = fit(world, tmp_path, {"linear": Linear}, sites=SITES)
    found, expected = (evaluate(world, [stored], both=True, closed_form=()) for stored in (means, on_tokens))
    assert found.meta["rows"] == "tokens"
    for direction in ("forward", "backward"):
        for name in ("mean", "random_embedding", "identity"):
            rows = [row for row in rows_of(found, name, direction) if row["rows"] == "tokens"]
            for a, b in zip(rows, rows_of(expected, name, direction), strict=True):
                assert a["fitted_on"] == "tokens"
                for column in ("fvu", "mse", "loss", "cosine"):
                    assert a[column] == pytest.approx(b[column], rel=1e-4), (name, column)
                if name == "random_embedding":
                    assert a["fvu"] > 1.5


@pytest.mark.slow
def test_a_closed_form_that_few_rows_do_not_determine_costs_its_own_rows(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_texts(tmp_path / "few.csv", sentences(TEST_TEXTS + 3 * FEW)[TEST_TEXTS:])
    text = TextSource(few, held_out=world.test, validation_share=0.66)
    data = activations(world, rows="mean", sites=SITES, text=text)
    rows = len(data.split("fit"))
    assert 2 < rows < WIDTH + 1
    given = {
        "data__model_x": world.model_x, "data__model_y": world.model_y, "data__sites": "1,3", "data__rows": "mean",
        "data__max_length": 64, "data__text__source": few, "data__text__held_out": world.test,
        "data__text__validation_share": 0.66, "both_directions": True, "trainer__logger": False,
        "trainer__accelerator": "cpu", "run": str(tmp_path / "spot"),
    }  # fmt: skip
    main(["inject", *options(**given)])
    assert "Left out, forward.linear: linear expects" in " ".join(capsys.readouterr().out.split())
    stored = load_bank(tmp_path / "spot" / "aligners.safetensors")
    evaluation = evaluate(world, [stored], both=True, rows="mean", text=text)
    kept = {"ridge", "procrustes", "permutation"}
    assert set(stored.maps["0_1"]) == kept
    methods = {(row["direction"], row["method"]) for row in evaluation.rows if row["role"] == "method"}
    assert methods == {(way, name) for way in ("forward", "backward") for name in kept}
    refusals = evaluation.meta["refusals"]
    assert set(refusals) == {
        f"{way}.{name}" for way in DIRECTIONS.values() for name in CLOSED_FORMS if name not in kept
    }
    assert f"linear expects at least {WIDTH + 1} fitting rows" in refusals["forward.linear"]
    assert f"but got {rows}" in refusals["backward.linear"]
    assert any("Left out, backward.linear: linear expects" in line for line in left_out(evaluation.meta))


def exploding(world: World, means: StoredBank, **changes: Any) -> tuple[list[dict[str, Any]], InjectionEvaluation]:
    """The rows of a linear map some of whose matrices hold other numbers at the second site."""
    broken = copy.deepcopy(means)
    for name, value in changes.items():
        getattr(broken.maps["0_1"]["linear"], name)[1] = value
    evaluation = evaluate(world, [broken], closed_form=())
    return [row for row in rows_of(evaluation, "linear") if row["rows"] == "tokens"], evaluation


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
def test_an_inverse_that_is_no_number_is_an_overflow(world: World, means: StoredBank, value: float) -> None:
    rows, _ = exploding(world, means, weight_back=value)
    assert [row["overflow"] for row in rows] == [False, True]
    assert [row["fvu_inverse"] is None for row in rows] == [False, True]
    assert all(row["fvu"] is not None for row in rows)


def test_a_report_of_answers_that_are_no_numbers_is_shown(world: World, means: StoredBank, tmp_path: Path) -> None:
    rows, evaluation = exploding(world, means, weight=torch.nan)
    assert [row["accuracy"] is None for row in rows] == [False, True]
    nothing = dict.fromkeys(("accuracy", "score", "score_low", "score_high"))
    lost = [  # not even the models' own answers, or those to their states as they are
        row | ({**nothing, "fvu": None} if row["method"] in ("native_y", "identity") else {}) for row in evaluation.rows
    ]
    backward = [row | {"direction": "backward", **nothing} for row in evaluation.rows if row["rows"] == "tokens"]
    for shown in (evaluation.rows, lost + backward):
        write(report({}, shown), tmp_path)
        assert console_tables(shown)
        assert reading(shown)
    assert "linear overflowed at some site" in reading(evaluation.rows)
    assert "own answers are not finite" in reading(lost)


def test_random_states_ask_the_device_for_nothing(world: World, means: StoredBank) -> None:
    data = activations(world, sites=SITES)
    ready = data.reader.prepare(next(iter(data.loader("test"))))
    texts, rows = ready.texts, ready.rows[0]
    assert rows.counts == tuple(texts.inputs_x["attention_mask"].sum(1).tolist())
    there = PairedBatch(torch.empty(2, len(rows), WIDTH, device="meta"), *([torch.empty(0)] * 2), texts.to("meta"))  # type: ignore[arg-type]
    there.rows = rows.to("meta")  # nothing can be copied from there
    (panel, *_) = evaluate(world, [means], closed_form=()).panels
    (drawn,) = (method for method in panel.methods if method.name == "random_embedding")  # type: ignore[union-attr]
    assert drawn.map(there.x, there).shape == (2, len(rows), WIDTH)
