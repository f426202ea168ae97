"""Gradient steps: how fast and with which clipping, what stops a site that diverges, and figures over ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from aligners.datamodules.identity import identity, refuse_other_run, trainer_identity
from aligners.errors import UserError, check_known, check_range
from aligners.files.given import refusing
from aligners.fitting.bank import StoredBank, refuse_other_models
from aligners.fitting.lengths import KnownLength
from aligners.fitting.steps import SiteSteps
from aligners.maps.base import Aligner
from aligners.maps.solving import Products, products_in


def mean_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    """Return the mean of all ranks' `values`, on every rank. All ranks have to call it."""
    if trainer.world_size == 1:
        return values
    return cast(Tensor, trainer.strategy.reduce(values.clone(), reduce_op="mean"))


def mean_count(trainer: pl.Trainer, count: int, device: torch.device) -> Tensor | float:
    """The mean over ranks of what each rank has of something; in a run of one process, that number itself."""
    if trainer.world_size == 1:
        return float(count)
    # filled on the device: a number that is copied there would wait for it
    return mean_over_ranks(trainer, torch.full((), float(count), device=device))


Schedule = Literal["constant", "linear", "cosine", "one_cycle", "trapezoid"]
AVERAGING = (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging)
REFERENCE_WIDTH = 64
# Steps over which the rate of trained maps rises at least, if need be beyond the end. The first steps of Adam change
# every entry by the rate, whatever its gradient says, until the averages know how far to trust it.
LEAST_RISE = 100
IN_MEMORY = "the fit in memory"  # in place of the name of a file
FULL_RATE_ROWS = 256  # rows a step from which invertible networks have the full rate


def make_optimizer(factory: OptimizerCallable, aligners: Iterable[Aligner]) -> torch.optim.Optimizer | None:
    """Make one optimiser for all aligners, whose step changes a matrix equally at any width.

    A step of Adam changes every entry by about the learning rate, whatever the gradient. Summed over n inputs that
    moves an output n times as far, while the entries themselves are of size 1/√n: one rate that suits width 64 makes
    width 768 diverge. So the rate of a matrix with n inputs is divided by n / 64; biases, and matrices with 64 inputs
    or fewer, keep the full rate. The step of SGD follows the gradient, and its rate is left alone.

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
            if parameter.requires_grad:
                share = min(1.0, REFERENCE_WIDTH / aligner.fan_in(name, parameter))
                groups.setdefault((share, aligner.bijective), []).append(parameter)
    if not groups:
        return None
    optimizer = factory([{"params": parameters} for parameters in groups.values()])
    for (share, bijective), group in zip(groups, optimizer.param_groups, strict=True):
        if not isinstance(optimizer, torch.optim.SGD):
            group["lr"] *= share
            group["by_rows"] = bijective
        group["initial_lr"] = group["lr"]
    return optimizer


def describe_optimizer(factory: OptimizerCallable) -> dict[str, Any]:
    """Return an optimiser's class and options as plain values, without those that only affect how it computes."""
    instance = factory([nn.Parameter(torch.zeros(1))])
    speed = ("foreach", "fused", "capturable", "differentiable")
    return {"class": type(instance).__name__, **{name: v for name, v in instance.defaults.items() if name not in speed}}


def schedule_factor(schedule: Schedule, steps: int, warmup: float, least_rise: int = 0) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the step.

    Args:
        schedule: after a linear warm-up, `constant` stays, `linear` and `cosine` fall to zero, and `trapezoid` stays
            for the first half of all steps, then falls linearly to zero; `one_cycle` rises and falls along a cosine
            (Smith and Topin 2017), its momentum left alone.
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
        late = min(1.0, 2 - 2 * min(step, steps) / steps)
        falls = {"constant": 1.0, "linear": 1 - done, "trapezoid": late}
        fall = falls.get(schedule, (1 + math.cos(math.pi * done)) / 2)
        risen = (step + 1) / (slowly + 1)
        if step >= slowly:
            return fall
        return min(fall, (1 - math.cos(math.pi * risen)) / 2 if schedule == "one_cycle" else risen)

    return factor


