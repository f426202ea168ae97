"""Which texts a model or a map was fitted on, kept beside it as hashes, so that it is not measured on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aligners.errors import UserError
from aligners.files.whole import whole_file
from datamodules.text.streaming import plain_text

if TYPE_CHECKING:
    from datasets import Dataset

FITTED = "fitted_on/texts.safetensors"  # in the folder of a model; not beside its weights, which some readers glob


@dataclass(frozen=True)
class FittedTexts:
    """The texts that something was fitted on, including those by which its best step was chosen.

    Attributes:
        keys: (n,) int64, ascending: a hash of each text, regardless of case, white space and the split's seed. Of a
            sentence pair also the hashes of its sentences.
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
        keys = np.fromiter((key for table in tables for key in _every_key(table)), dtype=np.int64)
        return cls(np.unique(keys), [{**origin, "n_texts": sum(len(table) for table in tables)}])

    def __or__(self, other: FittedTexts | None) -> FittedTexts:
        """All texts of both."""
        if other is None:
            return self
        origins = [*self.origins, *(origin for origin in other.origins if origin not in self.origins)]
        return FittedTexts(np.union1d(self.keys, other.keys), origins)

    def among(self, keys: np.ndarray) -> np.ndarray:
        """Tell which texts are among these, (n,) bool, from their `hash_texts`, (n,)."""
        return np.isin(keys, self.keys)

    def state(self) -> dict[str, Any]:
        """Return a tensor and plain values for a checkpoint."""
        return {"keys": torch.from_numpy(self.keys), "origins": self.origins}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state` returned."""
        return cls(state["keys"].numpy(), state["origins"])

    def save(self, folder: Path) -> None:
        """Write them into the folder of a model, whole or not at all."""
        path = folder / FITTED
        path.parent.mkdir(exist_ok=True)
        with whole_file(path) as unfinished:
            save_file({"keys": self.keys}, unfinished, {"origins": json.dumps(self.origins)})

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read them from the folder of a model; None where nothing is known.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / FITTED
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="np") as file:
                return cls(file.get_tensor("keys"), json.loads(file.metadata()["origins"]))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"Expected {path} to say which texts its model was fitted on, but it cannot be read: {error}. Make the "
                "model again, or remove the file if the held-out texts are none of them."
            ) from error


def hash_texts(table: Dataset) -> np.ndarray:
    """Hash each text of a split, (n,) int64."""
    return np.fromiter((_key(text) for text in _texts(table)), dtype=np.int64)


def words_on_left_out(described: Mapping[str, Any]) -> list[str]:
    """Say in a sentence which held-out texts were left out; nothing where none was.

    Args:
        described: what `Texts.describe` returned.
    """
    if "left_out" not in described:
        return []
    dropped, before, fitted = (described["left_out"][name] for name in ("texts", "of", "fitted_on_them"))
    first, *more = [f"{name} was fitted on {count}" for name, count in fitted.items()]
    said = ", ".join([f"{first} of them", *more])
    return [f"{dropped} of {before} held-out texts of {described['source']!r} were dropped: {said}."]


def _texts(table: Dataset) -> Iterator[tuple[str, ...]]:
    return zip(*(table[name][:] for name in ("text", "text_pair") if name in table.column_names), strict=True)


def _every_key(table: Dataset) -> Iterator[int]:
    for text in _texts(table):
        yield _key(text)
        if len(text) > 1:
            yield from (_key([part]) for part in text)


def _key(text: Sequence[str]) -> int:
    digest = blake2b(plain_text(text), digest_size=8, person=b"fitted").digest()
    return int.from_bytes(digest, "big", signed=True)
