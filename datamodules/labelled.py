"""The LightningDataModule of labelled text, on which classifiers are fine-tuned and surgery is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from aligners.models.classifiers import new_classifier
from aligners.models.model import FrozenModel
from datamodules.frozen_models import Wanted, with_revisions
from datamodules.module import TextModule
from datamodules.pipeline import TextPipeline
from datamodules.text.fitted import FittedTexts
from datamodules.text.label_names import LabelsOption
from datamodules.text.labels import known_labels
from datamodules.tokens.splits import Split

__all__ = ["LabelledTexts"]

SPLITS: tuple[Split, ...] = ("fit", "validation", "test")


class LabelledTexts(TextModule):
    """Turns labelled text into batches for one or more models, whatever their tokenizers, and leaves the models alone.

    Args:
        models: Hub ids, local folders, or embedded models such as `embedded:0`.
        bases: models from which `models` were fine-tuned. They come after the others, each under a new classification
            head that `seed` draws.
        revisions: of each of `models` on the Hub; default: the main one.
        labels: which classes of a head answer each class of the texts, where their names do not say, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Several are added. One map, or a list of one for each model.
        options: of `TextPipeline` and `FrozenModels`, by their names, without `packed`, `devices`, `device_map`,
            `store` and `store_dtype`. `seed` also draws the bases' heads; `reorder` gives the order of the texts
            another seed.

    Raises:
        ValueError: an option is out of its range, or no model is named.
    """

    not_kept = ("packed", "devices", "device_map", "store", "store_dtype")

    def __init__(
        self,
        models: list[str] | str = "embedded:0",
        bases: list[str] | str | None = None,
        revisions: list[str | None] | None = None,
        labels: LabelsOption = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.models, self.bases = _listed(models), _listed(bases or [])
        self.revisions, self.labels = revisions, labels
        wanted = Wanted(with_revisions(self.models, revisions), further=self._further, bases=self.bases)
        self.pipeline = TextPipeline(
            wanted, False, packed=False, devices=None, device_map=None, store=None, store_dtype=None, **options
        )
        self._order = self.pipeline.seed

    def _further(self, tuned: FrozenModel) -> list[FrozenModel]:
        """Load `bases` under new heads."""
        return [self._base(name, tuned) for name in self.bases]

    def _base(self, name: str, tuned: FrozenModel) -> FrozenModel:
        if tuned.n_labels is None:
            raise ValueError(
                f"Expected `models` to be classifiers where `bases` are named, but {tuned.name} has no classification "
                "head. Name models that were fine-tuned to classify."
            )
        return FrozenModel(
            *self.classifier(name, tuned.n_labels, self.pipeline.seed, dtype=self.pipeline.models.dtype), name=name
        )

    def classifier(self, name: str, n_labels: int, seed: int, **options: Any) -> tuple[Any, Any]:
        """Load a model under a new classification head, and its tokenizer, with this module's options.

        Args:
            name: of the model.
            n_labels: classes of the head; 1: it predicts a number.
            seed: of the head.
            options: further ones of `aligners.models.classifiers.new_classifier`.
        """
        models = self.pipeline.models
        given = {"attn_implementation": models.attn_implementation, "trust_remote_code": models.trust_remote_code}
        return new_classifier(models.path(name), n_labels, seed, **{**given, **options})

    def trained_on(self, base: str) -> FittedTexts:
        """Return what is kept beside a classifier that is trained from `base`: the texts of both.

        Validation texts do not count: nothing is chosen by them.
        """
        return self.texts.fitted("fit") | self.pipeline.models.fitted_on().get(base)

    def answers(self, split: Split) -> Tensor:
        """Return the class of each text of a split, (n,) int64, or the number to predict, (n,) float32.

        Raises:
            ValueError: some texts have none.
        """
        found = self.split(split).labels
        if found is None:
            raise ValueError(
                f"Expected text with classes, but the texts of {self.text.source!r} have no labels. Name a "
                "`label_column`, or another source."
            )
        missing = ~known_labels(found)
        if bool(missing.any()):
            raise ValueError(
                f"Expected a label for every text, but {int(missing.sum())} of the {len(found)} {split} texts of "
                f"{self.text.source!r} have none (-1, or nothing). Leave them out, or choose another `held_out`."
            )
        return found

    @property
    def classes(self) -> int:
        """The number of classes of a head that is to be trained on the texts, C; 1 for numbers.

        Raises:
            ValueError: as in `answers`, `Texts.classes_to_learn` and `Texts.check_numbers`.
        """
        if self.texts.regression:
            self.texts.check_numbers()
            return 1
        for split in SPLITS:
            self.answers(split)
        return self.texts.classes_to_learn

    def constant_answers(self) -> Tensor:
        """The best answer that does not depend on the text, for each held-out one, (n,): see `Texts.constant_label`."""
        constant = self.texts.constant_label(regression=self.texts.regression)
        return torch.full((len(self.answers("test")),), constant, dtype=torch.float64)

    def describe(self) -> dict[str, Any]:
        """Describe texts and models for a report, as plain values."""
        count = len(self.models)
        return {
            "models": [model.identity() for model in self.frozen[:count]],
            "bases": [model.identity() for model in self.frozen[count:]],
            "component": "residual",
            **self.pipeline.describe(),
        }

    @property
    def order(self) -> int:
        """Seed of the order of the training texts."""
        return self._order

    def reorder(self, seed: int) -> None:
        """Draw the order of the training texts from another seed from now on."""
        self._order = seed

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load the texts, and raise if any lacks a label."""
        for split in ("fit", "validation") if stage in ("fit", "validate") else ("test",):
            self.answers(split)

    def train_dataloader(self) -> DataLoader:
        """The fitting texts, in an order that follows from `order` and the epoch."""
        return self.resumable(self.pipeline.loader("fit", self.trainer, shuffle=True, seed=self._order))


def _listed(names: list[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
