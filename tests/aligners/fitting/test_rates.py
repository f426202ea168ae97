"""Rates, schedules, clipping, and what stops a site that diverges."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from tests.live_memory import LiveBytes
from torch import nn

from aligners.fitting.steps import Schedule, clip_per_site, learning_rates, make_optimizer, schedule_factor
from aligners.fitting.training_status import Divergence
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear
from aligners.maps.mlp import MLP


@pytest.mark.parametrize("schedule", get_args(Schedule))
@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_the_rate_rises_to_one_and_then_keeps_its_course(schedule: Schedule, warmup: float) -> None:
    steps = 100
    factor = schedule_factor(schedule, steps, warmup)
    course = [factor(step) for step in range(steps + 1)]
    risen = int(warmup * steps)
    assert all(a < b for a, b in pairwise(course[: risen + 1]))
    assert course[risen] == 1
    assert all(0 < value <= 1 for value in course[:steps])  # no step is wasted
    falls = {"constant": steps, "trapezoid": steps // 2}.get(schedule, risen)  # from which step on
    assert course[risen:falls] == [1] * (falls - risen)
    if falls < steps:
        assert all(a > b for a, b in pairwise(course[falls:]))
        assert course[steps] == pytest.approx(0)
        assert factor(10 * steps) == pytest.approx(0)


def test_courses_are_those_of_their_names() -> None:
    assert schedule_factor("linear", 100, 0.0)(25) == pytest.approx(0.75)
    assert schedule_factor("cosine", 100, 0.0)(25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert schedule_factor("linear", 100, 0.49)(24) == pytest.approx(0.5)
    assert schedule_factor("trapezoid", 100, 0.2)(75) == pytest.approx(0.5)
    assert schedule_factor("one_cycle", 100, 0.49)(24) == pytest.approx(0.5)
    assert schedule_factor("one_cycle", 100, 0.49)(11) < schedule_factor("linear", 100, 0.49)(11)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_the_rate_rises_over_so_many_steps_at_least(schedule: Schedule) -> None:
    plain, slow = schedule_factor(schedule, 40, 0.15), schedule_factor(schedule, 40, 0.15, 100)
    rising = schedule_factor(schedule, 1000, 0.1)  # over 100 steps
    assert [slow(step) for step in range(40)] == pytest.approx(
        [min(plain(step) if step >= 6 else 1.0, rising(step)) for step in range(40)]
    )
    assert max(slow(step) for step in range(40)) < 0.41
    long, same = schedule_factor(schedule, 2000, 0.15), schedule_factor(schedule, 2000, 0.15, 100)
    assert [same(step) for step in range(0, 2000, 7)] == pytest.approx([long(step) for step in range(0, 2000, 7)])
    never = schedule_factor(schedule, 40, 0.0, 100)
    assert never(0) == 1


@pytest.mark.parametrize(("rows", "share"), [(1000, 1.0), (64, 0.25), (4, 1 / 64), (None, 1.0)])
def test_with_few_rows_a_step_the_rate_is_in_proportion_to_them(rows: float | None, share: float) -> None:
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    for kind, aligner, expected in ((adamw, INN(1, 8, 8), share), (adamw, MLP(1, 8, 8), 1.0), (sgd, INN(1, 8, 8), 1.0)):
        optimizer = make_optimizer(partial(kind, lr=1.0), [aligner])
        assert optimizer is not None
        learning_rates(optimizer, schedule_factor("constant", 100, 0.0), rows)
        assert [group["lr"] for group in optimizer.param_groups] == [expected] * len(optimizer.param_groups)


def bank_of(weights: list[nn.Parameter]) -> Identity:
    """A bank of three sites with these parameters."""
    bank = Identity(3, 2, 2)
    for number, weight in enumerate(weights):
        bank.register_parameter(str(number), weight)
    return bank


def test_each_site_is_clipped_by_its_own_norm() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 5), (3, 1, 5), (3, 2, 4, 4)]
    weights = [nn.Parameter(torch.zeros(shape)) for shape in [*shapes, (3, 2)]]
    gradients = [torch.randn(shape, generator=draw) for shape in shapes]
    for weight, gradient in zip(weights, gradients, strict=False):  # the last one has none
        gradient[0] *= 100
        gradient[1] *= 1e-3
        weight.grad = gradient.clone()
    norms = torch.stack([torch.cat([g[site].flatten() for g in gradients]).norm() for site in range(3)])
    torch.testing.assert_close(clip_per_site(bank_of(weights), 1.0), norms)
    for weight, gradient in zip(weights, gradients, strict=False):
        torch.testing.assert_close(weight.grad[0], gradient[0] / norms[0])
        torch.testing.assert_close(weight.grad[1], gradient[1], rtol=0, atol=0)
        torch.testing.assert_close(weight.grad[2], gradient[2] / norms[2])


class OfWidths(Identity):
    """A bank of three sites, whose parameter 1 has those of two of them, turned round."""

    def places(self, name: str) -> Sequence[int] | slice:
        return [2, 0] if name == "1" else slice(None)


Identity.registry.pop("OfWidths")  # other tests make one of every map


def test_parameters_of_some_sites_are_clipped_with_those_of_all() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (2, 4), (3, 4)]  # the last like the first
    gradients = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    bank = OfWidths(3, 2, 2)
    for number, gradient in enumerate(gradients):
        weight = nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient.clone()
        bank.register_parameter(str(number), weight)
    first, second, third = (gradient.numpy() for gradient in gradients)
    sites = [[first[0], second[1], third[0]], [first[1], third[1]], [first[2], second[0], third[2]]]
    norms = np.array([np.linalg.norm(np.concatenate(parts)) for parts in sites])
    alive = torch.tensor([True, False, True])
    found = clip_per_site(bank, 0.1, lambda _: alive)
    np.testing.assert_allclose(found.numpy(), norms)
    factors = 0.1 / norms * alive.numpy()
    clipped = [parameter.grad for parameter in bank.parameters()]
    for gradient, before, places in zip(clipped, (first, second, third), ([0, 1, 2], [2, 0], [0, 1, 2]), strict=True):
        np.testing.assert_allclose(gradient.numpy(), before * factors[places, None])


def test_a_site_is_clipped_as_it_would_be_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 7, 5, generator=draw) for _ in range(9)]
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    together = clip_per_site(bank_of(weights), 1.0)
    alone = Identity(1, 2, 2)
    for number, gradient in enumerate(gradients):
        weight = nn.Parameter(torch.zeros(1, 7, 5))
        weight.grad = gradient[1:2].clone()
        alone.register_parameter(str(number), weight)
    assert torch.equal(clip_per_site(alone, 1.0), together[1:2])
    for weight, own in zip(weights, alone.parameters(), strict=True):
        assert weight.grad is not None
        assert torch.equal(own.grad, weight.grad[1:2])


def test_clipping_copies_the_gradients_of_one_shape_at_a_time() -> None:
    shapes = [(2, size, 8) for size in (10, 11, 12, 13) for _ in range(3)]
    largest = 3 * 2 * 13 * 8 * 4
    with LiveBytes() as live:
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        before = live.now
        clip_per_site(bank_of(weights), 1.0)
    assert largest <= live.peak - before < 1.2 * largest


def test_a_site_whose_gradient_broke_spoils_no_other_and_gets_none() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.tensor([[torch.nan, 1.0], [3.0, 4.0], [torch.inf, 0.0]])
    clip_per_site(bank_of([weight]), 0.0, torch.isfinite)
    assert torch.equal(weight.grad, torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))
    weight.grad[0, 0] = torch.nan
    clip_per_site(bank_of([weight]), 1.0)
    torch.testing.assert_close(weight.grad[1], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("width", [16, 768])
def test_the_rate_of_a_matrix_follows_its_fan_in(width: int) -> None:
    aligner = MLP(1, width, 8, hidden=[32])
    optimizer = make_optimizer(partial(torch.optim.AdamW, lr=0.01), [aligner])
    assert optimizer is not None
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(list(aligner.parameters()))
    first, second = aligner.layers
    assert rates[id(first.weight)] == rates[id(aligner.skip)] == pytest.approx(0.01 * min(1, 64 / width))
    assert rates[id(second.weight)] == rates[id(first.bias)] == 0.01


def test_sgd_keeps_its_rate_and_nothing_makes_no_optimizer() -> None:
    optimizer = make_optimizer(partial(torch.optim.SGD, lr=1.0), [MLP(1, 512, 8)])
    assert optimizer is not None
    assert {group["lr"] for group in optimizer.param_groups} == {1.0}
    assert make_optimizer(torch.optim.AdamW, [Linear(1, 8, 8)]) is None


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([[0.5, 0.5, 0.5, 0.5], [0.4, math.nan, math.inf, 0.6], [0.3, 0.1, 0.1, 5.1]], [0, 2, 2, 3]),
        ([[math.nan, 0.5], [0.1, 0.5]], [1, 0]),  # at once
        ([[0.01, 30.0, 2.0], [1.9, 200.0, 19.0]], [0, 0, 0]),  # harmless, or large from the start
        ([[0.01, 30.0, 2.0], [2.1, 301.0, 21.0]], [2, 2, 2]),
    ],
)
def test_a_loss_that_is_no_number_or_far_above_its_start_has_diverged(
    losses: list[list[float]], diverged: list[int]
) -> None:
    watched = Divergence()
    for step, loss in enumerate(losses, start=1):
        watched.watch("map", torch.tensor(loss), torch.ones(len(loss)), step)
    assert watched.step["map"].tolist() == diverged


def test_a_gradient_that_is_no_number_stops_its_site_for_good() -> None:
    watched = Divergence()
    for step, norms in enumerate(([1.0, 1.0], [math.inf, 1.0], [1.0, 1.0]), start=1):
        alive = watched.watch("map", torch.ones(2), torch.tensor(norms), step)
    assert alive.tolist() == [False, True]
    again = Divergence()
    again.load_state_dict(watched.state_dict(), torch.device("cpu"))
    again.watch("map", torch.tensor([1.0, 11.0]), torch.ones(2), 4)
    assert again.step["map"].tolist() == [2, 4]
