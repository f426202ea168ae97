"""The LightningModule that fits any set of aligners on one stream of paired rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from aligners.base import Aligner
from aligners.errors import MapErrors
from aligners.fitting import fit_map
from aligners.inn import INN
from aligners.linear import Linear, Procrustes
from aligners.optimisation import Schedule, clip_per_site, schedule_factor
from aligners.storage import KEY, check_names, describe_aligner, different_models
from frozen.finite import FiniteCheck
from frozen.precision import check_precision
from similarity.functional.moments import Moments
from similarity.moments import MomentsMetric

__all__ = ["AlignerFactory", "Alignment", "Direction", "Fit"]

AlignerFactory = Callable[[int, int, int], Aligner]
Direction = Literal["forward", "backward"]

DEFAULT_ALIGNERS: dict[str, AlignerFactory] = {"linear": Linear, "procrustes": Procrustes, "inn": INN}


class Fit(NamedTuple):
    """One aligner of a run: its name, whether it maps X to Y or Y to X, and the bank itself."""

    name: str
    direction: Direction
    aligner: Aligner

    def orient(self, x: Any, y: Any) -> tuple[Any, Any]:
        """(source, target) of this fit."""
        return (x, y) if self.direction == "forward" else (y, x)


class _Anchor(nn.Module):
    """A parameter that is neither trained nor saved: data-parallel training refuses a module without any."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def _save_to_state_dict(self, *args: Any) -> None:
        """Leave no trace in a checkpoint."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Expect none."""


