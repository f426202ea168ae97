"""The LightningModule that measures truncated classifiers and skipped layers: Phang et al. 2021, Figures 3 and 4."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.task_targets import (
    Targets,
    among_answers,
    classification_targets,
)
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, finite
from aligners.finetuning.classifier_training import (
    EPOCHS,
    FinetuningRecipe,
    mean_loss,
    measured_columns,
    optimisation,
)
from aligners.fitting.bank_training import mean_over_ranks
from aligners.fitting.lightning_loops import KnownLength
from aligners.injection.injecting import Evaluation
from aligners.injection.scoring.scores import ScoredTask, TextScores, UnitMeans
from aligners.injection.scoring.task_scores import (
    check_labels,
    in_data_order,
    match_heads,
    one_after_another,
    unit_answers,
)
from aligners.models.calling import FiniteCheck
from aligners.models.classifiers import head_parts, with_head
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel

Row = dict[str, Any]
Table = dict[str, Tensor]  # scores of a model by quantity
Kind = Literal["native", "untuned", "tuned", "tuned_orig", "skip"]
MEAN = "mean of the models"
QUANTITIES = ("correct", "loss", "answer")
# A head alone allows, and needs, larger steps than a model.
HEADS = FinetuningRecipe(learning_rate=1e-3, warmup=0.1)


@dataclass(frozen=True)
class Condition:
    """One way to run a model.

    Attributes:
        kind: native: the whole model; untuned: its own head on the state at `site`; tuned: a head trained there;
            tuned_orig: a head trained on the base model's state; skip: without blocks first..last.
        site: where the head reads; None for skip.
        first: the first block that is skipped, counted from 1; None if all are run.
        last: the last such block.
    """

    kind: Kind
    site: int | None = None
    first: int | None = None
    last: int | None = None


def conditions(depth: int, *, base: bool, heads: bool) -> list[Condition]:
    """List the conditions for a model of L = `depth` blocks, in the order of the table."""
    if base:
        return _truncations("tuned_orig", depth)
    found = [Condition("native", depth), *_truncations("untuned", depth)]
    for first in range(1, depth + 1):
        for last in range(first, depth + 1):
            found.append(Condition("skip", None, first, last))
    if heads:
        found += _truncations("tuned", depth)
    return found


def _truncations(kind: Kind, depth: int) -> list[Condition]:
    """Return a condition for a head at every site, above which all blocks are skipped."""
    found = []
    for site in range(depth):
        found.append(Condition(kind, site, first=site + 1, last=depth))
    return [*found, Condition(kind, depth)]


class SurgeryEvaluation(Evaluation, KnownLength):
    """Trains heads on the states of all sites at once, then measures every truncation and every skipped span.

    All states of a batch come from one pass through each model, and none is kept for longer. Heads on fine-tuned models
    start as the model's own head and continue its training (TUNED). Those on base models start from the data module's
    seed (TUNEDORIG). Scores are kept text by text, so the figures are the same for any number of ranks.

    Args:
        recipe: how the heads are trained.
        heads: whether heads are trained; if not, only the conditions that need none are measured, and no base model.
        seed: for resampling the texts.

    Attributes:
        rows: after a test, one for each model and condition, and for the mean over models of equal depth.
        meta: what holds for all rows.
    """

    kind = ModelTexts
    usual_epochs = EPOCHS

    def __init__(
        self, recipe: FinetuningRecipe = HEADS, heads: bool = True, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.recipe = recipe
        self.heads = heads
        self.banks = nn.ModuleList()
        self._check = FiniteCheck()

    # ------------------------------------------------------------------ before

    def prepare_panels(self) -> None:
        """Run all checks, and build a head for every site of every model."""
        check_precision(self.trainer)
        data = self.stream
        if data.bases and not self.heads:
            raise UserError(
                "Expected no `bases`, as no heads are trained, but got some. Leave `bases` out."
            )
        device = self.trainer.strategy.root_device
        self.models: list[FrozenModel] = [model.to(device) for model in data.frozen]
        count = len(data.models)
        tuned = self.models[:count]
        bases = self.models[count:]
        self.is_base = [False] * len(tuned) + [True] * len(bases)
        self._check_labels()
        self.matched = match_heads(data, tuned)
        self.asked = self.task = self._task(tuned[0])
        self.class_maps = [model.class_map for model in tuned]
        of_base = one_after_another(tuned[0].class_map)
        self.class_maps += [of_base] * len(bases)
        if self.heads and not self.banks:
            self._build_heads()

    def _build_heads(self) -> None:
        for model in self.models:
            self.banks.append(HeadBank(model, model.depth + 1))

    def _check_labels(self) -> None:
        """Raise if a label that is read is none of a model's classes."""
        data = self.stream
        splits: list[Split] = ["fit", "test"]
        if not self.heads:
            splits = ["test"]
        for model, split in product(self.models, splits):
            labels = data.split(split).labels
            check_labels(model, labels, data.text.source)

    def _task(self, model: FrozenModel) -> ScoredTask:
        """Return the models' task, and how it is scored."""
        data = self.stream
        if data.targets != "choices":
            return ScoredTask.of(data, model, seed=self.seed)
        constant = float(data.constant_answers()[0])
        return ScoredTask(
            "classification", labels=data.answers("test"), constant=constant
        )

    def injected_into(self) -> list[FrozenModel]:
        """All models."""
        return self.models

    def _states(self, batch: TextBatch, place: int) -> list[Tensor]:
        """Return the states of all sites of a model, from one pass."""
        model = self.models[place]
        with torch.no_grad():
            sites = range(model.depth + 1)
            return model.front(batch.inputs[place], sites)

    # ------------------------------------------------------------------ heads

    def configure_optimizers(self) -> Any:
        """Return one AdamW for all heads; it treats each weight independently."""
        weights = list(self.banks.parameters())
        return optimisation(self, weights, self.recipe)

    def _answers(self, batch: TextBatch, place: int, states: list[Tensor]) -> Tensor:
        """Return the logits of the trained heads, (S, B, C)."""
        bank = cast(HeadBank, self.banks[place])
        model = self.models[place]
        logits = bank.logits(model, batch.inputs[place], states)
        return self._in_data_order(batch, place, logits)

    def _in_data_order(self, batch: TextBatch, place: int, logits: Tensor) -> Tensor:
        """Return a model's logits in the order of the data's classes, or of the answers to choose from."""
        ordered = in_data_order(logits, self.class_maps[place])
        return among_answers(ordered, batch.answers)

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return the sum of all heads' mean losses; each head gets the gradient of its own."""
        labels = cast(Tensor, batch.labels)
        losses = []
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        for place, model in enumerate(self.models):
            states = self._states(batch, place)
            logits = self._answers(batch, place, states)
            loss = mean_loss(self, logits, labels)
            losses.append(loss.sum())
            names = [f"{model.name}, site {site}" for site in range(model.depth + 1)]
            self._check.watch(loss.detach(), names, "training loss", batch_idx)
            if (self.global_step + 1) % every == 0:
                whole = mean_over_ranks(self.trainer, loss.detach())
                self._log(place, "train_loss", whole)
        return torch.stack(losses).sum()

    def on_train_epoch_end(self) -> None:
        """Check the losses of the last batch, too."""
        self._check.flush()

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._means = []
        for model in self.models:
            means = UnitMeans(model.depth + 1)
            self._means.append(means.to(self.device))

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Add every head's accuracy on one batch, or its squared errors."""
        targets = _targets(batch)
        for place, means in enumerate(self._means):
            states = self._states(batch, place)
            logits = self._answers(batch, place, states)
            answers = unit_answers(logits, targets)
            measured = answers.correct
            if self.task.regression:
                measured = answers.loss
            means.update(measured)

    def on_validation_epoch_end(self) -> None:
        """Log the means, which are already summed over ranks."""
        figure = "validation_accuracy"
        if self.task.regression:
            figure = "validation_loss"
        for place, means in enumerate(self._means):
            values = means.compute()
            self._log(place, figure, values.float())

    def _log(self, place: int, figure: str, values: Tensor) -> None:
        """Log a figure (S,) of the heads of a model."""
        kind = "tuned_orig" if self.is_base[place] else "tuned"
        named = {}
        for site, value in enumerate(values):
            named[f"{kind}/{place}/{site}/{figure}"] = value
        self.log_dict(named, rank_zero_only=True)

    # ------------------------------------------------------------------ the one pass over the held-out texts

    def on_test_start(self) -> None:
        """Run every model's self-test, and make its table."""
        super().on_test_start()
        self._conditions = []
        self.tables = nn.ModuleList()
        for model, base in zip(self.models, self.is_base, strict=True):
            wanted = conditions(model.depth, base=base, heads=self.heads)
            self._conditions.append(wanted)
            table = TextScores(list(QUANTITIES), 1, len(wanted), self.n_texts)
            self.tables.append(table)
        self.tables.to(self.device)

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Score every condition of every model on one batch."""
        for place, wanted in enumerate(self._conditions):
            states = self._states(batch, place)
            trained = None
            if self.heads:
                trained = self._answers(batch, place, states)
            logits = []
            for condition in wanted:
                logits.append(self._answer(batch, place, condition, states, trained))
            answers = unit_answers(torch.stack(logits), _targets(batch))
            scores = {}
            for name, values in answers._asdict().items():
                scores[name] = values[None]
            table = cast(TextScores, self.tables[place])
            table.update(batch.text, scores)

    def _answer(
        self,
        batch: TextBatch,
        place: int,
        condition: Condition,
        states: list[Tensor],
        trained: Tensor | None,
    ) -> Tensor:
        """Return the logits of one condition, (B, C) float32."""
        model = self.models[place]
        inputs = batch.inputs[place]
        site = cast(int, condition.site)
        if condition.kind in ("tuned", "tuned_orig"):
            return cast(Tensor, trained)[site]
        if condition.kind == "native":
            logits = model.logits(inputs)
        elif condition.kind == "untuned":
            logits = model.tail(inputs, model.depth, states[site])
        else:
            first = cast(int, condition.first)
            last = cast(int, condition.last)
            logits = model.tail(inputs, last, states[first - 1])
        return self._in_data_order(batch, place, logits.float())

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """Make a row for every model and condition, and for the mean of the fine-tuned models."""
        tables = [cast(TextScores, table).compute() for table in self.tables]
        self.rows = []
        native = {}
        for place, model in enumerate(self.models):
            self.rows += self._rows(model.name, tables, [place])
            if not self.is_base[place]:
                answers = tables[place]["answer"]
                native[model.name] = answers[0, 0]  # of the first condition
        for base in (False, True):
            self.rows += self._mean_rows(tables, base)
        self.meta = {
            **self.stream.describe(),
            **self.about_answers(self.matched),
            "majority_score": self.task.constant_score(),
        }
        self.doubt_orders(native)

    def _mean_rows(self, tables: Sequence[Table], base: bool) -> list[Row]:
        """Return the rows of the mean over all fine-tuned models, or all base models, if they are equally deep."""
        places = []
        depths = set()
        for place, model in enumerate(self.models):
            if self.is_base[place] == base:
                places.append(place)
                depths.add(model.depth)
        if len(places) < 2 or len(depths) > 1:
            return []
        return self._rows(MEAN, tables, places)

    def _rows(
        self, name: str, tables: Sequence[Table], places: Sequence[int]
    ) -> list[Row]:
        """Make the rows of one model, or of the mean over several."""
        scores = {}
        for quantity in QUANTITIES:
            each = [tables[place][quantity] for place in places]
            scores[quantity] = torch.cat(each)
        labels = self.stream.answers("test")
        columns = measured_columns(self.task.score, scores, labels, self.seed)
        rows = []
        for number, condition in enumerate(self._conditions[places[0]]):
            row = {"model": name, **vars(condition)}
            for column, values in columns.items():
                row[column] = finite(values[number])
            row["score_name"] = self.task.score
            row["n_texts"] = scores["correct"].shape[-1]
            rows.append(row)
        return rows


def _targets(batch: TextBatch) -> Targets:
    return classification_targets(cast(Tensor, batch.labels))


class HeadBank(nn.Module):
    """A copy of a model's classification head, with its pooler if it has one, for each of S sites.

    The model stays frozen: only the heads get gradients. A final norm is the model's own. The heads train without
    dropout, so each is what it would be if it were trained alone.

    Args:
        model: a classifier; every copy starts as its head.
        sites: S, the number of copies.
    """

    def __init__(self, model: FrozenModel, sites: int) -> None:
        super().__init__()
        parts = head_parts(model.model)
        self.names = list(parts)
        self.heads = nn.ModuleList()
        for _ in range(sites):
            head = nn.ModuleList(map(copy.deepcopy, parts.values()))
            self.heads.append(head.eval().requires_grad_(True))

    def logits(
        self, model: FrozenModel, inputs: Mapping[str, Tensor], states: Sequence[Tensor]
    ) -> Tensor:
        """Return each head's logits for its site's states, as if these were the last site's: (S, B, C) float32.

        Args:
            model: the model, on the device of the heads.
            inputs: the tokenised batch.
            states: (B, T, d) for each site.
        """
        answers = []
        for head, state in zip(self.heads, states, strict=True):
            copies = cast(nn.ModuleList, head)
            parts = dict(zip(self.names, copies, strict=True))
            with with_head(model.model, parts):
                answers.append(model.tail(inputs, model.depth, state))
        return torch.stack(answers).float()
