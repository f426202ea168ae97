"""The LightningModule that fits any set of aligners on one stream of paired rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from aligners.errors import UserError, check_range
from aligners.fitting.bank import (
    ALIGNMENT,
    BACKWARD,
    FORWARD,
    StoredBank,
    check_names,
    describe_aligner,
    refuse_other_models,
)
from aligners.fitting.errors import MapErrors
from aligners.fitting.fits import AlignerFactory, Direction, Fit, fit_map, seeded
from aligners.fitting.moments import Reading, read_moments
from aligners.fitting.outcomes import warn_of_few_rows
from aligners.fitting.training import (
    LEAST_RISE,
    Divergence,
    Schedule,
    clip_per_site,
    describe_optimizer,
    gradient_norms,
    let_end,
    make_optimizer,
    mean_over_ranks,
    schedule_factor,
    training_steps,
    validate_if_due,
)
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes, Ridge
from aligners.maps.solving import Products, check_products, products_in
from aligners.models.loading.models import check_precision
from aligners.similarity.algebra.moments import Moments
from datamodules.batches import limited
from datamodules.identity import identity, refuse_other_run, trainer_identity
from datamodules.module import stream_of
from datamodules.rows.reading import PairedBatch
from datamodules.states import States

FORMAT = 3  # of what is added to a checkpoint of Lightning

DEFAULT_ALIGNERS: dict[str, AlignerFactory] = {"linear": Linear, "ridge": Ridge, "procrustes": Procrustes, "inn": INN}


class Alignment(pl.LightningModule):
    """Fits aligners on paired activations; each sees the same rows in the same order.

    A fit has two phases. The moments of the fitting texts are read first, over all ranks: they solve every closed form
    and give every trained aligner its scaling and its starting point. Then come gradient steps, as ordinary epochs;
    without anything to train there are none. The frozen models live in the data module: they are never in train mode
    and never in a checkpoint.

    Args:
        aligners: name in the report -> the aligner.
        both_directions: fit the aligners that are not bijective from Y to X as well; a bijective one is its own
            way back.
        optimizer: one optimiser for all trained aligners. Its learning rate is for matrices of up to 64 inputs; wider
            matrices get proportionally less, so the rate need not change with the width.
        schedule: how the learning rate moves over the training steps: constant, linear, cosine or one_cycle.
        rows: number of paired rows to train on, independent of the number of texts and of the batch size; training
            takes as many steps as that needs. If set, `trainer.max_epochs`, which counts training alone, and
            `trainer.max_steps` take precedence.
        most_steps: upper limit on the steps that `rows` may take; with `mean` rows a step has few rows.
        warmup: share of the steps over which the learning rate rises; above 0, it rises over 100 steps at least, and
            stays below its peak in a run too short for that.
        gradient_clip: largest gradient norm of a site of an aligner; 0 turns clipping off.
        products: precision of the networks' matrix products while they train: float32; tf32, on GPUs only; or
            bfloat16. What an inverse rests on, rotations and closed forms, stays in float32, as do validation and use.
        seed: the seed of every aligner's initial weights, which do not depend on the other aligners of the run.
    """

    automatic_optimization = False

    def __init__(
        self,
        aligners: dict[str, AlignerFactory] | None = None,
        both_directions: bool = False,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, fused=True),
        schedule: Schedule = "one_cycle",
        rows: int = 1_500_000,
        most_steps: int = 2000,
        warmup: float = 0.15,
        gradient_clip: float = 1.0,
        products: Products = "float32",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.factories = dict(aligners) if aligners else dict(DEFAULT_ALIGNERS)
        check_names(self.factories, "aligners")
        check_range(least=0, below=1, warmup=warmup)
        check_range(least=1, rows=rows, most_steps=most_steps)
        self.both_directions, self.seed = both_directions, seed
        self.rows, self.most_steps = rows, most_steps
        self.optimizer_factory, self.schedule, self.warmup = optimizer, schedule, warmup
        self.gradient_clip, self.products = gradient_clip, check_products(products)
        self.forward_maps, self.backward_maps = nn.ModuleDict(), nn.ModuleDict()
        self.moments: Moments | None = None
        self.reading, self.divergence = Reading(), Divergence()
        self.data: dict[str, Any] = {}
        self.data_config: dict[str, Any] = {}
        self.training_record: dict[str, dict[str, Any]] = {}
        self.validated_at: int | None = None
        self._complete = False
        self.unused: nn.Parameter | None = None
        self._adopted: StoredBank | None = None

    # ------------------------------------------------------------------ setting up

    @property
    def _stream(self) -> States:
        """The data module of the run."""
        return stream_of(self.trainer, States)

    def setup(self, stage: str) -> None:
        """Build the banks for the sites and widths of the data module."""
        check_precision(self.trainer)
        reader = self._stream.reader
        self.data = self._stream.describe()
        self.data_config = self._stream.config()
        self.sites, self.places = reader.sites, reader.places()
        if self._adopted is not None:
            self._take_over(self._adopted)
        elif not self.fits():
            self.build(len(reader.sites), *reader.widths)
        if stage == "fit" and self.trainer.world_size > 1 and not self.trained():
            # data-parallel training refuses a module without any parameter; `on_fit_start` removes it
            self.unused = nn.Parameter(torch.zeros(()))

    def adopt(self, stored: StoredBank) -> None:
        """Use the maps of a finished fit, with their moments and records, instead of new ones."""
        self._adopted = stored

    def _take_over(self, stored: StoredBank) -> None:
        refuse_other_models(stored.data["models"], self.data["models"], str(stored.path))
        if stored.pairs[FORWARD] != list(self.sites):
            raise UserError(
                f"{stored.path} was fitted at site pairs {stored.pairs[FORWARD]}, but `data.sites` gives "
                f"{list(self.sites)}. Give the `data.sites` of the fit."
            )
        for route, maps in ((FORWARD, self.forward_maps), (BACKWARD, self.backward_maps)):
            maps.update(stored.maps.get(route, {}))
        self.moments = stored.moments
        known = stored.training
        self.training_record = {fit.key: known[fit.place] for fit in self.trained() if fit.place in known}

    def build(self, sites: int, d_x: int, d_y: int) -> None:
        """Build all banks."""
        for fit in self.made(sites, d_x, d_y):
            self._maps()[fit.direction][fit.name] = fit.aligner

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the banks for this number of site pairs and these widths, each from the same seed, and keep none."""
        for name, factory in self.factories.items():
            aligner = seeded(factory, self.seed, sites, d_x, d_y)
            yield Fit(name, "forward", aligner)
            if self.both_directions and not aligner.bijective:
                yield Fit(name, "backward", seeded(factory, self.seed, sites, d_y, d_x))

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
        return [place.name for place in self.places]

    # ------------------------------------------------------------------ first phase: moments

    def on_fit_start(self) -> None:
        """Read the moments of the fitting texts, or those that a checkpoint lacks."""
        self.unused = None
        if self.moments is None:
            data = self._stream
            loader = data.loader("fit", shuffle=True)
            batches = limited(len(loader), self.trainer, "train")
            about = {"data": self.data, "config": self.data_config}
            found = read_moments(self.trainer, loader, self._read, data.reader.check, batches, self.reading, about)
            self.fit_moments(found["maps"], self._validation_moments(about))
            warn_of_few_rows(found["maps"])

    def _validation_moments(self, about: dict[str, Any]) -> Moments | None:
        """Read the moments of the validation texts, if a map chooses its strength on them."""
        if not any(isinstance(fit.aligner, Ridge) for fit in self.fits()):
            return None
        loader, about = self._stream.loader("validation"), {**about, "split": "validation"}
        check = self._stream.reader.check
        return read_moments(self.trainer, loader, self._read, check, len(loader), about=about)["maps"]

    def _read(self, texts: Any) -> dict[str, tuple[Tensor, Tensor]]:
        # as the Trainer does: the data module's hooks choose the rows, move the texts and read both models
        batch = self.trainer.strategy.batch_to_device(self._stream.on_before_batch_transfer(texts, 0))
        return {"maps": self.rows_of(batch)}

    def rows_of(self, batch: PairedBatch) -> tuple[Tensor, Tensor]:
        """The rows x and y of a batch that maps are fitted to."""
        return batch.x, batch.y

    def fit_moments(self, moments: Moments, validation: Moments | None = None) -> None:
        """Solve the closed-form aligners and start the trained ones from the moments of all fitting rows.

        Args:
            moments: of the fitting rows.
            validation: of the validation rows; None: no map asks for them.

        Raises:
            ValueError: there are fewer rows than an aligner needs, or the states of a site are constant.
        """
        for fit in self.fits():
            fit_map(fit.name, fit.aligner, *fit.moments(moments, validation))
        self.moments = moments

    # ------------------------------------------------------------------ second phase: gradient steps

    def configure_optimizers(self) -> Any:
        """One optimiser for all trained aligners."""
        return make_optimizer(self.optimizer_factory, [fit.aligner for fit in self.trained()])

    def on_train_start(self) -> None:
        """Validate the starting point, which training has to beat. A run of closed forms ends there."""
        read = int(cast(Moments, self.moments).n)
        self.training_steps = training_steps(self.trainer, self.rows, self.most_steps, read)
        complete = self._complete or not self.trained() or self.global_step >= self.training_steps
        validate_if_due(self.trainer, self.validated_at, complete)
        if complete:
            self.trainer.should_stop = True
            return
        optimizer = self.trainer.optimizers[0]
        course = [
            schedule_factor(self.schedule, self.training_steps, self.warmup, group["least_rise"])
            for group in optimizer.param_groups
        ]
        # Built here, where the number of steps is known, at the next step: no checkpoint needs to hold it.
        self._rate = torch.optim.lr_scheduler.LambdaLR(optimizer, course, self.global_step - 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take one step of every aligner at every site."""
        optimizer = cast(Any, self.optimizers())
        optimizer.zero_grad(set_to_none=True)
        share, (x, y) = self._share_of_rows(batch), self.rows_of(batch)
        with products_in(self.products):
            losses = {fit: fit.aligner.loss(*fit.orient(x, y)) for fit in self.trained()}
            self.manual_backward(share * torch.stack([loss.sum() for loss in losses.values()]).sum())
        self._guard(self._over_ranks(share, losses))
        optimizer.step()
        self._rate.step()
        if self.global_step >= self.training_steps:
            self.trainer.should_stop = True  # Lightning then validates: without it the steps since would not count

    def _guard(self, losses: dict[Fit, Tensor]) -> None:
        """Clip every site's gradient, stop the sites that diverge, and log the losses."""
        step = self.global_step + 1
        for fit, loss in losses.items():
            parameters = [p for p in fit.aligner.parameters() if p.requires_grad]
            self.divergence.watch(fit.key, loss, step)
            norms = gradient_norms(parameters)
            training = self.divergence.watch_gradient(fit.key, norms, step)
            clip_per_site(parameters, self.gradient_clip, norms, training)
            if step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]  # as Lightning, who writes then
                self.log_dict(self._keys("step", fit, "loss", loss.where(training, torch.nan)), rank_zero_only=True)

    def _over_ranks(self, share: Tensor | float, losses: dict[Fit, Tensor]) -> dict[Fit, Tensor]:
        """The losses over the rows of all ranks."""
        every = mean_over_ranks(self.trainer, share * torch.stack([loss.detach() for loss in losses.values()]))
        return dict(zip(losses, every, strict=True))

    def _share_of_rows(self, batch: Any) -> Tensor | float:
        """Return this rank's rows over the mean of all ranks, so that the averaged gradient is that of all rows."""
        if self.trainer.world_size == 1:
            return 1.0
        mine = torch.tensor(float(batch.x.shape[1]), device=self.device)
        return mine / mean_over_ranks(self.trainer, mine)

    def on_train_epoch_end(self) -> None:
        """Check the states of the last batch as well."""
        self._stream.reader.check.flush()

    # ------------------------------------------------------------------ validation

    def on_validation_epoch_start(self) -> None:
        """Reset the errors on the validation texts and on the fitting texts shown beside them."""
        self._errors: dict[tuple[str, Fit], MapErrors] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Errors of every aligner on one batch."""
        if self.moments is None:
            raise UserError("Nothing is fitted yet: fit first, or name a checkpoint with `--ckpt_path`.")
        split, (x, y) = ("validation", "train")[dataloader_idx], self.rows_of(batch)
        for fit in self.fits():
            if (split, fit) not in self._errors:
                self._errors[split, fit] = MapErrors(*self.means(fit)).to(self.device)
            self._errors[split, fit].update(fit.aligner, *fit.orient(x, y), batch.rows.unseen)

    def means(self, fit: Fit) -> tuple[Tensor, Tensor]:
        """Means of source and target on the fitting rows, (S, d) each."""
        return fit.orient(cast(Moments, self.moments).mean_x, cast(Moments, self.moments).mean_y)

    def on_validation_epoch_end(self) -> None:
        """Log all figures of all aligners and sites, and keep those of the validation texts."""
        self._stream.reader.check.flush()
        before, self.validated_at = self.validated_at, self.global_step
        fitting = self.trainer.state.fn == "fit"
        self.validation_figures: dict[Fit, dict[str, Tensor]] = {}
        for (split, fit), errors in self._errors.items():
            # torchmetrics makes a scalar of a bank of one site.
            figures = {name: values.reshape(-1) for name, values in errors.compute().items()}
            if split == "validation":
                self.validation_figures[fit] = figures
            known = self._known(fit, before) if fitting else []
            for figure, values in figures.items():
                if not values.isnan().all():
                    keys = self._keys(split, fit, figure, values.float())
                    shown = {key: value for s, (key, value) in enumerate(keys.items()) if s not in known}
                    self.log_dict(shown, rank_zero_only=True)  # of all ranks

    def _known(self, fit: Fit, before: int | None) -> list[int]:
        """Sites whose figures an earlier validation of this fit has logged: they no longer train, or never have."""
        if before is None or fit.aligner.closed_form:
            return [] if before is None else list(range(len(self.places)))
        steps = self.divergence.step.get(fit.key, torch.zeros(len(self.places)))
        return [s for s, step in enumerate(steps.tolist()) if 0 < step <= before]

    def banks(self) -> dict[str, Aligner]:
        """The trained banks by their keys."""
        return {fit.key: fit.aligner for fit in self.trained()}

    def criteria(self) -> dict[str, Tensor]:
        """The criterion of the last validation for each trained bank, (S,): lower is better."""
        found = {}
        for fit in self.trained():
            figures = self.validation_figures[fit]
            found[fit.key] = figures["fvu"] + figures["fvu_inverse"] if fit.aligner.both_ways else figures["fvu"]
        return found

    def _keys(self, split: str, fit: Fit, figure: str, values: Tensor) -> dict[str, Tensor]:
        name = fit.name if fit.direction == "forward" else f"{fit.name}_backward"
        return {f"{split}/{name}/{site}/{figure}": value for site, value in zip(self.site_names(), values, strict=True)}

    # ------------------------------------------------------------------ checkpoints

    def stored(self) -> StoredBank:
        """Return the maps as they are now, with what another process needs to use them."""
        known = self.training_record
        maps: dict[str, dict[str, Aligner]] = {FORWARD: {}, BACKWARD: {}}
        for fit in self.fits():
            maps[fit.route][fit.name] = fit.aligner
        return StoredBank(
            "fit",
            maps,
            {FORWARD: list(self.sites), BACKWARD: [(j, i) for i, j in self.sites]},
            self.data,
            self.data_config,
            self.moments,
            self._stream.seen,
            self._stream.texts.fitted("fit", "validation"),
            {fit.place: known[fit.key] for fit in self.trained() if fit.key in known},
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run needs, and what distinguishes the run from others."""
        self._stream.reader.check.flush()
        known = {} if self.moments is None else {name: value.cpu() for name, value in self.moments._asdict().items()}
        checkpoint[ALIGNMENT] = {
            "format": FORMAT,
            "aligners": {
                direction: {name: describe_aligner(cast(Aligner, aligner)) for name, aligner in maps.items()}
                for direction, maps in self._maps().items()
            },
            "moments": known,
            "reading": self.reading.state() if self.moments is None else None,
            "data": self.data,
            "data_config": self.data_config,
            "options": self._options(),
            "trainer": trainer_identity(self.trainer),
            "training": self.training_record,
            "divergence": self.divergence.state_dict(),
            "validated_at": self.validated_at,
            "seen": self._stream.seen.state(),
        }

    def _options(self) -> dict[str, Any]:
        """Return the options that a run resumed from this one must share, as plain values."""
        own = ("rows", "most_steps", "schedule", "warmup", "gradient_clip", "products", "seed")
        maps = {f"{f.direction}.{f.name}": describe_aligner(f.aligner) for f in self.fits()}
        return {
            "aligners": {name: {of: what[of] for of in ("class", "options")} for name, what in maps.items()},
            "optimizer": describe_optimizer(self.optimizer_factory),
            **{name: getattr(self, name) for name in own},
            "least_rise": LEAST_RISE,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the moments back.

        Raises:
            ValueError: the checkpoint was fitted on other models, or counts its epochs in another way; to go on from
                it, data or options differ.
        """
        stored = checkpoint[ALIGNMENT]
        if stored.get("format") != FORMAT:
            raise UserError("Expected a checkpoint of this version. Resume it with the one that wrote it, or fit anew.")
        refuse_other_models(stored["data"]["models"], self.data["models"], "The checkpoint")
        if self.trainer.state.fn == "fit":
            now = identity(self._stream, **self._options()) | {"trainer": trainer_identity(self.trainer)}
            refuse_other_run(stored, now, "The checkpoint")
        if stored["moments"]:
            self.moments = Moments(**{name: value.to(self.device) for name, value in stored["moments"].items()})
        else:
            self.reading = Reading.from_state(stored["reading"], self.device)
        self.training_record, self.validated_at = stored["training"], stored["validated_at"]
        self.divergence.load_state_dict(stored["divergence"], self.device)
        self._complete = let_end(self.trainer, checkpoint)
