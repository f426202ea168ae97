"""Batches of tokenised text: what they hold, how texts are grouped, and where a resumed fit continues."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from aligners.errors import UserError

CHUNK = 50  # batches within which texts of similar length are grouped when shuffling


class Movable:
    """A dataclass whose tensors, including those of the objects that it holds, move together."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Copy to another device."""
        return _changed(
            self, lambda tensor: tensor.to(device, non_blocking=non_blocking), {}
        )

    def pin_memory(self) -> Self:
        """Copy to page-locked memory, for asynchronous copies to a GPU."""
        return _changed(self, lambda tensor: tensor.pin_memory(), {})


def _changed(
    value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]
) -> Any:
    """Return a value with all of its tensors changed, each only once, so that shared parts stay shared.

    Not a closure: one that calls itself is a cycle, and would keep the tensors of every batch until Python happens to
    look for cycles.

    Args:
        value: any value; what is neither a tensor, nor a container, nor movable is returned as it is.
        change: takes a tensor and returns another.
        done: what was changed before, by the `id` of the original.
    """
    if id(value) in done:
        return done[id(value)]
    changed = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif isinstance(value, Movable):
        parts = _changed(vars(value), change, done)
        changed = type(value)(**parts)
    elif isinstance(value, dict):
        changed = {}
        for name, part in value.items():
            changed[name] = _changed(part, change, done)
    elif isinstance(value, (tuple, list)):
        parts = [_changed(part, change, done) for part in value]
        changed = type(value)(parts)
    done[id(value)] = changed
    return changed


@dataclass
class StoredRows(Movable):
    """The stored states of one model for every real token of a batch, or for the one row of each text, text by text.

    Attributes:
        sites: ascending.
        states: (P, d) at each of these sites, in the stored data type.
        pooled: whether the states are the rows themselves, (B, d) float32 at each site.
    """

    sites: tuple[int, ...]
    states: list[Tensor]
    pooled: bool = False


@dataclass
class TextBatch(Movable):
    """B texts, tokenised for each of M models and padded to the batch's longest.

    Attributes:
        inputs: for each model what its forward takes: input_ids, attention_mask and, where the model knows them,
            token_type_ids, each (B, T_m) int64. Models of equal tokenizers have the very same object.
        special: for each model True at its special tokens and its padding, (B, T_m) bool; shared in the same way.
        text: number of each text in its split, (B,) int64.
        labels: class of each text, (B,) int64, -1 where there is none; or the number to predict, (B,) float32, NaN
            where there is none; None for plain text.
        words: for each model the word of each token, (B, T_m) int64; shared in the same way. A text's words that every
            model has are counted from 0; -1 for special tokens, padding and the other words. None where `tokenise`
            was called without words.
        word_count: number of each text's words that every model has, (B,) int64; None in the same case.
        number: which batch of the epoch this is, 0, 1, ..., the same on every rank.
        text_numbers: `text` as plain numbers, which need no wait for a device, if the batch was made on the CPU.
        unseen: kind of rows -> (N,) bool, text by text: which rows have a type that fitting does not see; for the kinds
            whose types are known.
        far: kind of rows -> (N,) bool, text by text: which rows are far from all others; for the kinds that have such
            rows.
        leave_out: whether the rows of unseen types are to be left out, as in a batch to fit on.
        stored: the states read from a store, for each model that need not be run.
        answers: where the B texts are the answers to Q questions, the places of each question's answers in the batch,
            (Q, A) int64, -1 where it has fewer. `text` and `labels` are then of questions, (Q,): their numbers, and
            which of the answers is right, counted from 0.
    """

    inputs: tuple[dict[str, Tensor], ...]
    special: tuple[Tensor, ...]
    text: Tensor
    labels: Tensor | None = None
    words: tuple[Tensor, ...] | None = None
    word_count: Tensor | None = None
    number: int = 0
    text_numbers: tuple[int, ...] = ()
    unseen: dict[Any, Tensor] = field(default_factory=dict)
    far: dict[Any, Tensor] = field(default_factory=dict)
    leave_out: bool = False
    stored: dict[Any, StoredRows] = field(default_factory=dict)
    answers: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.text_numbers and self.text.device.type == "cpu":
            self.text_numbers = tuple(self.text.tolist())

    @property
    def inputs_x(self) -> dict[str, Tensor]:
        """Inputs of the first model, X."""
        return self.inputs[0]


class BatchOfRows(list[int]):
    """The row numbers of a batch, or of a rank's part of it, and the number of the batch."""

    def __init__(self, rows: Iterable[int], number: int) -> None:
        super().__init__(rows)
        self.number = number


