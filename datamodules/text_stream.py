"""What every stream of activations shares: options, texts, frozen models, tokenised splits and their loaders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, Self, cast, get_args

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from datamodules.batches import LengthBatches
from datamodules.placing import Placing, check_placings, placings
from datamodules.reading import WORDS, RowPolicy, check_policy
from datamodules.text.label_names import LabelsOption
from datamodules.text.labels import MISSING
from datamodules.text.sources import TextSource
from datamodules.text.texts import Texts, load_texts
from datamodules.text.tokenised_splits import Split, TokenisedSplits
from datamodules.text.tokens import TokenisedTexts, same_tokenizer
from frozen.architectures import Component, first_site
from frozen.embedded.recipes import EMBEDDED, Recipe, embedded_model, embedded_recipe
from frozen.loading.models import load_frozen
from frozen.loading.placement import DeviceMap
from frozen.model import FrozenModel

__all__ = ["EMBEDDED", "WITHOUT_GRADIENTS", "Split", "TextStream", "with_revisions"]

WITHOUT_GRADIENTS = 4  # so many times the training batch fits where nothing is kept for a backward pass


class TextStream(pl.LightningDataModule):
    """Text in, something of frozen models out, read on the device where the run is.

    A subclass takes its options under their own names, hands those below on, and says which models it reads, at
    which layers, and what reads them.

    Args:
        text: which texts, and how they are split.
        rows: row policy.
        special_tokens: whether special tokens count as rows; words have none.
        batch_size: texts a step, over all ranks together.
        max_length: longest text in tokens; longer ones are cut, and how many is said.
        packed: lay the texts of a split end to end, an end-of-text token after each, and cut them into sequences of
            exactly `max_length` tokens, without padding, other special tokens, or labels. The incomplete last sequence
            is dropped, and that is said. A sequence then takes the place of a text.
        seed: seed of the order of the texts.
        dtype: precision of the models: float32, bfloat16 or float16.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses.
        trust_remote_code: run code that a model's repository brings.
        recipe: how embedded classifiers are made.
        cache: where embedded models are kept.
        workers: processes that prepare batches beside the main one.
        labels: which classes of the heads answer each class of the texts; see `text.label_names`. One map for all
            models, or a list of one for each.
        component: what is read at a layer: the residual stream, or what the attention or mlp of a block adds to it.
        devices: of each model, such as cuda:1; default: the run's. Batches and what is read stay on the run's device.
        device_map: of each model, which part goes where, as transformers takes it; needs accelerate.

    Raises:
        ValueError: an option is out of its range.
    """

    option: str  # name of the subclass's option that says which layers
    # Why models of different tokenizers are refused, and what to do instead.
    pairs_tokens = "`rows` 'tokens' pairs models token by token"
    instead_of_tokens = "Use `rows` 'words', 'mean' or 'cls'"

    def __init__(
        self,
        *,
        text: TextSource,
        rows: RowPolicy,
        special_tokens: bool,
        batch_size: int,
        max_length: int,
        packed: bool = False,
        seed: int,
        dtype: str,
        attn_implementation: str | None,
        trust_remote_code: bool,
        recipe: Recipe,
        cache: Path | None,
        workers: int,
        labels: LabelsOption = None,
        component: Component = "residual",
        devices: Sequence[str | None] | None = None,
        device_map: Sequence[DeviceMap | None] | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("max_length", max_length, 2),
            ("workers", workers, 0),
        ):
            if value < least:
                raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
        check_policy(rows)
        check_placings(devices)
        if component not in get_args(Component):
            raise ValueError(f"Expected `component` out of {', '.join(get_args(Component))}, but got {component!r}.")
        if packed and rows not in ("tokens", "mean"):
            raise ValueError(
                "A sequence of `packed` text has no words that are whole and no first token that stands for it. "
                f"Expected `rows` 'tokens' or 'mean', but got {rows!r}."
            )
        # Under the arguments' own names: `config` reads them back.
        self.text, self.rows, self.special_tokens = text, rows, special_tokens
        self.batch_size, self.max_length, self.seed, self.workers = batch_size, max_length, seed, workers
        self.packed, self.component, self.labels = packed, component, labels
        self.devices, self.device_map = devices, device_map
        self.dtype, self.attn_implementation = dtype, attn_implementation
        self.trust_remote_code, self.recipe, self.cache = trust_remote_code, recipe, cache
        self._texts: Texts | None = None
        self._frozen: list[FrozenModel] | None = None
        self._tokenised: TokenisedSplits | None = None

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def named(self) -> list[tuple[str, str | None]]:
        """Name and revision of each model."""

    @abstractmethod
    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The layers asked for of models of these depths, model by model, whether they have them or not."""

    @property
    @abstractmethod
    def reader(self) -> Any:
        """What prepares a batch on the CPU and reads it on the device; made on first use, with every check."""

    @property
    def reads_words(self) -> bool:
        """Whether the words of the texts are needed."""
        return self.rows in WORDS

    # ------------------------------------------------------------------ what it holds, once set up

    @property
    def texts(self) -> Texts:
        """The three splits, loaded on first use."""
        if self._texts is None:
            self._texts = load_texts(self.text)
        return self._texts

    @property
    def frozen(self) -> list[FrozenModel]:
        """The frozen models, loaded on first use; one that is named twice is one object.

        Raises:
            ValueError: a model cannot be loaded or has too few positions, or tokens are to be paired between
                tokenizers that differ.
        """
        if self._frozen is None:
            maps = {named: placing.device_map for named, placing in zip(self.named(), self.placings, strict=True)}
            loaded = {named: self._load(*named, device_map) for named, device_map in maps.items()}
            models = [loaded[named] for named in self.named()]
            tokenizers = _tokenizers(models)
            for model, tokenizer in zip(models, tokenizers, strict=True):
                if self.rows == "tokens" and not same_tokenizer(tokenizers[0], tokenizer):
                    raise ValueError(
                        f"{self.pairs_tokens}, but the tokenizers of {models[0].name} and {model.name} differ. "
                        f"{self.instead_of_tokens}."
                    )
                if self.packed and not same_tokenizer(tokenizers[0], tokenizer):
                    raise ValueError(
                        "`packed` cuts texts into sequences of equally many tokens, which are not the same text where "
                        f"the tokenizers differ, as those of {models[0].name} and {model.name} do. Leave `packed` out."
                    )
            self._frozen = models
        return self._frozen

    @property
    def placings(self) -> list[Placing]:
        """Where each model goes.

        Raises:
            ValueError: `devices` and `device_map` do not say that of every model, or contradict each other.
        """
        return placings(self.named(), self.devices, self.device_map)

    def _load(self, name: str, revision: str | None, device_map: DeviceMap | None) -> FrozenModel:
        path = str(self._embedded(name)) if name.startswith(EMBEDDED) else name
        model = load_frozen(
            path,
            revision=revision,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            device_map=device_map,
            known_as=name,
        )
        self._check_positions(name, model.max_length)
        return model

    def _check_positions(self, name: str, positions: int | None) -> None:
        if positions is not None and self.max_length > positions:
            raise ValueError(
                f"Expected `max_length` of at most {positions}, the positions that {name} has, "
                f"but got {self.max_length}."
            )

    def _embedded(self, name: str) -> Path:
        seed, recipe = embedded_recipe(name, self.recipe)
        split = self.texts.fit
        labelled = "label" in split.column_names
        if isinstance(recipe, Recipe) and not labelled:
            raise ValueError(
                f"The embedded model {name} is trained as a classifier, but the texts of {self.text.source!r} have no "
                "labels. Name a `label_column`, or give your own models."
            )
        labels = list(split["label"]) if labelled else None
        if isinstance(recipe, Recipe) and (self.texts.regression or MISSING in (labels or ())):
            raise ValueError(
                f"The embedded model {name} is trained as a classifier, but the fitting texts of {self.text.source!r} "
                "do not all have a class. Leave out those without one, or give your own models."
            )
        return embedded_model(seed, list(split["text"]), labels, recipe=recipe, cache=self.cache)

    def config(self) -> dict[str, Any]:
        """The options as plain values: `from_config` of the same class makes an equal data module.

        Where the models are is a matter of the machine, and no part of it.
        """
        names = [name for name in signature(type(self)).parameters if name not in ("devices", "device_map")]
        return {name: _plain(getattr(self, name)) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The data module whose `config` this is."""
        text, recipe = TextSource(**config["text"]), Recipe(**config["recipe"])
        cache = Path(config["cache"]) if config["cache"] else None
        return cls(**{**config, "text": text, "recipe": recipe, "cache": cache})

    def describe_rows(self) -> dict[str, Any]:
        """What says which rows these are, models and layers apart, as plain values."""
        return {
            "component": self.component,
            "rows": self.rows,
            "special_tokens": self.special_tokens,
            **self.tokenised.describe(),
            "text": self.texts.describe(),
            "max_length": self.max_length,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    # ------------------------------------------------------------------ Lightning's hooks

    def prepare_data(self) -> None:
        """Make what is missing on disk, on one rank: the data set's files and the embedded models."""
        _ = self.placings
        embedded = [name for name, _ in self.named() if name.startswith(EMBEDDED)]
        for name in embedded:
            self._check_positions(name, embedded_recipe(name, self.recipe)[1].max_length)
        if len(embedded) == len(self.named()):
            # Their depths are known before they are: a wrong layer need not wait for their training.
            depths = [embedded_recipe(name, self.recipe)[1].layers for name in embedded]
            for name, depth, layers in zip(embedded, depths, self.wanted(depths), strict=True):
                for layer in layers:
                    least = first_site(self.component)
                    if not least <= layer <= depth:
                        raise ValueError(
                            f"Expected `{self.option}` between {least} and L = {depth}, the blocks of {name}, got "
                            f"{layer}."
                        )
        for name in dict.fromkeys(embedded):
            self._embedded(name)

    def setup(self, stage: str) -> None:
        """Load the texts and the models; every check that can be made before reading is made here."""
        ranks = self.trainer.world_size if self.trainer is not None else 1
        if ranks > 1 and any(placing.given for placing in self.placings):
            raise ValueError(
                f"Expected one process where `devices` or `device_map` says where models are, but got {ranks}: all "
                "would use the same devices. Leave the options out, or set `trainer.devices` to 1."
            )
        _ = self.reader
        device = self.trainer.strategy.root_device if self.trainer is not None else "cpu"
        for model, placing in zip(self.frozen, self.placings, strict=True):
            if placing.device_map is None:
                model.to(placing.device or device)
        for split in ("fit", "validation") if stage in ("fit", "validate") else ("test",):
            self.split(split)

    @property
    def tokenised(self) -> TokenisedSplits:
        """The splits as the models read them."""
        if self._tokenised is None:
            tokenizers = _tokenizers(self.frozen)
            self._tokenised = TokenisedSplits(
                self.texts, tokenizers, self.max_length, words=self.reads_words, packed=self.packed
            )
        return self._tokenised

    def split(self, name: Split) -> TokenisedTexts:
        """A split, tokenised for all models."""
        return self.tokenised[name]

    def bytes_per_token(self, name: Split) -> float:
        """Bytes of UTF-8 per token of a split: see `TokenisedSplits.bytes_per_token`."""
        return self.tokenised.bytes_per_token(name)

    def make_loader(
        self,
        split: Split,
        *,
        shuffle: bool,
        whole: bool,
        only: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> DataLoader:
        """A loader of whole batches of one split, this rank's share of them.

        Args:
            split: which texts.
            shuffle: a new order every epoch, the same for every number of ranks.
            whole: whether a rank takes whole batches, or its part of each.
            only: the first so many texts of the split.
            batch_size: texts a step; default: that of the data module.
            seed: of the order; default: that of the data module.
        """
        data = self.split(split)
        return self.loader_of(data, shuffle=shuffle, whole=whole, only=only, batch_size=batch_size, seed=seed)

    def loader_of(
        self,
        data: TokenisedTexts,
        *,
        shuffle: bool = False,
        whole: bool = False,
        only: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        first_epoch: int = 0,
    ) -> DataLoader:
        """As `make_loader`, of any tokenised texts; where rows are left out, of the texts that keep one."""
        chosen = None
        if data.leave_out and data.marks:
            (marks,) = data.marks.values()
            chosen = marks.texts_with_rows()[:only].numpy()
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        batches = LengthBatches(
            data.lengths.numpy()[slice(only) if chosen is None else chosen],
            batch_size or self.batch_size,
            shuffle=shuffle,
            whole=whole,
            seed=self.seed if seed is None else seed,
            rank=rank,
            world=world,
            chosen=chosen,
            first_epoch=first_epoch,
        )
        return DataLoader(
            data,
            sampler=batches,
            batch_size=None,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def resumable(self, loader: DataLoader) -> DataLoader:
        """A training loader that begins, after an interruption, with the batch that was next."""
        loop, batches = cast(Any, self.trainer).fit_loop, cast(LengthBatches, loader.sampler)
        batches.set_epoch(loop.epoch_progress.current.processed)  # worker processes ask for batches at once
        if loop.restarting:
            batches.skip(loop.epoch_loop.batch_progress.current.processed % len(batches))
        return loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Choose the rows while the batch is still on the CPU."""
        return self.reader.prepare(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Run the models where the batch is now."""
        return self.reader.read(batch)


def with_revisions(models: Sequence[str], revisions: Sequence[str | None] | None) -> list[tuple[str, str | None]]:
    """Name and revision of each model, the main one where none are given.

    Raises:
        ValueError: there is no model, or not one revision for each.
    """
    if not models:
        raise ValueError("Expected `models` to name at least one model, but got none.")
    if revisions is not None and len(revisions) != len(models):
        raise ValueError(
            f"Expected one of `revisions` for each of the {len(models)} `models`, but got {len(revisions)}. Write null "
            "for the main one."
        )
    return list(zip(models, revisions or [None] * len(models), strict=True))


def _tokenizers(models: Sequence[FrozenModel]) -> list[PreTrainedTokenizerBase]:
    return [cast(PreTrainedTokenizerBase, model.tokenizer) for model in models]  # loaded with one


def _plain(value: Any) -> Any:
    """An option as YAML or a checkpoint can hold it."""
    if isinstance(value, (TextSource, Recipe)):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value
