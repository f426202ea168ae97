"""What all data modules of this package share: Lightning's hooks over a text pipeline and its frozen models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Self, cast, get_args

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from aligners.models.architectures import Component, first_site
from aligners.models.embedded.recipes import Recipe
from aligners.models.model import FrozenModel
from datamodules.batches import LengthBatches
from datamodules.pipeline import TextPipeline
from datamodules.resuming import go_on_after_last_batch, limited
from datamodules.rows.policies import POLICIES, policy_of
from datamodules.store.stores import Reads
from datamodules.text.fitted import FittedTexts
from datamodules.text.sources import TextSource
from datamodules.text.texts import Texts
from datamodules.tokens.splits import Split
from datamodules.tokens.tokenised import TokenisedTexts

__all__ = ["PAIRS_TOKENS", "WITHOUT_GRADIENTS", "TextModule", "check_component", "check_rows"]

PAIRS_TOKENS = ("`rows` 'tokens' pairs models token by token", "Use `rows` 'words', 'mean' or 'cls'")
WITHOUT_GRADIENTS = 4  # so many times the training batch fits where nothing is kept for a backward pass


class TextModule(pl.LightningDataModule):
    """Turns text into batches for frozen models, or into what they compute, on the device of the run.

    A subclass gives the pipeline all options that it does not take itself, keeps its own as attributes of the same
    names, and says which layers it reads.

    Attributes:
        pipeline: the texts, and the models that read them.
        splits: what `test_dataloader` loads, one after the other.
    """

    pipeline: TextPipeline
    splits: tuple[Split, ...] = ("test",)
    option = "layers"  # the subclass's option that says which layers
    not_kept: tuple[str, ...] = ("devices", "device_map", "store", "store_dtype")  # a matter of the machine
    fixed: tuple[str, ...] = ()  # options of its base class that a subclass sets itself

    def named(self) -> list[tuple[str, str | None]]:
        """Name and revision of each model, as the user wrote them."""
        return self.pipeline.models.named

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The layers that the user asks for, of models of these depths. Whether they exist is not checked here."""
        return [[] for _ in depths]

    def reads(self) -> Reads | None:
        """Which states of the models are read of every batch; None: none, or not of the texts as they are."""
        return None

    def check_models(self) -> None:
        """Load the models, with every check that can be made before reading."""
        _ = self.frozen

    # ------------------------------------------------------------------ what it holds

    @property
    def frozen(self) -> list[FrozenModel]:
        """The frozen models, loaded on first use; one that is named twice is one object."""
        return self.pipeline.models.loaded

    @property
    def text(self) -> TextSource:
        """Which texts, and how they are split."""
        return self.pipeline.text

    @property
    def texts(self) -> Texts:
        """The three splits, loaded on first use."""
        return self.pipeline.texts

    @property
    def batch_size(self) -> int:
        """Texts a step, over all ranks together."""
        return self.pipeline.batch_size

    @property
    def seed(self) -> int:
        """The seed of the order of the texts."""
        return self.pipeline.seed

    def split(self, name: Split) -> TokenisedTexts:
        """A split, tokenised for all models."""
        return self.pipeline.tokenised[name]

    def leave_out(self, fitted: Mapping[str, FittedTexts]) -> None:
        """Drop held-out texts that maps were fitted on: see `TextPipeline.leave_out`."""
        self.pipeline.leave_out(fitted)

    def bytes_per_token(self, name: Split) -> float:
        """Bytes of UTF-8 per token of a split: see `TokenisedSplits.bytes_per_token`."""
        return self.pipeline.tokenised.bytes_per_token(name)

    # ------------------------------------------------------------------ options

    def config(self) -> dict[str, Any]:
        """Return the options as plain values, from which `from_config` makes an equal data module."""
        own = [(self, kind, _OWN) for kind in type(self).__mro__ if issubclass(kind, TextModule)]
        passed = [(part, type(part), _PASSED) for part in (self.pipeline, self.pipeline.models)]
        return {
            name: _plain(getattr(part, name))
            for part, kind, kinds in (*own, *passed)
            for name, parameter in signature(kind).parameters.items()
            if parameter.kind in kinds and name not in (*self.not_kept, *self.fixed)
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a data module from its `config`."""
        text, recipe = TextSource(**config["text"]), Recipe(**config["recipe"])
        cache = Path(config["cache"]) if config["cache"] else None
        return cls(**{**config, "text": text, "recipe": recipe, "cache": cache})

    # ------------------------------------------------------------------ batches

    def loader(
        self, split: Split, *, shuffle: bool = False, only: int | None = None, batch_size: int | None = None
    ) -> DataLoader:
        """Make a loader of one split's texts, with this rank's share of each batch.

        Args:
            split: which texts.
            shuffle: a new order every epoch, the same for every number of ranks.
            only: how many texts, from the first on; default: all.
            batch_size: texts a step; default: that of the data module.
        """
        given: dict[str, Any] = {"only": only, "batch_size": batch_size, "reads": self.reads()}
        return self.pipeline.loader(split, self.trainer, shuffle=shuffle, **given)

    def batches(self, split: Split, **options: Any) -> Iterator[Any]:
        """Iterate over a split, with the batches that a Trainer would hand to its module, on the first model's device.

        Args:
            split: which texts.
            options: of `loader`.
        """
        place = self.splits.index(split) if split in self.splits else 0
        for texts in self.loader(split, **options):
            ready = self.on_before_batch_transfer(texts, place)
            moved = self.transfer_batch_to_device(ready, self.frozen[0].device, place)
            yield self.on_after_batch_transfer(moved, place)

    # ------------------------------------------------------------------ Lightning's hooks

    def prepare_data(self) -> None:
        """Train the embedded models that are missing, on one rank."""
        models = self.pipeline.models
        _ = models.placings
        depths = models.embedded_depths
        if depths is not None:  # a wrong layer need not wait for their training
            for (name, _), depth, layers in zip(models.named, depths, self.wanted(depths), strict=True):
                least = first_site(getattr(self, "component", "residual"))
                wrong = [layer for layer in layers if not least <= layer <= depth]
                if wrong:
                    raise ValueError(
                        f"Expected `{self.option}` between {least} and L = {depth}, the blocks of {name}, got "
                        f"{wrong[0]}."
                    )
        models.make_embedded()

    def setup(self, stage: str) -> None:
        """Load the texts and the models, with every check that can be made before reading."""
        models, trainer = self.pipeline.models, self.trainer
        models.check_ranks(1 if trainer is None else trainer.world_size)
        self.check_models()
        self.place_models("cpu" if trainer is None else trainer.strategy.root_device)
        for split in _of_stage(stage):
            self.split(split)
        if stage == "fit":  # of the held-out texts an evaluation may still drop some
            self.complete_store(_of_stage(stage))

    def place_models(self, device: torch.device | str) -> None:
        """Move the models to the device of the run, before anything is read."""
        self.pipeline.models.place(device)

    def complete_store(self, splits: Sequence[Split]) -> None:
        """Write the states of these splits that the store lacks, if there is one, after announcing them together."""
        reads = self.reads()
        if reads is not None:
            self.pipeline.write_states([self.split(split) for split in dict.fromkeys(splits)], reads, self.trainer)

    def train_dataloader(self) -> DataLoader:
        """The fitting texts; after an interruption, from the batch that was next."""
        return self.resumable(self.loader("fit", shuffle=True))

    def val_dataloader(self) -> Any:
        """The validation texts."""
        return self.loader("validation", batch_size=WITHOUT_GRADIENTS * self.batch_size)

    def test_dataloader(self) -> list[DataLoader]:
        """The texts of `splits`: the held-out ones, unless an evaluation reads others too."""
        self.complete_store(self.splits)
        return [self.loader(split) for split in self.splits]

    def resumable(self, loader: DataLoader) -> DataLoader:
        """After an interruption, let a training loader begin with the batch that would have come next.

        torchdata's `StatefulDataLoader` (0.11) keeps a state of its own in every checkpoint: older checkpoints have
        none, and it can only be loaded with the same number of `workers`.
        """
        trainer, order = cast(Any, self.trainer), cast(LengthBatches, loader.sampler)
        if trainer.fit_loop.restarting:
            batches = limited(len(loader), trainer, "train")
            epoch, done = go_on_after_last_batch(trainer.fit_loop, batches)
            order.set_epoch(epoch)  # before the Trainer does: worker processes ask for batches at once
            order.skip(done)
        return loader


_OWN = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_PASSED = (Parameter.KEYWORD_ONLY,)  # positional arguments are no options: the parts give them to each other


def check_rows(rows: str, component: Component, packed: bool) -> None:
    """Raise unless `rows` and `component` are known, and can be read from `packed` text if it is."""
    check_component(component)
    if packed and not policy_of(rows).packed:
        fit = " or ".join(repr(name) for name, policy in POLICIES.items() if policy.packed)
        raise ValueError(
            "A sequence of `packed` text has no words that are whole and no first token that stands for it. "
            f"Expected `rows` {fit}, but got {rows!r}."
        )


def check_component(component: Component) -> None:
    """Raise unless `component` is one that can be read."""
    if component not in get_args(Component):
        raise ValueError(f"Expected `component` out of {', '.join(get_args(Component))}, but got {component!r}.")


def _of_stage(stage: str) -> tuple[Split, ...]:
    return ("fit", "validation") if stage in ("fit", "validate") else ("test",)


def _plain(value: Any) -> Any:
    """Convert an option to what YAML and checkpoints can hold."""
    if isinstance(value, (TextSource, Recipe)):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value
