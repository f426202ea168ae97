"""Text in three disjoint splits, its labels, and the record of which texts a model or a map was fitted on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aligners.datamodules.text.annotated.sentence import CHOICE
from aligners.datamodules.text.labels import MISSING, known_labels
from aligners.errors import UserError
from aligners.files.atomic import whole_file
from aligners.files.sealed import check_sealed, save_sealed
from aligners.files.yaml_tables import table_beside

if TYPE_CHECKING:
    from datasets import Dataset

WORDS: dict[str, str] = table_beside(__file__, "words.yaml")
FITTED = "fitted_on/texts.safetensors"  # in the folder of a model, but not beside its weights: some readers glob there
BLOCK = 1024  # texts that are hashed at a time


@dataclass(frozen=True)
class FittedTexts:
    """The texts that something was fitted on, including those that chose its best step.

    Attributes:
        keys: (n,) int64, ascending: a hash of each text, regardless of case, white space and the split's seed; for a
            sentence pair, also the hashes of its sentences.
        origins: for each data set its source, how it was split, and how many texts it gave.
    """

    keys: np.ndarray
    origins: list[dict[str, Any]]

    @classmethod
    def of(cls, origin: Mapping[str, Any], *tables: Dataset) -> Self:
        """Hash the texts of some splits.

        Args:
            origin: where they come from.
            tables: with the columns of `Texts`.
        """
        keys = np.fromiter(
            (key for table in tables for key in _every_key(table)), dtype=np.int64
        )
        return cls(
            np.unique(keys),
            [{**origin, "n_texts": sum(len(table) for table in tables)}],
        )

    def __or__(self, other: FittedTexts | None) -> FittedTexts:
        """Merge the texts of both."""
        if other is None:
            return self
        origins = [
            *self.origins,
            *(origin for origin in other.origins if origin not in self.origins),
        ]
        return FittedTexts(np.union1d(self.keys, other.keys), origins)

    def among(self, keys: np.ndarray) -> np.ndarray:
        """Tell which texts are among these, given their `hash_texts`, (n,): (n,) bool."""
        return np.isin(keys, self.keys)

    def state(self) -> dict[str, Any]:
        """Return a tensor and plain values for a checkpoint."""
        return {"keys": torch.from_numpy(self.keys), "origins": self.origins}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state` returned."""
        return cls(state["keys"].numpy(), state["origins"])

    def save(self, folder: Path) -> None:
        """Write the record into the folder of a model, whole or not at all."""
        with whole_file(folder / FITTED) as unfinished:
            save_sealed(
                save_file,
                {"keys": self.keys},
                unfinished,
                {"origins": json.dumps(self.origins)},
            )

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the record from the folder of a model; None where nothing is known.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / FITTED
        if not path.is_file():
            return None
        try:
            check_sealed(path)
            with safe_open(path, framework="np") as file:
                return cls(
                    file.get_tensor("keys"), json.loads(file.metadata()["origins"])
                )
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"Expected {path} to say which texts its model was fitted on, but it cannot be read: {error}. Train "
                "the model again, or remove the file if the model saw none of the held-out texts."
            ) from error


def _renumbered(table: Dataset) -> Dataset:
    """Number the rows of a table from 0 on."""
    return table.remove_columns("id").add_column("id", list(range(len(table))))


def hash_texts(table: Dataset) -> np.ndarray:
    """Hash each text of a split, (n,) int64."""
    return np.fromiter((_key(text) for text in _texts(table)), dtype=np.int64)


def plain_text(parts: Sequence[str | None]) -> bytes:
    """Join the one or two parts of a text, regardless of case and white space."""
    return "\x1f".join(
        " ".join((part or "").casefold().split()) for part in parts
    ).encode()


