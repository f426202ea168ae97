"""The LightningDataModule of texts for whole models, on which stitching layers are trained and measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from aligners.models.architectures import Component, Task
from datamodules.asking import Asking, TaskBatch
from datamodules.batches import TextBatch
from datamodules.frozen_models import Wanted, with_revisions
from datamodules.module import TextModule, check_component
from datamodules.pipeline import TextPipeline
from datamodules.rows.sites import route_sites
from datamodules.store.stores import Reads
from datamodules.text.label_names import LabelsOption

__all__ = ["ModelTexts"]


STITCHES_TOKENS = (
    "Stitching puts the state of a token where another model has that of the same token",
    "Position by position these would be different pieces of text: choose models of one tokenizer",
)


class ModelTexts(TextModule):
    """Turns text into batches for two or more frozen models that share a tokenizer. It does not run them.

    Args:
        models: Hub ids, local folders, or embedded models such as `embedded:0` and `embedded-gpt:0:activation=solu`.
        sites: where a state is read and where it goes in: `blocks` (1..L), `all` (0..L), `grid` (every block with every
            block), or layers and pairs: `1,3:5` is site 1 of both and site 3 of the earlier model in `models` with
            site 5 of the later one.
        masked_share: share of the tokens that a masked language model has to predict.
        revisions: of each model on the Hub; default: the main one.
        labels: which classes of a head answer each class of the texts, where their names do not say, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Several are added. One map, or a list of one for each model.
        component: what is read and replaced at a site: `residual`, the stream between the blocks; `attention` or `mlp`,
            what that sub-layer of the block adds to the stream.
        options: of `TextPipeline` and `FrozenModels`, by their names. `seed` also draws the masks.

    Raises:
        ValueError: an option is out of its range, or there are no two models.
    """

    option = "sites"

    def __init__(
        self,
        models: list[str] = ["embedded:0", "embedded:1"],  # noqa: B006  (never changed)
        sites: str | list[str | int] = "blocks",
        masked_share: float = 0.15,
        revisions: list[str | None] | None = None,
        labels: LabelsOption = None,
        component: Component = "residual",
        **options: Any,
    ) -> None:
        super().__init__()
        self.models, self.revisions = list(models), revisions
        self.sites, self.component, self.labels, self.masked_share = sites, component, labels, masked_share
        self.pipeline = TextPipeline(Wanted(with_revisions(models, revisions), STITCHES_TOKENS), False, **options)
        check_component(component)
        if len(models) < 2:
            raise ValueError(
                f"Expected `models` to name at least two models, but got {models}. The same name twice is allowed: "
                "a model and itself."
            )
        if not 0 < masked_share < 1:
            raise ValueError(f"Expected `masked_share` between 0 and 1, but got {masked_share}.")

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model, as the source or the target of any route."""
        sites: list[set[int]] = [set() for _ in depths]
        for a in range(len(depths)):
            for b in range(a + 1, len(depths)):
                for i, j in route_sites(self.sites, depths, a, b, self.component):
                    sites[a].add(i)
                    sites[b].add(j)
        return [sorted(each) for each in sites]

    def reads(self) -> Reads | None:
        """The states at all sites of every model; none of masked texts, which are others in every epoch."""
        if self.task == "masked":
            return None
        return Reads(self.wanted([model.depth for model in self.frozen]), self.component)

    def check_models(self) -> None:
        """Load the models, with every check that can be made before a batch is asked for."""
        for model, sites in zip(self.frozen, self.wanted([model.depth for model in self.frozen]), strict=True):
            for site in sites:
                model.check_site(site, "sites", self.component)
        if self.task is not None:
            Asking.of(self.frozen[-1], masked_share=self.masked_share, seed=self.pipeline.seed)

    @property
    def task(self) -> Task | None:
        """The task of the last model's head."""
        return self.frozen[-1].task

    def describe(self) -> dict[str, Any]:
        """Describe texts and models for a report, as plain values."""
        masked = {"masked_share": self.masked_share} if self.task == "masked" else {}
        rows = {"component": self.component, "rows": "tokens", "special_tokens": True}
        return {"models": [model.identity() for model in self.frozen], **masked, **rows, **self.pipeline.describe()}

    # ------------------------------------------------------------------ Lightning's hooks

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> TaskBatch:
        """Choose rows and masks while the batch is still on the CPU."""
        return self.prepare(batch, self._epoch())

    def prepare(self, texts: TextBatch, epoch: int = 0) -> TaskBatch:
        """Add to a batch, on the CPU, its rows and what the task of the last model asks: see `Asking`."""
        return Asking.of(self.frozen[-1], masked_share=self.masked_share, seed=self.pipeline.seed)(texts, epoch)

    def transfer_batch_to_device(self, batch: TaskBatch, device: torch.device, dataloader_idx: int) -> TaskBatch:
        """Move the batch without waiting for a GPU."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def _epoch(self) -> int:
        training = self.trainer is not None and self.trainer.training
        return cast(Any, self.trainer).current_epoch + 1 if training else 0
