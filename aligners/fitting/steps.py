"""Gradient steps of banks: learning rates, clipping, averaging, and what stops a site that diverges."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from aligners.errors import check_known
from aligners.maps.base import Aligner

# Keys of an optimiser's state, of a parameter and of a group. A checkpoint has both with the optimiser.
LAST = "last_weights"
COUNT = "averaged_steps"

Schedule = Literal["constant", "linear", "cosine", "one_cycle", "trapezoid"]
REFERENCE_WIDTH = 64
# Steps over which the rate of trained maps rises at least, if need be beyond the end. The first steps of Adam change
# every entry by the rate, whatever its gradient says, until the averages know how far to trust it.
LEAST_RISE = 100
FULL_RATE_ROWS = 256  # rows a step from which invertible networks have the full rate


def make_optimizer(
    factory: OptimizerCallable, aligners: Iterable[Aligner]
) -> torch.optim.Optimizer | None:
    """Make one optimiser for all aligners, whose step changes a matrix equally at any width.

    A step of Adam changes every entry by about the learning rate, whatever the gradient. Summed over n inputs that
    moves an output n times as far, while the entries themselves are of size 1/√n: a rate that suits width 64 makes
    width 768 diverge. So the rate of a matrix with n inputs is divided by n / 64; biases, and matrices with 64 inputs
    or fewer, keep the full rate. The step of SGD follows the gradient, so its rate stays as it is.

    Reference: Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466, Table 3: under Adam the rate of hidden weights
    goes with 1/fan-in, under SGD it does not.

    Args:
        factory: makes the optimiser of parameter groups, all with the full rate.
        aligners: what is trained.

    Returns:
        None where nothing has parameters.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for aligner in aligners:
        for name, parameter in aligner.named_parameters():
            if not parameter.requires_grad:
                continue
            inputs = aligner.fan_in(name, parameter)
            share = min(1.0, REFERENCE_WIDTH / inputs)
            alike = groups.setdefault((share, aligner.bijective), [])
            alike.append(parameter)
    if not groups:
        return None

    optimizer = factory([{"params": parameters} for parameters in groups.values()])
    made = optimizer.param_groups
    for (share, bijective), group in zip(groups, made, strict=True):
        if not isinstance(optimizer, torch.optim.SGD):
            group["lr"] *= share
            group["by_rows"] = bijective
        group["initial_lr"] = group["lr"]
    return optimizer


def describe_optimizer(factory: OptimizerCallable) -> dict[str, Any]:
    """Return an optimiser's class and options as plain values, without those that only affect how it computes."""
    instance = factory([nn.Parameter(torch.zeros(1))])
    described: dict[str, Any] = {"class": type(instance).__name__}
    for name, value in instance.defaults.items():
        if name not in ("foreach", "fused", "capturable", "differentiable"):
            described[name] = value
    return described


