"""The LightningModule that trains banks of maps, each site independently, and figures over ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from aligners.datamodules.run_identity import (
    identity,
    refuse_other_run,
    trainer_identity,
)
from aligners.errors import UserError, check_range
from aligners.files.user_files import refusing
from aligners.fitting.lightning_loops import (
    KnownLength,
    attached_trainer,
    lift_most_steps,
    validate_if_due,
)
from aligners.fitting.saved_bank import StoredBank, refuse_other_models
from aligners.fitting.steps import (
    LEAST_RISE,
    Schedule,
    SiteSteps,
    clip_per_site,
    describe_optimizer,
    learning_rates,
    make_optimizer,
    schedule_factor,
)
from aligners.fitting.training_status import Divergence
from aligners.maps.base import Aligner
from aligners.maps.matrices import Products, precision_of, products_in

AVERAGING = (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging)
IN_MEMORY = "the fit in memory"  # in place of a file's name


def mean_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    """Return the mean of all ranks' `values`, on every rank. All ranks must call it."""
    if trainer.world_size == 1:
        return values
    return cast(Tensor, trainer.strategy.reduce(values.clone(), reduce_op="mean"))


def mean_count(trainer: pl.Trainer, count: int, device: torch.device) -> Tensor | float:
    """Return the mean over ranks of a count; with one process, the count itself."""
    if trainer.world_size == 1:
        return float(count)
    # filled on the device: copying a number there would have to wait for it
    return mean_over_ranks(trainer, torch.full((), float(count), device=device))


