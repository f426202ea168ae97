"""The LightningModule that measures truncated and skipping classifiers: Phang et al. 2021, Figures 3 and 4."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.task_targets import among_answers, classification_targets
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
    """A head at every site, above which all blocks are skipped."""
    found = [Condition(kind, site, site + 1, depth) for site in range(depth)]
    return [*found, Condition(kind, depth)]


class SurgeryEvaluation(Evaluation, KnownLength):
    """Trains heads on the states of all sites at once, then measures every truncation and every skipped span.

    All states of a batch come from one pass through each model, and none is kept for longer. Heads on fine-tuned models
    start as the model's own head and continue its training (TUNED); those on base models start from the data module's
    seed (TUNEDORIG). Scores are kept text by text, so the figures are the same for any number of ranks.

    Args:
        recipe: how the heads are trained.
        heads: whether heads are trained; if not, only what needs none is measured, and no base model.
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
        tuned = self.models[: len(data.models)]
        bases = self.models[len(data.models) :]
        self.is_base = [False] * len(tuned) + [True] * len(bases)
        for model in self.models:
            for split in ("fit", "test") if self.heads else ("test",):
                check_labels(model, data.split(split).labels, data.text.source)
        self.matched = match_heads(data, tuned)
        self.asked = self.task = self._task(tuned[0])
        self.class_maps = [model.class_map for model in tuned]
        self.class_maps += [one_after_another(tuned[0].class_map)] * len(bases)
        if self.heads and not len(self.banks):
            for model in self.models:
                self.banks.append(HeadBank(model, model.depth + 1))

    def _task(self, model: FrozenModel) -> ScoredTask:
        """What is asked of the models, and how it is scored."""
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
            return model.front(batch.inputs[place], range(model.depth + 1))

    # ------------------------------------------------------------------ heads

    def configure_optimizers(self) -> Any:
        """Return one AdamW for all heads; it treats each weight independently."""
        return optimisation(self, list(self.banks.parameters()), self.recipe)

    def _answers(self, batch: TextBatch, place: int, states: list[Tensor]) -> Tensor:
        """Return the logits of the trained heads, (S, B, C)."""
        bank = cast(HeadBank, self.banks[place])
        logits = bank.logits(self.models[place], batch.inputs[place], states)
        return among_answers(
            in_data_order(logits, self.class_maps[place]), batch.answers
        )

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return the sum of all heads' mean losses; each head gets the gradient of its own."""
        labels = cast(Tensor, batch.labels)
        losses = []
        log = (self.global_step + 1) % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        for place, model in enumerate(self.models):
            loss = mean_loss(
                self, self._answers(batch, place, self._states(batch, place)), labels
            )
            names = [f"{model.name}, site {site}" for site in range(model.depth + 1)]
            self._check.watch(loss.detach(), names, "training loss", batch_idx)
            if log:
                whole = mean_over_ranks(self.trainer, loss.detach())
                self.log_dict(
                    self._keys(place, "train_loss", whole), rank_zero_only=True
                )
            losses.append(loss.sum())
        return torch.stack(losses).sum()

    def on_train_epoch_end(self) -> None:
        """Check the losses of the last batch, too."""
        self._check.flush()

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._means = [
            UnitMeans(model.depth + 1).to(self.device) for model in self.models
        ]

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Add every head's accuracy on one batch, or its squared errors."""
        for place, means in enumerate(self._means):
            logits = self._answers(batch, place, self._states(batch, place))
            answers = unit_answers(
                logits, classification_targets(cast(Tensor, batch.labels))
            )
            means.update(answers.loss if self.task.regression else answers.correct)

    def on_validation_epoch_end(self) -> None:
        """Log the means, which are already summed over ranks."""
        for place, means in enumerate(self._means):
            figure = "validation_accuracy"
            if self.task.regression:
                figure = "validation_loss"
            self.log_dict(
                self._keys(place, figure, means.compute().float()), rank_zero_only=True
            )

    def _keys(self, place: int, figure: str, values: Tensor) -> dict[str, Tensor]:
        kind = "tuned_orig" if self.is_base[place] else "tuned"
        return {
            f"{kind}/{place}/{site}/{figure}": value
            for site, value in enumerate(values)
        }

    # ------------------------------------------------------------------ the one pass over the held-out texts

    def on_test_start(self) -> None:
        """Run every model's self-test, and make its table."""
        super().on_test_start()
        self._conditions = []
        self.tables = nn.ModuleList()
        for model, base in zip(self.models, self.is_base, strict=True):
            wanted = conditions(model.depth, base=base, heads=self.heads)
            self._conditions.append(wanted)
            self.tables.append(
                TextScores(list(QUANTITIES), 1, len(wanted), self.n_texts)
            )
        self.tables.to(self.device)

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Score every condition of every model on one batch."""
        for place, wanted in enumerate(self._conditions):
            states = self._states(batch, place)
            trained = self._answers(batch, place, states) if self.heads else None
            logits = [
                self._answer(batch, place, each, states, trained) for each in wanted
            ]
            targets = classification_targets(cast(Tensor, batch.labels))
            answers = unit_answers(torch.stack(logits), targets)
            scores = {name: values[None] for name, values in answers._asdict().items()}
            cast(TextScores, self.tables[place]).update(batch.text, scores)

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
        return among_answers(
            in_data_order(logits.float(), self.class_maps[place]), batch.answers
        )

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """Make a row for every model and condition, and for the mean of the fine-tuned models."""
        tables = [cast(TextScores, table).compute() for table in self.tables]
        self.rows = []
        for model, wanted, table in zip(
            self.models, self._conditions, tables, strict=True
        ):
            self.rows += self._rows(model.name, wanted, [table])
        for base in (False, True):
            self.rows += self._mean_rows(tables, base)
        about = {**self.stream.describe(), **self.about_answers(self.matched)}
        self.meta = {**about, "majority_score": self.task.constant_score()}
        native = {}
        for model, table, base in zip(self.models, tables, self.is_base, strict=True):
            if not base:
                native[model.name] = table["answer"][0, 0]  # the first condition
        self.doubt_orders(native)

    def _mean_rows(
        self, tables: list[dict[str, Tensor]], base: bool
    ) -> list[dict[str, Any]]:
        """The rows of the mean over all fine-tuned models, or all base models, if they are equally deep."""
        places = [
            place for place, is_base in enumerate(self.is_base) if is_base == base
        ]
        depths = {self.models[place].depth for place in places}
        if len(places) < 2 or len(depths) > 1:
            return []
        return self._rows(
            MEAN, self._conditions[places[0]], [tables[place] for place in places]
        )

    def _rows(
        self, name: str, wanted: Sequence[Condition], tables: list[dict[str, Tensor]]
    ) -> list[dict[str, Any]]:
        """Make the rows of one model, or of the mean over several."""
        scores = {}
        for quantity in QUANTITIES:
            scores[quantity] = torch.cat([table[quantity] for table in tables])
        columns = measured_columns(
            self.task.score, scores, self.stream.answers("test"), self.seed
        )
        rows = []
        for number, condition in enumerate(wanted):
            row = {"model": name, **vars(condition)}
            for column, values in columns.items():
                row[column] = finite(values[number])
            row |= {
                "score_name": self.task.score,
                "n_texts": scores["correct"].shape[-1],
            }
            rows.append(row)
        return rows


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
            copies = [
                copy.deepcopy(part).eval().requires_grad_(True)
                for part in parts.values()
            ]
            self.heads.append(nn.ModuleList(copies))

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
            parts = dict(zip(self.names, cast(nn.ModuleList, head), strict=True))
            with with_head(model.model, parts):
                answers.append(model.tail(inputs, model.depth, state))
        return torch.stack(answers).float()
