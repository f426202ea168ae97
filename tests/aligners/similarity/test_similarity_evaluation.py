from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runs import quiet_trainer
from tests.world import World
from torch import Tensor

from aligners.callbacks.progress_bar import ProgressBar
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text.sources import TextSource
from aligners.reports.finished_runs import make_report
from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.catalogue import DEFAULT
from aligners.similarity.controls import calibrated, jackknife_interval, matching_layers
from aligners.similarity.functional.attention import AttentionSums, attention_sums, attnsim, fold, word_pairs
from aligners.similarity.functional.canonical_correlations import nuclear_norm
from aligners.similarity.functional.cca import cca_held_out, pwcca, svcca
from aligners.similarity.functional.cka import linear_cka, unbiased_cka
from aligners.similarity.functional.kernels import rsa
from aligners.similarity.functional.regression import neuronsim, r2, r2_held_out
from aligners.similarity.passes.streams import BatchRows, ModelRows
from aligners.similarity.similarity_evaluation import SimilarityEvaluation
from aligners.similarity.text_orders import permuted_rows

BLOCKS_X, BLOCKS_Y, WIDTH_X, WIDTH_Y = 3, 2, 16, 12


def stream(world: World, models: list[str], **options: Any) -> LayerActivations:
    text = options.pop("text", TextSource(world.fit, held_out=world.test))
    return LayerActivations(models[:2], text=text, max_length=60, **{"batch_size": 8} | options)


def evaluated(data: LayerActivations, **options: Any) -> SimilarityEvaluation:
    evaluation = SimilarityEvaluation(**options)
    quiet_trainer().test(evaluation, datamodule=data, verbose=False)
    return evaluation


def states(data: LayerActivations, split: Any) -> list[Tensor]:
    """All rows of a split, each model's layers: (L, N, d)."""
    batches = list(data.batches(split))
    return [torch.cat([batch.states[m] for batch in batches], 1).double() for m in range(len(data.models))]


def grid(
    evaluation: SimilarityEvaluation, label: str, column: str = "value", features: str = "raw", square: bool = False
) -> Tensor:
    """(L_x, L_y) of one measure between the two models; NaN where there is nothing."""
    x, y = (model.name for model in evaluation.models)
    rows = [
        row
        for row in evaluation.rows
        if (row["model_x"], row["model_y"], row["label"], row["features"]) == (x, y, label, features)
    ]
    values = torch.tensor([torch.nan if row[column] is None else row[column] for row in rows], dtype=torch.float64)
    return values.view(BLOCKS_X + 1, -1) if not square else values.view(round(len(values) ** 0.5), -1)


@pytest.fixture(scope="module")
def controlled(world: World, models: list[str]) -> SimilarityEvaluation:
    data = stream(world, models, batch_size=8, attention=True)
    return evaluated(data, measures="all", controls=True, groups=4, permutations=2)


