"""Reads the moments of the fitting texts, which every map needs before it is used or trained."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from aligners.datamodules.batches import LengthBatches, TextBatch, limited
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch
from aligners.datamodules.store.keeping import load_tensors, save_tensors
from aligners.datamodules.store.read_ahead import StoredLoader
from aligners.datamodules.tokens.splits import Split
from aligners.fitting.bank_training import BankTraining
from aligners.fitting.saved_bank import flat, nested
from aligners.models.calling import FiniteCheck
from aligners.progress import hidden, track
from aligners.similarity.algebra.moments import Moments, MomentsMetric

# For each bank, by name: x (S, N, d_x) and y (S, N, d_y).
Rows = Mapping[str, tuple[Tensor, Tensor]]


@dataclass
class MomentsSoFar:
    """The progress of reading moments.

    Attributes:
        batches: number of batches so far.
        metrics: the metric of each bank, over the rows of this rank.
    """

    batches: int = 0
    metrics: dict[str, MomentsMetric] = field(default_factory=dict)

    def add(self, rows: Rows) -> None:
        """Add a batch."""
        for name, (x, y) in rows.items():
            if name not in self.metrics:
                sites, _, d_x = x.shape
                d_y = y.shape[-1]
                metric = MomentsMetric(sites, d_x, d_y)
                self.metrics[name] = metric.to(x.device)
            self.metrics[name].update(x, y)
        self.batches += 1

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        sums = {}
        for name, metric in self.metrics.items():
            sums[name] = metric.moments()._asdict()
        return {"batches": self.batches, "metrics": sums}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Self:
        """Restore what `state` returned."""
        reading = cls(state["batches"])
        for name, sums in state["metrics"].items():
            metric = MomentsMetric.of(Moments(**sums))
            reading.metrics[name] = metric.to(device)
        return reading


def read_moments(
    trainer: pl.Trainer,
    loader: DataLoader,
    rows: Callable[[Any], Rows],
    check: FiniteCheck,
    batches: int,
    reading: MomentsSoFar | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Moments]:
    """Return the moments of the paired rows that all ranks together read, exact over ranks.

    After each batch `after_moments_batch` of the run's module is called, if it is a `BankTraining`.

    Args:
        trainer: the run's Trainer; a progress bar is shown if it has one.
        loader: this rank's share of the fitting texts.
        rows: reads a batch of the loader and returns, for each bank, x (S, N, d_x) and y (S, N, d_y).
        check: the check that `rows` uses to watch the states; flushed at the end.
        batches: the most batches to read.
        reading: moments that were read before, to which these are added.
        about: what decides the moments besides the loader's states, as plain values. With a store they are then kept
            beside it, and not read again if they are already there.

    Returns:
        The moments of each bank, at its S site pairs.

    Raises:
        ValueError: a state is not finite.
    """
    kept = None
    if about is not None and isinstance(loader, StoredLoader):
        # named by everything that decides the result of this pass
        name = loader.beside("moments", {"batches": batches, **about})
        kept = name.with_suffix(".safetensors")
        if trainer.strategy.broadcast(kept.is_file()):
            return _load(kept, trainer.strategy.root_device)

    if reading is None:
        reading = MomentsSoFar()
    module = trainer.lightning_module
    called = None
    if isinstance(module, BankTraining):
        called = module.after_moments_batch
    for batch in _tracked(trainer, loader, reading.batches, batches):
        reading.add(rows(batch))
        if called is not None:
            called()
    check.flush()

    moments = {}
    for bank, metric in reading.metrics.items():
        moments[bank] = metric.compute()
    if kept is not None and trainer.is_global_zero:
        _save(kept, moments)
    return moments


def _tracked(
    trainer: pl.Trainer, loader: DataLoader, done: int, most: int
) -> Iterator[Any]:
    """Yield the first `most` batches of a loader, except those already done, with a progress bar."""
    left = min(len(loader), most) - done
    left = max(left, 0)
    cast(LengthBatches, loader.sampler).skip(done)
    quiet = hidden(trainer)
    yield from track(islice(loader, left), "Reading moments", left, disable=quiet)


def _load(file: Path, device: torch.device) -> dict[str, Moments]:
    tensors = {}
    for name, value in load_tensors(file).items():
        tensors[name] = value.to(device)
    moments = {}
    for name, parts in nested(tensors).items():
        moments[name] = Moments(**parts)
    return moments


def _save(file: Path, moments: Mapping[str, Moments]) -> None:
    parts = {name: sums._asdict() for name, sums in moments.items()}
    tensors = {}
    for name, value in flat(parts):
        tensors[name] = value.cpu()
    save_tensors(file, tensors)


def moments_of_states(
    data: PairedActivations,
    rows: Callable[[PairedBatch], Rows],
    split: Split = "fit",
    *,
    reading: MomentsSoFar | None = None,
    also: Callable[[PairedBatch], None] | None = None,
    **about: Any,
) -> dict[str, Moments]:
    """Return the moments of paired rows of a split, read in batches as the run's Trainer would hand them on.

    Args:
        data: the data module of the run.
        rows: chooses the rows of a batch for each bank; see `read_moments`.
        split: split whose texts are read. Of the fitting texts, as many batches are read as the Trainer reads in its
            stage; a fit reads them in the order of epoch 0.
        reading: what was read before.
        also: is called with each batch as well. Moments that are kept beside a store are then not used.
        about: what decides the moments besides the data module's options and the split, as plain values.
    """
    trainer = cast(pl.Trainer, data.trainer)
    trains = trainer.state.fn == "fit"
    decides: dict[str, Any] = {"data": data.describe(), "config": data.config()}
    decides |= about
    loader = data.loader(split, shuffle=trains and split == "fit")
    batches = len(loader)
    if split == "fit":
        batches = limited(batches, trainer, "train" if trains else "test")
    else:
        decides["split"] = split

    def read(texts: TextBatch) -> Rows:
        batch = data.on_before_batch_transfer(texts, 0)
        batch = trainer.strategy.batch_to_device(batch)
        if also is not None:
            also(batch)
        return rows(batch)

    check = data.reader.check
    kept_by = None if also is not None else decides
    return read_moments(trainer, loader, read, check, batches, reading, kept_by)
