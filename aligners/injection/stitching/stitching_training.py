"""The LightningModule that trains stitching layers through frozen tails.

Sites are independent: each runs through its own tail, and its graph is freed before the next is built, so a bank needs
the memory of one site.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.module import stream_of
from aligners.datamodules.task_targets import TaskBatch
from aligners.datamodules.text.texts import FittedTexts
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_range
from aligners.fitting.bank_training import BankTraining, mean_count, mean_over_ranks
from aligners.fitting.fits import AlignerFactory, fit_map, seeded
from aligners.fitting.read_moments import read_moments
from aligners.fitting.saved_bank import (
    STITCHING,
    StoredBank,
    check_names,
    describe_aligner,
    load_bank,
)
from aligners.fitting.steps import Schedule, clip_per_site
from aligners.injection.behaviour import (
    ReadStates,
    bank_answers,
    mapped_rows,
    own_answers,
    own_logits,
    pair_logits,
    read_all,
)
from aligners.injection.methods import fitted_layers
from aligners.injection.routes import (
    Route,
    Routes,
    build_routes,
    check_routes,
    targets_of,
)
from aligners.injection.scoring.scores import UnitMeans
from aligners.injection.scoring.task_scores import divergence, match_heads, unit_losses
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.models.calling import FiniteCheck
from aligners.models.loading.load_models import check_precision


@dataclass(frozen=True)
class LossWeights:
    """The weights of the losses that a stitching layer is trained on, as a sum.

    Args:
        task: weight of the loss of the target's own task, cross-entropy in nats per text or predicted token.
        distillation: weight of KL(target's own prediction ‖ stitched prediction), likewise per text or token.
        temperature: temperature at which both predictions are compared; the divergence is multiplied by its square.
        activation: weight of the squared distance to the target's own states, in units of FVU.

    Raises:
        ValueError: a weight is negative, or all are zero; the temperature is not positive.
    """

    task: float = 1.0
    distillation: float = 0.0
    temperature: float = 1.0
    activation: float = 0.0

    def __post_init__(self) -> None:
        weights = (self.task, self.distillation, self.activation)
        if not (min(weights) >= 0 and max(weights) > 0):
            raise UserError(
                "Expected `loss` weights of zero or more, at least one of them positive, but got task "
                f"{self.task}, distillation {self.distillation}, activation {self.activation}."
            )
        check_range(above=0, **{"loss.temperature": self.temperature})


def bank_gradients(
    mapped: Tensor, loss: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the loss of each site and its gradient with respect to the mapped rows, one site after another.

    Args:
        mapped: (S, N, d) outputs of a bank; its own graph is not touched.
        loss: takes the number of a site pair and rows (N, d), and returns a scalar.

    Returns:
        Losses (S,) without a graph, and gradients (S, N, d), for `mapped.backward(gradients)`.
    """
    losses = []
    gradients = torch.empty_like(mapped)
    for s, rows in enumerate(mapped.detach()):
        leaf = rows.requires_grad_()
        with torch.enable_grad():
            value = loss(s, leaf)
        (gradients[s],) = torch.autograd.grad(value, leaf)
        losses.append(value.detach())
    return torch.stack(losses), gradients


@dataclass(frozen=True)
class RouteLoss:
    """The weighted sum of a route's losses on one batch.

    Attributes:
        weights: weights of the losses.
        route: from which model into which.
        batch: a batch on the device.
        units: number of units (texts or tokens) that means are taken over; with several ranks, its mean over them.
        rows: number of rows; with several ranks, its mean over them.
        own: (U, C) logits of the target itself, for distillation; None: no distillation.
        states: (S, N, d_y) states of the target itself, for the activation loss; None: no such loss.
        variance: (S,) variance of the target's states, for the activation loss; None: no such loss.
    """

    weights: LossWeights
    route: Route
    batch: TaskBatch
    units: Tensor | float
    rows: Tensor | float
    own: Tensor | None = None
    states: Tensor | None = None
    variance: Tensor | None = None

    def __call__(self, pair: int, mapped: Tensor) -> Tensor:
        """Return the loss of mapped rows (N, d_y) at the site pair of this number, a scalar."""
        weights = self.weights
        total = mapped.new_zeros(())
        if weights.task or self.own is not None:
            logits = pair_logits(self.route, pair, self.batch, mapped)
            if weights.task:
                losses = unit_losses(logits, self.batch.targets)
                total = total + weights.task * losses.sum() / self.units
            if self.own is not None:
                gaps = divergence(logits, self.own, weights.temperature)
                total = total + weights.distillation * (gaps.sum() / self.units)
        if self.states is not None and self.variance is not None:
            squares = (mapped - self.states[pair]).square().sum()
            scale = self.rows * float(self.variance[pair])
            total = total + weights.activation * squares / scale
        return total


PRECISIONS = ("32-true", "bf16-mixed")
SPLITS: tuple[Split, ...] = ("fit", "validation", "test")
STEPS = 2000  # number of steps, unless the Trainer gives another
MORE_ROWS = "Give more texts, a larger `start_batches`, or another `start`."


class Stitching(BankTraining):
    """Trains banks of stitching layers: every route, every layer, every site pair, on the same batches.

    Each model's front runs once per batch for all routes that start from it. The models live in the data module: they
    are never in train mode and never in a checkpoint. Sites are trained independently, including the clipping of
    gradients, so a bank gives each site the layer that it would get alone. Training takes 2,000 steps, or as many as
    the Trainer says.

    Args:
        layers: name in the report -> the stitching layer: any trainable aligner. Default: affine with a
            LayerNorm (Brown et al., App. C.1), started at the closed-form map.
        routes: `all`: every ordered pair of models, including each model with itself; `different`: only different
            models; `forward`: from the first model into the others.
        loss: what the layers are trained on.
        fitted: file aligners.safetensors of `train.py fit` on the first two models at the same sites: each of its maps
            is trained further.
        start_batches: batches of fitting texts whose states determine the starts of the layers; 0 if no layer needs
            any.
        allow_mixed: allow routes from a model that sees the next token to one that must predict it.
        optimizer: one optimiser for all layers.
        schedule: how the learning rate changes over the training steps: constant, linear, cosine or one_cycle.
        warmup: share of the steps over which the learning rate rises.
        gradient_clip: largest norm of the gradient of a layer at a site; 0 turns clipping off.
        seed: seed of every layer's starting weights.
    """

    stream: ModelTexts
    final = "stitching.safetensors"
    usual_steps = STEPS

    def __init__(
        self,
        layers: dict[str, AlignerFactory] | None = None,
        routes: Routes = "all",
        loss: LossWeights = LossWeights(),
        fitted: Path | None = None,
        start_batches: int = 50,
        allow_mixed: bool = False,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(
            p, lr=1e-3, weight_decay=0.0, fused=True
        ),
        schedule: Schedule = "linear",
        warmup: float = 0.1,
        gradient_clip: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, schedule, warmup, gradient_clip, seed)
        if layers is None:
            layers = {"affine_norm": partial(AffineLayer, norm=True)}
        self.factories = dict(layers)
        check_names(self.factories, "layers")
        if not self.factories and fitted is None:
            raise UserError(
                "Expected at least one of `layers`, or `fitted` maps to train on, but got neither."
            )
        if start_batches < 0 or (start_batches == 0 and loss.activation > 0):
            raise UserError(
                "Expected `start_batches` to be at least 1, or 0 where neither a layer's start nor the activation loss "
                f"needs the models' states, but got {start_batches}."
            )
        self.wanted_routes = routes
        self.weights = loss
        self.fitted = fitted
        self.start_batches = start_batches
        self.allow_mixed = allow_mixed
        self.spread: dict[str, dict[str, Tensor]] = {}
        self.curves: list[dict[str, Any]] = []
        self._losses: dict[str, Tensor] = {}
        self._started_from: FittedTexts | None = None
        self._check = FiniteCheck()

    def _layers(self) -> Iterator[tuple[Route, str, Aligner]]:
        """Yield each layer with its route and name."""
        for route in self.routes:
            for name, layer in self.banks_of(route.key).items():
                yield route, name, layer

    # ------------------------------------------------------------------ setting up

    def setup(self, stage: str) -> None:
        """Check the options, and build the banks of each route."""
        check_precision(self.trainer, PRECISIONS)
        if stage == "fit" and self.trainer.max_steps < 1:
            raise UserError(
                f"Expected `trainer.max_steps` to be at least 1, but got {self.trainer.max_steps}: it sets how many "
                "steps the layers are trained, and the learning rate's schedule."
            )
        data = self.stream = stream_of(self.trainer, ModelTexts)
        self.routes = build_routes(
            data.frozen, data.sites, self.wanted_routes, data.component
        )
        # checked now with the texts that are measured in the end, not after hours of training
        for split in SPLITS:
            check_routes(
                self.routes,
                data.split(split).labels,
                data.text.source,
                allow_mixed=self.allow_mixed,
                gradients=True,
            )
        if data.task == "classification":
            match_heads(data, targets_of(self.routes))
        if not len(self.maps):
            self._build_layers()
        closed = [name for _, name, layer in self._layers() if layer.closed_form]
        if closed or not self.banks():
            raise UserError(
                "Expected `layers` that can be trained, but got one without parameters. Leave it out."
            )

    def _build_layers(self) -> None:
        """Make the layers of each route, and take over those of `fitted`."""
        further: dict[str, dict[str, Aligner]] = {}
        if self.fitted is not None:
            bank = load_bank(self.fitted)
            further = fitted_layers(bank, self.routes, self.stream.frozen)
            self._started_from = bank.fitted
        for route in self.routes:
            layers = nn.ModuleDict()
            for name, factory in self.factories.items():
                layers[name] = seeded(factory, self.seed, *route.sizes)
            layers.update(further.get(route.key, {}))
            self.maps[route.key] = layers

    def on_fit_start(self) -> None:
        """Compute the start of every layer from the states of some fitting texts, unless a checkpoint is resumed."""
        if self.start_batches == 0 or self.spread:
            return
        loader = self.stream.loader("fit", shuffle=True)
        by_route = read_moments(
            self.trainer, loader, self._read, self._check, self.start_batches
        )
        for route in self.routes:
            moments = by_route[route.key]
            squares = moments.yy.diagonal(dim1=-2, dim2=-1).sum(-1)
            self.spread[route.key] = {
                "mean": moments.mean_y.cpu(),
                "variance": (squares / moments.n).cpu(),
            }
        for route, name, layer in self._layers():
            if name in self.factories:
                moments = by_route[route.key]
                which = f"{name} from {route.name}"
                fit_map(which, layer, moments, advice=MORE_ROWS)

    def _read(self, texts: TextBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each route what it reads, and the target's own states at the sites where it puts others."""
        batch = self.stream.prepare(texts).to(self.device)
        states = read_all(self.routes, batch, targets=True)
        rows = {}
        for route in self.routes:
            x, y = states.sources(route), states.targets(route)
            names = [f"site pair {site} of {route.name}" for site in route.site_names()]
            self._check.watch(x, names, f"states of {route.source.name}", texts.number)
            self._check.watch(y, names, f"states of {route.target.name}", texts.number)
            rows[route.key] = (x, y)
        return rows

    # ------------------------------------------------------------------ training

    def on_train_start(self) -> None:
        """Validate the start first, or the last step if the run was interrupted before its validation."""
        steps = self.trainer.max_steps
        if self.trainer.max_epochs not in (
            None,
            -1,
        ):  # epochs may end before the steps do
            steps = int(self.trainer.estimated_stepping_batches)
        validated = None
        if self.curves:
            validated = self.curves[-1]["step"]
        self.begin(steps, validated)

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Take one step of every layer at every site."""
        cast(Any, self.optimizers()).zero_grad(set_to_none=True)
        losses, surrogate = self._losses_and_surrogate(batch)
        self.manual_backward(surrogate)
        if self.gradient_clip:
            for layer in self.banks().values():
                clip_per_site(layer, self.gradient_clip)
        self.step()
        self._watch(losses, batch_idx)

    def _losses_and_surrogate(
        self, batch: TaskBatch
    ) -> tuple[dict[tuple[Route, str], Tensor], Tensor]:
        """Return the losses (S,) of each layer, and a scalar whose gradients are those of their sum."""
        states = read_all(self.routes, batch, targets=self.weights.activation > 0)
        surrogates: list[Tensor] = []
        losses: dict[tuple[Route, str], Tensor] = {}
        for loss in self._losses_of(batch, states):
            route = loss.route
            for name, layer in self.banks_of(route.key).items():
                mapped = mapped_rows(layer, states.sources(route))
                losses[route, name], gradients = bank_gradients(mapped, loss)
                surrogates.append((mapped * gradients).sum())
        return losses, torch.stack(surrogates).sum()

    def _losses_of(self, batch: TaskBatch, states: ReadStates) -> Iterator[RouteLoss]:
        """Return the loss of each route on a batch."""
        weights = self.weights
        # the mean over ranks: with it, the ranks' mean gradient is that of all units
        units = mean_count(self.trainer, len(batch.targets), self.device)
        rows = mean_count(self.trainer, len(batch.rows), self.device)
        own = {}
        if weights.distillation > 0:
            for target in targets_of(self.routes):
                own[target] = own_logits(target, batch)
        for route in self.routes:
            logits = own.get(route.target)
            loss = RouteLoss(weights, route, batch, units, rows, logits)
            if weights.activation > 0:
                variance = self.spread[route.key]["variance"]
                targets = states.targets(route)
                loss = replace(loss, states=targets, variance=variance)
            yield loss

    def _watch(self, losses: dict[tuple[Route, str], Tensor], batch_idx: int) -> None:
        """Check that the losses (S,) of each layer are finite, and log them."""
        for (route, name), loss in losses.items():
            sites = route.site_names()
            which = [f"{name}, {route.name}, site pair {site}" for site in sites]
            self._check.watch(loss, which, "training loss", batch_idx)
            if self.logs_now:
                whole = mean_over_ranks(self.trainer, loss)
                by_site = dict(zip(sites, whole, strict=True))
                self.log_sites(f"step/{route.key}/{name}", "loss", by_site)

    def on_train_epoch_end(self) -> None:
        """Check the last losses as well."""
        self._check.flush()

    # ------------------------------------------------------------------ validation: the learning curves

    def on_validation_epoch_start(self) -> None:
        """Reset the sums, and raise for losses that are not finite before a checkpoint is written."""
        self._check.flush()
        self._means = {}
        for key, bank in self.banks().items():
            self._means[key] = UnitMeans(bank.sites).to(self.device)
        self._natives = {}
        for target in targets_of(self.routes):
            self._natives[target] = UnitMeans(1).to(self.device)

    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Compute the losses of every layer, and of the targets with nothing replaced."""
        for target, means in self._natives.items():
            means.update(own_answers(target, batch).loss[None])
        states = read_all(self.routes, batch)
        for route, name, layer in self._layers():
            mapped = mapped_rows(layer, states.sources(route))
            answers = bank_answers(route, batch, mapped)
            losses = torch.stack([site.loss for site in answers])
            self._means[f"{route.key}.{name}"].update(losses)

    def on_validation_epoch_end(self) -> None:
        """Add a point to every learning curve: the penalty on the validation texts, or on a few in a sanity check."""
        if self.trainer.sanity_checking:
            return
        natives = {target: means.compute() for target, means in self._natives.items()}
        self._losses = {key: means.compute() for key, means in self._means.items()}
        for route, name, _ in self._layers():
            loss = self._losses[f"{route.key}.{name}"]
            penalty = (loss - natives[route.target]).cpu()
            self._add_to_curves(route, name, penalty)

    def _add_to_curves(self, route: Route, name: str, penalty: Tensor) -> None:
        """Log the penalties (S,) of a layer, and keep them for the report."""
        sites = dict(zip(route.site_names(), penalty.float(), strict=True))
        self.log_sites(f"validation/{route.key}/{name}", "penalty", sites)
        for (site_x, site_y), value in zip(route.pairs, penalty.tolist(), strict=True):
            point = {
                "step": self.global_step,
                "model_x": route.source.name,
                "model_y": route.target.name,
                "method": name,
                "site_x": site_x,
                "site_y": site_y,
                "penalty": value,
            }
            self.curves.append(point)

    def criteria(self) -> dict[str, Tensor]:
        """Return the last validation's loss at each site of each bank, (S,)."""
        return self._losses

    # ------------------------------------------------------------------ checkpoints

    def stored(self) -> StoredBank:
        """Return the layers as they are, with what another process needs to use them."""
        data = self.stream
        return StoredBank(
            "stitch",
            {key: self.banks_of(key) for key in self.maps},
            self._pairs(),
            data.describe(),
            data.config(),
            fitted=data.texts.fitted("fit", "validation") | self._started_from,
            spread=self.spread,
            curves=self.curves,
            loss=asdict(self.weights),
            training=self.training_record,
        )

    def _pairs(self) -> dict[str, list[tuple[int, int]]]:
        """Return the site pairs of each route."""
        return {route.key: list(route.pairs) for route in self.routes}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run needs, and what distinguishes it from other runs.

        Raises:
            ValueError: a loss since the last check was not finite.
        """
        self._check.flush()
        checkpoint[STITCHING] = {
            "spread": self.spread,
            "curves": self.curves,
            **self.identity(),
        }

    def options(self) -> dict[str, Any]:
        """Return the routes, the layers, where they start, and what they are trained on."""
        layers = self.banks().items()
        return {
            "routes": self._pairs(),
            "layers": {key: describe_aligner(layer) for key, layer in layers},
            "loss": asdict(self.weights),
            "start_batches": self.start_batches,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the layers' starts, and the curves so far.

        Raises:
            ValueError: the checkpoint is not one of stitching, or was trained on other models, at other site pairs,
                along other routes, or with other layers, data or options.
        """
        if STITCHING not in checkpoint:
            raise UserError(
                "Expected `ckpt_path` to be a last.ckpt of `train.py stitch`, but it is another file."
            )
        stored = checkpoint[STITCHING]
        steps = checkpoint["global_step"]
        most = self.trainer.max_steps  # checked before a complete run removes the limit
        self.resume(checkpoint, stored)
        if steps > most:
            raise UserError(
                f"Nothing is left to train: the checkpoint has {steps} steps, and `trainer.max_steps` is {most}. "
                "Measure its layers with `evaluate.py stitch --checkpoint`, or train for more steps."
            )
        self.spread, self.curves = stored["spread"], stored["curves"]