class BankTraining(KnownLength, ABC):
    """Trains banks of maps, each site independently, with one optimiser and one schedule of learning rates for all.

    Any Trainer will do: the best state of each site is kept by a `BestPerSite`, which the module brings along unless
    the Trainer has one.

    Args:
        optimizer: makes the optimiser.
        schedule: how the learning rate changes over the training steps.
        warmup: share of the steps over which the learning rate rises.
        gradient_clip: largest norm of the gradient of a bank at a site; 0 turns clipping off.
        seed: seed of the initial weights.
        averaging: whether maps are averages of the weights of all steps; see `SiteSteps`.

    Attributes:
        stream: the data module.
        final: name of the file that a finished run leaves; empty: none.
        products: precision of matrix products in training.
        maps: route -> name -> bank.
        training_record: route.name -> how training went, site by site; written by `BestPerSite`.
        training_steps: number of steps of the whole run, once training has begun.
        parts: number of parts of a batch, each of which gets a step of the optimiser, once training has begun.
        site_steps: how steps are taken, once training has begun.
        after_moments_batch: what a callback does after every batch of moments, set when the fit starts.
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
        self.optimizer_factory = optimizer
        self.schedule = schedule
        self.warmup = warmup
        self.gradient_clip = gradient_clip
        self.seed = seed
        self.averaging = averaging
        self.maps = nn.ModuleDict()
        self.divergence = Divergence()
        self.training_record: dict[str, dict[str, Any]] = {}
        self.after_moments_batch: Callable[[], None] | None = None
        self.parts = 1
        self._complete = False  # a resumed run that has taken all its steps
        self._limits: dict[
            str, Any
        ] = {}  # the Trainer's limit of steps, before it was lifted

    def banks_of(self, route: str) -> dict[str, Aligner]:
        """Return name -> bank of a route."""
        banks = cast(nn.ModuleDict, self.maps[route])
        return {name: cast(Aligner, bank) for name, bank in banks.items()}

    def banks(self) -> dict[str, Aligner]:
        """The trained banks by route.name."""
        trained = {}
        for route in self.maps:
            for name, bank in self.banks_of(route).items():
                if not bank.closed_form:
                    trained[f"{route}.{name}"] = bank
        return trained

    @abstractmethod
    def criteria(self) -> dict[str, Tensor]:
        """Return the last validation's criterion at each site of each trained bank, (S,): lower is better."""

    @abstractmethod
    def stored(self) -> StoredBank:
        """Return the maps as they are now, with what another process needs to use them."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the options that a resumed run must share, beside those of any training, as plain values."""

    def has_begun(self) -> bool:
        """Tell whether a run that is stopped now leaves anything to resume."""
        return self.global_step > 0

    def identity(self) -> dict[str, Any]:
        """Return what a run must share to resume this one, as plain values."""
        run = identity(
            self.stream,
            schedule=self.schedule,
            warmup=self.warmup,
            gradient_clip=self.gradient_clip,
            seed=self.seed,
            optimizer=describe_optimizer(self.optimizer_factory),
            **self.options(),
        )
        run["trainer"] = trainer_identity(self.trainer) | self._limits
        run["early_stopping"] = {}
        for callback in cast(Any, self.trainer).callbacks:
            if isinstance(callback, _best_per_site()):
                run["early_stopping"] |= callback.choosing()
        return run

    def resume(self, checkpoint: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Prepare to resume from a checkpoint; one with all of `max_steps` is validated: Lightning would just return.

        Args:
            checkpoint: what Lightning saved.
            stored: what was added to it, with the `identity` of the run.

        Raises:
            ValueError: the checkpoint is of other models, or its data or options differ.
        """
        what = f"The checkpoint {self.trainer.ckpt_path}"
        refuse_other_models(
            stored["data"]["models"], self.stream.describe()["models"], what
        )
        if self.trainer.state.fn == "fit":
            refuse_other_run(stored, self.identity(), what)
        self._limits = {"max_steps": self.trainer.max_steps}
        self._complete = 0 < self.trainer.max_steps <= checkpoint["global_step"]
        if self._complete:
            lift_most_steps(self.trainer)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the maps of a checkpoint.

        Raises:
            ValueError: the checkpoint has other maps, or maps of another shape.
        """
        with refusing(
            "The maps of the checkpoint do not fit those of this run",
            "Resume it with its own command.",
        ):
            return super().load_state_dict(*args, **kwargs)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return what keeps each site's best parameters, unless the Trainer has such a callback already."""
        callbacks = cast(Any, self.trainer).callbacks
        for callback in callbacks:
            if isinstance(callback, AVERAGING):
                raise UserError(
                    f"Expected `trainer.callbacks` without averages of weights, but got {type(callback).__name__}: "
                    "the best state of each site, from which a run can be resumed, does not include averages. "
                    "Leave it out."
                )
        kind = _best_per_site()
        if any(isinstance(callback, kind) for callback in callbacks):
            return []
        return [kind()]

    def configure_optimizers(self) -> Any:
        """Return one optimiser for all trained banks."""
        return make_optimizer(self.optimizer_factory, self.banks().values())

    def begin(
        self, steps: int, validated_at: int | None, *, rows: float | None = None
    ) -> None:
        """Validate the starting point, which training must beat, and set the schedule of the learning rates.

        Args:
            steps: number of steps of the whole run; a run that has taken them ends here.
            validated_at: step of the last validation; None if there was none.
            rows: rows of a step, for maps between rows; see `learning_rates`. Their rate rises over `LEAST_RISE` steps.
        """
        self.training_steps = steps
        self.parts = self.parts_of(rows)
        complete = self._complete or not self.banks() or self.global_step >= steps
        validate_if_due(self.trainer, validated_at, complete)
        if complete:
            self.trainer.should_stop = True
            return
        optimizer = self.trainer.optimizers[0]
        least_rise = 0 if rows is None else LEAST_RISE
        course = schedule_factor(
            self.schedule, steps * self.parts, self.warmup, least_rise
        )
        done = self.global_step * self.parts
        self._rate = learning_rates(optimizer, course, rows, done)
        self.site_steps = SiteSteps(
            optimizer, self.banks().values(), averaged=self.averaging
        )

    def parts_of(self, rows: float | None) -> int:
        """Return into how many parts a batch of about so many rows is cut, each with a step along its own gradient."""
        return 1

    def step(self, last: bool = True) -> None:
        """Take a step along the gradients, and end the run with the last one.

        Args:
            last: whether it is the last step of the batch: Lightning counts batches as steps.
        """
        optimizer = cast(Any, self.optimizers())
        (optimizer if last else optimizer.optimizer).step()
        self._rate.step()
        if last and self.global_step >= self.training_steps:
            # Lightning then validates: otherwise the steps since the last validation would not count
            self.trainer.should_stop = True

    def log_sites(self, where: str, figure: str, values: Mapping[str, Tensor]) -> None:
        """Log a figure of some sites, averaged over all ranks: site -> value."""
        named = {f"{where}/{site}/{figure}": value for site, value in values.items()}
        self.log_dict(named, rank_zero_only=True)

    @property
    def logs_now(self) -> bool:
        """Tell whether Lightning writes what is logged in this step."""
        trainer = cast(Any, self.trainer)
        return trainer.should_stop or self.global_step % trainer.log_every_n_steps == 0

    def train_on_rows(
        self, aligner: Aligner, x: Tensor, y: Tensor, steps: int, a_step: int, seed: int
    ) -> Tensor:
        """Train a map that is ready to train on rows in memory, drawn with replacement, as this module trains its own.

        Args:
            aligner: the map, already fitted to the moments.
            x: (S, N, d_x).
            y: (S, N, d_y).
            steps: number of steps, over which the learning rate takes its whole course.
            a_step: rows per step.
            seed: seed of the rows that are drawn.

        Returns:
            (S,) the step at which a site diverged; 0 where none did.
        """
        optimizer = make_optimizer(self.optimizer_factory, [aligner])
        if optimizer is None:
            return torch.zeros(aligner.sites, dtype=torch.long)
        parts = self.parts_of(a_step)
        rows = a_step // parts
        steps = steps * parts
        divergence = Divergence()
        course = schedule_factor(self.schedule, steps, self.warmup, LEAST_RISE)
        rate = learning_rates(optimizer, course, a_step)
        site_steps = SiteSteps(optimizer, [aligner], averaged=self.averaging)
        drawn = _drawn_rows(x, y, rows, steps, seed)
        for step, (some_x, some_y) in enumerate(drawn, 1):
            optimizer.zero_grad(set_to_none=True)
            with site_steps.step():
                loss = self._gradients_of(aligner, some_x, some_y)
                watch = partial(divergence.watch, "map", loss, step=step)
                clip_per_site(aligner, self.gradient_clip, watch)
                optimizer.step()
            aligner.settle(some_x, some_y)
            rate.step()
        return divergence.step["map"]

    def _gradients_of(self, aligner: Aligner, x: Tensor, y: Tensor) -> Tensor:
        """Add the gradients of a map on some rows, and return its loss, (S,)."""
        precision = precision_of(self.products, x.device)
        with products_in(precision):
            loss = aligner.loss(x, y)
            loss.sum().backward()
        return loss


def _drawn_rows(
    x: Tensor, y: Tensor, rows: int, times: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield so many paired rows at a time, drawn with replacement."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(times):
        chosen = torch.randint(x.shape[1], (rows,), generator=draw)
        chosen = chosen.to(x.device)
        yield x[:, chosen], y[:, chosen]


def _best_per_site() -> type[Any]:
    from aligners.callbacks.best import BestPerSite  # which imports this module

    return BestPerSite


def stored_of(maps: StoredBank | BankTraining) -> StoredBank:
    """Return the maps that an evaluation measures: those of a file, or frozen copies of what a module has trained.

    Raises:
        ValueError: the module has not been trained.
    """
    if isinstance(maps, StoredBank):
        return maps
    if attached_trainer(maps) is None:
        name = type(maps).__name__
        raise UserError(
            f"Expected maps that are fitted, but this `{name}` is not. Call `Trainer().fit` with it first."
        )
    bank = maps.stored()
    return replace(bank, maps=bank.of_each(deepcopy), path=Path(IN_MEMORY)).freeze()