def schedule_factor(
    schedule: Schedule, steps: int, warmup: float, least_rise: int = 0
) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the step.

    Args:
        schedule: after a linear warm-up, `constant` stays, `linear` and `cosine` fall to zero, and `trapezoid` stays
            for the first half of all steps, then falls linearly to zero; `one_cycle` rises and falls along a cosine
            (Smith and Topin 2017), its momentum left alone.
        steps: all training steps.
        warmup: share of them over which the factor rises to 1; 0: it does not rise.
        least_rise: fewest steps over which the factor rises. A run that is too short for them takes the smaller of
            rise and fall, and does not reach 1.
    """
    check_known(get_args(Schedule), schedule=schedule)
    rising = warmup * steps
    slowly = rising
    if warmup:
        slowly = max(rising, least_rise)

    def fall(step: int) -> float:
        after = max(0.0, step - rising)
        done = min(1.0, after / max(1.0, steps - rising))
        if schedule == "constant":
            return 1.0
        if schedule == "linear":
            return 1 - done
        if schedule == "trapezoid":
            return min(1.0, 2 - 2 * min(step, steps) / steps)
        return (1 + math.cos(math.pi * done)) / 2

    def factor(step: int) -> float:
        if step >= slowly:
            return fall(step)
        risen = (step + 1) / (slowly + 1)
        if schedule == "one_cycle":
            risen = (1 - math.cos(math.pi * risen)) / 2
        return min(fall(step), risen)

    return factor


def learning_rates(
    optimizer: torch.optim.Optimizer,
    course: Callable[[int], float],
    rows: float | None,
    done: int = 0,
) -> LambdaLR:
    """The learning rates along a `schedule_factor`; they follow from the steps done, so no checkpoint holds them.

    Adam takes steps of full size even where the gradient is noise, and the fewer rows a step has, the more of it is
    noise. With fewer than `FULL_RATE_ROWS` rows the rate of bijective maps is proportional to their number. The step of
    SGD follows the gradient.

    Args:
        optimizer: whose rates.
        course: the factor by step.
        rows: of a step; None: the rate does not depend on them.
        done: steps taken so far.
    """
    share = 1.0
    if rows is not None:
        share = min(1.0, rows / FULL_RATE_ROWS)

    def by_rows(step: int) -> float:
        return share * course(step)

    courses = []
    for group in optimizer.param_groups:
        courses.append(by_rows if group.get("by_rows") else course)
    return LambdaLR(optimizer, courses, done - 1)


class Alike(NamedTuple):
    """Parameters of one shape at the same sites, so that one operation does for all of them.

    Attributes:
        parameters: K of them, with gradients.
        places: their sites.
    """

    parameters: list[nn.Parameter]
    places: Sequence[int] | slice


class Gradients(NamedTuple):
    """The gradients of parameters that are alike.

    Attributes:
        values: (K, sites, ...).
        places: their sites.
    """

    values: Tensor
    places: Sequence[int] | slice

    def scale(self, factor: Tensor) -> None:
        """Multiply them by the factor (S,) of their site."""
        self.values.mul_(self._by_place(factor))

    def clear(self, sites: Tensor) -> None:
        """Set those of some sites, (S,) bool, to zero."""
        self.values.masked_fill_(self._by_place(sites), 0)

    def squares(self, sites: int) -> Tensor:
        """Their sums of squares (K, S); zero at sites that a parameter does not have."""
        sums = self.values.square().flatten(2).sum(2)
        if self.places == slice(None):
            return sums
        everywhere = sums.new_zeros(len(sums), sites)
        everywhere[:, self.places] = sums
        return everywhere

    def _by_place(self, of_sites: Tensor) -> Tensor:
        ones = [1] * (self.values.ndim - 2)
        return of_sites[self.places].view(-1, *ones)


def alike(bank: Aligner) -> list[Alike]:
    """The parameters of a bank that have gradients, by their shapes and sites."""
    found: dict[tuple[torch.Size, str], Alike] = {}
    for name, parameter in bank.named_parameters():
        if parameter.grad is None:
            continue
        places = bank.places(name)
        group = found.setdefault((parameter.shape, str(places)), Alike([], places))
        group.parameters.append(parameter)
    return list(found.values())


def gather_gradients(group: Alike) -> Gradients:
    """Copy the gradients of a group into one tensor, of which they are views from then on."""
    separate = [cast(Tensor, parameter.grad) for parameter in group.parameters]
    values = torch.stack(separate)
    for parameter, own in zip(group.parameters, values, strict=True):
        parameter.grad = own
    return Gradients(values, group.places)


@torch.no_grad()
def clip_per_site(
    bank: Aligner, largest: float, alive: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scale each site's gradient, over all parameters of a bank together, down to norm `largest`.

    Parameters of one shape are handled at once: a GPU takes longer to begin an operation than to do it. Afterwards
    their gradients share one tensor. Only the gradients of one shape are in memory twice at a time.

    Args:
        bank: whose parameters have gradients.
        largest: the norm; 0 turns clipping off.
        alive: says from the norms (S,) which sites train, (S,) bool; the gradients of all others are set to zero.

    Returns:
        (S,) the norms before.
    """
    gathered = [gather_gradients(group) for group in alike(bank)]
    squares = torch.cat([gradients.squares(bank.sites) for gradients in gathered])
    # in float64 a site's norm does not depend on how many sites are beside it
    norms = squares.sum(0, dtype=torch.float64).sqrt().to(squares.dtype)
    if largest:
        factor = (largest / (norms + 1e-12)).clamp(max=1)
        for gradients in gathered:
            gradients.scale(factor)
    if alive is not None:
        stopped = ~alive(norms)
        for gradients in gathered:
            gradients.clear(stopped)
    return norms


