"""Checkpoints: the state to resume from, also after Ctrl-C and SIGTERM, and the maps of a finished run."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from aligners.errors import check_range
from aligners.files.atomic import check_folder, whole_file
from aligners.files.sealed import check_sealed, seal_archive
from aligners.finetuning.classifier_training import Finetuning
from aligners.fitting.alignment import Alignment
from aligners.fitting.bank_training import BankTraining
from aligners.fitting.saved_bank import StoredBank, save_bank, take_sites
from aligners.fitting.universe.universe import pair_banks
from aligners.progress import tell
from aligners.reports.names import file_names

STEPS_BETWEEN_ASKING = 20
NOTICE = b"\nStopping after this batch, to save what has been reached. Again: stop at once, without saving.\n"


class Interruption:
    """Holds Ctrl-C and SIGTERM back until the run is between two steps.

    An exception that is raised wherever the signal arrives can cut an optimiser's step in two, separate it from its
    learning rate, or come between a validation and the saving of its results. Such a run cannot be resumed exactly.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._received: int | None = None
        self._holding = False

    def hold(self) -> None:
        """Only note signals from now on; a second one ends the process. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            if not self._holding:
                self._received = None
                self._holding = True
            for signum in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(signum, self._note)
                if before != self._note:
                    self._before.setdefault(signum, before)

    def release(self) -> None:
        """Handle the signals as before, and raise if one was held back."""
        self.end()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        self._raise(self._received)

    def end(self) -> None:
        """Stop holding signals back, even where the Trainer sets this handler again as it ends."""
        self._holding = False

    def check(self, trainer: pl.Trainer) -> None:
        """Raise if a signal was held back, on all ranks at the same batch.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SIGTERMException: it was SIGTERM.
        """
        if trainer.world_size == 1:
            self._raise(self._received)
            return
        held = self._received is not None
        if trainer.strategy.reduce_boolean_decision(held, all=False):
            self._raise(self._received or signal.SIGINT)

    def _note(self, number: int, _: Any) -> None:
        if self._received is not None or not self._holding:
            handler = signal.SIG_DFL if self._holding else self._before[number]
            signal.signal(number, handler)
            os.kill(os.getpid(), number)
            return
        self._received = number
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            os.write(2, NOTICE)  # the signal may have interrupted a `print`

    def _raise(self, number: int | None) -> None:
        if number == signal.SIGTERM:
            raise SIGTERMException(128 + signal.SIGTERM)
        if number is not None:
            raise KeyboardInterrupt


class WholeCheckpoints(TorchCheckpointIO):
    """Writes Lightning's checkpoints whole or not at all, on any filesystem, and reports a failure."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            OSError: it cannot be written; what was there before is still there.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(Path(path)) as unfinished:
            torch.save(checkpoint, unfinished)
            seal_archive(unfinished)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ValueError: it is damaged.
        """
        check_sealed(Path(path))
        return super().load_checkpoint(path, *args, **options)


class _Save(pl.callbacks.Checkpoint):
    """Writes `last.ckpt` every so often and when the run is stopped, and the final file when it is complete.

    Lightning calls a `Checkpoint` after all other callbacks, so that `last.ckpt` includes their state.
    """

    def __init__(
        self, folder: Path | None = None, every_n_minutes: float = 10.0
    ) -> None:
        check_range(above=0, every_n_minutes=every_n_minutes)
        self.folder = folder
        self.every_n_minutes = every_n_minutes
        self._saved_at = time.monotonic()
        self._interruption = Interruption()
        self._complete = False

    def inside(self, folder: Path) -> Self:
        """Return this callback writing to `folder`, unless the user named another."""
        other = copy(self)
        other.folder = self.folder or folder
        return other

    def setup(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str
    ) -> None:
        """Check that the folder can be written to before any work is done.

        Raises:
            ValueError: nothing can be written there.
        """
        if stage == "fit":
            self._saved_at = time.monotonic()
            if trainer.is_global_zero:
                check_folder(self._path(trainer).parent, "checkpoint.folder")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From now on, let signals stop the run only where it can be resumed."""
        self._interruption.hold()
        if isinstance(pl_module, BankTraining):
            pl_module.after_moments_batch = partial(self._while_reading, trainer)

    def on_train_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Take SIGTERM back from Lightning, whose handler communicates with the other ranks at any moment."""
        self._interruption.hold()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Stop here if a signal arrived: between two steps the run can be resumed."""
        self._interruption.check(trainer)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, *_: Any, **__: Any
    ) -> None:
        """Stop here if a signal arrived. All ranks agree where; a validation that is cut off is repeated."""
        if trainer.world_size == 1:
            self._interruption.check(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Renew `last.ckpt` if it is time."""
        self._save_if_due(trainer)

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException,
    ) -> None:
        """Save the progress of a run that is stopped; after any other error, leave the last checkpoint alone."""
        stopped = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        if stopped and not self._complete:
            self._save(trainer, announce=True)
        self._interruption.end()

    def teardown(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str
    ) -> None:
        """Write the final file once every callback has ended the fit, even if nothing was left to train."""
        if stage != "fit":
            return
        if isinstance(pl_module, BankTraining):
            pl_module.after_moments_batch = None
            bank = pl_module.stored()
            if trainer.is_global_zero and pl_module.final:
                path = self._path(trainer, pl_module.final)
                save_maps(bank, cast(Any, trainer).datamodule, path)
            trainer.strategy.barrier()  # every rank may read it now
        self._complete = True
        self._interruption.release()

    def _while_reading(self, trainer: pl.Trainer) -> None:
        """Save after a batch of moments. With several ranks nothing is saved: each has moments of its own."""
        self._interruption.check(trainer)
        if trainer.world_size == 1:
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        due = time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
        if trainer.world_size > 1:
            if trainer.global_step % STEPS_BETWEEN_ASKING:
                return  # agreeing makes the ranks wait for their devices
            due = trainer.strategy.broadcast(due)
        if due:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer, *, announce: bool = False) -> None:
        module = trainer.lightning_module
        if not isinstance(module, (BankTraining, Finetuning)) or not module.has_begun():
            return  # nothing has been done that could be resumed
        path = self._path(trainer)
        trainer.save_checkpoint(path)
        self._saved_at = time.monotonic()
        if announce:
            rank_zero_only(print)(f"Saved {path}")

    def _path(self, trainer: pl.Trainer, name: str = "last.ckpt") -> Path:
        folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir)
        return folder / name


class SaveAligners(_Save):
    """Writes `last.ckpt` while maps are fitted, and at the end what `save_maps` says, mostly `aligners.safetensors`.

    `last.ckpt` is a checkpoint of Lightning, to go on from (`train.py fit --ckpt_path`). `aligners.safetensors` holds
    the best parameters of every site, the moments, and what describes them: see `aligners.fitting.saved_bank`.

    Args:
        folder: where to write; default: beside the run's other files.
        every_n_minutes: how often `last.ckpt` is renewed, also while moments are read. It is also written when the run
            is stopped by Ctrl-C or SIGTERM.
        at_end: whether it is written once more when training has ended, so that a longer one can go on from it.
    """

    def __init__(
        self,
        folder: Path | None = None,
        every_n_minutes: float = 10.0,
        at_end: bool = True,
    ) -> None:
        super().__init__(folder, every_n_minutes)
        self.at_end = at_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Renew `last.ckpt` if any training steps were taken."""
        if self.at_end and trainer.global_step:
            self._save(trainer)


class SaveFinetuning(_Save):
    """Writes `last.ckpt` while a classifier is fine-tuned: before a batch, so that dropout can be reproduced.

    Args:
        every_n_minutes: how often `last.ckpt` is written. It is also written when the run is stopped by Ctrl-C or
            SIGTERM, before the next batch.
    """

    def __init__(self, every_n_minutes: float = 10.0) -> None:
        super().__init__(None, every_n_minutes)

    def on_train_batch_start(self, trainer: pl.Trainer, *batch: Any, **_: Any) -> None:
        """Stop here if a signal arrived, or renew `last.ckpt` if it is time. Do neither while gradients accumulate."""
        if batch[-1] % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_start(trainer)
            self._save_if_due(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Do nothing: a validation may come before the next batch."""

    on_validation_batch_start = on_train_batch_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here if a signal arrived after the last batch began: there is no next one."""
        self._interruption.check(trainer)


class SaveStitching(_Save):
    """Writes `last.ckpt` while stitching layers are trained, and `stitching.safetensors` when the run is complete.

    `last.ckpt` is a checkpoint of Lightning, to go on from (`train.py stitch --ckpt_path`). `stitching.safetensors`
    holds the best parameters of every site and what describes them: see `aligners.fitting.saved_bank`.

    Args:
        folder: where to write; default: beside the run's other files.
        every_n_minutes: how often `last.ckpt` is renewed between validations, each of which renews it too. It is also
            written when the run is stopped by Ctrl-C or SIGTERM.
    """

    def on_validation_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Renew `last.ckpt`, including what `BestPerSite` keeps of this validation."""
        if not trainer.sanity_checking:
            self._save(trainer)


def save_maps(bank: StoredBank, data: Any, path: Path) -> None:
    """Write the maps of a finished run; of many pairs, also a file for each, as `train.py fit` would.

    A fit of one pair, or a stitching run, gives one file. A fit of many pairs gives one for each pair,
    pairs/X--Y/aligners.safetensors, with the short names of the models. A universe gives both.

    Args:
        bank: the maps.
        data: the data module of the run.
        path: where the one file goes.
    """
    many = bank.command == "fit" and isinstance(bank.data["models"], list)
    if not many:
        save_bank(bank, path)
        tell(f"Saved {path}")
    if not many and bank.command != "universe":
        return
    folder = path.parent / "pairs"
    names = file_names(data.models)
    of_each = _of_universe if bank.command == "universe" else _of_pairs
    count = 0
    for i, j, pair in of_each(bank, data):
        name = f"{names[data.models[i]]}--{names[data.models[j]]}"
        save_bank(pair, folder / name / Alignment.final)
        count += 1
    tell(f"Saved {count} files {folder}/*/{Alignment.final}")


def _of_universe(bank: StoredBank, data: Any) -> Iterator[tuple[int, int, StoredBank]]:
    """Return the maps between every two models of a universe, with the numbers of the models."""
    for i, j, pair in pair_banks(bank):
        described, config = data.described_pair(i, j)
        yield i, j, replace(pair, data=described, data_config=config)


def _of_pairs(bank: StoredBank, data: Any) -> Iterator[tuple[int, int, StoredBank]]:
    """Return the maps of each pair of a fit of many pairs, with the numbers of its models."""
    of_each = zip(data.numbers, data.described_pairs(), strict=True)
    for (i, j), (places, described, config) in of_each:
        pair = take_sites(bank, places)
        yield i, j, replace(pair, data=described, data_config=config)
