"""From a source of text to batches of tokens: read, split, tokenised, packed where asked, and loaded by length."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from aligners.models.loading.known import KnownModels
from datamodules.batches import LengthBatches
from datamodules.frozen_models import FrozenModels, Wanted
from datamodules.store.loader import StoredLoader
from datamodules.store.stores import Reads, Stores, check_store
from datamodules.text.fitted import FittedTexts, words_on_left_out
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource
from datamodules.text.texts import Texts, words_on_copies, words_on_splits
from datamodules.tokens.splits import Split, TokenisedSplits
from datamodules.tokens.tokenised import TokenisedTexts

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["TextPipeline"]

logger = logging.getLogger(__name__)


class TextPipeline:
    """Reads, splits, tokenises and batches texts for frozen models.

    Args:
        wanted: which models.
        words: whether the words of the texts are needed.
        text: which texts, and how they are split.
        batch_size: texts (or packed sequences) a step, over all ranks together.
        max_length: most tokens of a text; longer texts are cut, and the log says how many.
        packed: lay the texts end to end in sequences of exactly `max_length` tokens, for language models: an
            end-of-text token after each text, no padding, no labels, the incomplete last sequence dropped. A sequence
            then takes the place of a text.
        seed: of the order of the texts, and of everything else that a data module draws.
        workers: processes that prepare batches beside the main one.
        store: folder in which states of the models are kept: what is there is read, and what is missing is computed and
            written first, after its size was announced. Rows and their order stay the same. Default: the models run
            for every batch.
        store_dtype: data type of the stored states: float32, float16 or bfloat16; default: `dtype`. A smaller one
            rounds them.
        models: options of `FrozenModels`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        wanted: Wanted,
        words: bool,
        *,
        text: TextSource = TextSource(),  # noqa: B008  (frozen)
        batch_size: int = 32,
        max_length: int = 128,
        packed: bool = False,
        seed: int = 0,
        workers: int = 0,
        store: Path | None = None,
        store_dtype: str | None = None,
        **models: Any,
    ) -> None:
        check_store(store, store_dtype)
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("max_length", max_length, 2),
            ("workers", workers, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
        self.text, self.batch_size, self.max_length = text, batch_size, max_length
        self.packed, self.seed, self.workers = packed, seed, workers
        self.store, self.store_dtype = store, store_dtype
        self._stores = None if store is None else Stores(store, store_dtype)
        if packed and wanted.one_tokenizer is None:
            why = "`packed` cuts texts into sequences of equally many tokens, which must be the same texts for all"
            wanted = replace(wanted, one_tokenizer=(why, "Leave `packed` out"))
        known = None if store is None else KnownModels(store / "models")
        self.models = FrozenModels(wanted, lambda: self.texts, max_length, known, **models)
        self._words = words
        self._texts: Texts | None = None
        self._tokenised: TokenisedSplits | None = None
        self._fitted: dict[str, FittedTexts] = {}

    @property
    def texts(self) -> Texts:
        """The three splits, loaded on first use, without held-out texts that a model is known to be trained on."""
        if self._texts is None:
            self._whole = load_texts(self.text)
            described = self._whole.describe()
            rank_zero_only(print)(words_on_splits(described), *words_on_copies(described), flush=True)
            self._texts = _said(self._whole.without(self.models.fitted_on()))
        return self._texts

    @property
    def stored(self) -> list[Path]:
        """Folders of the stored states that were read so far."""
        return [] if self._stores is None else self._stores.opened

    def leave_out(self, fitted: Mapping[str, FittedTexts]) -> None:
        """Drop held-out texts that maps were fitted on, from now on.

        Args:
            fitted: name of a map's file -> the texts that it was fitted on.

        Raises:
            ValueError: no held-out text is left.
        """
        before, self._fitted = self.texts, dict(fitted)
        texts = self._whole.without({**self.models.fitted_on(), **fitted})
        if texts.origin != before.origin:
            self._texts, self._tokenised = _said(texts), None

    def other(self, source: TextSource) -> Texts:
        """Load another source, without held-out texts that a model or a map is known to be fitted on.

        Raises:
            ValueError: as `load_texts` does, or no held-out text is left.
        """
        return _said(load_texts(source).without({**self.models.fitted_on(embedded=True), **self._fitted}))

    @property
    def tokenised(self) -> TokenisedSplits:
        """The splits as the models read them."""
        if self._tokenised is None:
            self._tokenised = self.tokenise(self.texts)
        return self._tokenised

    def tokenise(self, texts: Texts) -> TokenisedSplits:
        """Tokenise other texts in the same way."""
        return TokenisedSplits(texts, self.models.tokenizers, self.max_length, words=self._words, packed=self.packed)

    def read_words(self, words: bool) -> None:
        """Set whether the words of the texts are needed from now on."""
        if words != self._words:
            self._words, self._tokenised = words, None

    def describe(self) -> dict[str, Any]:
        """Describe the texts for a report, as plain values."""
        return {
            **self.tokenised.describe(),
            "text": self.texts.describe(),
            "max_length": self.max_length,
            "dtype": self.models.dtype,
            **({} if self.store_dtype in (None, self.models.dtype) else {"stored_as": self.store_dtype}),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def loader(
        self,
        data: Split | TokenisedTexts,
        trainer: pl.Trainer | None = None,
        *,
        only: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        reads: Reads | None = None,
        alone: bool = False,
        **order: Any,
    ) -> DataLoader:
        """Make a loader that batches texts of similar length, with a rank's share of them.

        Args:
            data: a split, or other tokenised texts. Texts whose rows are all left out do not come.
            trainer: of the run, which knows the ranks; None: one process.
            only: how many texts, from the first on; default: all.
            batch_size: texts a step; default: `batch_size`.
            seed: of the order; default: `seed`.
            reads: which states are read of the batches; they come along if there is a store.
            alone: whether this rank loads all batches.
            order: `shuffle`, `whole` and `first_epoch` of `LengthBatches`.
        """
        data = self.tokenised[data] if isinstance(data, str) else data
        chosen = data.texts_with_rows()
        chosen = None if chosen is None else chosen[:only]
        batches = LengthBatches(
            data.lengths.numpy()[slice(only) if chosen is None else chosen],
            batch_size or self.batch_size,
            rank=0 if trainer is None or alone else trainer.global_rank,
            world=1 if trainer is None or alone else trainer.world_size,
            seed=self.seed if seed is None else seed,
            chosen=chosen,
            **order,
        )
        options: dict[str, Any] = {
            "sampler": batches,
            "batch_size": None,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "pin_memory": trainer is not None and trainer.strategy.root_device.type == "cuda",
        }
        if self._stores is None or reads is None or not any(reads.sites):
            return DataLoader(data, **options)
        (stored,) = self._stores.complete(self.models, [data], reads, trainer)
        return StoredLoader(data, stored, self._stores.rings, **options)

    def write_states(self, splits: Sequence[TokenisedTexts], reads: Reads, trainer: pl.Trainer | None) -> None:
        """Write the states of several splits that the store lacks, if there is one."""
        if self._stores is not None:
            self._stores.complete(self.models, splits, reads, trainer)


def _said(texts: Texts) -> Texts:
    """Warn of held-out texts that were dropped."""
    for words in words_on_left_out(texts.describe()):
        logger.warning(words)
    return texts
