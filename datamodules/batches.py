"""Batches of tokenised text: which texts go together, and how they are padded for every model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = ["LengthBatches", "TextBatch", "TokenisedTexts", "same_tokenizer", "tokenise"]

logger = logging.getLogger(__name__)

CHUNK = 50  # batches among which texts of similar length are sought when shuffling


@dataclass
class TextBatch:
    """B texts, tokenised for each of M models and padded to the batch's longest.

    Attributes:
        inputs: for each model what its forward takes: input_ids, attention_mask and, where the model knows them,
            token_type_ids, each (B, T_m) int64. Models of equal tokenizers have the very same object.
        special: for each model True at its special tokens and its padding, (B, T_m) bool; shared likewise.
        text: number of each text in its split, (B,) int64.
        labels: class of each text, (B,) int64; None for plain text.
    """

    inputs: tuple[dict[str, Tensor], ...]
    special: tuple[Tensor, ...]
    text: Tensor
    labels: Tensor | None = None

    @property
    def inputs_x(self) -> dict[str, Tensor]:
        """Inputs of the first model, X."""
        return self.inputs[0]

    @property
    def inputs_y(self) -> dict[str, Tensor]:
        """Inputs of the last model, Y."""
        return self.inputs[-1]

    @property
    def special_x(self) -> Tensor:
        """Special tokens and padding of the first model, X."""
        return self.special[0]

    @property
    def special_y(self) -> Tensor:
        """Special tokens and padding of the last model, Y."""
        return self.special[-1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TextBatch:
        """The batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TextBatch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> TextBatch:
        """Change every tensor once, so that what models share stays shared."""
        done: dict[int, Any] = {}

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(changed(part) for part in value)
            if value is None:
                return None
            if id(value) not in done:
                many = isinstance(value, dict)
                done[id(value)] = {k: change(v) for k, v in value.items()} if many else change(value)
            return done[id(value)]

        return TextBatch(**{field.name: changed(getattr(self, field.name)) for field in fields(self)})


class LengthBatches(DistributedSampler):
    """Lists of row numbers, one list per step: texts of similar length together, little padding.

    Used as `DataLoader(dataset, sampler=LengthBatches(...), batch_size=None)`. Every text comes once per
    epoch, over all ranks, and every rank has equally many batches, none of them empty. The batches of all
    ranks together are those that a single rank would have, and rank r takes every `world`-th text of each. It
    is a `DistributedSampler` so that Lightning leaves it in place.

    Args:
        lengths: number of tokens of each text, (n,).
        batch_size: texts per step over all ranks. Batches are cut as equal as can be, none larger than this
            unless fewer than `world` texts per batch would be left.
        shuffle: a new order every epoch, from `seed` and the epoch. Otherwise the longest texts come first,
            so that a batch too large for the memory shows at once.
        seed: of the order.
        rank: this process's number, 0..world - 1.
        world: number of processes.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < world:
            raise ValueError(
                f"Expected `batch_size` (texts per step over all ranks) of at least the number of ranks, "
                f"{world}, but received {batch_size}."
            )
        if len(lengths) < world:
            raise ValueError(
                f"Expected at least one text for each of the {world} ranks, but received {len(lengths)} "
                "texts. Use fewer devices or more text."
            )
        self.lengths = np.asarray(lengths)
        super().__init__(self.lengths, num_replicas=world, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        n = len(self.lengths)
        count = min(-(-n // batch_size), n // world)
        self.bounds = np.arange(count + 1) * n // count
        self.start = 0

    def __len__(self) -> int:
        """Batches per epoch, of each rank and of all together, whatever was skipped."""
        return len(self.bounds) - 1

    def skip(self, batches: int) -> None:
        """Leave out the first batches of the next epoch to be read: to resume in the middle of one."""
        self.start = batches

    def __iter__(self) -> Iterator[list[int]]:
        """The rank's part of each batch."""
        start, self.start = self.start, 0
        for batch in self._batches()[start:]:
            yield batch[self.rank :: self.num_replicas].tolist()

    def _batches(self) -> list[np.ndarray]:
        if not self.shuffle:
            return np.split(np.argsort(-self.lengths, kind="stable"), self.bounds[1:-1])
        draw = np.random.default_rng([self.seed, self.epoch])
        order = draw.permutation(len(self.lengths))
        for first in range(0, len(self), CHUNK):
            chunk = order[self.bounds[first] : self.bounds[min(first + CHUNK, len(self))]]
            chunk[:] = chunk[np.argsort(self.lengths[chunk], kind="stable")]
        batches = np.split(order, self.bounds[1:-1])
        return [batches[i] for i in draw.permutation(len(batches))]


