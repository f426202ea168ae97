import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runs import activations, quiet_trainer, related_rows
from tests.world import World

from aligners.callbacks.best import BestPerSite
from aligners.fitting.alignment import Alignment
from aligners.maps.inn import INN
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import moments_of

NAMES = {"mlp": partial(MLP, hidden=[4]), "inn": partial(INN, couplings=2, hidden=4)}


def validated(
    callback: BestPerSite, history: list[dict[str, list[list[float]]]], sites: int = 3
) -> tuple[Alignment, list[bool]]:
    """The callback after validations with these figures, {name: [fvu of each site, of the inverse]}.

    Before validation v every parameter is v. Also, whether the run was told to stop after each.
    """
    module = Alignment(NAMES)
    module.build(sites, 4, 4)
    module.moments = moments_of(*related_rows(sites, 50, 4, 4))
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), should_stop=False, global_step=0, optimizers=[], sanity_checking=False
    )
    stopped = []
    for number, figures in enumerate(history):
        for weight in module.parameters():
            weight.data.fill_(number)
        module.validation_figures = {
            fit: {"fvu": torch.tensor(figures[fit.name][0]), "fvu_inverse": torch.tensor(figures[fit.name][1])}
            for fit in module.fits()
        }
        trainer.global_step += 1
        callback.on_validation_end(trainer, module)
        stopped.append(trainer.should_stop)
    callback.on_fit_end(trainer, module)
    return module, stopped


def kept(module: Alignment, name: str) -> list[float]:
    """The number of the validation whose parameters each site has."""
    weights = [weight.flatten(1) for weight in module.banks_of("0_1")[name].parameters()]
    found = torch.cat(weights, 1)
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


def history(*mlp: list[float], inn: list[list[list[float]]] | None = None) -> list[dict[str, list[list[float]]]]:
    inn = inn or [[[1.0 - v / 100] * 3, [1.0] * 3] for v in range(len(mlp))]
    return [{"mlp": [a, [math.nan] * 3], "inn": b} for a, b in zip(mlp, inn, strict=True)]


@pytest.mark.parametrize(
    ("mlp", "least", "best"),
    [
        ([[0.5, 0.5, 0.5], [0.4, 0.6, 0.3], [0.45, 0.4, 0.2]], 0.0, [1, 2, 2]),
        ([[0.5, 0.5, 0.5], [0.46, 0.44, 0.5]], 0.05, [0, 1, 0]),  # too small an improvement is none
        ([[0.5, math.nan, math.nan], [math.nan, 0.5, math.nan], [0.6, 0.6, 0.7]], 0.0, [0, 1, 2]),
    ],
)
def test_each_site_keeps_its_own_best(mlp: list[list[float]], least: float, best: list[int]) -> None:
    module, stopped = validated(BestPerSite(min_delta=least), history(*mlp))
    assert kept(module, "mlp") == best
    assert not any(stopped)


def test_trained_both_ways_counts_both_ways() -> None:
    inn = [[[0.5] * 3, [0.5, 0.5, 0.5]], [[0.4] * 3, [0.7, 0.5, 0.55]]]
    module, _ = validated(BestPerSite(), history([0.5] * 3, [0.4] * 3, inn=inn))
    assert kept(module, "inn") == [0, 1, 1]


def test_a_site_without_patience_left_is_closed_and_the_last_one_ends_the_run() -> None:
    flat = [[[1.0] * 3, [1.0] * 3]] * 5
    course = history([0.5, 0.5, 0.5], [0.6, 0.4, 0.6], [0.6, 0.3, 0.4], [0.1, 0.3, 0.4], [0.1, 0.3, 0.4], inn=flat)
    module, stopped = validated(BestPerSite(patience=2), course)
    # Site 0 was closed before its .1 came, as if its training had ended.
    assert kept(module, "mlp") == [0, 2, 2]
    assert kept(module, "inn") == [0, 0, 0]
    assert stopped == [False, False, False, False, True]


def test_it_goes_on_from_a_checkpoint() -> None:
    course = history([0.5, 0.5, 0.5], [0.6, 0.4, 0.6], [0.7, 0.7, 0.4])
    whole = BestPerSite(patience=2)
    expected, _ = validated(whole, course)
    first, second = BestPerSite(patience=2), BestPerSite(patience=2)
    validated(first, course[:2])
    second.load_state_dict(first.state_dict())
    module, _ = validated(second, course[2:])
    # parameters are numbered from 0 again: site 2 improved in the second half's first validation
    assert kept(module, "mlp") == [0, 1, 0]
    assert kept(expected, "mlp") == [0, 1, 2]
    for name, values in whole.state_dict()["best"].items():
        assert torch.equal(values, second.state_dict()["best"][name])


def test_through_a_trainer_a_bank_stops_site_by_site(world: World) -> None:
    """At a rate at which validation gets worse at once, or soon."""

    def trained(*sites: int) -> Alignment:
        net, rate = partial(MLP, hidden=[8], skip=False), partial(torch.optim.AdamW, lr=0.1)
        module = Alignment({"mlp": net}, optimizer=rate, schedule="constant", warmup=0.0)
        trainer = quiet_trainer(max_epochs=9, callbacks=[BestPerSite(patience=1)], limit_train_batches=4)
        trainer.fit(module, datamodule=activations(world, sites=list(sites)))
        assert trainer.current_epoch < 9
        return module

    together, alone = trained(1, 3), [trained(1), trained(3)]
    best = [step for module in alone for step in module.training_record["0_1.mlp"]["best_step"]]
    assert together.training_record["0_1.mlp"]["best_step"] == best
    assert best[0] > best[1] == 0
    for name, value in together.state_dict().items():
        torch.testing.assert_close(value, torch.cat([module.state_dict()[name] for module in alone]), msg=name)
