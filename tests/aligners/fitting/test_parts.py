import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live_memory import LiveBytes
from tests.world import World

from aligners.cli.table import train
from aligners.files.resources import free_memory
from aligners.fitting.alignment import Alignment
from aligners.fitting.parts import bytes_a_site, find_part, sites_at_once
from aligners.fitting.saved_bank import load_bank
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import MomentsMetric


def options(world: World, run: Path) -> list[str]:
    aligners = {"linear": "Linear", "mlp": {"class_path": "MLP", "init_args": {"hidden": [8]}}}
    return [
        "fit", "--data.model_x", world.model_x, "--data.model_y", world.model_y, "--data.text.source", world.fit,
        "--data.text.held_out", world.test, "--data.max_length", "64", "--data.batch_size", "18",
        "--data.held_out_types", "0", "--data.sites", "1,2:3", "--model.aligners", json.dumps(aligners),
        "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.logger", "false", "--run", str(run),
    ]  # fmt: skip


@pytest.mark.slow
def test_parts_give_what_the_bank_gives_and_go_on_where_they_were(world: World, tmp_path: Path) -> None:
    train(options(world, tmp_path / "whole"))
    train([*options(world, tmp_path / "parts"), "--sites_at_once", "1"])
    whole, parts = (load_bank(tmp_path / name / "aligners.safetensors") for name in ("whole", "parts"))
    assert parts.pairs["0_1"] == whole.pairs["0_1"] == [(1, 1), (2, 3)]
    assert parts.training == whole.training
    torch.testing.assert_close(parts.moments.xy, whole.moments.xy, rtol=1e-6, atol=1e-4)
    for name, aligner in whole.maps["0_1"].items():
        for key, value in aligner.state_dict().items():
            torch.testing.assert_close(parts.maps["0_1"][name].state_dict()[key], value, rtol=1e-3, atol=1e-4)
    elsewhere = [*options(world, tmp_path / "not"), "--sites_at_once", "1", "--ckpt_path", str(tmp_path / "parts")]
    with pytest.raises(ValueError, match=r"part-1-1/.* is of a run with other .*`data\.text\.seed` was"):
        train([*elsewhere, "--data.text.seed", "7"])
    with pytest.raises(ValueError, match=r"part-1-1/aligners\.safetensors has the sites 1:1, but this part .* has 2:3"):
        train([*elsewhere, "--data.sites", "2:3,1", "--run", str(tmp_path / "nor")])
    with pytest.raises(ValueError, match=r"`sites_at_once`.*at least 1.*0"):
        train([*options(world, tmp_path / "none"), "--sites_at_once", "0"])
    shutil.rmtree(tmp_path / "parts" / "part-2-1")  # as an interruption of its first epoch would leave it
    before = (tmp_path / "parts" / "part-1-1" / "aligners.safetensors").stat().st_mtime_ns
    train([*options(world, tmp_path / "again"), "--sites_at_once", "1", "--ckpt_path", str(tmp_path / "parts")])
    assert (tmp_path / "parts" / "part-1-1" / "aligners.safetensors").stat().st_mtime_ns == before
    once, again = ((tmp_path / name / "aligners.safetensors").read_bytes() for name in ("parts", "again"))
    assert once == again


def test_a_plan_fits_in_the_memory() -> None:
    assert sites_at_once(12, bytes_each=100, free=2000) == 12
    assert sites_at_once(12, bytes_each=100, free=1000) == 8
    with pytest.raises(ValueError, match=r"training one takes.*`data.batch_size`"):
        sites_at_once(12, bytes_each=100, free=100)
    assert free_memory(torch.device("cpu")) > 0


def test_a_site_is_as_large_as_its_maps() -> None:
    small = bytes_a_site(Alignment({"linear": Linear}), 16, 16, rows=10)
    inn = partial(INN, couplings=2, hidden=8)
    one = bytes_a_site(Alignment({"linear": Linear, "inn": inn}), 16, 16, rows=10)
    weights = sum(weight.numel() for weight in INN(1, 16, 16, couplings=2, hidden=8).parameters())
    assert small < one
    assert one - small >= 20 * weights
    mlp = partial(MLP, hidden=[4])
    both = bytes_a_site(Alignment({"mlp": mlp}, both_directions=True), 16, 16, rows=10)
    moments = bytes_a_site(Alignment({"linear": Linear}), 16, 16, rows=0)
    assert both > 1.5 * bytes_a_site(Alignment({"mlp": mlp}), 16, 16, rows=10) - moments


def announced_and_held(width: int, rows: int, step: int, **options: Any) -> tuple[int, int]:
    """Bytes, of a fit of the default maps at two sites."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows, width, generator=draw)
    y = x.roll(1, 2) + torch.tanh(x)
    moments = MomentsMetric(2, width, width)
    moments.update(x, y)
    with LiveBytes() as live:
        module = Alignment(**options)
        module.build(2, width, width)
        module.fit_moments(moments.compute(), None)
        for fit in module.trained():
            best = {name: value.clone() for name, value in fit.aligner.state_dict().items()}
            module.train_on_rows(fit.aligner, x, y, 3, step, seed=0)
            del best
    return 2 * bytes_a_site(Alignment(**options), width, width, step), live.peak


@pytest.mark.parametrize("step", [2, 96])
def test_what_is_announced_is_what_a_step_holds(step: int) -> None:
    """With two rows a step the weights are what counts, and clipping copies them; with 96 the activations."""
    announced, held = announced_and_held(64, 96, step)
    assert 0.7 * announced < held <= announced


@pytest.mark.parametrize(("rows", "copies"), [(0, 1), (10_000, 2)])
def test_recorded_steps_hold_their_gradients_and_activations(rows: int, copies: int) -> None:
    """Beside the copy of clipping, or the activations, whichever was more."""
    inn = partial(INN, couplings=2, hidden=8)
    weights = sum(weight.numel() for weight in inn(1, 16, 16).parameters())
    eager = Alignment({"inn": inn}, graphs=False)
    assert bytes_a_site(eager, 16, 16, rows, on_gpu=True) == bytes_a_site(eager, 16, 16, rows)
    recorded = Alignment({"inn": inn})
    more = bytes_a_site(recorded, 16, 16, rows, on_gpu=True) - bytes_a_site(recorded, 16, 16, rows)
    assert more == 4 * copies * weights


def test_parts_are_found_by_what_they_hold(tmp_path: Path) -> None:
    assert find_part(tmp_path, 1) == (tmp_path / "part-1-1", None, None)
    for name, file in (("part-1-1", "last.ckpt"), ("part-1-2", "last.ckpt"), ("part-10-1", "aligners.ckpt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert find_part(tmp_path, 1) == (tmp_path / "part-1-3", None, tmp_path / "part-1-2" / "last.ckpt")
    assert find_part(tmp_path, 10)[1] == tmp_path / "part-10-1" / "aligners.ckpt"  # of the version before
