"""What an evaluation says where maps cannot be fitted, were fitted on other rows, or leave the range of numbers."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.cli.table import evaluate as main
from aligners.fitting.bank import StoredBank, load_bank
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import CLOSED_FORMS
from aligners.maps.linear import Linear, Procrustes
from aligners.reports.finished import make_report
from aligners.reports.publishing import write
from aligners.reports.runs.injection import console_tables, left_out, reading
from datamodules.rows.reading import PairedBatch
from datamodules.text.sources import TextSource
from tests.aligners.injection.test_injecting import evaluate, fit, rows_of
from tests.runs import activations
from tests.world import TEST_TEXTS, World, sentences, write_texts

report = partial(make_report, "injection")

SITES = [1, 3]
WIDTH = 16
FEW = 12  # fitting rows: enough for a rotation, too few for least squares


@pytest.fixture(scope="module")
def means(world: World, tmp_path_factory: pytest.TempPathFactory) -> StoredBank:
    return fit(world, tmp_path_factory.mktemp("means"), {"linear": Linear}, rows="mean", sites=SITES)


def test_floors_are_of_the_rows_that_are_injected(world: World, means: StoredBank, tmp_path: Path) -> None:
    found = evaluate(world, [means], both=True, sites=SITES)
    on_tokens = fit(world, tmp_path, {"linear": Linear}, sites=SITES)
    expected = evaluate(world, [on_tokens], both=True, sites=SITES)
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


def test_a_closed_form_that_few_rows_do_not_determine_costs_its_own_rows(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = write_texts(tmp_path / "few.csv", sentences(TEST_TEXTS + 3 * FEW)[TEST_TEXTS:])
    source: dict[str, Any] = {"source": few, "held_out": world.test, "validation_share": 0.66}
    given: dict[str, Any] = {"rows": "mean", "sites": SITES, "text": TextSource(**source)}
    rows = len(activations(world, **given).split("fit"))
    assert 2 < rows < WIDTH + 1
    stored = fit(world, tmp_path, {"procrustes": Procrustes}, **given)
    evaluation = evaluate(world, [stored], both=True, **given)
    options = [*(f"--data.text.{name}={value}" for name, value in source.items()), "--data.sites", "1,3"]
    models = ["--data.model_x", world.model_x, "--data.model_y", world.model_y, "--data.max_length", "64"]
    run = ["--data.rows", "mean", "--trainer.logger", "false", "--trainer.accelerator", "cpu", "--run", "spot"]
    main(["inject", *models, *options, *run])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Left out, forward.linear: linear expects at least {WIDTH + 1} fitting rows" in shown
    kept = {"ridge", "procrustes", "permutation"}
    assert set(load_bank(tmp_path / "spot" / "aligners.ckpt").maps["0_1"]) == kept
    methods = {(row["direction"], row["method"]) for row in evaluation.rows if row["role"] == "method"}
    assert methods == {(way, name) for way in ("forward", "backward") for name in kept}
    assert set(evaluation.meta["refusals"]) == {
        f"{way}.{name}" for way in ("forward", "backward") for name in CLOSED_FORMS if name not in kept
    }
    assert f"but got {rows}" in evaluation.meta["refusals"]["backward.linear"]
    assert any("backward.linear" in line for line in left_out(evaluation.meta))


def exploding(world: World, means: StoredBank, **changes: Any) -> tuple[list[dict[str, Any]], InjectionEvaluation]:
    """The rows of a linear map some of whose matrices hold other numbers at the second site."""
    broken = copy.deepcopy(means)
    for name, value in changes.items():
        getattr(broken.maps["0_1"]["linear"], name)[1] = value
    evaluation = evaluate(world, [broken], closed_form=(), sites=SITES)
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
    (panel, *_) = evaluate(world, [means], sites=SITES).panels
    (drawn,) = (method for method in panel.methods if method.name == "random_embedding")  # type: ignore[union-attr]
    assert drawn.map(there.x, there).shape == (2, len(rows), WIDTH)
