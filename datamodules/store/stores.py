"""The stores that a data module reads from: opened on first use, and completed after their size was announced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning.pytorch.utilities import rank_zero_only
from rich.progress import Progress

from aligners.errors import UserError, check_known
from aligners.files.room import free_disk, in_words
from aligners.files.whole import check_folder
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from datamodules.frozen_models import FrozenModels
from datamodules.store.reading import Rings
from datamodules.store.states import DTYPES, StoredStates, name_of
from datamodules.store.writing import write_missing
from datamodules.tokens.tokenised import TokenisedTexts

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Reads(NamedTuple):
    """Which states a data module reads.

    Attributes:
        sites: of each model.
        component: what is read there.
    """

    sites: Sequence[Sequence[int]]
    component: Component


def check_store(folder: Path | None, dtype: str | None) -> None:
    """Raise unless the options of a store make sense."""
    check_known(DTYPES, store_dtype=dtype)
    if dtype is not None and folder is None:
        raise UserError(
            f"`store_dtype` {dtype!r} says how states are stored, but there is no `store`. Name its folder, or leave "
            "`store_dtype` out."
        )


class Stores:
    """The stored states of a data module.

    Args:
        folder: in which each store has a folder of its own.
        dtype: data type of the stored states; None: that of the models.

    Attributes:
        rings: memory for what is read.
    """

    def __init__(self, folder: Path, dtype: str | None) -> None:
        self.folder, self.dtype, self.rings = folder, dtype, Rings()
        self._opened: dict[tuple[FrozenModel, str, str], StoredStates] = {}

    @property
    def opened(self) -> list[Path]:
        """The folder of each store that was opened."""
        return [states.folder for states in self._opened.values()]

    def complete(
        self,
        models: FrozenModels,
        splits: Sequence[TokenisedTexts],
        reads: Reads,
        trainer: pl.Trainer | None = None,
    ) -> list[list[tuple[StoredStates, tuple[int, ...]]]]:
        """Write the states that are missing, after announcing their size; all ranks take part.

        Args:
            models: whose states are read; where one has to run, it is moved to its place meanwhile.
            splits: on which texts, tokenised for these models.
            reads: which states.
            trainer: of the run; a progress bar is shown if it has one.

        Returns:
            For each split, the states of each model and the sites that are read.

        Raises:
            ValueError: the disk has not the room, a store is damaged or not ours, or states are not finite.
            OSError: something cannot be written.
        """
        found = [self._open(models.loaded, data, reads) for data in splits]
        every = [each for split in found for each in split]
        if any(states.missing(sites) for states, sites in every):
            check_folder(self.folder, "store")
            self._announce(every)
            with _progress(every, trainer) as progress:
                for states, sites in every:
                    with models.running(states.model, None if trainer is None else trainer.strategy.root_device):
                        write_missing(states, sites, progress)
        for states, _ in every:
            states.note_use()
        if models.known is not None and os.access(self.folder, os.W_OK):
            models.known.save()
        return found

    def _open(
        self, models: Sequence[FrozenModel], data: TokenisedTexts, reads: Reads
    ) -> list[tuple[StoredStates, tuple[int, ...]]]:
        found: dict[FrozenModel, tuple[StoredStates, set[int]]] = {}
        for place, (model, sites) in enumerate(zip(models, reads.sites, strict=True)):
            if not sites:
                continue
            if model not in found:
                key = (model, data.digest(place), reads.component)
                if key not in self._opened:
                    stored_as = self.dtype or name_of(model.dtype)
                    self._opened[key] = StoredStates(self.folder, model, data, place, reads.component, stored_as)
                found[model] = (self._opened[key], set())
            found[model][1].update(sites)
        return [(states, tuple(sorted(sites))) for states, sites in found.values()]

    def _announce(self, every: Sequence[tuple[StoredStates, tuple[int, ...]]]) -> None:
        """Say how much will be written.

        Raises:
            ValueError: the disk has less.
        """
        sizes = {}
        for states, sites in every:
            size = sum(states.size(k) * len(lacking) for k, lacking in states.missing(sites).items())
            sizes[states] = size
        total, free = sum(sizes.values()), free_disk(self.folder)
        what = ", ".join(dict.fromkeys(states.model.name for states, size in sizes.items() if size))
        if total > free:
            raise UserError(
                f"Expected room for {in_words(total)} of states of {what} in `store` {self.folder}, but its disk has "
                f"{in_words(free)} free. Remove what is no longer needed, ask for fewer sites or texts, store "
                "bfloat16 (`store_dtype`), or leave `store` out."
            )
        rank_zero_only(print)(
            f"Writing {in_words(total)} of states of {what} to {self.folder}, whose disk has {in_words(free)} free.",
            flush=True,
        )


@contextmanager
def _progress(
    every: Sequence[tuple[StoredStates, tuple[int, ...]]], trainer: pl.Trainer | None
) -> Iterator[Callable[[int], None]]:
    """A progress bar over the rows that are missing, if the Trainer shows any."""
    shown = trainer is not None and trainer.is_global_zero and trainer.progress_bar_callback is not None
    missing = sum(states.manifest.rows[k] for states, sites in every for k in states.missing(sites))
    with Progress(transient=True, disable=not shown) as bar:
        task = bar.add_task("Writing states", total=missing)
        yield lambda rows: bar.advance(task, rows)
