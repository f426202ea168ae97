"""Everything that adds up over ranks, in two real processes: the same rows give the same figures."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.ranks import two_ranks
from tests.runs import activations, quiet_trainer, related_rows
from tests.world import World
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.fitting.heldout_retrieval import HeldOutRows
from aligners.fitting.map_errors import MapErrors
from aligners.injection.scoring.scores import TextScores
from aligners.maps.linear import Linear, Procrustes
from aligners.similarity.algebra.moments import MomentsMetric, moments_of

SITES, ROWS, D_X, D_Y, TEXTS, LENGTH = 2, 61, 5, 4, 7, 5


def accumulate(rank: int, world: int) -> dict[str, Any]:
    """What a rank of `world` computes after it has seen its share: every `world`-th row, in two batches."""
    x, y = related_rows(SITES, ROWS, D_X, D_Y)
    mine = x[:, rank::world] + 1000, y[:, rank::world]
    batches = [(a, b) for a, b in zip(*(rows.tensor_split([3], 1) for rows in mine), strict=True)]
    moments = MomentsMetric(SITES, D_X, D_Y)
    aligner = Procrustes(SITES, D_X, D_Y).double()
    aligner.fit(moments_of(x + 1000, y))
    errors = MapErrors(x.mean(1) + 1000, y.mean(1))
    scores = TextScores(["a"], 1, SITES, TEXTS)
    drawn = HeldOutRows(SITES, D_X, D_Y, 0, torch.device("cpu"))
    for (a, b), numbers in zip(batches, torch.arange(ROWS)[rank::world].tensor_split([3]), strict=True):
        moments.update(a, b)
        errors.update(aligner, a, b)
        drawn.add(a, b, text=numbers // LENGTH, place=numbers % LENGTH)
    retrieved = drawn.columns(aligner(drawn.end().double()))
    text = torch.arange(rank, TEXTS, world)
    scores.update(text, {"a": torch.stack([text, 10 * text])[None].double()})
    summed = {"moments": moments.compute()._asdict(), "errors": errors.compute(), "scores": scores.compute()}
    return {**summed, "retrieved": retrieved}


def flat(found: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{group}.{name}": value for group, values in found.items() for name, value in values.items()}


def fitted(rank: int, world: World, store: Path) -> dict[str, Tensor]:
    """The only map of a run in which nothing is trained, whose moments the second fit takes from beside a store."""
    ranks = 1 if rank < 0 else 2
    settings = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "use_distributed_sampler": False}
    for _ in range(2):
        module = Alignment({"linear": Linear})
        trainer = quiet_trainer(max_epochs=-1, limit_train_batches=5, **settings)
        trainer.fit(module, datamodule=activations(world, sites=[1, 2], store=store / str(ranks)))
        assert trainer.global_step == trainer.current_epoch == 0
        assert not list(module.parameters())
        assert len(list((store / str(ranks) / "moments").iterdir())) == 1
    figures = module.validation_figures[module.fits()[0]]
    few = Alignment({"few": Procrustes})
    trainer = quiet_trainer(max_epochs=-1, limit_train_batches=1, **settings)
    trainer.fit(few, datamodule=activations(world, sites=[1, 3], rows="cls", batch_size=9))
    assert few.moments.n < few.moments.xx.shape[-1]
    return {**module.state_dict(), **few.state_dict(), **{name: figures[name] for name in ("fvu", "mse")}}


def both(rank: int, world: World, store: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the fits leave, and what is accumulated in the process group that they made."""
    return fitted(rank, world, store), accumulate(max(rank, 0), 1 if rank < 0 else 2)


def test_two_processes_fit_and_compute_what_one_does(world: World, tmp_path: Path) -> None:
    fits, sums = both(-1, world, tmp_path / "store")
    expected = flat(sums)
    assert expected["moments.n"] == ROWS
    (tmp_path / "ranks").mkdir()
    work = partial(both, world=world, store=tmp_path / "store")
    for found, accumulated in two_ranks(work, tmp_path / "ranks", meet=False):
        assert set(found) == set(fits)
        for name, value in fits.items():
            if "few" in name or (
                "condition" not in name and "back" not in name
            ):  # of a singular map: decided by the last digit
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert set(flat(accumulated)) == set(expected)
        for name, value in flat(accumulated).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-9, equal_nan=True, msg=name)
