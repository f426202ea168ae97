"""Steps at rates of each site's own, and the average of the weights of all steps."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aligners.callbacks.best import BestPerSite
from aligners.fitting.alignment import Alignment
from aligners.fitting.map_errors import MapErrors
from aligners.fitting.steps import LAST, SiteSteps, clip_per_site, make_optimizer
from aligners.fitting.training_status import Divergence
from aligners.maps.base import Aligner
from aligners.maps.inn import INN, MUCH_LEFT
from aligners.similarity.algebra.moments import moments_of


class Weights(Aligner):
    """Nothing but a weight of each of two sites, the second of which trains at a quarter of the rate."""

    def __init__(self) -> None:
        super().__init__(2, 2, 2)
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def fit(self, moments: Any) -> None:
        pass

    def rate_share(self, name: str) -> Tensor | None:
        return torch.tensor([1.0, 0.25])


Weights.registry.pop("Weights")  # other tests make one of every map


def take(steps: SiteSteps, weights: Weights, gradient: Tensor) -> Tensor:
    """Take a step along a gradient, and return the weights in which it ended."""
    with steps.step():
        weights.weight.grad = gradient.clone()
        steps.optimizer.step()
    state = steps.optimizer.state[weights.weight]
    return state[LAST].clone() if LAST in state else weights.weight.detach().clone()


def gradients(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=draw) for _ in range(count)]


def test_between_steps_the_parameters_hold_the_average_and_steps_go_on_from_the_last_weights() -> None:
    weights = Weights()
    steps = SiteSteps(torch.optim.SGD(weights.parameters(), lr=0.1), [weights], averaged=True)
    expected = torch.zeros(2, 3)
    last = torch.zeros(2, 3)
    for number, gradient in enumerate(gradients(20), start=1):
        last = last - 0.1 * torch.tensor([[1.0], [0.25]]) * gradient
        share = 3 / (number + 2)
        expected = (1 - share) * expected + share * last
        torch.testing.assert_close(take(steps, weights, gradient), last)
        torch.testing.assert_close(weights.weight.detach(), expected)


@pytest.mark.parametrize("averaged", [False, True])
def test_a_site_with_a_share_of_the_rate_takes_that_share_of_adams_steps(averaged: bool) -> None:
    weights = Weights()
    steps = SiteSteps(torch.optim.AdamW(weights.parameters(), lr=0.1, weight_decay=0.0), [weights], averaged=averaged)
    gradient = torch.ones(2, 3)
    for number in range(1, 4):
        last = take(steps, weights, gradient)
        torch.testing.assert_close(last, -0.1 * number * torch.tensor([[1.0], [0.25]]).expand(2, 3))


def test_a_checkpoint_of_the_optimiser_holds_the_last_weights() -> None:
    weights = Weights()
    steps = SiteSteps(torch.optim.AdamW(weights.parameters(), lr=0.1), [weights], averaged=True)
    first, second = gradients(10)[:5], gradients(10)[5:]
    for gradient in first:
        take(steps, weights, gradient)
    saved = copy.deepcopy((weights.state_dict(), steps.optimizer.state_dict()))
    for gradient in second:
        take(steps, weights, gradient)
    again = Weights()
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    resumed = SiteSteps(optimizer, [again], averaged=True)
    for gradient in second:
        take(resumed, again, gradient)
    assert torch.equal(again.weight, weights.weight)


def test_a_site_that_is_set_back_stays_at_its_best() -> None:
    weights = Weights()
    steps = SiteSteps(torch.optim.AdamW(weights.parameters(), lr=0.1, weight_decay=0.0), [weights], averaged=True)
    kept = BestPerSite()
    for number, gradient in enumerate(gradients(12)):
        if number == 3:
            kept._kept["map"] = copy.deepcopy(weights.state_dict())
        take(steps, weights, gradient)
    best, first_site = kept._kept["map"]["weight"][0], torch.tensor([True, False])
    others = weights.weight[1].detach().clone()
    trainer: Any = SimpleNamespace(optimizers=[steps.optimizer])
    kept._set_back("map", weights, first_site, trainer)
    assert torch.equal(weights.weight[1], others)
    for gradient in gradients(20):
        gradient[0] = 0  # as of a site that has diverged
        take(steps, weights, gradient)
    torch.testing.assert_close(weights.weight[0].detach(), best)
    assert not torch.equal(weights.weight[1], others)


def test_a_step_that_fails_leaves_the_average() -> None:
    weights = Weights()
    steps = SiteSteps(torch.optim.SGD(weights.parameters(), lr=0.1), [weights], averaged=True)
    for gradient in gradients(4):
        take(steps, weights, gradient)
    before = weights.weight.detach().clone()
    with pytest.raises(RuntimeError, match="no gradient"), steps.step():
        raise RuntimeError("no gradient")
    assert torch.equal(weights.weight, before)


class Counted(TorchDispatchMode):
    """Counts the operations within it that compute something: each of them is begun by itself on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def operations_of_a_step(couplings: int, share: float) -> int:
    """Those of clipping, of the optimiser and of averaging."""
    inn = INN(1, 8, 8, couplings=couplings)
    inn.step_share.fill_(share)
    optimizer = make_optimizer(partial(torch.optim.AdamW, lr=0.01, fused=True), [inn])
    assert optimizer is not None
    steps = SiteSteps(optimizer, [inn], averaged=True)
    x, y = torch.randn(1, 32, 8), torch.randn(1, 32, 8)
    watched = Divergence()
    for step in range(1, 4):
        optimizer.zero_grad(set_to_none=True)
        loss = inn.loss(x, y)
        loss.sum().backward()
        with Counted() as counted, steps.step():
            clip_per_site(inn, 1.0, partial(watched.watch, "inn", loss, step=step))
            optimizer.step()
    return counted.number