class LengthBatches(DistributedSampler):
    """Groups texts of similar length into batches, to save padding; yields a list of row numbers for each step.

    Used as `DataLoader(dataset, sampler=LengthBatches(...), batch_size=None)`. Every text comes once per epoch, over
    all ranks. Every rank has batches, and none is empty. Together, the ranks have the batches that a single rank would
    have. It is a `DistributedSampler` so that Lightning leaves it in place.

    Args:
        lengths: number of tokens of each text, (n,).
        batch_size: texts per step over all ranks. Batches are as equal in size as possible, and none is larger than
            this unless fewer than `world` texts per batch would be left.
        shuffle: a new order every epoch, from `seed` and the epoch. Otherwise the longest texts come first,
            so that a batch too large for the memory shows at once.
        whole: how ranks share the batches. False: every `world`-th text of each batch, so that all ranks have equally
            many batches. True: every `world`-th batch, whole, for results that are computed batch by batch; some ranks
            may have one batch more, and the batches are the same for any number of ranks.
        seed: seed of the order.
        rank: this process's number, 0..world - 1.
        world: number of processes.
        chosen: numbers of the texts that take part, in the order of `lengths`; default: 0..n - 1.
        first_epoch: number of the first epoch, which decides its order.
        group: texts that stay together: batches then have a multiple of so many, `batch_size` rounded down, and the
            last has what is left, so that the groups are the same at any `batch_size`.

    Attributes:
        count: batches per epoch, of all ranks together.

    Raises:
        ValueError: there are too few texts, or too few in a batch, to give every rank its part.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        *,
        shuffle: bool = False,
        whole: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        chosen: np.ndarray | None = None,
        first_epoch: int = 0,
        group: int = 1,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.whole = whole
        self.chosen = chosen
        self.first_epoch = first_epoch
        self.start = 0
        n = len(self.lengths)
        groups = max(min(n, 1), n // group)
        most = math.ceil(groups / max(1, batch_size // group))
        self.count = most if whole else min(most, n // world)
        for_ranks = self.count if whole else min(n, batch_size)
        if for_ranks < world:
            what = "whole batch" if whole else "text of every batch"
            raise UserError(
                f"Expected at least one {what} for each of the {world} ranks, but got {n} texts in batches of "
                f"{batch_size} (`batch_size`). Use fewer devices, more text, or another `batch_size`."
            )
        data: Any = self.lengths  # only its length is used
        super().__init__(
            data, num_replicas=world, rank=rank, shuffle=shuffle, seed=seed
        )
        self.bounds = np.arange(self.count + 1) * groups // self.count * group
        self.bounds[-1] = n

    def __len__(self) -> int:
        """The number of batches that this rank has in an epoch, skipped ones included."""
        return len(self._own())

    def described(self) -> tuple[Any, ...]:
        """Return what decides the batches of the next epoch, except for the texts' lengths."""
        chosen = None if self.chosen is None else self.chosen.tolist()
        order = (self.shuffle, self.seed, self.first_epoch + self.epoch)
        parts = (self.count, self.whole, self.num_replicas)
        return len(self.lengths), chosen, *parts, *order

    def skip(self, batches: int) -> None:
        """Skip the first batches of the next epoch, to resume in the middle of it."""
        self.start = batches

    def __iter__(self) -> Iterator[BatchOfRows]:
        """The rank's part of each batch, or its batches."""
        start = self.start
        self.start = 0
        batches = self._batches()
        for number in self._own()[start:]:
            texts = batches[number]
            if not self.whole:
                texts = texts[self.rank :: self.num_replicas]
            if self.chosen is not None:
                texts = self.chosen[texts]
            yield BatchOfRows(texts.tolist(), number)

    def _own(self) -> range:
        """Return the numbers of the batches of which this rank takes all or a part."""
        if self.whole:
            return range(self.rank, self.count, self.num_replicas)
        return range(self.count)

    def _batches(self) -> list[np.ndarray]:
        """The batches of an epoch, of all ranks together."""
        if not self.shuffle:
            longest_first = np.argsort(-self.lengths, kind="stable")
            return np.split(longest_first, self.bounds[1:-1])
        draw = np.random.default_rng([self.seed, self.first_epoch + self.epoch])
        order = draw.permutation(len(self.lengths))
        for first in range(0, self.count, CHUNK):
            last = min(first + CHUNK, self.count)
            chunk = order[self.bounds[first] : self.bounds[last]]
            by_length = np.argsort(self.lengths[chunk], kind="stable")
            chunk[:] = chunk[by_length]
        batches = np.split(order, self.bounds[1:-1])
        return [batches[i] for i in draw.permutation(len(batches))]


def limited(batches: int, trainer: Any, stage: Literal["train", "test"]) -> int:
    """Return how many of `batches` a Trainer reads, under its `limit_train_batches` or `limit_test_batches`.

    Raises:
        ValueError: the limit leaves none.
    """
    name = f"limit_{stage}_batches"
    limit = getattr(trainer, name)
    count = min(batches, limit)
    if isinstance(limit, float):
        count = int(batches * limit)
    if not count:
        raise UserError(
            f"Expected `trainer.{name}` to leave at least one of {batches} batches, but got {limit}."
        )
    return count


def go_on_after_last_batch(fit_loop: Any, batches: int) -> tuple[int, int]:
    """Set the counters of a restored fit loop to what they were at the end of its last whole batch.

    Lightning 2.6 has no public way to say at which batch a fit begins. `tests/datamodules/test_batches.py` fails when a
    name used here no longer exists in Lightning.

    Only the number of processed batches can be relied on. Lightning's counter of all batches begun still includes one
    that was cut off, as Lightning 2.6 corrects the current epoch only. A validation at every n-th batch would then come
    one batch too soon.

    Args:
        fit_loop: the Trainer's, after it was restored and before it runs.
        batches: number of batches in an epoch.

    Returns:
        The epoch of the next batch, counted from 0, and how many of its batches are done.
    """
    loop = fit_loop.epoch_loop
    done = loop.batch_progress.total.processed
    loop.val_loop.batch_progress.reset()
    if done == 0:
        fit_loop.epoch_progress.reset()
        loop.batch_progress.reset()
        fit_loop.restarting = False
        return 0, 0

    epoch, before = divmod(done - 1, batches)
    for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        tracker.ready = tracker.started = epoch + 1
        tracker.processed = tracker.completed = epoch
    _end(loop.batch_progress.total, done)
    _end(loop.batch_progress.current, before + 1)
    loop.batch_progress.is_last_batch = before + 1 == batches
    loop._batches_that_stepped = done - 1  # private: the step that loggers write
    return divmod(done, batches)


def _end(tracker: Any, batches: int) -> None:
    """Record that the last of so many batches was processed, but not yet completed."""
    tracker.ready = tracker.started = tracker.processed = batches
    tracker.completed = batches - 1