def words_on(described: Mapping[str, Any], *topics: str) -> list[str]:
    """Return a sentence on each topic, worded by `words.yaml`; topics without anything to say are skipped.

    Args:
        described: what `Texts.describe` returned, perhaps in an earlier version, which counted less.
        topics: `splits`: how many texts there are; `filled`: which held-out texts come from another split; `copies`:
            how many, and whether they were dropped; `left_out`: which held-out texts were left out.
    """
    from jinja2 import Template

    return [
        words for topic in topics if (words := Template(WORDS[topic]).render(described))
    ]


def _texts(table: Dataset) -> Iterator[tuple[str, ...]]:
    """Yield each text with its pair, reading in blocks: whole columns would take as much memory as the texts."""
    names = [name for name in ("text", "text_pair") if name in table.column_names]
    for block in table.select_columns(names).iter(BLOCK):
        yield from zip(*(block[name] for name in names), strict=True)


def _every_key(table: Dataset) -> Iterator[int]:
    for text in _texts(table):
        yield _key(text)
        if len(text) > 1:
            yield from (_key([part]) for part in text)


def _key(text: Sequence[str]) -> int:
    digest = blake2b(plain_text(text), digest_size=8, person=b"fitted").digest()
    return int.from_bytes(digest, "big", signed=True)