def learning_rates(
    optimizer: torch.optim.Optimizer, course: Callable[[int], float], rows: float | None, done: int = 0
) -> LambdaLR:
    """The learning rates along a `schedule_factor`, which follow from the steps done: no checkpoint needs to hold them.

    Adam's step has its full size even where the gradient is noise, as more of it is the fewer rows a step has. With
    fewer than `FULL_RATE_ROWS` the rate of bijective maps is in proportion to them; the step of SGD follows the
    gradient.

    Args:
        optimizer: whose rates.
        course: the factor by step.
        rows: of a step; None: the rate does not depend on them.
        done: steps that were taken.
    """
    share = 1.0 if rows is None else min(1.0, rows / FULL_RATE_ROWS)
    courses = {True: lambda step: share * course(step), False: course}
    return LambdaLR(optimizer, [courses[group.get("by_rows", False)] for group in optimizer.param_groups], done - 1)


@torch.no_grad()
def clip_per_site(bank: Aligner, largest: float, alive: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Scale each site's gradient, over all parameters of a bank together, down to norm `largest`.

    Args:
        bank: whose parameters have gradients.
        largest: the norm; 0 turns clipping off.
        alive: says from the norms (S,) which sites train, (S,) bool; the gradients of all others are set to zero.

    Returns:
        (S,) the norms before.
    """
    given = [(p.grad, bank.places(name)) for name, p in bank.named_parameters() if p.grad is not None]
    norms = given[0][0].new_zeros(bank.sites)
    for g, at in given:
        norms[at] += g.flatten(1).square().sum(1)
    norms = norms.sqrt()
    factor = (largest / (norms + 1e-12)).clamp(max=1) if largest else torch.ones_like(norms)
    kept = torch.ones_like(norms, dtype=torch.bool) if alive is None else alive(norms)
    for g, at in given:
        each = -1, *[1] * (g.ndim - 1)
        g.copy_(torch.where(kept[at].view(each), g * factor[at].view(each), 0))
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

    def watch(self, bank: str, loss: Tensor, norms: Tensor, step: int) -> Tensor:
        """Check the losses and gradients of a step.

        Args:
            bank: its name.
            loss: (S,) of all ranks.
            norms: (S,) of the gradients.
            step: number of the step, from 1.

        Returns:
            (S,) True where a site goes on training.
        """
        loss = loss.detach()
        if bank not in self.step:
            self.step[bank] = torch.zeros_like(loss, dtype=torch.long)
            self._first[bank] = loss.nan_to_num(0.0, 0.0)
        known, limit = self.step[bank], (FACTOR * self._first[bank]).clamp(min=HARMLESS)
        bad = ~(loss <= limit) | ~norms.isfinite()
        self.step[bank] = torch.where(bad & (known == 0), step, known)
        return self.step[bank] == 0

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {"step": self.step, "first": self._first}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state from a checkpoint."""
        self.step, self._first = (
            {bank: value.to(device) for bank, value in state[name].items()} for name in ("step", "first")
        )


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
        validation = fitting.fit_loop.epoch_loop.val_loop
        validation.restarting = False  # from its first batch
        validation.reset_restart_stage()
        fitting.validating = True
        validation.run()
        fitting.training = True


class BankTraining(KnownLength, ABC):
    """Trains banks of maps, each site by itself: one optimiser for all, and one course of its learning rates.

    Any Trainer will do: the best state of each site is kept by a `BestPerSite`, which the module brings along unless
    the Trainer has one.

    Args:
        optimizer: makes the optimiser.
        schedule: how the learning rate moves over the training steps.
        warmup: share of the steps over which it rises.
        gradient_clip: largest gradient norm of a site of a bank; 0 turns clipping off.
        seed: of the initial weights.
        averaging: whether maps are the average of the weights of all steps: see `SiteSteps`.

    Attributes:
        stream: the data module.
        final: name of the file that a finished run leaves; empty: it leaves none.
        products: precision of matrix products in training.
        maps: route -> name -> bank.
        training_record: route.name -> how training went, site by site; written by `BestPerSite`.
        training_steps: of the whole run, once training has begun.
        parts: of a batch, each of which gets a step of the optimiser, likewise.
        site_steps: how steps are taken, likewise.
    """

    automatic_optimization = False
    stream: Any
    final = ""
    products: Products = "float32"

    def __init__(
        self,
        optimizer: OptimizerCallable,
        schedule: Schedule,
        warmup: float,
        gradient_clip: float,
        seed: int,
        averaging: bool = False,
    ) -> None:
        super().__init__()
        check_range(least=0, below=1, warmup=warmup)
        self.optimizer_factory, self.schedule, self.warmup = optimizer, schedule, warmup
        self.gradient_clip, self.seed, self.averaging = gradient_clip, seed, averaging
        self.maps, self.divergence = nn.ModuleDict(), Divergence()
        self.training_record: dict[str, dict[str, Any]] = {}
        self._complete, self.parts = False, 1
        self._limits: dict[str, Any] = {}  # of a run that goes on with all its steps taken: Lightning's is then lifted

    def banks_of(self, route: str) -> dict[str, Aligner]:
        """Name -> bank of a route."""
        return {name: cast(Aligner, bank) for name, bank in cast(nn.ModuleDict, self.maps[route]).items()}

    def banks(self) -> dict[str, Aligner]:
        """The trained banks by route.name."""
        every = ((f"{route}.{name}", bank) for route in self.maps for name, bank in self.banks_of(route).items())
        return {key: bank for key, bank in every if not bank.closed_form}

    @abstractmethod
    def criteria(self) -> dict[str, Tensor]:
        """The last validation's criterion at each site of each trained bank, (S,): lower is better."""

    @abstractmethod
    def stored(self) -> StoredBank:
        """The maps as they are now, with what another process needs to use them."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What a run that goes on from this one has to share beside the options of any training, as plain values."""

    def has_begun(self) -> bool:
        """Whether a run that is stopped now has anything to go on from."""
        return self.global_step > 0

    def identity(self) -> dict[str, Any]:
        """What a run that goes on from this one has to share, as plain values."""
        options = {name: getattr(self, name) for name in ("schedule", "warmup", "gradient_clip", "seed")}
        options |= {"optimizer": describe_optimizer(self.optimizer_factory), **self.options()}
        trainer = trainer_identity(self.trainer) | self._limits
        return identity(self.stream, **options) | {"trainer": trainer, "early_stopping": self._stopping()}

    def _stopping(self) -> dict[str, Any]:
        """By what the best state of each site is chosen, as callbacks say it."""
        said: dict[str, Any] = {}
        for callback in cast(Any, self.trainer).callbacks:
            describe = getattr(callback, "choosing", None)
            if describe is not None:
                said |= describe()
        return said

    def resume(self, checkpoint: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Prepare to go on from a checkpoint. With all of `max_steps` it is validated: Lightning would just return.

        Args:
            checkpoint: what Lightning saved.
            stored: what was added to it, with the `identity` of the run.

        Raises:
            ValueError: it is of other models; to go on from it, data or options differ.
        """
        what = f"The checkpoint {self.trainer.ckpt_path}"
        refuse_other_models(stored["data"]["models"], self.stream.describe()["models"], what)
        if self.trainer.state.fn == "fit":
            refuse_other_run(stored, self.identity(), what)
        self._limits = {"max_steps": self.trainer.max_steps}
        self._complete = 0 < self.trainer.max_steps <= checkpoint["global_step"]
        if self._complete:
            cast(Any, self.trainer).fit_loop.epoch_loop.max_steps = -1

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take back the maps of a checkpoint.

        Raises:
            ValueError: it has others, or of another shape.
        """
        with refusing("The maps of the checkpoint do not fit those of this run", "Resume it with its own command."):
            return super().load_state_dict(*args, **kwargs)

    def configure_callbacks(self) -> list[pl.Callback]:
        """What keeps each site's best parameters, unless the Trainer has such a callback with options of its own."""
        from aligners.callbacks.best import BestPerSite  # which imports this module

        callbacks = cast(Any, self.trainer).callbacks
        averages = [type(callback).__name__ for callback in callbacks if isinstance(callback, AVERAGING)]
        if averages:
            raise UserError(
                f"Expected `trainer.callbacks` without averages of weights, but got {averages[0]}: the best state of "
                "each site is kept, and a run can be resumed from it, which averages are no part of. Leave it out."
            )
        there = any(isinstance(callback, BestPerSite) for callback in callbacks)
        return [] if there else [BestPerSite()]

    def configure_optimizers(self) -> Any:
        """One optimiser for all trained banks."""
        return make_optimizer(self.optimizer_factory, self.banks().values())

    def begin(self, steps: int, validated_at: int | None, *, rows: float | None = None) -> None:
        """Validate the starting point, which training has to beat, and set the course of the learning rates.

        Args:
            steps: of the whole run; one that has taken them ends here.
            validated_at: step of the last validation; None if there was none.
            rows: of a step of maps between rows, see `learning_rates`; their rate rises over `LEAST_RISE` steps.
        """
        self.training_steps = steps
        self.parts = self.parts_of(rows)
        complete = self._complete or not self.banks() or self.global_step >= steps
        validate_if_due(self.trainer, validated_at, complete)
        if complete:
            self.trainer.should_stop = True
            return
        optimizer = self.trainer.optimizers[0]
        course = schedule_factor(self.schedule, steps * self.parts, self.warmup, 0 if rows is None else LEAST_RISE)
        self._rate = learning_rates(optimizer, course, rows, self.global_step * self.parts)
        self.site_steps = SiteSteps(optimizer, self.banks().values(), averaged=self.averaging)

    def parts_of(self, rows: float | None) -> int:
        """Into how many parts a batch of about so many rows is cut, with a step along the gradient of each."""
        return 1

    def step(self, last: bool = True) -> None:
        """Take a step along the gradients, and end the run with the last one.

        Args:
            last: of the batch: Lightning counts batches as steps.
        """
        optimizer = cast(Any, self.optimizers())
        (optimizer if last else optimizer.optimizer).step()
        self._rate.step()
        if last and self.global_step >= self.training_steps:
            self.trainer.should_stop = True  # Lightning then validates: without it the steps since would not count

    def log_sites(self, where: str, figure: str, values: Mapping[str, Tensor]) -> None:
        """Log a figure of some sites, which is that of all ranks: site -> value."""
        self.log_dict({f"{where}/{site}/{figure}": value for site, value in values.items()}, rank_zero_only=True)

    @property
    def logs_now(self) -> bool:
        """Whether Lightning writes what is logged in this step."""
        trainer = cast(Any, self.trainer)
        return trainer.should_stop or self.global_step % trainer.log_every_n_steps == 0

    def train_on_rows(self, aligner: Aligner, x: Tensor, y: Tensor, steps: int, a_step: int, seed: int) -> Tensor:
        """Train a map that is ready to train on rows in memory, drawn with replacement, as this module trains its own.

        Args:
            aligner: the map, already fitted to the moments.
            x: (S, N, d_x).
            y: (S, N, d_y).
            steps: how many; the learning rate takes its whole course over them.
            a_step: rows a step.
            seed: of the rows that are drawn.

        Returns:
            (S,) the step at which a site diverged; 0 where none did.
        """
        optimizer = make_optimizer(self.optimizer_factory, [aligner])
        if optimizer is None:
            return torch.zeros(aligner.sites, dtype=torch.long)
        parts = self.parts_of(a_step)
        course = schedule_factor(self.schedule, steps * parts, self.warmup, LEAST_RISE)
        rate, divergence = learning_rates(optimizer, course, a_step), Divergence()
        site_steps = SiteSteps(optimizer, [aligner], averaged=self.averaging)
        draw = torch.Generator().manual_seed(seed)
        for step in range(1, steps * parts + 1):
            chosen = torch.randint(x.shape[1], (a_step // parts,), generator=draw).to(x.device)
            optimizer.zero_grad(set_to_none=True)
            with site_steps.step():
                with products_in(self.products):
                    loss = aligner.loss(x[:, chosen], y[:, chosen])
                    loss.sum().backward()
                clip_per_site(aligner, self.gradient_clip, partial(divergence.watch, "map", loss, step=step))
                optimizer.step()
            rate.step()
        return divergence.step["map"]


def stored_of(maps: StoredBank | BankTraining) -> StoredBank:
    """The maps that an evaluation measures: those of a file, or frozen copies of what a module has trained.

    Raises:
        ValueError: the module has not been trained.
    """
    if isinstance(maps, StoredBank):
        return maps
    if maps._trainer is None:
        name = type(maps).__name__
        raise UserError(f"Expected maps that are fitted, but this `{name}` is not. Call `Trainer().fit` with it first.")
    bank = maps.stored()
    return replace(bank, maps=bank.of_each(deepcopy), path=Path(IN_MEMORY)).freeze()