def test_what_follows_a_gradient_takes_as_many_operations_however_many_layers_there_are() -> None:
    assert operations_of_a_step(8, 1.0) == operations_of_a_step(4, 1.0) < 60


def test_a_share_of_the_rate_takes_one_operation_for_each_parameter_that_has_one() -> None:
    inn = INN(1, 8, 8, couplings=8)
    less = [name for name, _ in inn.named_parameters() if inn.rate_share(name) is not None]
    more = operations_of_a_step(8, 0.5) - operations_of_a_step(8, 1.0)
    shapes = {parameter.shape for name, parameter in inn.named_parameters() if name in less}
    assert more == len(less) + len(shapes)


def test_a_checkpoint_of_an_optimiser_that_is_not_fused_goes_on_fused() -> None:
    weights = Weights()
    plain = torch.optim.AdamW(weights.parameters(), lr=0.1, fused=False)
    steps = SiteSteps(plain, [weights], averaged=True)
    first, second = gradients(10)[:5], gradients(10)[5:]
    for gradient in first:
        take(steps, weights, gradient)
    saved = copy.deepcopy((weights.state_dict(), plain.state_dict()))
    for gradient in second:
        take(steps, weights, gradient)
    again = Weights()
    fused = torch.optim.AdamW(again.parameters(), lr=0.1, fused=True)
    again.load_state_dict(saved[0])
    fused.load_state_dict(saved[1])
    resumed = SiteSteps(fused, [again], averaged=True)
    for gradient in second:
        take(resumed, again, gradient)
    torch.testing.assert_close(again.weight, weights.weight)


def similar_pair(rows: int, width: int, noise: float) -> tuple[Tensor, Tensor]:
    """States (1, n, d) that differ by a rotation and by noise: all that is left is noise."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, rows, width, generator=draw)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=draw)).Q
    return x, x @ rotation + noise * torch.randn(1, rows, width, generator=draw)


def excess_of(training: Alignment, seed: int, *, full_rate: bool) -> float:
    """By which share of the start's error, there and back, training raises it, where there is nothing to learn."""
    noise, fitted = 0.05, 5000
    x, y = similar_pair(6000, 32, noise)
    moments = moments_of(x[:, :fitted], y[:, :fitted])
    torch.manual_seed(seed)
    inn = INN(1, 32, 32)
    inn.fit(moments)
    left = float(inn.step_share) ** 2 * MUCH_LEFT
    assert left == pytest.approx(noise**2 / (1 + noise**2), rel=0.1)
    if full_rate:
        inn.step_share.fill_(1)

    def error() -> float:
        errors = MapErrors(moments.mean_x, moments.mean_y)
        errors.update(inn, x[:, fitted:], y[:, fitted:])
        figures = errors.compute()
        return float(figures["fvu"] + figures["fvu_inverse"])

    start = error()
    training.train_on_rows(inn, x[:, :fitted], y[:, :fitted], 60, 256, seed)
    return error() / start - 1


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_a_short_run_hardly_leaves_a_start_on_which_nothing_improves(seed: int) -> None:
    excess = excess_of(Alignment(), seed, full_rate=False)
    before = excess_of(Alignment(schedule="one_cycle", averaging=False), seed, full_rate=True)
    assert excess < 0.05
    assert excess < 0.3 * before