class Alignment(pl.LightningModule):
    """Fits aligners on paired activations; each sees the same rows in the same order.

    The first epoch reads the moments of all rows, summed over ranks, and ends with every closed-form aligner
    solved and every trained one at its starting point. The epochs after it train the latter. The frozen
    models live in the data module: they are never in train mode and never in a checkpoint.

    Args:
        aligners: name in the report -> the aligner.
        both_directions: fit the aligners that are not bijective from Y to X as well; a bijective one is its own
            way back.
        optimizer: one optimiser for all trained aligners.
        schedule: how the learning rate moves over the training steps: constant, linear, cosine or one_cycle.
        warmup: share of the steps over which it rises.
        gradient_clip: largest gradient norm of a site of an aligner; 0 turns clipping off.
        seed: seed of every aligner's starting weights. Each starts from the same draw whatever else is in the run.
    """

    automatic_optimization = False

    def __init__(
        self,
        aligners: dict[str, AlignerFactory] | None = None,
        both_directions: bool = False,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, fused=True),
        schedule: Schedule = "one_cycle",
        warmup: float = 0.15,
        gradient_clip: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.factories = dict(aligners) if aligners else dict(DEFAULT_ALIGNERS)
        check_names(self.factories, "aligners")
        if not 0 <= warmup < 1:
            raise ValueError(f"Expected `warmup` to be a share of the steps in [0, 1), but got {warmup}.")
        self.both_directions, self.seed = both_directions, seed
        self.optimizer_factory, self.schedule, self.warmup = optimizer, schedule, warmup
        self.gradient_clip = gradient_clip
        self.forward_maps, self.backward_maps = nn.ModuleDict(), nn.ModuleDict()
        self.moments: Moments | None = None
        self.data: dict[str, Any] = {}
        self.data_config: dict[str, Any] = {}
        self._check = FiniteCheck()

    # ------------------------------------------------------------------ setting up

    @property
    def _stream(self) -> Any:
        """The data module of the run."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Build the banks for the data module's sites and widths."""
        check_precision(self.trainer)
        reader = self._stream.reader
        self.data = self._stream.describe()
        self.data_config = self._stream.config()
        self.sites = reader.sites
        if not self.fits():
            self.build(len(reader.sites), reader.model_x.width, reader.model_y.width)
        trained = [fit.name for fit in self.fits() if not fit.aligner.closed_form]
        if stage == "fit" and trained and self.trainer.max_epochs == 1:
            raise ValueError(
                "`trainer.max_epochs` is 1, but the first epoch only reads moments, and "
                f"{', '.join(sorted(set(trained)))} need training after it. Set it to 2 or more."
            )

    def build(self, sites: int, d_x: int, d_y: int) -> None:
        """Make the banks, every one from the same seed."""
        for name, factory in self.factories.items():
            aligner = self._seeded(factory, sites, d_x, d_y)
            self.forward_maps[name] = aligner
            if self.both_directions and not aligner.bijective:
                self.backward_maps[name] = self._seeded(factory, sites, d_y, d_x)
        self._moments = MomentsMetric(sites, d_x, d_y)
        if not self.trained():
            self._anchor = _Anchor()

    def _seeded(self, factory: AlignerFactory, sites: int, d_x: int, d_y: int) -> Aligner:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return factory(sites, d_x, d_y)

    def _maps(self) -> dict[Direction, nn.ModuleDict]:
        return {"forward": self.forward_maps, "backward": self.backward_maps}

    def fits(self) -> list[Fit]:
        """Every aligner of the run, in a stable order."""
        return [
            Fit(name, direction, cast(Aligner, aligner))
            for direction, maps in self._maps().items()
            for name, aligner in maps.items()
        ]

    def trained(self) -> list[Fit]:
        """The fits that need gradient steps."""
        return [fit for fit in self.fits() if not fit.aligner.closed_form]

    def site_names(self) -> list[str]:
        """`i-j` for each site pair."""
        return [f"{i}-{j}" for i, j in self.sites]

    # ------------------------------------------------------------------ training

    def configure_optimizers(self) -> Any:
        """One optimiser and one schedule over the steps that follow the epoch of moments."""
        parameters = [p for fit in self.trained() for p in fit.aligner.parameters() if p.requires_grad]
        if not parameters:
            return None
        optimizer = self.optimizer_factory(parameters)
        factor = schedule_factor(self.schedule, self._training_steps(), self.warmup)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, factor)]

    def _training_steps(self) -> int:
        """Steps of the whole run, counted without the Trainer's loader.

        The Trainer would build its loader to count, before a checkpoint says where a resumed run has to begin.
        """
        epochs, most = self.trainer.max_epochs, self.trainer.max_steps
        if epochs is None or epochs < 0:
            if most < 0:
                raise ValueError(
                    "Expected `trainer.max_epochs` or `trainer.max_steps` to be finite: the schedule needs it."
                )
            return most
        batches, limit = len(self._stream.loader("fit")), self.trainer.limit_train_batches
        batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
        in_epochs = batches * (epochs - 1)
        return in_epochs if most < 0 else min(in_epochs, most)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Add to the moments in the first epoch, take one optimiser step in the others."""
        if self.moments is None:
            self._moments.update(batch.x, batch.y)
            if self.trainer.is_last_batch:
                self.fit_moments(self._moments.compute())
                if not self.trained():
                    self.trainer.should_stop = True
            return
        losses = {}
        for fit in self.trained():
            losses[fit] = fit.aligner.loss(*fit.orient(batch.x, batch.y))
        optimizer, scheduler = cast(Any, self.optimizers()), cast(Any, self.lr_schedulers())
        optimizer.zero_grad(set_to_none=True)
        total = torch.stack([loss.sum() for loss in losses.values()]).sum()
        self.manual_backward(self._share_of_rows(batch) * total)
        if self.gradient_clip:
            for fit in losses:
                clip_per_site(fit.aligner.parameters(), self.gradient_clip)
        optimizer.step()
        scheduler.step()
        self._watch(losses, batch_idx)

    def _share_of_rows(self, batch: Any) -> Tensor | float:
        """This rank's rows over the mean of all ranks': with it, ranks' mean gradient is that of all rows."""
        if self.trainer.world_size == 1:
            return 1.0
        mine = torch.tensor(float(batch.x.shape[1]), device=self.device)
        return mine / self.trainer.strategy.reduce(mine.clone(), reduce_op="mean")

    def _watch(self, losses: dict[Fit, Tensor], batch_idx: int) -> None:
        log = (self.global_step - 1) % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        for fit, loss in losses.items():
            names = [f"{fit.name} ({fit.direction}), site pair {site}" for site in self.site_names()]
            self._check.watch(loss, names, "training loss", batch_idx)
            if log:
                self.log_dict(self._keys("step", fit, "loss", loss.detach()))

    def on_train_epoch_end(self) -> None:
        """Look at the last batch's states and losses too."""
        self._check.flush()
        self._stream.reader.check.flush()

    def fit_moments(self, moments: Moments) -> None:
        """Solve the closed-form aligners and start the trained ones from the moments of all fitting rows.

        Raises:
            ValueError: there are fewer rows than an aligner needs, or the states of a site are constant.
        """
        for fit in self.fits():
            fit_map(fit.name, fit.aligner, moments if fit.direction == "forward" else moments.swap())
        self.moments = moments

    # ------------------------------------------------------------------ validation

    def on_validation_epoch_start(self) -> None:
        """Fresh errors for the validation texts and for the fitting texts beside them."""
        self._errors: dict[tuple[str, Fit], MapErrors] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Errors of every aligner on one batch."""
        if self.moments is None:
            return
        split = ("validation", "train")[dataloader_idx]
        for fit in self.fits():
            if (split, fit) not in self._errors:
                means = fit.orient(self.moments.mean_x, self.moments.mean_y)
                self._errors[split, fit] = MapErrors(*means).to(self.device)
            self._errors[split, fit].update(fit.aligner, *fit.orient(batch.x, batch.y))

    def on_validation_epoch_end(self) -> None:
        """Log every figure of every aligner and site, and keep those of the validation texts."""
        self._stream.reader.check.flush()
        self.validation_figures: dict[Fit, dict[str, Tensor]] = {}
        for (split, fit), errors in self._errors.items():
            # torchmetrics makes a scalar of a bank of one site.
            figures = {name: values.reshape(-1) for name, values in errors.compute().items()}
            if split == "validation":
                self.validation_figures[fit] = figures
            for figure, values in figures.items():
                if not values.isnan().all():
                    # The metric has already been reduced over ranks.
                    self.log_dict(self._keys(split, fit, figure, values.float()), rank_zero_only=True)

    def banks(self) -> dict[str, Aligner]:
        """Each trained bank by a name of its own."""
        return {f"{fit.direction}.{fit.name}": fit.aligner for fit in self.trained()}

    def criteria(self) -> dict[str, Tensor]:
        """What the last validation says of each site of each trained bank, (S,): less is better."""
        found = {}
        for fit in self.trained() if self.moments is not None else []:
            figures = self.validation_figures[fit]
            both = fit.aligner.both_ways
            criterion = figures["fvu"] + figures["fvu_inverse"] if both else figures["fvu"]
            found[f"{fit.direction}.{fit.name}"] = criterion
        return found

    def _keys(self, split: str, fit: Fit, figure: str, values: Tensor) -> dict[str, Tensor]:
        name = fit.name if fit.direction == "forward" else f"{fit.name}_backward"
        return {f"{split}/{name}/{site}/{figure}": value for site, value in zip(self.site_names(), values, strict=True)}

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what another process needs to use the maps: how to build them, on what they were fitted."""
        if self.moments is None:
            raise RuntimeError("A checkpoint was asked for before the moments were complete; nothing is fitted yet.")
        checkpoint[KEY] = {
            "aligners": {
                direction: {name: describe_aligner(cast(Aligner, aligner)) for name, aligner in maps.items()}
                for direction, maps in self._maps().items()
            },
            "moments": {name: value.cpu() for name, value in self.moments._asdict().items()},
            "data": self.data,
            "data_config": self.data_config,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the moments back.

        Raises:
            ValueError: the checkpoint was fitted on other models.
        """
        stored = checkpoint[KEY]
        differences = different_models(stored["data"]["models"], self.data["models"])
        if differences:
            raise ValueError("The checkpoint was fitted on other models: " + "; ".join(differences) + ".")
        self.moments = Moments(**{name: value.to(self.device) for name, value in stored["moments"].items()})
