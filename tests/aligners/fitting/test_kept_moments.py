"""With a store, the moments of a pass are kept beside it and not read again; what changes them makes another pass."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations, quiet_trainer
from tests.world import World

from aligners.cli.table import study
from aligners.datamodules.rows.read_rows import PairReader
from aligners.fitting.alignment import Alignment
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import Moments

MAPS = {"linear": Linear}


def moments(world: World, store: Path | None, maps: Any = MAPS, trainer: Any = None, **options: Any) -> Moments:
    module = Alignment(maps)
    quiet = quiet_trainer(max_epochs=-1, limit_val_batches=0, **(trainer or {}))
    quiet.fit(module, datamodule=activations(world, **{"sites": [1, 3], "store": store} | options))
    assert module.moments is not None
    return module.moments


def test_a_second_fit_does_not_read_for_its_moments(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = moments(world, tmp_path)
    reads, real = [], PairReader.read
    monkeypatch.setattr(PairReader, "read", lambda *given: reads.append(1) or real(*given))
    again = moments(world, tmp_path)
    assert reads == []
    assert all(map(torch.equal, first, again))
    for found, expected in zip(again, moments(world, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    assert len(reads) > 0
    reads.clear()
    moments(world, tmp_path, {"mlp": partial(MLP, hidden=[8])}, {"max_steps": 2})
    assert len(reads) == 2  # of training alone


def test_whatever_changes_the_moments_has_them_read_again(world: World, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"sites": ["1:3", 3]}, {"rows": "mean"}, {"special_tokens": False}, {"held_out_types": 0.3}, {"seed": 2},
        {"component": "mlp"}, {"trainer": {"limit_train_batches": 3}}, {"batch_size": 5}, {"store_dtype": "bfloat16"},
        {"model_y": world.model_x},
    ]  # fmt: skip
    for number, options in enumerate(changes, start=1):
        moments(world, tmp_path, **{"trainer": {"limit_train_batches": 2}} | options)
        assert len(list((tmp_path / "moments").iterdir())) == number


def test_damaged_moments_are_refused_listed_and_removed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments(world, tmp_path)
    (path,) = (tmp_path / "moments").iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        moments(world, tmp_path)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        study(["store", "--folder", str(tmp_path), "--verify"])
    assert "moments of a pair" in capsys.readouterr().out
    study(["store", "--folder", str(tmp_path), "--remove", f"[{path.name}]"])
    assert not path.exists()
    moments(world, tmp_path)
    assert path.exists()
