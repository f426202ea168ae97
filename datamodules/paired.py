"""The LightningDataModule that streams paired activations of two frozen models over labelled text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from datamodules.batches import LengthBatches, TokenisedTexts, same_tokenizer, tokenise
from datamodules.reading import PairedBatch, PairReader, RowPolicy, parse_sites
from datamodules.text import Texts, TextSource, load_texts
from frozen.embedded import Recipe, embedded_model
from frozen.loading import load_frozen
from frozen.model import FrozenModel

__all__ = ["EMBEDDED", "PairedActivations"]

EMBEDDED = "embedded:"
WITHOUT_GRADIENTS = 4  # so many times the training batch fits where no activations are kept for a backward pass
Split = Literal["fit", "validation", "test"]


class PairedActivations(pl.LightningDataModule):
    """Text in, paired rows of two frozen models out, read on the device where the aligner is.

    Args:
        model_x: X: a Hub id, a local folder, or `embedded:SEED` for a small BERT that is trained on the fitting
            texts the first time it is asked for and kept in `cache`.
        model_y: Y, likewise.
        text: which texts, and how they are split.
        sites: `all` (0..L), `blocks` (1..L), or layers and pairs: `1,3:5` is site 1 of both and X's 3 with Y's 5.
            Site 0 is the embedding output, site l the output of block l before any final norm.
        rows: `tokens`: every real token; `mean`: the mean over a text's tokens; `cls`: its first token.
        special_tokens: whether [CLS], [SEP] and the like count as rows. Injection replaces them too.
        batch_size: texts a step, over all ranks together.
        max_length: longest text in tokens; longer ones are cut, and how many is said.
        seed: seed of the order of the texts.
        dtype: precision of the two models: float32, bfloat16 or float16. Rows are always float32.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses.
        revision_x: revision of X on the Hub.
        revision_y: revision of Y on the Hub.
        trust_remote_code: run code that a model's repository brings. Off, because it is somebody else's code.
        recipe: how embedded models are made.
        cache: where embedded models are kept. Default: $ALIGNERS_CACHE, else ~/.cache/aligners.
        workers: processes that prepare batches beside the main one.
    """

    def __init__(
        self,
        model_x: str = "embedded:0",
        model_y: str = "embedded:1",
        text: TextSource = TextSource(),  # noqa: B008  (frozen)
        sites: str | list[str | int] = "all",
        rows: RowPolicy = "tokens",
        special_tokens: bool = True,
        batch_size: int = 32,
        max_length: int = 128,
        seed: int = 0,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        revision_x: str | None = None,
        revision_y: str | None = None,
        trust_remote_code: bool = False,
        recipe: Recipe = Recipe(),  # noqa: B008  (frozen)
        cache: Path | None = None,
        workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("max_length", max_length, 2),
            ("workers", workers, 0),
        ):
            if value < least:
                raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
        # Under the arguments' own names: `config` reads them back.
        self.model_x, self.model_y = model_x, model_y
        self.revision_x, self.revision_y = revision_x, revision_y
        self.text, self.sites, self.rows, self.special_tokens = text, sites, rows, special_tokens
        self.batch_size, self.max_length, self.seed, self.workers = batch_size, max_length, seed, workers
        self.dtype, self.attn_implementation = dtype, attn_implementation
        self.trust_remote_code, self.recipe, self.cache = trust_remote_code, recipe, cache
        self._texts: Texts | None = None
        self._data: dict[str, TokenisedTexts] = {}
        self._reader: PairReader | None = None

    # ------------------------------------------------------------------ what it holds, once set up

    @property
    def texts(self) -> Texts:
        """The three splits, loaded on first use."""
        if self._texts is None:
            self._texts = load_texts(self.text)
        return self._texts

    @property
    def reader(self) -> PairReader:
        """The two models and the site pairs, loaded on first use."""
        if self._reader is None:
            model_x = self._model(self.model_x, self.revision_x)
            model_y = self._model(self.model_y, self.revision_y)
            for model in (model_x, model_y):
                if model.max_length is not None and self.max_length > model.max_length:
                    raise ValueError(
                        f"Expected `max_length` of at most {model.max_length}, the positions that {model.name} has, "
                        f"but got {self.max_length}."
                    )
            pairs = parse_sites(self.sites, model_x.depth, model_y.depth)
            reader = PairReader(model_x, model_y, pairs, self.rows, self.special_tokens)
            if self.rows == "tokens" and not same_tokenizer(*_tokenizers(reader)):
                raise ValueError(
                    f"`rows` 'tokens' pairs the two models token by token, but the tokenizers of {model_x.name} and "
                    f"{model_y.name} differ. Use `rows` 'mean' or 'cls'."
                )
            self._reader = reader
        return self._reader

    def _model(self, name: str, revision: str | None) -> FrozenModel:
        path = str(self._embedded(name)) if name.startswith(EMBEDDED) else name
        model = load_frozen(
            path,
            revision=revision,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )
        model.name = name
        return model

    def _embedded(self, name: str) -> Path:
        seed = name.removeprefix(EMBEDDED)
        if not seed.isdigit():
            raise ValueError(f"Expected an embedded model to be named `{EMBEDDED}SEED`, but got {name!r}.")
        split = self.texts.fit
        if "label" not in split.column_names:
            raise ValueError(
                f"The embedded model {name} is trained as a classifier, but the texts of {self.text.source!r} have no "
                "labels. Name a `label_column`, or give your own models."
            )
        return embedded_model(
            int(seed), list(split["text"]), list(split["label"]), recipe=self.recipe, cache=self.cache
        )

    def config(self) -> dict[str, Any]:
        """The options as plain values: `PairedActivations.from_config` makes an equal data module."""
        return {name: _plain(getattr(self, name)) for name in signature(PairedActivations).parameters}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PairedActivations:
        """The data module whose `config` this is."""
        text, recipe = TextSource(**config["text"]), Recipe(**config["recipe"])
        cache = Path(config["cache"]) if config["cache"] else None
        return cls(**{**config, "text": text, "recipe": recipe, "cache": cache})

    def describe(self) -> dict[str, Any]:
        """Everything that says which rows these are, as plain values."""
        reader = self.reader
        return {
            "models": {"x": reader.model_x.identity(), "y": reader.model_y.identity()},
            "sites": [list(pair) for pair in reader.sites],
            "rows": reader.policy,
            "special_tokens": self.special_tokens,
            "text": self.texts.describe(),
            "max_length": self.max_length,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    # ------------------------------------------------------------------ Lightning's hooks

    def prepare_data(self) -> None:
        """Make what is missing on disk, on one rank: the data set's files and the embedded models."""
        if all(name.startswith(EMBEDDED) for name in (self.model_x, self.model_y)):
            # Their depth is known before they are: a wrong site need not wait for their training.
            depth = self.recipe.layers
            for site in {site for pair in parse_sites(self.sites, depth, depth) for site in pair}:
                if not 0 <= site <= depth:
                    raise ValueError(
                        f"Expected `sites` between 0 and L = {depth}, the embedded models' blocks, got {site}."
                    )
        for name in (self.model_x, self.model_y):
            if name.startswith(EMBEDDED):
                self._embedded(name)

    def setup(self, stage: str) -> None:
        """Load the texts and both models; every check that can be made before reading is made here."""
        reader = self.reader
        device = self.trainer.strategy.root_device if self.trainer is not None else "cpu"
        reader.model_x.to(device)
        reader.model_y.to(device)
        for split in ("fit", "validation") if stage in ("fit", "validate") else ("test",):
            self.split(split)

    def split(self, name: Split) -> TokenisedTexts:
        """A split, tokenised for both models."""
        if name not in self._data:
            texts, (tokenizer_x, tokenizer_y) = getattr(self.texts, name), _tokenizers(self.reader)
            tokens_x = tokens_y = tokenise(texts, tokenizer_x, self.max_length)
            if not same_tokenizer(tokenizer_x, tokenizer_y):
                tokens_y = tokenise(texts, tokenizer_y, self.max_length)
            self._data[name] = TokenisedTexts([tokens_x, tokens_y], [tokenizer_x, tokenizer_y])
        return self._data[name]

    def loader(
        self, split: Split, *, shuffle: bool = False, only: int | None = None, batch_size: int | None = None
    ) -> DataLoader:
        """A loader of whole batches of one split, this rank's share of them.

        Args:
            split: which texts.
            shuffle: a new order every epoch, the same for every number of ranks.
            only: the first so many texts of the split.
            batch_size: texts a step; default: that of the data module.
        """
        data = self.split(split)
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        batches = LengthBatches(
            data.lengths[:only].numpy(),
            batch_size or self.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            rank=rank,
            world=world,
        )
        return DataLoader(
            data,
            sampler=batches,
            batch_size=None,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def train_dataloader(self) -> DataLoader:
        """The fitting texts; after an interruption, from the batch that was next."""
        loader, loop = self.loader("fit", shuffle=True), cast(Any, self.trainer).fit_loop
        batches = cast(LengthBatches, loader.sampler)
        batches.set_epoch(loop.epoch_progress.current.processed)  # worker processes ask for batches at once
        if loop.restarting:
            batches.skip(loop.epoch_loop.batch_progress.current.processed % len(batches))
        return loader

    def val_dataloader(self) -> Sequence[DataLoader]:
        """The validation texts, and as many of the fitting texts to set beside them."""
        larger = WITHOUT_GRADIENTS * self.batch_size
        count = len(self.split("validation"))
        return [self.loader("validation", batch_size=larger), self.loader("fit", only=count, batch_size=larger)]

    def test_dataloader(self) -> DataLoader:
        """The held-out texts."""
        return self.loader("test")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Choose the rows while the batch is still on the CPU."""
        return self.reader.prepare(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> PairedBatch:
        """Run both heads where the batch is now."""
        return self.reader.read(batch)


def _tokenizers(reader: PairReader) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    return cast(Any, (reader.model_x.tokenizer, reader.model_y.tokenizer))


def _plain(value: Any) -> Any:
    """An option as YAML or a checkpoint can hold it."""
    if isinstance(value, (TextSource, Recipe)):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value
