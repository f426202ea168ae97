"""Recorded states give what the models that they come from give, in any format, batch size and order of rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recordings import FORMATS, SOURCE, Recorded, recorded_world, shuffled, world_text, write
from tests.runs import activations, quiet_trainer
from tests.world import World

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states, universe_states
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError
from aligners.fitting.alignment import Alignment
from aligners.injection.injecting import InjectionEvaluation
from aligners.maps.linear import Linear
from aligners.similarity.similarity_evaluation import SimilarityEvaluation

MEASURES = ["cka", "svcca", "r2", "rsa"]


@pytest.fixture(scope="module")
def recorded(world: World) -> Recorded:
    return recorded_world(world)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory, recorded: Recorded) -> dict[str, list[str]]:
    """Format -> names of X and Y, the rows of each in an order of its own."""
    folder = tmp_path_factory.mktemp("recorded")
    written: dict[str, list[str]] = {}
    for kind in FORMATS:
        x = write(folder / kind / "x", recorded.x, recorded, kind, shuffled(recorded, 1))
        y = write(folder / kind / "y", recorded.y, recorded, kind, shuffled(recorded, 2))
        written[kind] = [x, y]
    return written


def text_source() -> TextSource:
    return TextSource(**SOURCE)


def paired(names: list[str], **options: Any) -> PairedActivations:
    return pair_states(*names, text=text_source(), **{"batch_size": 8} | options)


def errors(data: PairedActivations) -> dict[tuple[Any, ...], list[float]]:
    """Method, site -> its errors on held-out texts, after a fit."""
    fit = Alignment({"linear": Linear})
    quiet_trainer().fit(fit, datamodule=data)
    evaluation = InjectionEvaluation([fit.stored()], closed_form=["ridge", "procrustes"])
    quiet_trainer().test(evaluation, datamodule=data, verbose=False)
    assert "forward" in evaluation.meta["not_injected"] or data.models[0].startswith("/")
    found = {}
    for row in evaluation.rows:
        if row["rows"] in ("tokens", "states") and row["fvu"] is not None:
            found[row["method"], row["site_x"]] = [row["fvu"], row["mse"]]
    return found


@pytest.fixture(scope="module")
def from_models(world: World) -> dict[tuple[Any, ...], list[float]]:
    return errors(activations(world, text=world_text(world), sites="all"))


def check_errors(found: dict[tuple[Any, ...], list[float]], expected: dict[tuple[Any, ...], list[float]]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 12
    for place, values in expected.items():
        assert found[place] == pytest.approx(values, rel=1e-3, abs=1e-5), place


@pytest.mark.parametrize("kind", FORMATS)
def test_fit_and_errors_are_those_of_the_models(
    names: dict[str, list[str]], from_models: dict[tuple[Any, ...], list[float]], kind: str
) -> None:
    check_errors(errors(paired(names[kind])), from_models)


def test_batch_size_changes_nothing(
    names: dict[str, list[str]], from_models: dict[tuple[Any, ...], list[float]]
) -> None:
    check_errors(errors(paired(names["npy"], batch_size=64)), from_models)


def measured(data: LayerActivations) -> dict[tuple[Any, ...], list[float | None]]:
    evaluation = SimilarityEvaluation(MEASURES, controls=True, groups=3)
    quiet_trainer().test(evaluation, datamodule=data, verbose=False)
    columns = ("value", "low", "high", "null", "held_out", "ceiling")
    found = {}
    for row in evaluation.rows:
        models = row["model_x"] == row["model_y"]
        place = (models, row["label"], row["layer_x"], row["layer_y"], row["features"])
        found.setdefault(place, []).extend(row[column] for column in columns)
    return found


def test_similarity_is_that_of_the_models(world: World, names: dict[str, list[str]]) -> None:
    options: dict[str, Any] = {"batch_size": 8, "rows": "tokens", "special_tokens": True}
    models = [world.model_x, world.model_y]
    expected = measured(LayerActivations(models, text=world_text(world), max_length=60, **options))
    for kind in ("parquet", "safetensors"):
        found = measured(LayerActivations(names[kind], text=text_source(), **options))
        assert found.keys() == expected.keys()
        for place, values in expected.items():
            for one, other in zip(found[place], values, strict=True):
                assert (one is None) == (other is None), place
                assert one is None or one == pytest.approx(other, rel=2e-3, abs=2e-3), place


def test_universe_reads_the_states_of_all(names: dict[str, list[str]], recorded: Recorded) -> None:
    third = names["saved"][0].replace("key=key", "key=key,column=layer_9+layer_10")
    three = [names["npy"][0], names["parquet"][1], third]
    data = universe_states(three, sites="0,1", text=text_source())
    batch = next(iter(data.paired("test")))
    assert batch.x.shape[0] == 6
    group = data.texts.test["text"][:]
    rows = [group[number] for number in batch.text.tolist()]
    by_group = {name: [row for row, own in enumerate(recorded.group) if own == name] for name in set(rows)}
    places = batch.rows.place.tolist()
    wanted = [by_group[name][place] for name, place in zip(rows, places, strict=True)]
    for place, states in enumerate((recorded.x, recorded.x, recorded.y, recorded.y, recorded.x, recorded.x)):
        assert torch.equal(batch.x[place], torch.from_numpy(states[place % 2][wanted]))


def test_means_are_over_the_rows_of_a_group(names: dict[str, list[str]], recorded: Recorded) -> None:
    data = paired(names["npy"], rows="mean", sites="1")
    batch = next(iter(data.paired("test")))
    name = data.texts.test["text"][int(batch.text[0])]
    own = [row for row, group in enumerate(recorded.group) if group == name]
    assert torch.allclose(batch.y[0, 0], torch.from_numpy(recorded.y[1, own].mean(0)), atol=1e-5)


def test_a_saved_bank_loads_against_the_same_states_alone(
    names: dict[str, list[str]], tmp_path: Path, recorded: Recorded
) -> None:
    data = paired(names["npy"], sites="1")
    fit = Alignment({"linear": Linear})
    quiet_trainer().fit(fit, datamodule=data)
    bank = fit.stored()
    same = paired(names["npy"], sites="1")
    quiet_trainer().test(InjectionEvaluation([bank], closed_form=[]), datamodule=same, verbose=False)
    changed = write(tmp_path / "y", recorded.y * 1.01, recorded, "npy", shuffled(recorded, 2))
    other = paired([names["npy"][0], changed], sites="1")
    with pytest.raises(UserError, match=r"was fitted on other models: Y was states:.*and is states:"):
        quiet_trainer().test(InjectionEvaluation([bank], closed_form=[]), datamodule=other, verbose=False)
