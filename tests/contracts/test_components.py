"""Sub-layers through the whole chain: read as rows, fitted, stored, injected, compared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligners.injection.test_injecting import evaluate, fit
from tests.runs import activations
from tests.world import World

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text.sources import TextSource
from aligners.maps.linear import Linear
from aligners.models import load_frozen

SITES = [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("component", ["attention", "mlp"])
def test_a_sub_layer_is_fitted_and_injected(world: World, tmp_path: Path, component: str) -> None:
    same = world._replace(model_y=world.model_x)
    stored = fit(same, tmp_path, {"linear": Linear}, sites="blocks", component=component)
    assert (stored.pairs["0_1"], stored.data["component"]) == (SITES, component)
    found = evaluate(same, [stored], component=component)
    assert found.meta["component"] == component
    rows = [row for row in found.rows if row["method"] == "linear"]
    assert [(row["site_x"], row["site_y"]) for row in rows] == SITES
    for row in rows:  # a model's own states, put back where they came from
        assert row["agreement"] == 1
        assert row["fvu"] < 1e-6
    mean = [row for row in found.rows if row["method"] == "mean"]
    assert all(row["fvu"] > 0.5 for row in mean)


def test_a_checkpoint_of_another_component_is_refused(world: World, tmp_path: Path) -> None:
    stored = fit(world, tmp_path, {"linear": Linear}, sites="blocks")
    with pytest.raises(ValueError, match=r"was fitted on `component` 'residual', but `data.component` is 'mlp'"):
        evaluate(world, [stored], component="mlp")
    del stored.data["component"]  # as before there were others
    evaluate(world, [stored])


def test_layers_of_a_sub_layer_are_what_the_model_reads(world: World) -> None:
    text = TextSource(world.fit, held_out=world.test)
    data = LayerActivations(
        [world.model_x], text=text, rows="tokens", special_tokens=True, component="mlp", attention=True, max_length=60
    )
    model = load_frozen(world.model_x, attn_implementation="eager")
    assert data.reader.layers == [[1, 2, 3]]
    assert data.describe()["component"] == "mlp"
    for batch in data.batches("test"):
        texts = batch.texts
        mask = texts.inputs[0]["attention_mask"].bool()
        for found, wanted in zip(batch.states[0], model.front(texts.inputs[0], [1, 2, 3], "mlp"), strict=True):
            assert torch.equal(found, wanted[mask])


@pytest.mark.parametrize(("options", "message"), [
    ({"component": "head"}, "`component` to be one of residual, attention, mlp, but got 'head'"),
    ({"component": "mlp", "sites": [0]}, "`sites` between 1 and 3, but got 0"),
])  # fmt: skip
def test_what_is_no_sub_layer_is_refused(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = activations(world, **options).reader


def test_a_sub_layer_without_a_site_is_refused_before_embedded_models_are_trained(world: World) -> None:
    data = activations(world, model_x="embedded:0", model_y="embedded:1", component="attention", sites=[0])
    with pytest.raises(ValueError, match="`sites` between 1 and L = 4, the blocks of embedded:0, got 0"):
        data.prepare_data()
