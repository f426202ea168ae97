"""The LightningModule that fits any set of aligners on one stream of paired rows."""

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch, Plan
from aligners.errors import UserError, check_known, check_range
from aligners.fitting.bank_training import BankTraining, mean_count, mean_over_ranks
from aligners.fitting.fits import AlignerFactory, Fit, fit_map, seeded
from aligners.fitting.heldout_retrieval import HeldOutRows
from aligners.fitting.lightning_loops import attached_trainer
from aligners.fitting.map_errors import (
    FAR_COLUMNS,
    FarErrors,
    MapErrors,
    Row,
    error_rows,
    far_columns,
)
from aligners.fitting.read_moments import MomentsSoFar, moments_of_states
from aligners.fitting.recorded_steps import RecordedSteps, recorded_steps
from aligners.fitting.saved_bank import (
    ALIGNMENT,
    BACKWARD,
    FORWARD,
    StoredBank,
    check_names,
    kind_of,
    refuse_other_bank,
)
from aligners.fitting.steps import LEAST_RISE, Schedule, clip_per_site
from aligners.fitting.training_status import few_rows, outcomes
from aligners.maps.by_rows.drawn_rows import KeptRows
from aligners.maps.canonical import reduced_mse
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes, Ridge
from aligners.maps.matrices import ProductPrecision, Products, precision_of, products_in
from aligners.maps.shared_solutions import SharedMoments
from aligners.models.loading.load_models import check_precision
from aligners.progress import hidden, track
from aligners.similarity.algebra.moments import Moments

logger = logging.getLogger(__name__)

# Figures of a report on held-out and on fitting rows.
HELD_OUT = (
    *("mse", "l2", "relative_error", "fvu", "fvu_unseen"),
    *FAR_COLUMNS.values(),
    *("fvu_inverse", "round_trip"),
)
FITTING = ("mse", "relative_error", "fvu")
FORMAT = 4  # of what is added to a checkpoint of Lightning

DEFAULT_ALIGNERS: dict[str, AlignerFactory] = {
    "linear": Linear,
    "ridge": Ridge,
    "procrustes": Procrustes,
    "inn": INN,
}


