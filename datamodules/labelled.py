"""The LightningDataModule of labelled text: what classifiers are fine-tuned on, and what surgery is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.batches import TextBatch
from datamodules.text.label_names import LabelsOption
from datamodules.text.labels import known_labels
from datamodules.text.sources import TextSource
from datamodules.text_stream import EMBEDDED, WITHOUT_GRADIENTS, Split, TextStream, with_revisions
from frozen.classifiers import new_classifier
from frozen.embedded.recipes import Recipe
from frozen.model import FrozenModel

__all__ = ["LabelledTexts"]


class LabelledTexts(TextStream):
    """Text with classes in, batches for one or more models of any tokenizers out. No model is run or moved here.

    Args:
        models: Hub ids, local folders, or embedded models such as `embedded:0`.
        bases: models from which `models` were fine-tuned, each loaded under a new classification head drawn from
            `seed`; they come after the others.
        text: which texts, and how they are split.
        batch_size: texts a step, over all ranks together.
        max_length: longest text in tokens; longer ones are cut, and how many is said.
        seed: of the order of the texts, unless `reorder` says otherwise, and of the bases' heads.
        dtype: precision of the models: float32, bfloat16 or float16.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses.
        revisions: of each of `models` on the Hub; default: the main one.
        trust_remote_code: run code that a model's repository brings. Off, because it is somebody else's code.
        recipe: how embedded models are made.
        cache: where embedded models are kept. Default: $ALIGNERS_CACHE, else ~/.cache/aligners.
        workers: processes that prepare batches beside the main one.
        labels: which classes of a head answer each class of the texts, where their names do not say, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Several are added. One map, or a list of one for each model.

    Raises:
        ValueError: an option is out of its range, or no model is named.
    """

    option = "models"

    def __init__(
        self,
        models: list[str] | str = "embedded:0",
        bases: list[str] | str | None = None,
        text: TextSource = TextSource(),  # noqa: B008  (frozen)
        batch_size: int = 32,
        max_length: int = 128,
        seed: int = 0,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        revisions: list[str | None] | None = None,
        trust_remote_code: bool = False,
        recipe: Recipe = Recipe(),  # noqa: B008  (frozen)
        cache: Path | None = None,
        workers: int = 0,
        labels: LabelsOption = None,
    ) -> None:
        super().__init__(
            text=text,
            rows="cls",  # no rows are read; this policy asks nothing of the tokenizers
            special_tokens=True,
            batch_size=batch_size,
            max_length=max_length,
            seed=seed,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            recipe=recipe,
            cache=cache,
            workers=workers,
            labels=labels,
        )
        self.models, self.bases = _listed(models), _listed(bases or [])
        self.revisions = revisions
        self._order = seed
        self._named = with_revisions(self.models, revisions)

    def named(self) -> list[tuple[str, str | None]]:
        """Name and revision of each of `models`."""
        return self._named

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """No layer is asked for here."""
        return [[] for _ in depths]

    @property
    def reader(self) -> list[FrozenModel]:
        """The models: there is nothing else to make ready."""
        return self.frozen

    @property
    def frozen(self) -> list[FrozenModel]:
        """`models`, loaded on first use, and then `bases` under new heads.

        Raises:
            ValueError: a model cannot be loaded or has too few positions, or there is a base without a classifier.
        """
        if self._frozen is None:
            models = super().frozen
            self._frozen = [*models, *(self._base(name, models[0]) for name in self.bases)]
        return self._frozen

    def _base(self, name: str, tuned: FrozenModel) -> FrozenModel:
        if tuned.n_labels is None:
            raise ValueError(
                f"Expected `models` to be classifiers where `bases` are named, but {tuned.name} has no classification "
                "head. Name models that were fine-tuned to classify."
            )
        loaded = new_classifier(
            self.path(name),
            tuned.n_labels,
            self.seed,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )
        return FrozenModel(*loaded, name=name)

    def path(self, name: str) -> str:
        """The folder of an embedded model, made now if it is not in the cache; any other name as it is."""
        return str(self._embedded(name)) if name.startswith(EMBEDDED) else name

    def answers(self, split: Split) -> Tensor:
        """The class of each text of a split, (n,) int64, or the number to predict, (n,) float32.

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
        """Number of classes, C: those that are named, or one more than the largest in any split; 1 for numbers.

        Raises:
            ValueError: as in `answers`, or a class is negative.
        """
        if self.texts.regression:
            return 1
        splits: tuple[Split, ...] = ("fit", "validation", "test")
        least = min(int(self.answers(split).min()) for split in splits)
        if least < 0:
            raise ValueError(f"Expected classes counted from 0 in {self.text.source!r}, but got {least}.")
        return self.texts.classes

    def constant_answers(self) -> Tensor:
        """The answer to each held-out text that needs none of them, (n,): see `Texts.constant_label`."""
        constant = self.texts.constant_label(regression=self.texts.regression)
        return torch.full((len(self.answers("test")),), constant, dtype=torch.float64)

    def describe(self) -> dict[str, Any]:
        """Everything that says which texts and models these are, as plain values."""
        described = self.describe_rows()
        for name in ("rows", "special_tokens"):
            del described[name]
        count = len(self.models)
        return {
            "models": [model.identity() for model in self.frozen[:count]],
            "bases": [model.identity() for model in self.frozen[count:]],
            **described,
        }

    @property
    def order(self) -> int:
        """Seed of the order of the training texts."""
        return self._order

    def reorder(self, seed: int) -> None:
        """Draw the order of the training texts from another seed from now on, for the next model that trains."""
        self._order = seed

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load the texts; every check that can be made before training is made here."""
        for split in ("fit", "validation") if stage in ("fit", "validate") else ("test",):
            self.answers(split)

    def loader(self, split: Split, *, shuffle: bool = False, batch_size: int | None = None) -> DataLoader:
        """A loader of whole batches of one split, this rank's share of them."""
        return self.make_loader(split, shuffle=shuffle, whole=False, batch_size=batch_size)

    def train_dataloader(self) -> DataLoader:
        """The fitting texts, in an order that follows from `order` and the epoch."""
        return self.resumable(self.make_loader("fit", shuffle=True, whole=False, seed=self._order))

    def val_dataloader(self) -> DataLoader:
        """The validation texts."""
        return self.loader("validation", batch_size=WITHOUT_GRADIENTS * self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The held-out texts."""
        return self.loader("test")

    def on_before_batch_transfer(self, batch: TextBatch, dataloader_idx: int) -> TextBatch:
        """The batch as it is."""
        return batch

    def on_after_batch_transfer(self, batch: TextBatch, dataloader_idx: int) -> TextBatch:
        """The batch as it is: models are run by who trains."""
        return batch


def _listed(names: list[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
