"""Gradient steps: how many, how fast, how clipped, what stops a site that diverges, and figures over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from aligners.errors import check_known


def training_steps(trainer: pl.Trainer, rows: int, most: int, read: int) -> int:
    """Return the number of steps of the whole run: the Trainer's limit if it has one, otherwise what `rows` takes.

    Args:
        trainer: the run's Trainer, after its training loader was set up.
        rows: number of rows to train on.
        most: upper limit on the steps that `rows` may take.
        read: number of rows in one epoch.
    """
    limited = trainer.estimated_stepping_batches
    if limited != math.inf:
        return int(limited)
    return min(math.ceil(rows * int(trainer.num_training_batches) / read), most)


def mean_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    """Return the mean of all ranks' `values`, on every rank. All ranks have to call it."""
    if trainer.world_size == 1:
        return values
    return cast(Tensor, trainer.strategy.reduce(values.clone(), reduce_op="mean"))


Schedule = Literal["constant", "linear", "cosine", "one_cycle"]


REFERENCE_WIDTH = 64


# Steps over which the rate of trained maps rises at least, if need be beyond the end. The first steps of Adam change
# every entry by the rate, whatever its gradient says, until the averages know how far to trust it.
LEAST_RISE = 100.0


class Trained(Protocol):
    """A module that says how its parameters move its output; see `Aligner.fan_in` and `Aligner.in_a_row`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of every `nn.Module`."""
        ...

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Number of inputs."""
        ...

    def in_a_row(self, name: str) -> int:
        """Number of parameters whose steps add up."""
        ...


def make_optimizer(factory: OptimizerCallable, aligners: Iterable[Trained]) -> torch.optim.Optimizer | None:
    """Make one optimiser for all aligners, whose step changes a matrix equally at any width.

    A step of Adam changes every entry by about the learning rate, whatever the gradient. Summed over n inputs that
    moves an output n times as far, while the entries themselves are of size 1/√n: one rate that suits width 64 makes
    width 768 diverge. So the rate of a matrix with n inputs is divided by n / 64; biases, and matrices with 64 inputs
    or fewer, keep the full rate. The step of SGD follows the gradient, and its rate is left alone.

    A group's `least_rise` is the number of steps over which its rate should rise at least: `LEAST_RISE`, times half
    the number of matrices whose steps add up.

    Reference: Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466, Table 3: under Adam the rate of hidden weights
    goes with 1/fan-in, under SGD it does not.

    Args:
        factory: makes the optimiser of parameter groups, all with the full rate.
        aligners: what is trained.

    Returns:
        None where nothing has parameters.
    """
    groups: dict[tuple[float, int], list[nn.Parameter]] = {}
    for aligner in aligners:
        for name, parameter in aligner.named_parameters():
            if parameter.requires_grad:
                share = min(1.0, REFERENCE_WIDTH / aligner.fan_in(name, parameter))
                groups.setdefault((share, aligner.in_a_row(name)), []).append(parameter)
    if not groups:
        return None
    optimizer = factory([{"params": parameters} for parameters in groups.values()])
    for (share, row), group in zip(groups, optimizer.param_groups, strict=True):
        if not isinstance(optimizer, torch.optim.SGD):
            group["lr"] *= share
        group["initial_lr"], group["least_rise"] = group["lr"], LEAST_RISE * max(1.0, row / 2)
    return optimizer


def describe_optimizer(factory: OptimizerCallable) -> dict[str, Any]:
    """Return an optimiser's class and options as plain values, without those that only affect how it computes."""
    made = factory([nn.Parameter(torch.zeros(1))])
    speed = ("foreach", "fused", "capturable", "differentiable")
    return {"class": type(made).__name__, **{name: v for name, v in made.defaults.items() if name not in speed}}


def schedule_factor(schedule: Schedule, steps: int, warmup: float, least_rise: float = 0) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the step.

    Args:
        schedule: after a linear warm-up, `constant` stays, `linear` and `cosine` fall to zero; `one_cycle` rises
            and falls along a cosine (Smith and Topin 2017), its momentum left alone.
        steps: all training steps.
        warmup: share of them over which the factor rises to 1; 0: it does not rise.
        least_rise: number of steps over which the factor rises at least. A run that is too short for that takes the
            smaller of rise and fall, and does not reach 1.
    """
    check_known(get_args(Schedule), schedule=schedule)
    rising = warmup * steps
    slowly = max(rising, least_rise if warmup else 0)

    def factor(step: int) -> float:
        done = min(1.0, max(0.0, step - rising) / max(1.0, steps - rising))
        fall = {"constant": 1.0, "linear": 1 - done}.get(schedule, (1 + math.cos(math.pi * done)) / 2)
        risen = (step + 1) / (slowly + 1)
        if step >= slowly:
            return fall
        return min(fall, (1 - math.cos(math.pi * risen)) / 2 if schedule == "one_cycle" else risen)

    return factor


@torch.no_grad()
def gradient_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm (S,) of each site's gradient, over all parameters (S, ...) together."""
    return torch.stack([p.grad.flatten(1).square().sum(1) for p in parameters if p.grad is not None]).sum(0).sqrt()