def test_every_figure_is_the_measure_of_all_rows(world: World, models: list[str]) -> None:
    data = stream(world, models)
    before = {path.name: path.stat().st_mtime_ns for path in Path(models[0]).iterdir()}
    found = evaluated(data, measures=[*DEFAULT, "minibatch_cka"])
    assert {path.name: path.stat().st_mtime_ns for path in Path(models[0]).iterdir()} == before  # left alone
    x, y = states(data, "test")
    expected = {
        "cka": linear_cka(x, y),
        "unbiased_cka": unbiased_cka(x, y),
        "svcca": svcca(x, y),
        "r2 of X": r2(x, y),
        "r2 of Y": r2(y, x).mT,
        "neuronsim of X": neuronsim(x, y),
        "neuronsim of Y": neuronsim(y, x).mT,
        "rsa": rsa(x, y),
    }
    for label, value in expected.items():
        torch.testing.assert_close(grid(found, label), value, rtol=1e-9, atol=1e-9, msg=label)
    assert {row["n_rows"] for row in found.rows} == {x.shape[1]}
    assert all(row["null"] is row["low"] is row["held_out"] is None for row in found.rows)
    norms = [row["nuclear_norm"] for row in found.report_tables["layers"] if row["model"] == models[1]]
    assert norms == pytest.approx(nuclear_norm(grid_moments(y, y).xx).tolist())
    assert found.refusals == {}
    assert found.report_tables["distances"] == []  # of unequal depths
    others = evaluated(stream(world, models, batch_size=13), measures=["cka", "rsa", "minibatch_cka"])
    for label in ("cka", "rsa"):  # batches change nothing but what is defined by them
        torch.testing.assert_close(grid(others, label), grid(found, label), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(grid(others, "minibatch_cka"), grid(found, "minibatch_cka"), atol=1e-4)


def test_controls_stand_beside_every_value(controlled: SimilarityEvaluation, world: World, models: list[str]) -> None:
    assert controlled.refusals == {}
    labels = list(dict.fromkeys(row["label"] for row in controlled.rows))
    matched = matching_layers(range(BLOCKS_X + 1), range(BLOCKS_Y + 1))
    on_diagonal = torch.zeros(BLOCKS_X + 1, BLOCKS_Y + 1, dtype=torch.bool)
    blocks_only = [label for label in labels if label.startswith("att")]
    for label in labels:
        if label in blocks_only:
            continue
        value = grid(controlled, label)
        low, high, null = (grid(controlled, label, column) for column in ("low", "high", "null"))
        for i, j in matched:
            on_diagonal[i, j] = True
        assert torch.equal(low.isfinite(), on_diagonal), label
        assert ((low < value) & (value < high))[on_diagonal].all(), label
        # the same words: random models agree on little more
        if "minibatch" not in label:  # which is higher where texts are cut
            assert null[0, 0] < value[0, 0], label
        assert (grid(controlled, label, "null_high") >= null).all()
        torch.testing.assert_close(grid(controlled, label, "ceiling"), torch.ones_like(value), rtol=0, atol=1e-6)
        assert grid(controlled, label, "untrained").isfinite().all()
        assert grid(controlled, label, features="standardised").isfinite().all()
    data = stream(world, models)
    fit, test = (states(data, split) for split in ("fit", "test"))
    fitted, held_out = grid_moments(*fit), grid_moments(*test)
    expected = {
        "cca": cca_held_out(fitted, held_out),
        "r2 of X": r2_held_out(fitted, held_out),
        "r2 of Y": r2_held_out(fitted.swap(), held_out.swap()).mT,
    }
    for label, value in expected.items():
        torch.testing.assert_close(grid(controlled, label, "held_out"), value, rtol=1e-7, atol=1e-7, msg=label)
    assert grid(controlled, "cka", "held_out").isnan().all()  # nothing is fitted
    scaled = [
        (new - old.mean(1, keepdim=True)) / old.std(1, correction=0, keepdim=True)
        for old, new in zip(fit, test, strict=True)
    ]
    for name, function in (("cka", linear_cka), ("rsa", rsa)):
        value = grid(controlled, name, features="standardised")
        torch.testing.assert_close(value, function(*scaled), rtol=1e-6, atol=1e-6, msg=name)
    assert {row["chance"] for row in controlled.rows if row["model_x"] == row["model_y"]} == {None}


def test_intervals_and_nulls_are_what_they_say(
    controlled: SimilarityEvaluation, world: World, models: list[str]
) -> None:
    batches = list(stream(world, models, batch_size=8).batches("test"))
    null = []
    for order in (0, 1, 2):
        pairs = [(batch.states, permuted_rows(batch.text, order)) for batch in batches]
        other = (torch.cat([states[m][:, rows[m]] for states, rows in pairs], 1).double() for m in range(2))
        null.append(linear_cka(*other))
    as_paired = null.pop(0)
    torch.testing.assert_close(grid(controlled, "cka", "null"), (null[0] + null[1]) / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grid(controlled, "cka", "null_high"), null[0].maximum(null[1]), rtol=1e-5, atol=1e-6)
    found = calibrated(grid(controlled, "cka"), torch.stack(null), as_paired)
    for column in ("effect", "p", "p_family"):
        expected = getattr(found, column)
        torch.testing.assert_close(grid(controlled, "cka", column), expected, rtol=1e-5, atol=1e-6, msg=column)
    assert grid(controlled, "cka", "p").min() == pytest.approx(1 / 3)
    x, y = (torch.cat([batch.states[m] for batch in batches], 1).double() for m in range(2))
    text = torch.cat([batch.text for batch in batches])
    number = torch.cat([torch.full_like(batch.text, 4 * at // len(batches)) for at, batch in enumerate(batches)])
    for name, function, group in (("cka", linear_cka, number), ("rsa", rsa, text % 4)):
        rest = torch.stack([function(x[:, group != g], y[:, group != g]) for g in range(4)])
        for column, end in zip(("low", "high"), jackknife_interval(function(x, y), rest), strict=True):
            found = grid(controlled, name, column)
            expected = end.where(found.isfinite(), torch.nan)  # only matching layers have one
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("batch_size", [8, 64])
def test_as_many_permutations_as_asked_tell_related_states_from_unrelated_ones(tmp_path: Path, batch_size: int) -> None:
    draw = np.random.default_rng(0)
    group = np.repeat(np.arange(200), draw.integers(1, 5, 200))
    x = draw.normal(size=(200, 6))[group] + draw.normal(size=(len(group), 6))
    of_y = {"turned": x @ np.linalg.qr(draw.normal(size=(6, 6)))[0], "other": draw.normal(size=(200, 6))[group]}
    np.save(tmp_path / "group.npy", group)
    for name, rows in {"x": x, **of_y}.items():
        np.save(tmp_path / f"{name}.npy", rows.astype("float32"))
    names = [f"states:{tmp_path}/{name}.npy:group=group.npy" for name in ("x", *of_y)]
    data = LayerActivations(names, text=TextSource(test_share=0.5), batch_size=batch_size)
    options = {"measures": ["cka", "mutual_knn"], "controls": True, "groups": 2, "permutations": 19}
    found = evaluated(data, **options)  # type: ignore[arg-type]
    value = {}
    for row in found.rows:
        if row["features"] == "raw" and row["model_x"] != row["model_y"] and "x.npy" in row["model_x"]:
            value[row["measure"], row["model_y"].split("/")[-1].split(".")[0]] = row
    for measure in ("cka", "mutual_knn"):
        related, unrelated = value[measure, "turned"], value[measure, "other"]
        assert related["p"] == related["p_family"] == 1 / 20
        assert related["effect"] > 0.8
        assert unrelated["p"] > 0.05
        assert abs(unrelated["effect"]) < 0.05


def test_every_pair_of_blocks_has_its_attnsim(
    controlled: SimilarityEvaluation, world: World, models: list[str]
) -> None:
    sums: list[AttentionSums] = []
    for batch in stream(world, models, attention=True).batches("test"):
        words = batch.texts.word_count
        sums.append(attention_sums(*(fold(batch.attention[m], batch.texts.words[m], words) for m in range(2)), words))
    both = sum(sums[1:], sums[0])
    for label, value in (("X", attnsim(both, "js")), ("Y", attnsim(both.swap(), "js").mT)):
        rows = [row for row in controlled.rows if row["label"] == f"attnsim_js of {label}" and row["null"] is not None]
        found = {(row["layer_x"] - 1, row["layer_y"] - 1): row["value"] for row in rows}
        assert found == pytest.approx({tuple(place): value[*place].item() for place in value.nonzero().tolist()})
        assert all(row["null"] < row["ceiling"] == pytest.approx(1) for row in rows)


def test_attention_is_standardised_head_by_head(world: World, models: list[str]) -> None:
    share, parts = 0.6, list[list[Tensor]](([], []))  # a share that leaves components out: else scales change nothing
    names = [f"attention_{name}{end}" for name in ("svcca", "pwcca") for end in ("", "_standardised")]
    compared = evaluated(stream(world, models, attention=True), measures=names, share=share)
    for batch in stream(world, models, attention=True).batches("test"):
        words = batch.texts.word_count
        for m, rows in enumerate(parts):
            rows.append(word_pairs(fold(batch.attention[m], batch.texts.words[m], words), words))
    x, y = (torch.cat(rows, 1).double() for rows in parts)
    scaled = [(rows - rows.mean(1, keepdim=True)) / rows.std(1, correction=0, keepdim=True) for rows in (x, y)]
    expected = {
        "attention_svcca": svcca(x, y, share=share),
        "attention_svcca_standardised": svcca(*scaled, share=share),
        "attention_pwcca_standardised of X": pwcca(x, y, share=share, standardised=True),
    }
    assert not torch.allclose(*list(expected.values())[:2], atol=1e-3)
    for label, value in expected.items():
        found = [row["value"] for row in compared.rows if row["label"] == label]
        assert found == pytest.approx(value.flatten().tolist(), rel=1e-6), label


def test_the_null_of_attention_sets_different_texts_against_each_other() -> None:
    weights = torch.eye(3, dtype=torch.float64).expand(1, 1, 4, 3, 3).clone()
    weights[:, :, 2:] = 1 / 3  # texts 2 and 3 spread evenly, 0 and 1 look at themselves
    words, text = torch.full((4,), 3), torch.arange(4).repeat_interleave(3)
    states = torch.zeros(1, 12, 2)
    rows = dict.fromkeys(range(2), ModelRows(states, weights))
    null = BatchRows(text, torch.arange(3).repeat(4), words, rows, rows)
    orders = [null.reordered(order, 0) for order in range(1, 20)]
    places = [permuted_rows(text, order)[1][::3] // 3 for order in range(1, 20)]
    assert len({tuple(place.tolist()) for place in places}) > 9
    for found, place in zip(orders, places, strict=True):
        torch.testing.assert_close(found.x[0].heads, weights)
        torch.testing.assert_close(found.y[1].heads, weights[:, :, place])  # the texts that its rows are of


def test_models_of_one_depth_have_an_angular_distance(world: World) -> None:
    found = evaluated(stream(world, [world.model_x, world.model_y]), measures=["cka", "neuronsim", "svcca"])
    (distance,) = found.report_tables["distances"]
    diagonal = [row["value"] for row in found.rows if row["label"] == "cka" and row["layer_x"] == row["layer_y"]]
    expected = torch.tensor(diagonal).arccos().square().sum().sqrt()
    assert distance["angular_distance"] == pytest.approx(expected.item(), rel=1e-5)
    for place, (name, side) in enumerate(((world.model_x, "of X"), (world.model_y, "of Y"))):
        layers = grid(found, f"neuronsim {side}", square=True), grid(found, "svcca", square=True)
        expected = (layers[0] - layers[1]).mean(1 - place)  # over the other model's layers
        scores = [row["localization"] for row in found.report_tables["layers"] if row["model"] == name]
        assert scores == pytest.approx(expected.tolist())


def test_what_is_refused_costs_no_other_measure(world: World, models: list[str]) -> None:
    data = stream(world, models, rows="mean", batch_size=12)
    few = SimilarityEvaluation(["cka", "cca"])
    quiet_trainer(limit_test_batches=1).test(few, datamodule=data, verbose=False)
    assert {row["measure"] for row in few.rows} == {"cka"}
    (reason,) = few.refusals.values()
    assert "rows" in reason
    (missing,) = few.report_tables["missing"]
    about = {"model_x": models[0], "model_y": models[1], "measure": "cca", "figure": "value"}
    assert missing == {**about, "why": reason}
    report = make_report("similarity", few.meta, few.rows, **few.report_tables)
    assert [reason in sentence for sentence in report.sentences].count(True) == 1
    with pytest.raises(ValueError, match=r"No measure could be computed.*rows"):
        quiet_trainer(limit_test_batches=1).test(SimilarityEvaluation(["cca"]), datamodule=data, verbose=False)


FITTED = ("cca", "svcca", "pwcca", "r2", "mixedsim")


def test_few_rows_for_a_fit_are_a_caution(world: World, models: list[str], caplog: pytest.LogCaptureFixture) -> None:
    few, many = (
        evaluated(stream(world, models, rows=rows, batch_size=25), measures=["cka", *FITTED], share=0.9)
        for rows in ("mean", "words")
    )
    directions = {"r2 of X": WIDTH_Y, "r2 of Y": WIDTH_X, "mixedsim of X": WIDTH_Y, "cca": max(WIDTH_X, WIDTH_Y)}
    assert many.meta["n_rows"] > 10 * WIDTH_X + 1
    for found, cautious in ((few, True), (many, False)):
        n = found.meta["n_rows"]
        for row in found.rows:
            if row["label"] in directions and row["model_x"] != row["model_y"] and row["features"] == "raw":
                assert row["chance"] == pytest.approx(directions[row["label"]] / (n - 1))
            elif row["measure"] == "cka":
                assert row["chance"] is None
        names = {said.split()[0] for said in found.meta["cautions"]}
        assert ("r2" in names) == ("mixedsim" in names) == ("pwcca" in names) == cautious
    assert "r2 of" in caplog.text
    assert f"fitted on {few.meta['n_rows']} rows" in few.meta["cautions"][-1]


@pytest.mark.parametrize(("batch_size", "groups"), [(8, 4), (25, 1)])
def test_few_texts_make_fewer_groups(world: World, models: list[str], batch_size: int, groups: int) -> None:
    found = evaluated(stream(world, models, batch_size=batch_size), measures=["cka"], controls=True)
    assert found.meta["groups"] == groups
    matching = [row for row in found.rows if row["features"] == "raw" and row["layer_x"] == row["layer_y"] == 1]
    intervals = {(row["low"] is not None) for row in matching if row["model_x"] != row["model_y"]}
    assert intervals == {groups > 1}
    refused = [why for what, why in found.refusals.items() if what.endswith("interval")]
    assert ["expects at least 2, but got 1 batch" in why for why in refused] == [True] * (groups == 1)
    alone = evaluated(stream(world, models[:1], batch_size=batch_size), measures=["cka"], controls=True)
    assert alone.meta["groups"] is None  # there is nothing beside the values of one model


def test_what_cannot_be_is_refused_before_reading(world: World, models: list[str]) -> None:
    for options, says in (
        ({"measures": ["ckaa"]}, r"`measures` out of cka.*ckaa"),
        ({"measures": []}, "`measures` out of"),
        ({"groups": 1}, "`groups` to be at least 2"),
        ({"permutations": 0}, "`permutations` to be at least 1"),
        ({"share": 1.5}, r"`share`.*1\.5"),
    ):
        with pytest.raises(ValueError, match=says):
            SimilarityEvaluation(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`data\.attention` false.*attnsim_js"):
        evaluated(stream(world, models), measures=["cka", "attnsim_js"])
    with pytest.raises(ValueError, match=r"`groups` = 10.*2 batches"):
        evaluated(stream(world, models, batch_size=13), controls=True, groups=10)
    with pytest.raises(ValueError, match=r"fewer `permutations` than .* orders, 1, .*`data\.batch_size`"):
        evaluated(stream(world, models, batch_size=1), controls=True)
    with pytest.raises(ValueError, match=r"`data\.models` to name each model once.*`within`"):
        evaluated(stream(world, [models[0], models[0]]), measures=["cka"])


def test_a_last_batch_of_no_meaning_is_not_passed_over(world: World, models: list[str]) -> None:
    data = stream(world, models, batch_size=25)
    _ = data.reader
    data.frozen[1].blocks[1].output.dense.weight[3, 3] = torch.inf  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"batch 0 holds .* at layer 2 of"):
        evaluated(data, measures=["cka"])


def test_memory_is_announced_in_one_line(world: World, models: list[str], caplog: pytest.LogCaptureFixture) -> None:
    few, all_of_them = (
        evaluated(stream(world, models), measures=names, memory=1) for names in (["cka"], ["cka", "rsa"])
    )
    said = [record.message for record in caplog.records if "takes up to" in record.message]
    assert said == [
        f"This comparison takes up to {each.announced / 1e9:.3g} GB besides its models, of 1 GB (`memory`), in 1 pass "
        "over the texts, and reads every model 1 time."
        for each in (few, all_of_them)
    ]
    sample = 5000 * ((BLOCKS_X + 1) * WIDTH_X + (BLOCKS_Y + 1) * WIDTH_Y) * 4
    assert all_of_them.announced >= few.announced + sample
    assert few.meta["passes"] == 1


def test_reading_and_measuring_are_shown_one_after_the_other(
    world: World, models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    trainer = quiet_trainer(callbacks=[ProgressBar()], enable_progress_bar=True)
    trainer.test(SimilarityEvaluation(measures=["cka"]), datamodule=stream(world, models), verbose=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" steps.")]
    assert [line.partition(":")[0] for line in lines] == ["Evaluating", "Measuring"]
    assert lines[-1] == "Measuring: 1 steps."  # a pair of models
