"""The LightningDataModule of whole models on one stream of text: what stitching trains and is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from datamodules.asking import Asking, TaskBatch
from datamodules.batches import TextBatch
from datamodules.reading import parse_sites
from datamodules.text.label_names import LabelsOption
from datamodules.text.sources import TextSource
from datamodules.text_stream import WITHOUT_GRADIENTS, Split, TextStream, with_revisions
from frozen.architectures import Component, Task
from frozen.embedded.recipes import Recipe
from frozen.loading.placement import DeviceMap
from frozen.model import FrozenModel

__all__ = ["ModelTexts", "route_sites"]


class ModelTexts(TextStream):
    """Text in, batches for two or more frozen models of one tokenizer out. Nothing is read from the models here.

    Args:
        models: Hub ids, local folders, or embedded models such as `embedded:0` and `embedded-gpt:0:activation=solu`.
        text: which texts, and how they are split.
        sites: where a state is read and where it goes in: `blocks` (1..L), `all` (0..L), `grid` (every block with every
            block), or layers and pairs: `1,3:5` is site 1 of both and site 3 of the earlier model in `models` with
            site 5 of the later one.
        packed: lay the texts end to end in sequences of exactly `max_length` tokens, for language models.
        masked_share: share of the tokens that a masked language model has to find.
        batch_size: texts (or packed sequences) a step, over all ranks together.
        max_length: longest text in tokens; longer ones are cut, and how many is said.
        seed: of the order of the texts, and of the masks.
        dtype: precision of the models: float32, bfloat16 or float16.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses.
        revisions: of each model on the Hub; default: the main one.
        trust_remote_code: run code that a model's repository brings. Off, because it is somebody else's code.
        recipe: how embedded classifiers are made.
        cache: where embedded models are kept. Default: $ALIGNERS_CACHE, else ~/.cache/aligners.
        workers: processes that prepare batches beside the main one.
        labels: which classes of a head answer each class of the texts, where their names do not say, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Several are added. One map, or a list of one for each model.
        component: what is read and replaced at a site: `residual`, the stream between the blocks; `attention` or `mlp`,
            what that sub-layer of the block adds to the stream.
        devices: of each model, such as cuda:1; default: the run's.
        device_map: of each model, which part goes where, as transformers takes it; needs accelerate.

    Raises:
        ValueError: an option is out of its range, or there are no two models.
    """

    option = "sites"
    pairs_tokens = "Stitching puts the state of a token where another model has that of the same token"
    instead_of_tokens = "Position by position these would be different pieces of text: choose models of one tokenizer"

    def __init__(
        self,
        models: list[str] = ["embedded:0", "embedded:1"],  # noqa: B006  (never changed)
        text: TextSource = TextSource(),  # noqa: B008  (frozen)
        sites: str | list[str | int] = "blocks",
        packed: bool = False,
        masked_share: float = 0.15,
        batch_size: int = 32,
        max_length: int = 128,
        seed: int = 0,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        revisions: list[str | None] | None = None,
        trust_remote_code: bool = False,
        recipe: Recipe = Recipe(),  # noqa: B008  (frozen)
        cache: Path | None = None,
        workers: int = 0,
        labels: LabelsOption = None,
        component: Component = "residual",
        devices: list[str | None] | None = None,
        device_map: list[DeviceMap | None] | None = None,
    ) -> None:
        super().__init__(
            text=text,
            rows="tokens",
            special_tokens=True,
            packed=packed,
            batch_size=batch_size,
            max_length=max_length,
            seed=seed,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            recipe=recipe,
            cache=cache,
            workers=workers,
            labels=labels,
            component=component,
            devices=devices,
            device_map=device_map,
        )
        if len(models) < 2:
            raise ValueError(
                f"Expected `models` to name at least two models, but got {models}. The same name twice is allowed: "
                "a model and itself."
            )
        if not 0 < masked_share < 1:
            raise ValueError(f"Expected `masked_share` between 0 and 1, but got {masked_share}.")
        with_revisions(models, revisions)
        self.models, self.revisions = list(models), revisions
        self.sites, self.masked_share = sites, masked_share

    def named(self) -> list[tuple[str, str | None]]:
        """Name and revision of each model."""
        return with_revisions(self.models, self.revisions)

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model, as source or as target of any route."""
        sites: list[set[int]] = [set() for _ in depths]
        for a in range(len(depths)):
            for b in range(a + 1, len(depths)):
                for i, j in route_sites(self.sites, depths, a, b, self.component):
                    sites[a].add(i)
                    sites[b].add(j)
        return [sorted(each) for each in sites]

    @property
    def reader(self) -> list[FrozenModel]:
        """The models: there is nothing else to make ready, and every check of theirs is made by loading them."""
        for model, sites in zip(self.frozen, self.wanted([model.depth for model in self.frozen]), strict=True):
            for site in sites:
                model.check_site(site, "sites", self.component)
        if self.task is not None:
            Asking.of(self.frozen[-1], masked_share=self.masked_share, seed=self.seed)
        return self.frozen

    @property
    def task(self) -> Task | None:
        """What the last model's head answers."""
        return self.frozen[-1].task

    def describe(self) -> dict[str, Any]:
        """Everything that says which texts and models these are, as plain values."""
        masked = {"masked_share": self.masked_share} if self.task == "masked" else {}
        return {"models": [model.identity() for model in self.frozen], **masked, **self.describe_rows()}

    # ------------------------------------------------------------------ Lightning's hooks

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> TaskBatch:
        """Choose rows and masks while the batch is still on the CPU."""
        return self.prepare(batch, self._epoch())

    def prepare(self, texts: TextBatch, epoch: int = 0) -> TaskBatch:
        """A batch with its rows and with what the last model's task asks of it, masked where that is part of it.

        Args:
            texts: on the CPU.
            epoch: a training text is masked anew in every epoch.

        Raises:
            ValueError: the task is a classification and the texts have no labels.
        """
        return Asking.of(self.frozen[-1], masked_share=self.masked_share, seed=self.seed)(texts, epoch)

    def transfer_batch_to_device(self, batch: TaskBatch, device: torch.device, dataloader_idx: int) -> TaskBatch:
        """Move it without waiting for a GPU."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def on_after_batch_transfer(self, batch: TaskBatch, dataloader_idx: int) -> TaskBatch:
        """Nothing: models are run by who trains."""
        return batch

    def _epoch(self) -> int:
        training = self.trainer is not None and self.trainer.training
        return cast(Any, self.trainer).current_epoch + 1 if training else 0

    def loader(self, split: Split, *, shuffle: bool = False, batch_size: int | None = None) -> DataLoader:
        """A loader of whole batches of one split, this rank's share of them."""
        return self.make_loader(split, shuffle=shuffle, whole=False, batch_size=batch_size)

    def train_dataloader(self) -> DataLoader:
        """The fitting texts; after an interruption, from the batch that was next."""
        return self.resumable(self.loader("fit", shuffle=True))

    def val_dataloader(self) -> DataLoader:
        """The validation texts."""
        return self.loader("validation", batch_size=WITHOUT_GRADIENTS * self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The held-out texts."""
        return self.loader("test")


def route_sites(
    sites: str | Sequence[str | int],
    depths: Sequence[int],
    source: int,
    target: int,
    component: Component = "residual",
) -> list[tuple[int, int]]:
    """Site pairs of the route from one model to another, or to itself.

    A pair that the user wrote holds from an earlier model to a later one. On the way back it is turned round; from a
    model to itself, its own end of the pair is taken twice. A grid is every block with every block on any route.

    Args:
        sites: as the user wrote them.
        depths: L of each model.
        source: number of the model that is read.
        target: number of the model that is run from there.
        component: what is read there.
    """
    if source < target or sites == "grid":
        return parse_sites(sites, depths[source], depths[target], component)
    if source > target:
        return [(j, i) for i, j in parse_sites(sites, depths[target], depths[source], component)]
    partner = 1 if source == 0 else 0
    ends = parse_sites(sites, depths[min(source, partner)], depths[max(source, partner)], component)
    own = dict.fromkeys(pair[0] if source == 0 else pair[1] for pair in ends)
    return [(site, site) for site in own]
