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
HEADS = FinetuningRecipe(
    learning_rate=1e-3, warmup=0.1
)  # a head alone allows, and needs, larger steps than a model


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

    def cut(kind: Kind) -> list[Condition]:
        gone = [(site + 1, depth) if site < depth else (None, None) for site in range(depth + 1)]
        return [Condition(kind, site, *ends) for site, ends in enumerate(gone)]

    if base:
        return cut("tuned_orig")
    spans = [
        Condition("skip", None, i, j) for i in range(1, depth + 1) for j in range(i, depth + 1)
    ]
    return [Condition("native", depth), *cut("untuned"), *spans, *(cut("tuned") if heads else [])]


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

    def __init__(self, recipe: FinetuningRecipe = HEADS, heads: bool = True, seed: int = 0) -> None:
        super().__init__(seed)
        self.recipe, self.heads = recipe, heads
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
        self.models: list[FrozenModel] = [
            m.to(self.trainer.strategy.root_device) for m in data.frozen
        ]
        self.is_base = [place >= len(data.models) for place in range(len(self.models))]
        for model in self.models:
            for split in ("fit", "test") if self.heads else ("test",):
                check_labels(model, data.split(split).labels, data.text.source)
        tuned = self.models[: len(data.models)]
        self.matched = match_heads(data, tuned)
        if data.targets == "choices":
            answers = {
                "labels": data.answers("test"),
                "constant": float(data.constant_answers()[0]),
            }
            self.asked = self.task = ScoredTask("classification", **answers)
        else:
            self.asked = self.task = ScoredTask.of(data, tuned[0], seed=self.seed)
        of_bases = one_after_another(tuned[0].class_map)
        self.class_maps = [*(model.class_map for model in tuned), *[of_bases] * sum(self.is_base)]
        if self.heads and not len(self.banks):
            self.banks.extend(HeadBank(model, model.depth + 1) for model in self.models)

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
        logits = cast(HeadBank, self.banks[place]).logits(
            self.models[place], batch.inputs[place], states
        )
        return among_answers(in_data_order(logits, self.class_maps[place]), batch.answers)

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return the sum of all heads' mean losses; each head gets the gradient of its own."""
        labels, losses = cast(Tensor, batch.labels), []
        log = (self.global_step + 1) % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        for place, model in enumerate(self.models):
            loss = mean_loss(self, self._answers(batch, place, self._states(batch, place)), labels)
            names = [f"{model.name}, site {site}" for site in range(model.depth + 1)]
            self._check.watch(loss.detach(), names, "training loss", batch_idx)
            if log:
                whole = mean_over_ranks(self.trainer, loss.detach())
                self.log_dict(self._keys(place, "train_loss", whole), rank_zero_only=True)
            losses.append(loss.sum())
        return torch.stack(losses).sum()

    def on_train_epoch_end(self) -> None:
        """Check the losses of the last batch, too."""
        self._check.flush()

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._means = [UnitMeans(model.depth + 1).to(self.device) for model in self.models]

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Add every head's accuracy on one batch, or its squared errors."""
        for place, means in enumerate(self._means):
            logits = self._answers(batch, place, self._states(batch, place))
            answers = unit_answers(logits, classification_targets(cast(Tensor, batch.labels)))
            means.update(answers.loss if self.task.regression else answers.correct)

    def on_validation_epoch_end(self) -> None:
        """Log the means, which are already summed over ranks."""
        for place, means in enumerate(self._means):
            figure = "validation_loss" if self.task.regression else "validation_accuracy"
            self.log_dict(self._keys(place, figure, means.compute().float()), rank_zero_only=True)

    def _keys(self, place: int, figure: str, values: Tensor) -> dict[str, Tensor]:
        kind = "tuned_orig" if self.is_base[place] else "tuned"
        return {f"{kind}/{place}/{site}/{figure}": value for site, value in enumerate(values)}

    # ------------------------------------------------------------------ the one pass over the held-out texts

    def on_test_start(self) -> None:
        """Run every model's self-test, and make its table."""
        super().on_test_start()
        every = zip(self.models, self.is_base, strict=True)
        self._conditions = [
            conditions(model.depth, base=base, heads=self.heads) for model, base in every
        ]
        tables = (
            TextScores(list(QUANTITIES), 1, count, self.n_texts)
            for count in map(len, self._conditions)
        )
        self.tables = nn.ModuleList(tables).to(self.device)

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Score every condition of every model on one batch."""
        for place, wanted in enumerate(self._conditions):
            states = self._states(batch, place)
            trained = self._answers(batch, place, states) if self.heads else None
            logits = torch.stack(
                [self._answer(batch, place, condition, states, trained) for condition in wanted]
            )
            answers = unit_answers(logits, classification_targets(cast(Tensor, batch.labels)))
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
        model, inputs = self.models[place], batch.inputs[place]
        if condition.kind in ("tuned", "tuned_orig"):
            return cast(Tensor, trained)[cast(int, condition.site)]
        if condition.kind == "native":
            logits = model.logits(inputs)
        elif condition.kind == "untuned":
            logits = model.tail(inputs, model.depth, states[cast(int, condition.site)])
        else:
            logits = model.tail(
                inputs, cast(int, condition.last), states[cast(int, condition.first) - 1]
            )
        return among_answers(in_data_order(logits.float(), self.class_maps[place]), batch.answers)

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """Make a row for every model and condition, and for the mean of the fine-tuned models."""
        tables = [cast(TextScores, table).compute() for table in self.tables]
        self.rows = []
        for model, wanted, table in zip(self.models, self._conditions, tables, strict=True):
            self.rows += self._rows(model.name, wanted, [table])
        for base in (False, True):
            places = [place for place, is_base in enumerate(self.is_base) if is_base == base]
            if len(places) > 1 and len({self.models[place].depth for place in places}) == 1:
                self.rows += self._rows(
                    MEAN, self._conditions[places[0]], [tables[place] for place in places]
                )
        about = {**self.stream.describe(), **self.about_answers(self.matched)}
        self.meta = {**about, "majority_score": self.task.constant_score()}
        whole = zip(
            self.models, tables, self.is_base, strict=True
        )  # their first condition, but for bases
        self.doubt_orders(
            {model.name: table["answer"][0, 0] for model, table, base in whole if not base}
        )

    def _rows(
        self, name: str, wanted: Sequence[Condition], tables: list[dict[str, Tensor]]
    ) -> list[dict[str, Any]]:
        """Make the rows of one model, or of the mean over several."""
        every = {
            quantity: torch.cat([table[quantity] for table in tables]) for quantity in QUANTITIES
        }
        columns = measured_columns(self.task.score, every, self.stream.answers("test"), self.seed)
        return [
            {
                "model": name,
                **vars(condition),
                **{column: finite(values[number]) for column, values in columns.items()},
                "score_name": self.task.score,
                "n_texts": every["correct"].shape[-1],
            }
            for number, condition in enumerate(wanted)
        ]


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
        copies = (
            [copy.deepcopy(part).eval().requires_grad_(True) for part in parts.values()]
            for _ in range(sites)
        )
        self.heads = nn.ModuleList(map(nn.ModuleList, copies))

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
            with with_head(
                model.model, dict(zip(self.names, cast(nn.ModuleList, head), strict=True))
            ):
                answers.append(model.tail(inputs, model.depth, state))
        return torch.stack(answers).float()