@dataclass(frozen=True)
class Texts:
    """Three splits that share no text, up to case and white space.

    Attributes:
        fit: texts to fit on. Every split has the columns text (str), text_pair (str, sentence pairs only),
            label (labelled text only: int64 for a class, -1 where there is none; float64 for a number to predict, NaN
            where there is none) and id (int64, the row's number in its split).
        validation: texts on which the fit is watched.
        test: texts that only the evaluation sees.
        label_names: names of the classes in the order of their numbers, where known.
        origin: how the splits were made, for `describe`.
    """

    fit: Dataset
    validation: Dataset
    test: Dataset
    label_names: list[str] | None
    origin: dict[str, Any]

    @property
    def regression(self) -> bool:
        """Whether the labels are numbers to predict."""
        return (
            "label" in self.test.column_names
            and self.test.features["label"].dtype == "float64"
        )

    @property
    def classes(self) -> int:
        """The number of classes: the number of names, or one more than the largest label of any split.

        Raises:
            ValueError: a class is negative; or all texts have one class, unless `TextSource.where` chose them from
                texts of several named classes.
        """
        labels, source = self._found_classes(), self.origin["source"]
        if labels and labels[0] < 0:
            raise UserError(
                f"Expected classes counted from 0 (-1: none) in {source!r}, but got the label {labels[0]}. Number them "
                f"0, 1, ..., or write numbers that are to be predicted with fractions, such as {labels[0]}.0."
            )
        if len(labels) == 1 and not (self.label_names and "where" in self.origin):
            only = self.label_names[labels[0]] if self.label_names else labels[0]
            raise UserError(
                f"Expected two or more classes in {source!r}, but all its texts have the label {only!r}: "
                "there is nothing to classify. Name another `label_column`, or other texts."
            )
        return (
            len(self.label_names)
            if self.label_names is not None
            else 1 + max(labels, default=-1)
        )

    @property
    def classes_to_learn(self) -> int:
        """Return the number of classes of a head that is to be trained.

        Raises:
            ValueError: as in `classes`, or no text has some class below the largest.
        """
        classes, labels = self.classes, self._found_classes()
        if self.label_names is None and len(labels) < classes:
            shown = ", ".join(map(str, labels[:5])) + (
                ", ..." if len(labels) > 5 else ""
            )
            raise UserError(
                f"Expected classes numbered 0, 1, 2, ... without gaps in {self.origin['source']!r}, but the labels are "
                f"{shown}: a head for them would have {classes} classes, {classes - len(labels)} of them without a "
                "text. Number the classes without gaps, or use names."
            )
        return classes

    @property
    def columns_without_labels(self) -> str:
        """List the columns besides the texts, in words for an error about missing labels; empty if there are none."""
        others = self.origin.get("other_columns", ())
        return (
            f" (`--data.text.label_column` can name one of {', '.join(others)})"
            if others
            else ""
        )

    def check_numbers(self) -> None:
        """Check that numbers to predict, if the labels are numbers, are not all equal.

        Raises:
            ValueError: all of them are equal.
        """
        splits = (
            torch.tensor(split["label"][:])
            for split in (self.fit, self.validation, self.test)
        )
        numbers = torch.cat(
            [labels[known_labels(labels)] for labels in splits]
        ).unique()
        if len(numbers) == 1:
            raise UserError(
                f"Expected different numbers to predict in {self.origin['source']!r}, but all its texts have "
                f"{numbers.item():g}. Name another `label_column`, or other texts."
            )

    def _found_classes(self) -> list[int]:
        """Return the classes that any text has, ascending."""
        every = {
            label
            for split in (self.fit, self.validation, self.test)
            for label in split["label"][:]
        }
        return sorted(every - {MISSING})

    def constant_label(self, *, regression: bool) -> float:
        """Return the best answer that ignores the text: the most frequent class of the fitting texts, or the mean.

        If no fitting text has a label, the held-out texts' labels are used.
        """
        splits = (torch.tensor(split["label"][:]) for split in (self.fit, self.test))
        known = next(
            given
            for given in (labels[known_labels(labels)] for labels in splits)
            if len(given)
        )
        return float(known.double().mean() if regression else known.bincount().argmax())

    def fitted(self, *splits: str) -> FittedTexts:
        """Return the record of some splits, which is saved with whatever is fitted on them."""
        keys = (
            "source",
            "subset",
            "revision",
            "split",
            "seed",
            "validation_share",
            "test_share",
        )
        origin = {name: self.origin[name] for name in keys if name in self.origin}
        return FittedTexts.of(
            {**origin, "splits": list(splits)},
            *(getattr(self, split) for split in splits),
        )

    def _fitted_on(self, fitted: Mapping[str, FittedTexts]) -> dict[str, np.ndarray]:
        """Return for each name which held-out texts are among those that it was fitted on."""
        keys = hash_texts(self.test)
        masks = {name: known.among(keys) for name, known in fitted.items()}
        if CHOICE not in self.test.column_names:
            return masks
        # if one answer is dropped, so are all answers to that question
        asked = np.asarray(self.test[CHOICE][:])
        return {name: np.isin(asked, asked[mask]) for name, mask in masks.items()}

    def without(self, fitted: Mapping[str, FittedTexts]) -> Texts:
        """Drop the held-out texts that anything was fitted on, and count them in `origin`.

        Args:
            fitted: name of what is to be measured -> the texts that it was fitted on.

        Raises:
            ValueError: no held-out text is left.
        """
        if not fitted:
            return self
        masks = self._fitted_on(fitted)
        rest = np.flatnonzero(~np.any(list(masks.values()), axis=0))
        if len(rest) == len(self.test):
            return self
        names = {name: int(seen.sum()) for name, seen in masks.items() if seen.any()}
        left_out = {
            "texts": len(self.test) - len(rest),
            "of": len(self.test),
            "fitted_on_them": names,
        }
        if len(rest) == 0:
            raise UserError(
                f"Expected held-out texts that nothing was fitted on, but models or maps were fitted on all "
                f"{len(self.test)} held-out texts of {self.origin['source']!r} ({', '.join(names)}). Use the split "
                "with which they were fitted, or other texts."
            )
        test = _renumbered(self.test.select(rest))
        return replace(self, test=test, origin={**self.origin, "left_out": left_out})

    def describe(self) -> dict[str, Any]:
        """Describe the texts for a report, as plain values."""
        sizes = {
            name: len(getattr(self, name)) for name in ("fit", "validation", "test")
        }
        return {**self.origin, "label_names": self.label_names, "n_texts": sizes}