class Alignment(BankTraining):
    """Fits aligners on paired activations; each sees the same rows in the same order.

    A fit has two phases. First it reads the moments of the fitting texts, over all ranks: they solve every closed form
    and give every trained aligner its scaling and its starting point. Then come gradient steps, as ordinary epochs, if
    there is anything to train. The frozen models live in the data module: they are never in train mode and never in a
    checkpoint. A test measures the maps from X to Y on the held-out texts and on as many fitting texts.

    Attributes:
        rows: of the report, after a test.
        meta: what holds for all of them.

    Args:
        aligners: name in the report -> the aligner.
        both_directions: fit the aligners that are not bijective from Y to X as well; a bijective one needs no second
            map.
        optimizer: one optimiser for all trained aligners. Its learning rate is for matrices of up to 64 inputs; wider
            matrices get proportionally less, so the rate need not change with the width. With fewer than 256 rows a
            step, as with `mean` rows, the rate of invertible networks is proportional to the number of rows.
        schedule: how the learning rate changes over the training steps: constant, linear, cosine, one_cycle or
            trapezoid.
        averaging: whether maps are the average of the weights of all steps, in which later steps count more.
        rows: number of paired rows to train on, independent of the number of texts and of the batch size; training
            takes as many steps as that needs. If set, `trainer.max_epochs`, which counts training alone, and
            `trainer.max_steps` take precedence.
        most_steps: upper limit on the steps that `rows` may take; with `mean` rows a step has few rows.
        warmup: share of the steps over which the learning rate rises. Above 0, it rises over at least 100 steps, and
            stays below its peak in a run too short for that.
        gradient_clip: largest gradient norm of a site of an aligner; 0 turns clipping off.
        products: precision of the maps' matrix products while they train: float32, tf32, or auto, which is tf32 on
            GPUs that have it and float32 elsewhere. Moments and closed forms are solved in float64, and maps are
            validated and used in float32, whatever this says.
        seed: the seed of every aligner's initial weights, which do not depend on the other aligners of the run.
        graphs: whether steps on a GPU are recorded as CUDA graphs and replayed: see `recorded_steps`. On one GPU that
            is several times as fast where batches are small. Batches are then filled up, which changes how sums are
            rounded, and no more.
    """

    stream: PairedActivations
    final = "aligners.safetensors"

    def __init__(
        self,
        aligners: dict[str, AlignerFactory] | None = None,
        both_directions: bool = False,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(
            p, lr=1e-2, weight_decay=0.0, fused=True
        ),
        schedule: Schedule = "trapezoid",
        averaging: bool = True,
        rows: int = 1_500_000,
        most_steps: int = 2000,
        warmup: float = 0.15,
        gradient_clip: float = 1.0,
        products: Products = "auto",
        seed: int = 0,
        graphs: bool = True,
    ) -> None:
        super().__init__(optimizer, schedule, warmup, gradient_clip, seed, averaging)
        self.factories = dict(aligners or DEFAULT_ALIGNERS)
        check_names(self.factories, "aligners")
        check_range(least=1, rows=rows, most_steps=most_steps)
        check_known(get_args(Products), products=products)
        self.both_directions = both_directions
        self.products = products
        self.precision: ProductPrecision = "float32"  # of a run on its device
        self.rows_to_train = rows
        self.most_steps = most_steps
        self.graphs = graphs
        self.recorded: RecordedSteps | None = None
        self.maps[FORWARD] = nn.ModuleDict()
        self.maps[BACKWARD] = nn.ModuleDict()
        self.moments: Moments | None = None
        self.reading = MomentsSoFar()
        self.kept: KeptRows | None = None  # while maps that need rows are fitted
        self.validated_at: int | None = None
        self.validation_figures: dict[Fit, dict[str, Tensor]] = {}
        self.unused: nn.Parameter | None = None
        self._adopted: StoredBank | None = None

    # ------------------------------------------------------------------ setting up

    def setup(self, stage: str) -> None:
        """Build the banks for the sites and widths of the data module."""
        check_precision(self.trainer)
        device = self.trainer.strategy.root_device
        self.precision = precision_of(self.products, device)
        self.stream = stream_of(self.trainer, PairedActivations)
        if stage == "test":
            self.stream.plan(Plan(measured=self.stream.seen, fitting=True))
        reader = self.stream.reader
        self.data = self.stream.describe()
        self.data_config = self.stream.config()
        self.sites = reader.sites
        self.places = reader.places()
        if self._adopted is not None:
            self._take_over(self._adopted)
        elif not self.fits():
            self.build(len(reader.sites), *reader.widths)
        several = self.trainer.world_size > 1
        if stage == "fit" and several and not self.trained():
            # DDP refuses a module without any parameter; `on_fit_start` removes it
            self.unused = nn.Parameter(torch.zeros(()))

    def adopt(self, stored: StoredBank) -> None:
        """Use the maps of a finished fit, with their moments and records, instead of new ones."""
        self._adopted = stored

    def _take_over(self, stored: StoredBank) -> None:
        pairs = {FORWARD: self.sites}
        refuse_other_bank(stored, self.data["models"], self.data["component"], pairs)
        for route, maps in self.maps.items():
            cast(nn.ModuleDict, maps).update(stored.maps.get(route, {}))
        self.moments = stored.moments
        self.training_record = stored.training

    def build(self, sites: int, d_x: int, d_y: int) -> None:
        """Build all banks."""
        for fit in self.made(sites, d_x, d_y):
            banks = cast(nn.ModuleDict, self.maps[fit.route])
            banks[fit.name] = fit.aligner

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build banks of this size without keeping them, all from the same seed."""
        for name, factory in self.factories.items():
            aligner = seeded(factory, self.seed, sites, d_x, d_y)
            yield Fit(name, FORWARD, aligner)
            if self.both_directions and not aligner.bijective:
                backward = seeded(factory, self.seed, sites, d_y, d_x)
                yield Fit(name, BACKWARD, backward)

    def fits(self) -> list[Fit]:
        """Every aligner of the run, in a stable order."""
        found = []
        for route in self.maps:
            for name, bank in self.banks_of(route).items():
                found.append(Fit(name, route, bank))
        return found

    def trained(self) -> list[Fit]:
        """The fits that need gradient steps."""
        return [fit for fit in self.fits() if not fit.aligner.closed_form]

    def site_names(self) -> list[str]:
        """`i-j` for each site pair."""
        return [place.name for place in self.places]

    # ------------------------------------------------------------------ first phase: moments

    def on_fit_start(self) -> None:
        """Read the moments of the fitting texts unless a checkpoint has them, and fit to them."""
        self.unused = None
        if self.moments is not None:
            return
        read = partial(moments_of_states, self.stream, self.moment_rows)
        kept = self.kept = self.kept or self._keeping()
        moments = read(reading=self.reading, also=kept.adding("fit"))["maps"]
        validation = None
        kinds = [type(fit.aligner) for fit in self.fits()]
        # on which a strength is chosen
        if Ridge in kinds or kept.validation is not None:
            also = kept.adding("validation")
            validation = read("validation", also=also)["maps"]
        kept.end()
        self.fit_moments(moments, validation)
        self.kept = None
        if self.trainer.is_global_zero:
            for caution in few_rows(moments):
                logger.warning(caution)

    def fit_moments(self, moments: Moments, validation: Moments | None) -> None:
        """Solve the closed-form aligners and start the trained ones from the moments of all fitting rows.

        Args:
            moments: of the fitting rows.
            validation: of the validation rows; None: no map asks for them.

        Raises:
            ValueError: there are fewer rows than an aligner needs, or the states of a site are constant.
        """
        quiet = hidden(attached_trainer(self))
        shared = SharedMoments.of(moments)
        for fit in track(self.fits(), "Solving", disable=quiet):
            self.fit_one(fit, shared, validation)
        self.moments = moments

    def fit_one(self, fit: Fit, moments: Moments, validation: Moments | None) -> None:
        """Solve or start one aligner from the moments, and the rows if it keeps any: see `fit_moments`."""
        own = fit.moments(moments, validation)
        kept = self.kept or KeptRows()
        rows = kept.arguments(fit.aligner, backward=fit.route == BACKWARD)
        fit_map(fit.name, fit.aligner, *own, **rows)

    def _keeping(self) -> KeptRows:
        """Prepare the draws of the rows that maps keep."""
        maps = [fit.aligner for fit in self.fits()]
        return KeptRows.of(
            maps, len(self.places), self.stream.reader.widths, self.device
        )

    def moment_rows(self, batch: PairedBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """The rows of a batch whose moments are read."""
        return {"maps": self.rows_of(batch)}

    def rows_of(self, batch: PairedBatch) -> tuple[Tensor, Tensor]:
        """The rows x and y of a batch that maps are fitted to."""
        return batch.x, batch.y

    # ------------------------------------------------------------------ second phase: gradient steps

    def on_train_start(self) -> None:
        """Validate the starting point, which training has to beat. A run of closed forms ends there."""
        steps = self.trainer.estimated_stepping_batches
        moments = cast(Moments, self.moments)
        rows = int(moments.n) / int(self.trainer.num_training_batches)
        if steps == math.inf:
            wanted = math.ceil(self.rows_to_train / rows)
            steps = min(wanted, self.most_steps)
        self.begin(int(steps), self.validated_at, rows=rows)
        if self.graphs:
            self.recorded = recorded_steps(self, self.trained(), self.precision)

    def on_train_end(self) -> None:
        """Free the memory of what was recorded."""
        self.recorded = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take one step of every aligner at every site, or one for each part of the batch."""
        for part in range(self.parts):
            x, y = self.part_of(batch, part)
            last = part + 1 == self.parts
            self._take_step(x, y, last)

    def part_of(self, batch: PairedBatch, part: int) -> tuple[Tensor, Tensor]:
        """The rows of a part of a batch; 0: of all that there are."""
        return self.rows_of(batch)

    def _take_step(self, x: Tensor, y: Tensor, last: bool) -> None:
        optimizer = cast(Any, self.optimizers())
        optimizer.zero_grad(set_to_none=True)
        with self.site_steps.step():
            losses = self._backward(x, y)
            self._clip(losses)
            self.step(last)
        for fit in losses:
            fit.aligner.settle(*fit.orient(x, y))
        if last and self.logs_now:
            for fit, loss in losses.items():
                alive = self.divergence.step[fit.key] == 0
                shown = loss.where(alive, torch.nan)
                self._log("step", fit, "loss", shown)

    def _backward(self, x: Tensor, y: Tensor) -> dict[Fit, Tensor]:
        """Compute the gradients of the rows of all ranks, and return the losses (S,) on them."""
        fits = self.trained()
        if self.recorded is not None:
            replayed = self.recorded.step(x, y)
            if replayed is not None:
                return dict(zip(fits, replayed, strict=True))
        count = x.shape[1]
        # averaged over ranks, the gradient is then that of all rows
        share = torch.full((), float(count), device=self.device)
        share = share / mean_count(self.trainer, count, self.device)
        losses = []
        with products_in(self.precision):
            for fit in fits:
                source, target = fit.orient(x, y)
                losses.append(fit.aligner.loss(source, target))
            sums = torch.stack([loss.sum() for loss in losses])
            self.manual_backward(share * sums.sum())
        detached = torch.stack([loss.detach() for loss in losses])
        of_all = mean_over_ranks(self.trainer, share * detached)
        return dict(zip(fits, of_all, strict=True))

    def _clip(self, losses: dict[Fit, Tensor]) -> None:
        """Clip the gradients of each site, and set those of sites that diverged to zero."""
        step = self.global_step + 1
        for fit, loss in losses.items():
            watch = partial(self.divergence.watch, fit.key, loss, step=step)
            clip_per_site(fit.aligner, self.gradient_clip, watch)

    def on_train_epoch_end(self) -> None:
        """Check the states of the last batch as well."""
        self.stream.reader.check.flush()

    # ------------------------------------------------------------------ validation

    def on_validation_epoch_start(self) -> None:
        """Reset the errors of each split: on these texts, and on the fitting texts shown beside them."""
        self._errors: dict[tuple[str, Fit], MapErrors] = {}
        self._far_errors: dict[tuple[str, Fit], FarErrors] = {}
        self._drawn: dict[str, HeldOutRows] = {}  # for retrieval, by route
        if self.trainer.state.fn == "validate":
            sites = len(self.places)
            for fit in self.fits():
                d_x, d_y = fit.orient(*self.stream.reader.widths)
                rows = HeldOutRows(sites, d_x, d_y, self.seed, self.device)
                self._drawn.setdefault(fit.route, rows)

    on_test_epoch_start = on_validation_epoch_start

    def _measure(self, split: str, fits: Sequence[Fit], batch: PairedBatch) -> None:
        """Add the errors of some aligners on one batch."""
        x, y = self.rows_of(batch)
        for fit in fits:
            if (split, fit) not in self._errors:
                errors = MapErrors(*self.means(fit))
                self._errors[split, fit] = errors.to(self.device)
            errors = self._errors[split, fit]
            source, target = fit.orient(x, y)
            errors.update(fit.aligner, source, target, batch.rows.unseen)
        if batch.counterpart is not None:
            self._measure_beside(split, fits, batch.counterpart)

    def _measure_beside(
        self, split: str, fits: Sequence[Fit], batch: PairedBatch
    ) -> None:
        """Add the errors on the rows that stand beside those that count: with far rows, or without them."""
        x, y = self.rows_of(batch)
        for fit in fits:
            source, target = fit.orient(x, y)
            if (split, fit) not in self._far_errors:
                _, mean = self.means(fit)
                errors = FarErrors(mean)
                self._far_errors[split, fit] = errors.to(self.device)
            mapped = fit.aligner(source)
            self._far_errors[split, fit].update(mapped, target)

    def _figures(self, split: str, fit: Fit) -> dict[str, Tensor]:
        """All errors of an aligner on a split, (S,) each."""
        figures = self._errors[split, fit].compute()
        beside = None
        if (split, fit) in self._far_errors:
            beside = self._far_errors[split, fit].compute()
        columns = far_columns(self.stream.far_rows, beside, figures["fvu"])
        return figures | columns

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Errors of every aligner on one batch; of closed forms only in a fit's first validation."""
        if self.moments is None:
            raise UserError(
                "Nothing is fitted yet: fit first, or name a checkpoint with `--ckpt_path`."
            )
        if dataloader_idx == 0:
            self._draw(batch)
        fits = self.fits()
        if self.trainer.state.fn == "fit" and self.validated_at is not None:
            fits = self.trained()
        splits = ("validation", "train")
        self._measure(splits[dataloader_idx], fits, batch)

    def _draw(self, batch: PairedBatch) -> None:
        """Keep rows of a batch for retrieval, if the validation draws any."""
        for route, drawn in self._drawn.items():
            x, y = self.rows_of(batch)
            if route == BACKWARD:
                x, y = y, x
            drawn.add(x, y, batch.text, batch.rows.place)

    def means(self, fit: Fit) -> tuple[Tensor, Tensor]:
        """Means of source and target on the fitting rows, (S, d) each."""
        moments = cast(Moments, self.moments)
        return fit.orient(moments.mean_x, moments.mean_y)

    def on_validation_epoch_end(self) -> None:
        """Log all figures of all aligners and sites, and keep those of the validation texts, not of a sanity check."""
        self.stream.reader.check.flush()
        if self.trainer.sanity_checking:
            return
        before = self.validated_at
        self.validated_at = self.global_step
        for split, fit in self._errors:
            figures = self._figures(split, fit)
            if split == "validation":
                self.validation_figures[fit] = figures
            known = self._known(fit, before)
            for figure, values in figures.items():
                if not values.isnan().all():
                    self._log(split, fit, figure, values.float(), known)
        self._retrieve()

    def _retrieve(self) -> None:
        """Score every map by retrieval, if rows were drawn: in a validation that is not part of a fit."""
        if not self._drawn:
            return
        rows = {route: drawn.end() for route, drawn in self._drawn.items()}
        for fit in track(self.fits(), "Retrieval", disable=hidden(self.trainer)):
            mapped = fit.aligner(rows[fit.route])
            columns = self._drawn[fit.route].columns(mapped)
            self.validation_figures[fit] |= columns

    def _known(self, fit: Fit, before: int | None) -> list[int]:
        """Sites that no longer train, whose figures an earlier validation of this fit has logged."""
        diverged = self.divergence.step.get(fit.key)
        if self.trainer.state.fn != "fit" or diverged is None:
            return []
        stopped = (diverged > 0) & (diverged <= (before or 0))
        return stopped.nonzero().flatten().tolist()

    def criteria(self) -> dict[str, Tensor]:
        """The criterion of the last validation for each trained bank, (S,): lower is better."""
        criteria = {}
        for fit in self.trained():
            figures = self.validation_figures[fit]
            criteria[fit.key] = figures["fvu"]
            if fit.aligner.reconstructs:
                criteria[fit.key] = figures["fvu_reconstruction"]
            if fit.aligner.both_ways:
                criteria[fit.key] = figures["fvu"] + figures["fvu_inverse"]
        return criteria

    def _log(
        self,
        split: str,
        fit: Fit,
        figure: str,
        values: Tensor,
        known: Sequence[int] = (),
    ) -> None:
        """Log a figure (S,) of all sites but those that are known."""
        name = fit.name
        if fit.route == BACKWARD:
            name = f"{name}_backward"
        sites = {}
        for s, site in enumerate(self.site_names()):
            if s not in known:
                sites[site] = values[s]
        self.log_sites(f"{split}/{name}", figure, sites)

    # ------------------------------------------------------------------ the errors on held-out texts

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Errors of every aligner from X to Y on one batch."""
        split = self.stream.splits[dataloader_idx]
        self._measure(split, self._fits_forward(), batch)

    def _fits_forward(self) -> list[Fit]:
        return [fit for fit in self.fits() if fit.route == FORWARD]

    def on_test_epoch_end(self) -> None:
        """One row of a report for every map and place."""
        self.stream.reader.check.flush()
        cautions = few_rows(cast(Moments, self.moments))
        self.meta = {**self.stream.describe(), "split": "test", "cautions": cautions}
        self.rows: list[Row] = []
        sites = len(self.places)
        for fit in self._fits_forward():
            held_out = self._figures("test", fit)
            fitting = self._figures("fit", fit)
            figures: dict[str, Any] = {name: held_out[name] for name in HELD_OUT}
            figures["mse_reduced"] = reduced_mse(fit.aligner, sites)
            for name in FITTING:
                figures[f"{name}_fit"] = fitting[name]
            training = outcomes(self.training_record.get(fit.key), sites)
            rows = error_rows(self.places, fit.name, fit.aligner, training, figures)
            self.rows += rows

    # ------------------------------------------------------------------ checkpoints

    def has_begun(self) -> bool:
        """Whether moments were read; each of several ranks has its own, and would begin anew."""
        if self.moments is not None:
            return True
        return self.reading.batches > 0 and self.trainer.world_size == 1

    def stored(self) -> StoredBank:
        """Return the maps as they are now, with what another process needs to use them."""
        turned = [(j, i) for i, j in self.sites]
        return StoredBank(
            command="fit",
            maps={route: self.banks_of(route) for route in self.maps},
            pairs={FORWARD: list(self.sites), BACKWARD: turned},
            data=self.data,
            data_config=self.data_config,
            moments=self.moments,
            seen=self.stream.seen,
            fitted=self.stream.texts.fitted("fit", "validation"),
            training=self.training_record,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run needs, and what distinguishes the run from others."""
        self.stream.reader.check.flush()
        moments = {}
        reading = None
        if self.moments is None:
            reading = self.reading.state()
            if self.kept is not None and self.kept.fitting is not None:
                reading["kept"] = self.kept.fitting.state()
        else:
            for name, value in self.moments._asdict().items():
                moments[name] = value.cpu()
        checkpoint[ALIGNMENT] = {
            "format": FORMAT,
            "moments": moments,
            "reading": reading,
            **self.identity(),
            "training": self.training_record,
            "divergence": self.divergence.state_dict(),
            "validated_at": self.validated_at,
        }

    def options(self) -> dict[str, Any]:
        """The aligners, the number of rows and steps, and how a step is taken."""
        options = {
            "aligners": {fit.key: kind_of(fit.aligner) for fit in self.fits()},
            "rows": self.rows_to_train,
            "most_steps": self.most_steps,
            "least_rise": LEAST_RISE,
            "products": self.precision,
        }
        if self.averaging:  # else absent, as in checkpoints of earlier versions
            options["averaging"] = True
        return options

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the moments back.

        Raises:
            ValueError: the checkpoint was fitted on other models, or is of another version; or the run is to go on
                from it with other data or options.
        """
        stored = checkpoint[ALIGNMENT]
        if stored.get("format") != FORMAT:
            raise UserError(
                f"Expected a checkpoint of this version, but {self.trainer.ckpt_path} is of another: resume it with "
                "that, or fit anew."
            )
        begun_in = stored["options"].get("products")
        if self.products == "auto" and begun_in in get_args(ProductPrecision):
            self.precision = begun_in  # a run goes on as it began
        self.resume(checkpoint, stored)
        if stored["moments"]:
            self.moments = Moments(**stored["moments"]).to(self.device)
        else:
            reading = stored["reading"]
            self.reading = MomentsSoFar.from_state(reading, self.device)
            self.kept = self._keeping()
            if self.kept.fitting is not None:
                self.kept.fitting.restore(reading["kept"])
        self.training_record = stored["training"]
        self.validated_at = stored["validated_at"]
        self.divergence.load_state_dict(stored["divergence"], self.device)
