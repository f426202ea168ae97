"""The LightningModule that fine-tunes a classifier on labelled text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.module import stream_of
from aligners.datamodules.task_targets import among_answers, classification_targets
from aligners.datamodules.text.sources import Score
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_range
from aligners.finetuning.tokens import COUNTS, TokenTask
from aligners.fitting.bank_training import mean_count, mean_over_ranks
from aligners.fitting.lightning_loops import KnownLength, make_training_loader_again
from aligners.fitting.steps import Schedule, schedule_factor
from aligners.injection.scoring.scores import (
    TextScores,
    UnitMeans,
    interval,
    named,
    resampled_scores,
    with_interval,
)
from aligners.injection.scoring.task_scores import unit_answers, unit_losses
from aligners.models.calling import Caller, FiniteCheck
from aligners.models.classifiers import freeze_unused

FINETUNING = "finetuning"  # what is added to a checkpoint of Lightning
EPOCHS = 3  # where the Trainer says nothing else
LARGEST_GRADIENT = 1.0  # norm over all weights, likewise


@dataclass(frozen=True)
class FinetuningRecipe:
    """A recipe for fine-tuning a classifier: AdamW, warm-up, decay. Defaults are those of Wu et al. 2020, Table 1.

    Args:
        learning_rate: AdamW's, reached after the warm-up.
        epsilon: AdamW's.
        weight_decay: AdamW's, for matrices only; biases and norms do not decay.
        schedule: course of the learning rate after the warm-up: constant, linear or cosine; or one_cycle.
        warmup: how long the learning rate rises: a whole number of steps, or a share of all steps below 1.
    """

    learning_rate: float = 5e-5
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = "linear"
    warmup: int | float = 0.0

    def __post_init__(self) -> None:
        check_range(above=0, learning_rate=self.learning_rate, epsilon=self.epsilon)
        check_range(least=0, weight_decay=self.weight_decay)
        is_share = isinstance(self.warmup, float)
        if self.warmup < 0 or (is_share and self.warmup >= 1):
            raise UserError(
                f"Expected `warmup` to be a whole number of steps, or a share of them in [0, 1), but got {self.warmup}."
            )

    def warmup_share(self, steps: int) -> float:
        """Return the share of `steps` over which the learning rate rises.

        Raises:
            ValueError: the warm-up is longer than the training.
        """
        if isinstance(self.warmup, int):
            if self.warmup > steps:
                raise UserError(
                    f"Expected `warmup` of at most {steps}, all steps, but got {self.warmup}."
                )
            return self.warmup / max(1, steps)
        return self.warmup


class Finetuning(KnownLength):
    """Trains and measures a classifier, with dropout; or a regression head, on squared errors; or a head for a `task`.

    By default, training takes 3 epochs, and gradients are clipped to a norm of 1. The Trainer's `max_epochs` and
    `gradient_clip_val` change that; `gradient_clip_val=0` turns clipping off.

    Validation accuracy and all test figures are exact for any number of ranks. Training depends on their number: every
    rank draws its own dropout.

    Args:
        model: the classifier; weights that do not require gradients stay as they are.
        recipe: how it is trained.
        name: prefix of what is logged.
        place: its index among the data module's models, which says what inputs it takes.
        seed: for dropout.
        task: of a head that answers every token; None: a classifier.

    Attributes:
        about: what identifies the run in a checkpoint, as plain values.
        validation_accuracy: after the last validation; of a `task`, the mean score of a text; None for numbers.
        scores: after a test, quantity -> (1, 1, n), a value for each held-out text: correct, loss, and answer, a class
            or a number; of a `task` its counts.
    """

    usual_epochs = EPOCHS

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: FinetuningRecipe = FinetuningRecipe(),
        *,
        name: str = "finetune",
        place: int = 0,
        seed: int = 0,
        task: TokenTask | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.name = name
        self.place = place
        self.task = task
        self.seed = seed
        self.about: dict[str, Any] = {}
        self.validation_accuracy: float | None = None
        self.scores: dict[str, Tensor] = {}
        self._caller = Caller(model)
        self._check = FiniteCheck()
        # states of random numbers that the next batch begins with
        self._random: list[Tensor] | None = None

    def logits(self, batch: TextBatch) -> Tensor:
        """Return the logits, (B, C) float32; (B, T, C) of a head that answers every token; (Q, A) of choices."""
        logits = self._caller.logits(batch.inputs[self.place])
        return among_answers(logits.float(), batch.answers)

    # ------------------------------------------------------------------ training

    def setup(self, stage: str) -> None:
        """Freeze weights that no answer depends on, before the ranks agree on what trains."""
        if stage == "fit":
            few: TextBatch = stream_of(self.trainer, ModelTexts).split("fit")[[0]]
            with torch.enable_grad():
                freeze_unused(self.model, self._losses(few.to(self.device)))

    def on_fit_start(self) -> None:
        """Turn dropout on, since models are loaded in eval mode. Every rank draws its own."""
        torch.manual_seed(self.seed + 2**32 * self.global_rank)
        self.model.train()

    def on_train_batch_start(self, batch: TextBatch, batch_idx: int) -> None:
        """Let a resumed run draw its first dropout as if it had not been interrupted."""
        if self._random is not None:
            torch.set_rng_state(self._random[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self._random[1], self.device)
            self._random = None

    def configure_optimizers(self) -> Any:
        """Return AdamW on the trainable weights, with a schedule over all steps."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        return optimisation(self, weights, self.recipe)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the Trainer says, or to the usual norm if it says nothing."""
        largest = LARGEST_GRADIENT if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, largest, gradient_clip_algorithm)

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return cross-entropy or squared error, averaged over the texts of all ranks."""
        losses = self._losses(batch)
        loss = losses.sum() / mean_count(self.trainer, len(losses), losses.device)
        self._check.watch(loss.detach()[None], [self.name], "training loss", batch_idx)
        if (self.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            of_all = mean_over_ranks(self.trainer, loss.detach())
            self.log(f"{self.name}/train_loss", of_all, rank_zero_only=True)
        return loss

    def _losses(self, batch: TextBatch) -> Tensor:
        """Return the loss of each text to fit on, (B,)."""
        logits = self.logits(batch)
        if self.task is not None:
            return self.task.losses(logits, batch, "fit")
        targets = classification_targets(cast(Tensor, batch.labels))
        return unit_losses(logits[None], targets)[0]

    def on_train_epoch_end(self) -> None:
        """Check the loss of the last batch, too."""
        self._check.flush()

    # ------------------------------------------------------------------ checkpoints

    def has_begun(self) -> bool:
        """Whether a run that is stopped now leaves anything to resume from."""
        return self.global_step > 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run needs: the states of all ranks' random numbers as the next batch begins."""
        self._check.flush()
        every = []
        for state in self._random_states():
            of_ranks = state[None]
            if self.trainer.world_size > 1:
                gathered = cast(Tensor, self.all_gather(state.to(self.device)))
                of_ranks = gathered.cpu()
            every.append(of_ranks)
        checkpoint[FINETUNING] = {
            "name": self.name,
            "about": self.about,
            "random": every,
            "validation_accuracy": self.validation_accuracy,
        }

    def _random_states(self) -> list[Tensor]:
        """Return the states of this rank's random numbers as the next batch begins."""
        if self._random is not None:
            return self._random
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added.

        Raises:
            ValueError: the run had another number of ranks, each of which draws its own dropout.
        """
        kept = checkpoint[FINETUNING]
        ranks = len(kept["random"][0])
        if ranks != self.trainer.world_size:
            raise UserError(
                f"Expected `trainer.devices` to make {ranks} processes, as in the run that is resumed, but got "
                f"{self.trainer.world_size}: each draws dropout of its own."
            )
        self._random = [state[self.global_rank].cpu() for state in kept["random"]]
        self.validation_accuracy = kept["validation_accuracy"]

    # ------------------------------------------------------------------ measuring

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._means = UnitMeans(2).to(self.device)

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Add the accuracy and loss of one batch."""
        measured = self._measured(batch, "validation")
        correct = measured["correct"]
        if "weight" in measured:  # of a task whose texts have several answers
            correct = correct / measured["weight"].clamp(min=1)
        self._means.update(torch.stack([correct, measured["loss"]]))

    def _measured(self, batch: TextBatch, split: Split) -> dict[str, Tensor]:
        """Return the entries of `scores` for each text of a batch, (B,)."""
        logits = self.logits(batch)
        if self.task is not None:
            return self.task.measures(logits, batch, split)
        targets = classification_targets(cast(Tensor, batch.labels))
        return unit_answers(logits, targets)._asdict()

    def on_validation_epoch_end(self) -> None:
        """Log accuracy and loss, which are already summed over ranks."""
        accuracy, loss = self._means.compute().float()
        self.log(f"{self.name}/validation_loss", loss, rank_zero_only=True)
        if not stream_of(self.trainer, ModelTexts).texts.regression:
            self.validation_accuracy = float(accuracy)
            self.log(f"{self.name}/validation_accuracy", accuracy, rank_zero_only=True)

    def on_test_start(self) -> None:
        """Make a table for the held-out texts."""
        texts = len(stream_of(self.trainer, ModelTexts).split("test"))
        quantities = ["correct", "loss", "answer"]
        if self.task is not None:
            quantities = list(COUNTS)
        self._table = TextScores(quantities, 1, 1, texts).to(self.device)

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Score every text of a batch."""
        measured = self._measured(batch, "test")
        scores = {name: values[None, None] for name, values in measured.items()}
        self._table.update(batch.text, scores)

    def on_test_epoch_end(self) -> None:
        """Keep the scores of all texts, on every rank."""
        self.scores = self._table.compute()


def optimisation(
    module: pl.LightningModule,
    weights: Sequence[nn.Parameter],
    recipe: FinetuningRecipe,
) -> Any:
    """Return AdamW and its schedule, in the form that Lightning's `configure_optimizers` returns.

    Args:
        module: the module whose run the schedule covers.
        weights: the weights to train.
        recipe: rates and schedule.

    Raises:
        ValueError: the run has no end, or is shorter than the warm-up.
    """
    matrices = [weight for weight in weights if weight.ndim > 1]
    others = [weight for weight in weights if weight.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, eps=recipe.epsilon)
    steps = module.trainer.estimated_stepping_batches
    if module.trainer.ckpt_path is not None:
        make_training_loader_again(module.trainer)
    if steps == float("inf"):
        raise UserError(
            "Expected `trainer.max_epochs` or `trainer.max_steps` to be finite: the schedule needs it."
        )
    steps = int(steps)
    warmup = recipe.warmup_share(steps)
    factor = schedule_factor(recipe.schedule, steps, warmup)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


def mean_loss(module: pl.LightningModule, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss whose gradient, averaged over ranks, is that of the mean over the texts of all ranks.

    Args:
        module: the LightningModule that trains.
        logits: (S, B, C) float32, of this rank's texts.
        labels: (B,).

    Returns:
        (S,) sums over this rank's texts, divided by the mean number of texts of a rank.
    """
    texts = mean_count(module.trainer, len(labels), logits.device)
    losses = unit_losses(logits, classification_targets(labels))
    return losses.sum(-1) / texts


def measured_columns(
    score: Score, scores: Mapping[str, Tensor], labels: Tensor, seed: int
) -> dict[str, Tensor]:
    """Return accuracy, loss and the task's score, mean over M models, with intervals over the texts: each (C,).

    Args:
        score: the task's.
        scores: (M, C, n) of C conditions: `correct`, `loss` and `answer` of each held-out text.
        labels: (n,).
        seed: seed of the resampling.
    """
    accuracy = interval(scores["correct"].mean(0), seed=seed)
    found = named("accuracy", accuracy)
    found["loss"] = scores["loss"].mean(0).mean(-1)
    scored = resampled_scores(score, scores["answer"], labels, seed=seed).mean(0)
    return found | named("score", with_interval(scored))