class SiteSteps:
    """Takes the steps of an optimiser, and leaves in the parameters the average of the weights of all steps.

    A step of Adam has one size, however small the gradient is, so the weights keep moving around what they have
    learned. Their average is nearer to it:

        m_t = (1 − 3 / (t + 2)) m_(t−1) + 3 / (t + 2) w_t,

    in which the weights of step t count roughly in proportion to t². Between steps the parameters hold this average:
    validations and checkpoints read it. The last weights are in the optimiser's state.

    Reference: Shamir and Zhang 2013, "Stochastic Gradient Descent for Non-smooth Optimization", arXiv 1212.1824,
    section 3 (polynomial-decay averaging, with η = 2).

    Args:
        optimizer: of all parameters.
        aligners: the banks, whose `rate_share` says at which share of the rate a site is trained.
        averaged: whether weights are averaged; else the parameters hold the last ones.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        aligners: Iterable[Aligner],
        *,
        averaged: bool,
    ) -> None:
        self.optimizer = optimizer
        self.averaged = averaged
        # by shape, what takes less than a whole step, and the share that it keeps of where the step began
        of_shape: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = {}
        for aligner in aligners:
            for name, parameter in aligner.named_parameters():
                share = aligner.rate_share(name)
                if share is None or bool((share == 1).all()):
                    continue
                ones = [1] * (parameter.ndim - 1)
                parameters, kept = of_shape.setdefault(parameter.shape, ([], []))
                parameters.append(parameter)
                kept.append(1 - share.view(-1, *ones))
        self.kept = list(of_shape.values())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the last weights while a gradient is computed and a step of the optimiser is taken, inside."""
        means = self._hold_last()
        before = [torch.stack(parameters).detach() for parameters, _ in self.kept]
        try:
            yield
        except BaseException:
            for parameter, mean in means.items():
                parameter.data = mean
            raise
        with torch.no_grad():
            for (parameters, kept), starts in zip(self.kept, before, strict=True):
                for parameter, start, share in zip(
                    parameters, starts, kept, strict=True
                ):
                    parameter.lerp_(start, share)
            if self.averaged:
                self._hold_mean(means)

    def _hold_last(self) -> dict[Tensor, Tensor]:
        """Put the last weights into the parameters, and return the averages that they held."""
        means: dict[Tensor, Tensor] = {}
        for parameter, state in self.optimizer.state.items():
            if LAST in state:
                means[parameter] = parameter.data
                parameter.data = state[LAST]
        return means

    def _hold_mean(self, means: dict[Tensor, Tensor]) -> None:
        """Move the averages towards the weights that the parameters have now, and put them into the parameters."""
        for group in self.optimizer.param_groups:
            group[COUNT] = group.get(COUNT, 0) + 1
            share = 3 / (group[COUNT] + 2)
            averages = []
            lasts = []
            for parameter in group["params"]:
                last = parameter.data
                mean = means.get(parameter)
                if mean is None:  # after the first step
                    mean = last.clone()
                else:
                    averages.append(mean)
                    lasts.append(last)
                self.optimizer.state[parameter][LAST] = last
                parameter.data = mean
            if averages:
                move = get_ema_multi_avg_fn(1 - share)
                move(averages, lasts, None)
