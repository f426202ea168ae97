"""What all data modules share: texts read, split, tokenised and batched for frozen models, and Lightning's hooks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from aligners.datamodules.batches import LengthBatches, go_on_after_last_batch, limited
from aligners.datamodules.doubts import Doubts
from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.rows.far import FarRows
from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.store.read_ahead import StoredLoader
from aligners.datamodules.store.stores import KeptRows, Stores, check_store
from aligners.datamodules.text.labels import LabelsOption
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.recorded_texts import recorded_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import FittedTexts, Texts, words_on
from aligners.datamodules.tokens.splits import Split, TokenisedSplits
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError, check_range
from aligners.models.architectures import Component, first_site
from aligners.models.loading.known import KnownModels
from aligners.models.model import FrozenModel

# The training batch fits in memory so many times where nothing is kept for a backward pass.
WITHOUT_GRADIENTS = 4

DataT = TypeVar("DataT", bound=pl.LightningDataModule)
logger = logging.getLogger(__name__)


class TextModule(pl.LightningDataModule):
    """Turns text into batches for frozen models, or into what they compute, on the device of the run.

    A subclass decides which models and layers it reads, and keeps each option in an attribute of the same name.

    Args:
        named: name and revision of each model.
        words: whether the words of the texts are needed.
        one_tokenizer: why the models need equal tokenizers, and what else the user can do; None: they do not need them.
        text: which texts to read, and how to split them.
        batch_size: texts (or packed sequences) per step, over all ranks together.
        max_length: most tokens of a text; longer texts are cut, and the log reports how many.
        packed: lay the texts end to end in sequences of exactly `max_length` tokens, for language models: an
            end-of-text token after each text, no padding, no labels, the incomplete last sequence dropped. A sequence
            then takes the place of a text.
        seed: seed of the order of the texts, and of every other random choice of the data module.
        workers: processes that prepare batches beside the main one.
        store: folder in which states of the models are kept. States that are there are read; missing ones are computed
            and written first, after their size was announced. Rows and their order stay the same. Default: the models
            run for every batch.
        store_dtype: data type of the stored states: float32, float16 or bfloat16; default: `dtype`. A smaller one
            rounds them.
        store_rows: what is kept: `tokens`, from which any rows can be made, or `texts`, the one row per text that
            `rows` mean or cls makes. Models then run for anything else. Whatever form the store already has is read.
        models: options of `FrozenModels`.

    Attributes:
        frozen_models: loads the models, and places them.
        splits: what `test_dataloader` loads, one after the other.
        order: seed of the order of the texts.

    Raises:
        ValueError: an option is out of its range.
    """

    splits: tuple[Split, ...] = ("test",)
    option = "sites"  # the subclass's option that says which layers
    bases: Sequence[str] = ()
    labels: LabelsOption = None
    component: Component = "residual"
    storable = True  # whether states come from a store, if there is one
    far_rows: FarRows = "keep"  # subclasses that read rows leave far ones out
    _stores: Stores | None = None
    _texts: Texts | None = None
    _all_texts: Texts | None = None
    _tokenised: TokenisedSplits | None = None
    reader: Any  # of states or layers, loaded on first use; `ModelTexts` has none

    def __init__(
        self,
        named: Sequence[tuple[str, str | None]],
        words: bool,
        one_tokenizer: tuple[str, str] | None,
        *,
        text: TextSource = TextSource(),  # noqa: B008  (frozen)
        batch_size: int = 32,
        max_length: int = 128,
        packed: bool = False,
        seed: int = 0,
        workers: int = 0,
        store: Path | None = None,
        store_dtype: str | None = None,
        store_rows: KeptRows = "tokens",
        **models: Any,
    ) -> None:
        check_store(store, store_dtype, store_rows)
        check_range(least=1, batch_size=batch_size)
        check_range(least=2, max_length=max_length)
        check_range(least=0, workers=workers, seed=seed)
        super().__init__()
        self.text = text
        self.batch_size = batch_size
        self.max_length = max_length
        self.packed = packed
        self.seed = seed
        self.order = seed
        self.workers = workers
        self.store = store
        self.store_dtype = store_dtype
        known = None
        if store is not None:
            self._stores = Stores(store, store_dtype, store_rows)
            known = KnownModels(store / "models")
        # The command line finds the options of `FrozenModels` here.
        self.frozen_models = FrozenModels(
            named,
            one_tokenizer,
            lambda: self.texts_to_learn,
            max_length,
            known,
            self.bases,
            self.under_heads,
            packed,
            **models,
        )
        self._words = words
        self._fitted: dict[str, FittedTexts] = {}
        self.cautions: list[str] = []
        self.doubts = Doubts(self)

    def caution(self, sentence: str) -> None:
        """Log what makes figures on these texts and models doubtful, and put it first in every report, once.

        Args:
            sentence: a whole sentence, beginning with "Caution: ".
        """
        if sentence not in self.cautions:
            self.cautions.append(sentence)
            rank_zero_only(logger.warning)(sentence)

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """Return the sites that the user names, for models of these depths, without checking that they exist."""
        return [[] for _ in depths]

    def wanted_sites(self) -> list[list[int]]:
        """The sites at which each model is read."""
        return self.wanted([model.depth for model in self.frozen])

    @property
    def kinds_read(self) -> Sequence[RowKind]:
        """Kinds of rows that are read, the one of `rows` first."""
        return [RowKind("tokens")]

    def under_heads(self, tuned: FrozenModel) -> list[FrozenModel]:
        """Load the `bases`, each under a new head like that of the given model."""
        return []

    def check_models(self) -> None:
        """Load the models, with every check that is possible before reading."""
        _ = self.reader

    # ------------------------------------------------------------------ what it holds

    @property
    def stored(self) -> list[Path]:
        """Folders of the stored states read so far, which `aligners.cli.run_loggers` reports to W&B."""
        if self._stores is None:
            return []
        return self._stores.opened

    def named(self) -> Sequence[tuple[str, str | None]]:
        """Name and revision of each model, as the user wrote them."""
        return self.frozen_models.named

    @property
    def frozen(self) -> list[FrozenModel]:
        """The frozen models, loaded on first use; one that is named twice is one object."""
        return self.frozen_models.sharing

    def identities(self) -> list[dict[str, Any]]:
        """What each frozen model is, as plain values."""
        return [model.identity() for model in self.frozen]

    @property
    def texts(self) -> Texts:
        """The three splits, loaded on first use, without held-out texts that a model is known to have learned."""
        if self._texts is None:
            self._whole = self._load(self.text)
            sentences = words_on(self._whole.describe(), "splits", "filled", "copies")
            rank_zero_only(print)(*sentences, flush=True)
            self._caution_on(self._whole)
            self._texts = _warned(self._whole.without(self.frozen_models.fitted_on()))
        return self._texts

    def _load(self, source: TextSource) -> Texts:
        """Load the texts of a source, or the groups of recorded rows."""
        recorded = self.frozen_models.recorded
        if recorded is None:
            return load_texts(source, self.frozen_models.chat_tokenizers)
        joined = recorded.joined
        return recorded_texts(source, joined.names, recorded.said, joined.digest())

    @property
    def texts_to_learn(self) -> Texts:
        """The splits with all fitting texts, regardless of `text.max_texts`: embedded models are trained on them.

        For a stream, whose length is unknown, these are just the texts that are fitted on.
        """
        if self.text.max_texts is None or self.text.streaming:
            return self.texts
        if self._all_texts is None:
            self._all_texts = self._load(replace(self.text, max_texts=None))
        return self._all_texts

    @property
    def run_device(self) -> torch.device | None:
        """The device of the run; None without a Trainer."""
        if self.trainer is None:
            return None
        return self.trainer.strategy.root_device

    def leave_out(self, fitted: Mapping[str, FittedTexts]) -> None:
        """Drop from now on the held-out texts that maps were fitted on.

        Args:
            fitted: name of each map's file -> the texts that the map was fitted on.

        Raises:
            ValueError: no held-out text is left.
        """
        before = self.texts
        self._fitted = dict(fitted)
        texts = self._whole.without({**self.frozen_models.fitted_on(), **fitted})
        if texts.origin != before.origin:
            self._texts = _warned(texts)
            self._tokenised = None

    def other_texts(self, source: TextSource) -> Texts:
        """Load another source, without held-out texts that a model or a map is known to have been fitted on.

        Raises:
            ValueError: as `load_texts` does, or no held-out text is left.
        """
        fitted = {**self.frozen_models.fitted_on(embedded=True), **self._fitted}
        texts = self._load(source)
        self._caution_on(texts)
        texts = _warned(texts.without(fitted))
        self.frozen_models.check_tokens(texts)
        return texts

    def _caution_on(self, texts: Texts) -> None:
        for sentence in texts.origin.get("cautions", ()):
            self.caution(sentence)

    def texts_labelled_by(self, column: str) -> Texts:
        """Return the same texts, in the same order, with the labels of another column.

        Raises:
            ValueError: there is no such column, or it holds neither numbers nor names.
        """
        source = replace(
            self.text,
            label_column=column,
            text_columns=self.texts.origin["text_columns"],
        )
        texts = self._load(source)
        return texts.without({**self.frozen_models.fitted_on(), **self._fitted})

    @property
    def tokenised(self) -> TokenisedSplits:
        """The splits as the models read them."""
        if self._tokenised is None:
            self._tokenised = self.tokenise(self.texts)
        return self._tokenised

    @property
    def _most_tokens(self) -> int:
        """The most tokens of a text; groups of recorded rows are never cut."""
        recorded = self.frozen_models.recorded
        return self.max_length if recorded is None else recorded.tokens.longest + 1

    def tokenise(self, texts: Texts) -> TokenisedSplits:
        """Tokenise texts, each split when it is first read."""
        return TokenisedSplits(
            texts,
            self.frozen_models.tokenizers,
            self._most_tokens,
            words=self._words,
            packed=self.packed,
            models=self.frozen,
        )

    def split(self, name: Split) -> TokenisedTexts:
        """Return a split, tokenised for all models."""
        texts = self.tokenised[name]
        self.doubts.look_at_texts(name, texts)
        return texts

    def bytes_per_token(self, name: Split) -> float:
        """Return a split's bytes of UTF-8 per token; see `TokenisedSplits.bytes_per_token`."""
        return self.tokenised.bytes_per_token(name)

    def describe(self) -> dict[str, Any]:
        """Describe the texts for a report, as plain values."""
        dtype = self.frozen_models.dtype
        described = {
            **self.tokenised.describe(),
            "text": self.texts.describe(),
            "max_length": self._most_tokens,
            "dtype": dtype,
        }
        if self.store_dtype not in (None, dtype):
            described["stored_as"] = self.store_dtype
        cautions: list[str] = []
        for model in self.frozen:
            cautions += model.cautions  # logged when it was loaded
        cautions += self.cautions
        described |= {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "data_cautions": list(dict.fromkeys(cautions)),
        }
        return described

    def config(self) -> dict[str, Any]:
        """Return the options as plain values, from which an equal data module can be made."""
        return {
            "text": asdict(self.text),
            "batch_size": self.batch_size,
            "max_length": self.max_length,
            "packed": self.packed,
            "seed": self.seed,
            "workers": self.workers,
            **self.frozen_models.config(),
        }

    # ------------------------------------------------------------------ batches

    def load(
        self,
        data: Split | TokenisedTexts,
        *,
        only: int | None = None,
        batch_size: int | None = None,
        sites: Sequence[Sequence[int]] = (),
        alone: bool = False,
        chosen: Sequence[int] | None = None,
        **order: Any,
    ) -> DataLoader:
        """Make a loader that batches texts of similar length and gives each rank its share.

        Args:
            data: a split, or other tokenised texts. Texts whose rows are all left out are skipped.
            only: number of texts to load, from the first on; default: all.
            batch_size: texts per step; default: `batch_size`.
            sites: sites at which each model is read; their states come along if a store can have them.
            alone: whether this rank loads all batches.
            chosen: numbers of the texts to load, of a split whose texts all have rows; those of equal length come in
                this order. Default: all.
            order: arguments `shuffle`, `whole`, `group` and `first_epoch` of `LengthBatches`.
        """
        self.doubts.look_at_models()  # it reads texts, so it comes after every check of a module's setup
        if isinstance(data, str):
            data = self.split(data)
        if not alone:
            order["rank"], order["world"] = self._ranks()
        if chosen is None:
            batches = self._batches(data, only, batch_size or self.batch_size, order)
        else:
            numbers = np.asarray(chosen)
            batches = LengthBatches(
                data.lengths.numpy()[numbers],
                batch_size or self.batch_size,
                seed=self.order,
                chosen=numbers,
                **order,
            )
        device = self.run_device
        options: dict[str, Any] = {
            "sampler": batches,
            "batch_size": None,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "pin_memory": device is not None and device.type == "cuda",
        }
        if self._stores is not None and self.storable and any(sites):
            (stored,) = self._stores.complete(self, [data], sites)
            if stored:
                return StoredLoader(data, stored, **options)
        return DataLoader(data, **options)

    def _batches(
        self,
        data: TokenisedTexts,
        only: int | None,
        batch_size: int,
        order: Mapping[str, Any],
    ) -> LengthBatches:
        """Return the batches of the first texts of a split that have rows."""
        chosen = data.texts_with_rows()
        lengths = data.lengths.numpy()
        if chosen is not None:
            lengths = lengths[chosen]
            chosen = chosen[:only]
        return LengthBatches(
            lengths[:only], batch_size, seed=self.order, chosen=chosen, **order
        )

    def _ranks(self) -> tuple[int, int]:
        """Return the number of this process, and the number of all processes."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def loader(
        self, split: Split, *, shuffle: bool = False, **options: Any
    ) -> DataLoader:
        """Make a loader of one split's texts, with this rank's share of each batch.

        Args:
            split: texts to load.
            shuffle: whether every epoch has a new order, the same for any number of ranks.
            options: further arguments of `load`.
        """
        return self.load(split, shuffle=shuffle, sites=self.wanted_sites(), **options)

    def batches(self, split: Split, **options: Any) -> Iterator[Any]:
        """Iterate over a split's batches as a Trainer would hand them to its module, on the first model's device.

        Args:
            split: texts to load.
            options: options of `loader`.
        """
        place = self.splits.index(split) if split in self.splits else 0
        for texts in self.loader(split, **options):
            ready = self.on_before_batch_transfer(texts, place)
            moved = self.transfer_batch_to_device(ready, self.frozen[0].device, place)
            yield self.on_after_batch_transfer(moved, place)

    # ------------------------------------------------------------------ Lightning's hooks

    def prepare_data(self) -> None:
        """Train the embedded models that are missing, on one rank."""
        models = self.frozen_models
        _ = models.places  # raises before anything is made
        depths = models.embedded_depths
        if depths is not None:  # a wrong layer is reported before they are trained
            self._check_depths(depths)
        models.make_embedded()

    def _check_depths(self, depths: Sequence[int]) -> None:
        """Raise unless models of these depths have all layers that the user wants."""
        least = first_site(self.component)
        every = zip(self.frozen_models.named, depths, self.wanted(depths), strict=True)
        for (name, _), depth, layers in every:
            last = depth + name.startswith("embedded-gpt")  # which have a final norm
            wrong = [layer for layer in layers if layer < least or layer > last]
            if wrong:
                raise UserError(
                    f"Expected `{self.option}` between {least} and L = {depth}, the blocks of {name}, got {wrong[0]}."
                )

    def setup(self, stage: str) -> None:
        """Load the texts and the models, with every check that is possible before reading."""
        splits = splits_of_stage(stage)
        self.frozen_models.check_ranks(self._ranks()[1])
        self.check_models()
        self.place_models(self.run_device or "cpu")
        for split in splits:
            self.split(split)
        self.doubts.compared_on = "validation" if "validation" in splits else "test"
        if stage == "fit":  # an evaluation may still drop some of the held-out texts
            self.complete_store(splits)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move the batch without waiting for a GPU."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def place_models(self, device: torch.device | str) -> None:
        """Move the models to the device of the run, before anything is read."""
        self.frozen_models.place(device)

    def complete_store(self, splits: Sequence[Split]) -> None:
        """Write the states of these splits that the store lacks, if there is a store, after announcing their size."""
        if self._stores is not None and self.storable:
            every = [self.split(split) for split in dict.fromkeys(splits)]
            self._stores.complete(self, every, self.wanted_sites())

    def test_dataloader(self) -> list[DataLoader]:
        """Load the texts of `splits`: the held-out ones, unless an evaluation reads others too."""
        self.complete_store(self.splits)
        return [self.loader(split) for split in self.splits]

    def resumable(self, loader: DataLoader) -> DataLoader:
        """After an interruption, make a training loader begin with the batch that would have come next.

        torchdata's `StatefulDataLoader` (0.11) would not do: it keeps a state of its own in every checkpoint, which
        older checkpoints lack and which can only be loaded with the same number of `workers`.
        """
        trainer = cast(Any, self.trainer)
        order = cast(LengthBatches, loader.sampler)
        if trainer.fit_loop.restarting:
            batches = limited(len(loader), trainer, "train")
            epoch, done = go_on_after_last_batch(trainer.fit_loop, batches)
            # before the Trainer makes an iterator: worker processes take batches at once
            order.set_epoch(epoch)
            order.skip(done)
        return loader


def splits_of_stage(stage: str) -> tuple[Split, ...]:
    """Return the splits that a stage of Lightning reads."""
    if stage in ("fit", "validate"):
        return "fit", "validation"
    return ("test",)


def stream_of(trainer: Any, kind: type[DataT]) -> DataT:
    """Return the data module of a run.

    Args:
        trainer: Trainer of the run.
        kind: class of data module that is needed.

    Raises:
        ValueError: the run has none, or one of another kind.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, kind):
        given = "none" if data is None else type(data)
        raise UserError(
            f"Expected a data module of the kind {kind.__name__}, but got {given}. Give the Trainer one, as "
            "`datamodule`."
        )
    return data


def _warned(texts: Texts) -> Texts:
    """Warn of held-out texts that were dropped."""
    for words in words_on(texts.describe(), "left_out"):
        logger.warning(words)
    return texts
