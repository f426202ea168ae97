"""Moments that were read from a store of states, kept beside it: the same pass need not be made twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from aligners.similarity.algebra.moments import Moments
from datamodules.store.loader import StoredLoader
from datamodules.store.results import load_tensors, save_tensors

__all__ = ["KeptMoments"]


@dataclass(frozen=True)
class KeptMoments:
    """The file of the moments that a pass gives.

    Attributes:
        path: named by everything that decides them, to the last bit.
    """

    path: Path

    @classmethod
    def of(cls, loader: DataLoader, batches: int, about: Mapping[str, Any] | None) -> Self | None:
        """The file for a pass over a loader; None if its states do not come from a store.

        Args:
            loader: of the pass.
            batches: the most batches that are read.
            about: what else decides the moments, as plain values; None: it is not known, and nothing is kept.
        """
        if about is None or not isinstance(loader, StoredLoader):
            return None
        return cls(loader.beside("moments", {"batches": batches, **about}).with_suffix(".safetensors"))

    def load(self, trainer: pl.Trainer) -> dict[str, Moments] | None:
        """The moments of each bank, on the CPU; None if they are not there for the first rank.

        Raises:
            ValueError: the file is damaged.
        """
        if not trainer.strategy.broadcast(self.path.is_file()):
            return None
        found: dict[str, dict[str, Any]] = {}
        for name, value in load_tensors(self.path).items():
            bank, _, part = name.rpartition("/")
            found.setdefault(bank, {})[part] = value
        return {bank: Moments(**parts) for bank, parts in found.items()}

    def save(self, trainer: pl.Trainer, moments: Mapping[str, Moments]) -> None:
        """Keep the moments; the first rank writes them.

        Raises:
            OSError: they cannot be written.
        """
        if not trainer.is_global_zero:
            return
        parts = {
            f"{bank}/{part}": value.cpu() for bank, each in moments.items() for part, value in each._asdict().items()
        }
        save_tensors(self.path, parts)
