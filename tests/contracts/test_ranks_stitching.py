"""Stitching in two real processes: the same layers, the same learning curves, the same rows as in one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import two_ranks
from tests.runs import quiet_trainer
from tests.stitches import LAYERS, model_texts, train
from tests.world import TEST_TEXTS, World

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveStitching
from aligners.fitting.saved_bank import load_bank
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.stitching_training import LossWeights
from aligners.maps.affine import AffineLayer
from aligners.maps.mlp import MLP

ALL = LossWeights(0.5, distillation=1.0, temperature=2.0, activation=0.1)
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "classification": (
        {**LAYERS, "mlp": partial(MLP, hidden=[8])},
        {"batch_size": 17, "gradient_clip": 0.2, "loss": ALL},
    ),
    "causal": ({"affine": AffineLayer}, {"sites": ["1:2"], "packed": True, "max_length": 12, "routes": "different"}),
    "masked": ({"affine": AffineLayer}, {"batch_size": 13, "routes": "forward"}),
}


def run(folder: Path, world: World, models: dict[str, list[str]], *, ranks: int) -> dict[str, Any]:
    """Train and measure each kind of task; what one rank has in the end."""
    found = {}
    for kind, (layers, given) in RUNS.items():
        settings = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "use_distributed_sampler": False}
        saved = folder / f"{kind}-{ranks}"
        steps = {"max_steps": 4, "val_check_interval": 2, "callbacks": [BestPerSite(), SaveStitching(saved)]}
        module = train(world, layers, models=models[kind], trainer=settings | steps, **given)
        data = {name: given[name] for name in ("batch_size", "sites", "packed", "max_length") if name in given}
        evaluation = StitchingEvaluation(load_bank(saved / "stitching.safetensors"))
        datamodule = model_texts(world, models=models[kind], **data)
        quiet_trainer(**settings).test(evaluation, datamodule=datamodule, verbose=False)
        found[kind] = {
            "layers": module.state_dict(),
            "spread": module.spread,
            "curves": [point["penalty"] for point in module.curves],
            "rows": evaluation.rows,
        }
    return found


def main(rank: int, folder: Path, world: World, models: dict[str, list[str]]) -> dict[str, Any]:
    """One of two processes that somebody else has started."""
    found = run(folder, world, models, ranks=2)
    assert torch.distributed.get_world_size() == 2
    return found


@pytest.fixture(scope="module")
def found(
    world: World, causal: list[str], masked: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """One process, and the two of a pair."""
    folder = tmp_path_factory.mktemp("ranks")
    models = {"classification": [world.model_x, world.model_y], "causal": causal, "masked": masked}
    alone = run(folder, world, models, ranks=1)
    return [alone, *two_ranks(partial(main, folder=folder, world=world, models=models), folder, meet=False)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_two_processes_train_and_measure_what_one_does(found: list[dict[str, Any]], kind: str) -> None:
    """After training that agrees to 1e-5; with layers that are the same, to 1e-6: native and identity."""
    alone, first, second = (each[kind] for each in found)
    for name, value in alone["layers"].items():
        assert torch.equal(first["layers"][name], second["layers"][name]), name
        torch.testing.assert_close(first["layers"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    for key, spread in alone["spread"].items():
        for name, value in spread.items():
            torch.testing.assert_close(first["spread"][key][name], value, rtol=1e-6, atol=1e-6)
    assert first["curves"] == second["curves"]
    assert first["curves"] == pytest.approx(alone["curves"], rel=1e-4, abs=1e-6)
    assert TEST_TEXTS % 2 == 1
    assert first["rows"] == second["rows"]
    for a, b in zip(first["rows"], alone["rows"], strict=True):
        rel = 1e-4 if b["role"] == "method" else 1e-6
        for name, value in b.items():
            close = pytest.approx(value, rel=rel, abs=rel) if isinstance(value, float) else value
            assert a[name] == close, (b["method"], name)