@torch.no_grad()
def clip_per_site(
    parameters: Iterable[nn.Parameter], largest: float, norms: Tensor | None = None, alive: Tensor | None = None
) -> Tensor:
    """Scale each site's gradient, over all parameters (S, ...) together, down to norm `largest`.

    Args:
        parameters: one bank's parameters.
        largest: the norm; 0 turns clipping off.
        norms: their `gradient_norms`, if already computed.
        alive: (S,) True for sites that train; the gradients of all others are set to zero.

    Returns:
        (S,) the norms before.
    """
    parameters = list(parameters)
    norms = gradient_norms(parameters) if norms is None else norms
    factor = (largest / (norms + 1e-12)).clamp(max=1) if largest else torch.ones_like(norms)
    for g in (p.grad for p in parameters if p.grad is not None):
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))
        if alive is not None:
            g.copy_(torch.where(alive.view(-1, *[1] * (g.ndim - 1)), g, 0))
    return norms


# A loss this many times that of the first step does not come back.
FACTOR = 10.0


# In units of FVU: below this a site is no worse than the mean, wherever it started.
HARMLESS = 2.0


class Divergence:
    """Which sites of some banks have diverged, and when.

    A site diverges where its loss or its gradient is not finite, or its loss exceeds both ten times that of its first
    step and 2 (a map that answers the mean has 1, or 2 both ways). From then on its gradient is zero; nothing
    else is done to it here. Every rank has to see the same losses and gradients.

    Attributes:
        step: bank -> (S,) the step, counted from 1, at which a site diverged; 0 while it has not.
    """

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def watch(self, bank: str, loss: Tensor, step: int) -> None:
        """Check the losses of a step.

        Args:
            bank: its name.
            loss: (S,) of all ranks.
            step: number of the step, from 1.
        """
        loss = loss.detach()
        if bank not in self.step:
            self.step[bank] = torch.zeros_like(loss, dtype=torch.long)
            self._first[bank] = loss.nan_to_num(0.0, 0.0)
        self._mark(bank, ~(loss <= (FACTOR * self._first[bank]).clamp(min=HARMLESS)), step)

    def watch_gradient(self, bank: str, norms: Tensor, step: int) -> Tensor:
        """Check the gradient norms (S,) of a step; returns (S,), True where a site goes on training."""
        self._mark(bank, ~norms.isfinite(), step)
        return self.step[bank] == 0

    def _mark(self, bank: str, bad: Tensor, step: int) -> None:
        known = self.step[bank]
        self.step[bank] = torch.where(bad & (known == 0), step, known)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {"step": self.step, "first": self._first}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state from a checkpoint."""
        self.step, self._first = (
            {bank: value.to(device) for bank, value in state[name].items()} for name in ("step", "first")
        )


def let_end(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint has all of `max_steps`, and if so let the run validate; Lightning would just return."""
    complete = 0 < trainer.max_steps <= checkpoint["global_step"]
    if complete:
        cast(Any, trainer).fit_loop.epoch_loop.max_steps = -1
    return complete


def validate_if_due(trainer: pl.Trainer, validated_at: int | None, complete: bool) -> None:
    """Validate before the first batch of a run, if the current step still lacks its validation.

    It does at the start, which training has to beat, and when an interruption cut a validation off.

    Args:
        trainer: the run's Trainer, after its training loader was set up.
        validated_at: step of the last validation; None if there was none.
        complete: whether this is the last step.
    """
    fitting = cast(Any, trainer)
    if validated_at == trainer.global_step or not fitting.enable_validation:
        return
    epochs = trainer.check_val_every_n_epoch
    interval = fitting.val_check_batch if epochs is None else epochs * trainer.num_training_batches
    if complete or trainer.global_step % interval == 0:
        _validate_now(fitting)


def _validate_now(fitting: Any) -> None:
    """Run a fit's own validation loop from its first batch, with all its hooks. Not from within a training step."""
    validation = fitting.fit_loop.epoch_loop.val_loop
    validation.restarting = False  # from its first batch
    validation.reset_restart_stage()
    fitting.validating = True
    validation.run()
    fitting.training = True
