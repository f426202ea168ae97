"""Reads the moments of the fitting texts, which every map needs before it is used or trained."""

from collections.abc import Callable, Mapping
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


@dataclass
class MomentsSoFar:
    """How far the moments have been read.

    Attributes:
        batches: number of batches so far.
        metrics: the metric of each bank, over the rows of this rank.
    """

    batches: int = 0
    metrics: dict[str, MomentsMetric] = field(default_factory=dict)

    def add(self, rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a batch: for each bank, x (S, N, d_x) and y (S, N, d_y)."""
        for name, (x, y) in rows.items():
            if name not in self.metrics:
                self.metrics[name] = MomentsMetric(len(x), x.shape[-1], y.shape[-1]).to(
                    x.device
                )
            self.metrics[name].update(x, y)
        self.batches += 1

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        sums = {
            name: metric.moments()._asdict() for name, metric in self.metrics.items()
        }
        return {"batches": self.batches, "metrics": sums}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Self:
        """Restore what `state` returned."""
        reading = cls(state["batches"])
        for name, sums in state["metrics"].items():
            reading.metrics[name] = MomentsMetric.of(Moments(**sums)).to(device)
        return reading


def read_moments(
    trainer: pl.Trainer,
    loader: DataLoader,
    rows: Callable[[Any], Mapping[str, tuple[Tensor, Tensor]]],
    check: FiniteCheck,
    batches: int,
    reading: MomentsSoFar | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Moments]:
    """Return the moments of the paired rows that all ranks together read, exact over ranks.

    After each batch `after_moments_batch` of the run's module is called, where it is a `BankTraining`.

    Args:
        trainer: the run's Trainer; a progress bar is shown if it has one.
        loader: this rank's share of the fitting texts.
        rows: reads a batch of the loader and returns, for each bank, x (S, N, d_x) and y (S, N, d_y).
        check: the check by which `rows` watches the states; flushed at the end.
        batches: the most batches to read.
        reading: what was read before, to which this is added.
        about: what decides the moments beside the loader's states, as plain values. With a store they are then kept
            beside it, and not read again where they are there already.

    Returns:
        The moments of each bank, at its S site pairs.

    Raises:
        ValueError: a state is not finite.
    """
    kept = None
    if about is not None and isinstance(loader, StoredLoader):
        # named by everything that decides what this pass gives
        kept = loader.beside("moments", {"batches": batches, **about}).with_suffix(
            ".safetensors"
        )
        if trainer.strategy.broadcast(kept.is_file()):
            return _load(kept, trainer.strategy.root_device)

    reading = MomentsSoFar() if reading is None else reading
    left = max(min(len(loader), batches) - reading.batches, 0)
    cast(LengthBatches, loader.sampler).skip(reading.batches)
    module = trainer.lightning_module
    for batch in track(
        islice(loader, left), "Reading moments", left, disable=hidden(trainer)
    ):
        reading.add(rows(batch))
        if isinstance(module, BankTraining) and module.after_moments_batch is not None:
            module.after_moments_batch()
    check.flush()

    moments = {name: metric.compute() for name, metric in reading.metrics.items()}
    if kept is not None and trainer.is_global_zero:
        _save(kept, moments)
    return moments


def _load(file: Path, device: torch.device) -> dict[str, Moments]:
    stored = nested(
        {name: value.to(device) for name, value in load_tensors(file).items()}
    )
    return {name: Moments(**parts) for name, parts in stored.items()}


def _save(file: Path, moments: Mapping[str, Moments]) -> None:
    parts = flat({name: sums._asdict() for name, sums in moments.items()})
    save_tensors(file, {name: value.cpu() for name, value in parts})


def moments_of_states(
    data: PairedActivations,
    rows: Callable[[PairedBatch], Mapping[str, tuple[Tensor, Tensor]]],
    split: Split = "fit",
    *,
    reading: MomentsSoFar | None = None,
    **about: Any,
) -> dict[str, Moments]:
    """Return the moments of paired rows of a split, read in batches as the Trainer of the run would hand them on.

    Args:
        data: the data module of the run.
        rows: chooses the rows of a batch for each bank; see `read_moments`.
        split: whose texts are read. Of fitting texts these are as many batches as the Trainer reads in its stage, in a
            fit in the order of epoch 0.
        reading: what was read before.
        about: what decides the moments besides the data module's options and the split, as plain values.
    """
    trainer = cast(pl.Trainer, data.trainer)
    trains = trainer.state.fn == "fit"
    about = {"data": data.describe(), "config": data.config(), **about}
    loader = data.loader(split, shuffle=trains and split == "fit")
    batches = len(loader)
    if split == "fit":
        batches = limited(batches, trainer, "train" if trains else "test")
    else:
        about["split"] = split

    def read(texts: TextBatch) -> Mapping[str, tuple[Tensor, Tensor]]:
        return rows(
            trainer.strategy.batch_to_device(data.on_before_batch_transfer(texts, 0))
        )

    return read_moments(
        trainer, loader, read, data.reader.check, batches, reading, about
    )
