"""What frozen models are asked about a batch of texts: a class, a number, masked tokens or next tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from aligners.models.architectures import Task
from aligners.models.model import FrozenModel
from datamodules.batches import TextBatch
from datamodules.rows.policies import Rows, select_rows
from datamodules.targets import Targets, classification_targets, masked_targets, next_token_targets
from datamodules.tokens.masking import mask_tokens

__all__ = ["Asking", "TaskBatch"]


@dataclass
class TaskBatch:
    """B texts for models of one tokenizer, which positions are rows, and what is asked.

    Attributes:
        texts: the tokenised batch; with a masked task its inputs are masked already.
        rows: every real token, (N,).
        targets: what the models are asked about the batch.
    """

    texts: TextBatch
    rows: Rows
    targets: Targets

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs, which are the same for all models."""
        return self.texts.inputs_x

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TaskBatch:
        """The same on another device."""
        moved: Any = [part.to(device, non_blocking) for part in (self.texts, self.rows, self.targets)]
        return TaskBatch(*moved)


@dataclass(frozen=True)
class Asking:
    """Adds to a batch of texts, on the CPU, its rows and what a task asks about it.

    Attributes:
        task: of the models' heads.
        regression: whether a classification head predicts a number.
        masked_share: share of the tokens that a masked language model has to predict.
        seed: of the masks.
        mask_token: id of the mask token, for masked language models.
        vocabulary: number of tokens, for masked language models.
    """

    task: Task
    regression: bool = False
    masked_share: float = 0.15
    seed: int = 0
    mask_token: int = -1
    vocabulary: int = 0

    @classmethod
    def of(cls, model: FrozenModel, *, masked_share: float, seed: int) -> Self:
        """The task that a model's head was trained for.

        Raises:
            ValueError: a masked language model has no mask token.
        """
        asking = cls(cast(Task, model.task), model.regression, masked_share, seed)
        if model.task != "masked":
            return asking
        tokenizer = cast(Any, model.tokenizer)
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"Expected a tokenizer with a mask token for a masked language model, but that of {model.name} has "
                "none. Set its `mask_token`."
            )
        return replace(asking, mask_token=tokenizer.mask_token_id, vocabulary=len(tokenizer))

    def __call__(self, texts: TextBatch, epoch: int = 0) -> TaskBatch:
        """The batch with its rows and targets, masked where that is part of the task.

        Args:
            texts: on the CPU.
            epoch: each one masks a text anew.

        Raises:
            ValueError: the task is a classification and the texts have no labels.
        """
        rows = select_rows(texts.inputs_x["attention_mask"], texts.special_x, "tokens")
        if self.task == "causal":
            return TaskBatch(texts, rows, next_token_targets(texts.inputs_x))
        if self.task == "masked":
            return self._masked(texts, rows, epoch)
        if texts.labels is None:
            raise ValueError("A classification needs labels, but these texts have none. Name a `label_column`.")
        return TaskBatch(texts, rows, classification_targets(texts.labels.float() if self.regression else texts.labels))

    def _masked(self, texts: TextBatch, rows: Rows, epoch: int) -> TaskBatch:
        inputs, answers = mask_tokens(
            texts.inputs_x,
            texts.special_x,
            texts.text,
            mask_token=self.mask_token,
            vocabulary=self.vocabulary,
            share=self.masked_share,
            seed=self.seed,
            epoch=epoch,
        )
        masked = TextBatch((inputs,) * len(texts.inputs), texts.special, texts.text, texts.labels, number=texts.number)
        return TaskBatch(masked, rows, masked_targets(answers))