def tokenise(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> datasets.Dataset:
    """Tokenise a split, through the cache of `datasets`.

    Args:
        split: the columns text and id, and text_pair and label where there are such.
        tokenizer: of the model.
        max_length: tokens beyond this are cut. How many texts reach it is said once, in the log.

    Returns:
        The columns input_ids, special_tokens_mask, length, id, and token_type_ids and label where there are
        such, in the split's order.
    """
    from datasets.fingerprint import Hasher

    # Named by content: pickled tokenizers differ with what they were last used for.
    name = Hasher.hash([split._fingerprint, _description(tokenizer), type(tokenizer).__name__, max_length])
    tokens = split.map(
        _tokens,
        batched=True,
        remove_columns=[column for column in split.column_names if column not in ("id", "label")],
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        new_fingerprint=name,
        desc="Tokenising",
    )
    cut = int((np.asarray(tokens["length"][:]) >= max_length).sum())
    if cut:
        logger.warning("%d of %d texts reach %d tokens: what is beyond is cut.", cut, len(tokens), max_length)
    return tokens


def _tokens(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[Any]]:
    encoded = tokenizer(
        batch["text"],
        batch.get("text_pair"),
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_special_tokens_mask=True,
    )
    return {**encoded, "length": [len(ids) for ids in encoded["input_ids"]]}


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers turn every text into the same inputs."""
    return a is b or _description(a) == _description(b)


def _description(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides what a tokenizer makes of a text."""
    if tokenizer.is_fast:
        inner = json.loads(tokenizer.backend_tokenizer.to_str())
        # How the last call padded and cut, not a property of the tokenizer.
        del inner["padding"], inner["truncation"]
    else:
        inner = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    outer = {
        name: getattr(tokenizer, name)
        for name in (
            "padding_side",
            "truncation_side",
            "pad_token_id",
            "pad_token_type_id",
            "model_input_names",
        )
    }
    return json.dumps([inner, outer], sort_keys=True)


class _Tokens:
    """The tokenised texts of one model, laid end to end: a batch is then one gather per input."""

    def __init__(self, tokens: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None:
            raise ValueError(
                "Expected a tokenizer with a padding token, but that of "
                f"{tokenizer.name_or_path!r} has none. Set `tokenizer.pad_token`."
            )
        self.left = tokenizer.padding_side == "left"
        self.lengths = torch.as_tensor(np.asarray(tokens["length"][:], dtype=np.int64))
        self.starts = self.lengths.cumsum(0) - self.lengths
        table = tokens.with_format("arrow")[:]
        self.padding = {"input_ids": tokenizer.pad_token_id, "special_tokens_mask": 1}
        if "token_type_ids" in tokens.column_names:
            self.padding["token_type_ids"] = tokenizer.pad_token_type_id
        self.flat = {name: _flat(table.column(name)) for name in self.padding}

    def batch(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs for these rows, and where special tokens and padding are."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        column = torch.arange(longest)[None]
        if self.left:
            column = column - (longest - lengths)[:, None]
        real = (column >= 0) & (column < lengths[:, None])
        place = torch.where(real, self.starts[rows][:, None] + column, 0)
        padded = {name: torch.where(real, flat[place], self.padding[name]).long() for name, flat in self.flat.items()}
        special = padded.pop("special_tokens_mask").bool()
        return {**padded, "attention_mask": real.long()}, special


def _flat(column: Any) -> Tensor:
    """All lists of an Arrow column end to end, as int32 (by chunk: the offsets of all could overflow)."""
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


class TokenisedTexts(Dataset):
    """A split, tokenised for each of M models, that answers a list of row numbers with a `TextBatch`.

    Args:
        tokens: what `tokenise` made for each model; one and the same object for models of equal tokenizers.
        tokenizers: of each model: they say how to pad.
    """

    def __init__(self, tokens: Sequence[datasets.Dataset], tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
        if not tokens or len(tokens) != len(tokenizers):
            raise ValueError(
                "Expected `tokens` and `tokenizers` of the same models, one or more, but received "
                f"{len(tokens)} and {len(tokenizers)}."
            )
        if any(other["id"][:] != tokens[0]["id"][:] for other in tokens if other is not tokens[0]):
            raise ValueError("Expected `tokens` of the same texts for every model, but their ids differ.")
        first = [next(i for i, other in enumerate(tokens) if other is table) for table in tokens]
        # What models share is laid out, and later padded, once.
        self._laid = {i: _Tokens(tokens[i], tokenizers[i]) for i in sorted(set(first))}
        self._models = first
        self.lengths = torch.stack([laid.lengths for laid in self._laid.values()]).amax(0)
        self.ids = torch.as_tensor(tokens[0]["id"][:], dtype=torch.int64)
        labelled = "label" in tokens[0].column_names
        self.labels = torch.as_tensor(tokens[0]["label"][:], dtype=torch.int64) if labelled else None

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.ids)

    def __getitem__(self, rows: Sequence[int]) -> TextBatch:
        """The texts with these row numbers, as one batch."""
        index = torch.as_tensor(rows)
        found = {i: laid.batch(index) for i, laid in self._laid.items()}
        inputs, special = zip(*(found[i] for i in self._models), strict=True)
        labels = None if self.labels is None else self.labels[index]
        return TextBatch(inputs, special, self.ids[index], labels)
