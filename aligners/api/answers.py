"""What a model answers with mapped states in place of its own, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aligners.injection.forward import stitched_logits
from aligners.injection.scoring.tasks import check_labels, chosen, unit_scores
from aligners.models.model import FrozenModel
from datamodules.asking import Asking, TaskBatch
from datamodules.batches import TextBatch
from datamodules.rows.reading import read_rows
from datamodules.tokens.tokenised import same_tokenizer

__all__ = ["Answers"]


class Answers:
    """Sums of what is scored over the units of all batches: texts of a classifier, tokens of a language model.

    Args:
        source: X.
        target: Y.
        site: where X is read, and where Y's states are replaced.
        masked_share: of the tokens that a masked language model has to find.
        seed: of the masks.
        labelled: whether the texts come with classes.

    Raises:
        ValueError: Y has no head or predicts numbers, labels are given to a language model, or tokenizers differ.
    """

    def __init__(
        self,
        source: FrozenModel,
        target: FrozenModel,
        site: tuple[int, int],
        masked_share: float,
        seed: int,
        *,
        labelled: bool,
    ) -> None:
        _check(source, target, labelled=labelled)
        self.source, self.target, self.site = source, target, site
        self.asking = Asking.of(target, masked_share=masked_share, seed=seed)
        self.scored = labelled or target.task != "classification"
        names = ("loss", "correct", "native_loss", "native_correct", "agree")
        self.n, self.sums = 0, {name: torch.zeros((), dtype=torch.float64, device=target.device) for name in names}

    def add(self, texts: TextBatch, mapped: Callable[[Tensor], Tensor]) -> None:
        """Score a batch.

        Args:
            texts: on the CPU.
            mapped: the map, of rows (N, d_x).

        Raises:
            ValueError: the map gives rows of another shape, or the head cannot answer the labels.
        """
        batch = self._asked(texts).to(self.target.device)
        rows = read_rows(self.source, batch.inputs, [self.site[0]], batch.rows)[0]
        states = mapped(rows.to(self.source.device)).to(self.target.device)
        if states.shape != (len(rows), self.target.width):
            raise ValueError(
                f"Expected `map` to give rows of shape {(len(rows), self.target.width)}, those of {self.target.name}, "
                f"but got {tuple(states.shape)}."
            )
        own = chosen(self.target.logits(batch.inputs), batch.targets)
        logits = stitched_logits(self.target, batch.inputs, self.site[1], batch.rows, states)
        found = unit_scores(chosen(logits, batch.targets), batch.targets, own.argmax(-1))
        native = {f"native_{name}": value for name, value in unit_scores(own, batch.targets).items()}
        for name in self.sums:
            self.sums[name] += (found | native)[name].double().sum()
        self.n += len(batch.targets)

    def means(self) -> dict[str, Any]:
        """The fields of `Injected`.

        Raises:
            ValueError: nothing was asked: all texts are of one token.
        """
        if not self.n:
            raise ValueError("Expected `texts` with a token that follows another, but all have one token. Give longer.")
        mean: dict[str, Any] = {name: float(value) / self.n for name, value in self.sums.items()}
        if not self.scored:
            mean |= dict.fromkeys(("loss", "correct", "native_loss", "native_correct"))
        return {
            "loss": mean["loss"],
            "native_loss": mean["native_loss"],
            "penalty": mean["loss"] - mean["native_loss"] if self.scored else None,
            "accuracy": mean["correct"],
            "native_accuracy": mean["native_correct"],
            "agreement": mean["agree"],
            "n": self.n,
        }

    def _asked(self, texts: TextBatch) -> TaskBatch:
        if self.scored and self.target.task == "classification":
            check_labels(self.target, texts.labels, "labels")
        if self.scored:
            return self.asking(texts)
        return self.asking(replace(texts, labels=torch.zeros_like(texts.text)))  # how well they answer is not said


def _check(source: FrozenModel, target: FrozenModel, *, labelled: bool) -> None:
    if target.task is None or target.regression:
        raise ValueError(
            f"Expected `model_y` to be a classifier or a language model, but {target.name} "
            f"{'predicts a number' if target.regression else 'has no head'}. Name another; states can still be mapped."
        )
    if labelled and target.task != "classification":
        raise ValueError(f"Expected no `labels` for the language model {target.name}: it is asked for tokens.")
    if source.tokenizer is None or target.tokenizer is None or not same_tokenizer(source.tokenizer, target.tokenizer):
        raise ValueError(
            f"Expected models of one tokenizer, since every token's state is replaced, but those of {source.name} and "
            f"{target.name} differ. Compare them by `rows` 'words', with `train.py fit`."
        )
