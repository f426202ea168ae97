"""What LightningModules need from their data module. Any data module that provides it will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

    from aligners.models.architectures import Component
    from aligners.models.model import FrozenModel
    from datamodules.asking import TaskBatch
    from datamodules.batches import TextBatch
    from datamodules.layers import LayerReader
    from datamodules.rows.reading import PairReader, Plan
    from datamodules.rows.types import SeenTypes
    from datamodules.text.fitted import FittedTexts
    from datamodules.text.label_names import LabelsOption
    from datamodules.text.sources import TextSource
    from datamodules.text.texts import Texts
    from datamodules.tokens.splits import Split
    from datamodules.tokens.tokenised import TokenisedTexts

__all__ = ["HeadData", "LabelledData", "LayerData", "PairedData", "SiteData", "TaskData", "TextData", "stream_of"]


class TextData(Protocol):
    """Texts, and the frozen models that read them."""

    @property
    def text(self) -> TextSource:
        """Which texts, and how they are split."""

    @property
    def texts(self) -> Texts:
        """The three splits as text."""

    @property
    def frozen(self) -> list[FrozenModel]:
        """The models."""

    def named(self) -> list[tuple[str, str | None]]:
        """Name and revision of each model, as the user wrote them."""

    def split(self, name: Split) -> TokenisedTexts:
        """A split, tokenised for all models."""

    def leave_out(self, fitted: Mapping[str, FittedTexts]) -> None:
        """Drop held-out texts that maps were fitted on."""

    def bytes_per_token(self, name: Split) -> float:
        """Bytes of UTF-8 per token of a split."""

    def loader(self, split: Split, *, shuffle: bool = False) -> DataLoader:
        """Batches of texts, this rank's share."""

    def describe(self) -> dict[str, Any]:
        """Describe texts, rows and models for a report."""

    def config(self) -> dict[str, Any]:
        """The options, from which the data module can be made again."""


class HeadData(TextData, Protocol):
    """Texts with classes, and models whose heads may predict them."""

    labels: LabelsOption


class SiteData(HeadData, Protocol):
    """Models whose states are read and replaced at sites."""

    component: Component


class PairedData(SiteData, Protocol):
    """Paired rows of two models: see `PairedActivations`."""

    splits: tuple[Split, ...]

    @property
    def reader(self) -> PairReader:
        """What reads the rows."""

    @property
    def seed(self) -> int:
        """The seed of the order of the texts."""

    @property
    def seen(self) -> SeenTypes:
        """The types of the fitting rows."""

    def on_before_batch_transfer(self, batch: TextBatch, dataloader_idx: int) -> Any:
        """Choose the rows of a batch, before it goes to the device."""

    def plan(self, plan: Plan) -> None:
        """Choose what an evaluation reads."""

    def describe_other(self) -> dict[str, Any]:
        """Describe the other source of text for a report."""


class LayerData(TextData, Protocol):
    """The same rows of all layers of any number of models: see `LayerActivations`."""

    attention: bool
    splits: tuple[Split, ...]

    @property
    def reader(self) -> LayerReader:
        """What reads the rows."""

    def plan(
        self,
        splits: Sequence[Split] = ("test",),
        layers: Sequence[Sequence[Sequence[int]]] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Choose what an evaluation reads, of each split the layers of each model, and whether all of its batches."""

    def loader(
        self, split: Split, *, shuffle: bool = True, layers: Sequence[Sequence[int]] | None = None
    ) -> DataLoader:
        """Batches of texts, this rank's share, with these layers of each model if they come from a store."""


class TaskData(SiteData, Protocol):
    """Tasks for whole models that share a tokenizer: see `ModelTexts`."""

    sites: str | list[str | int]

    @property
    def task(self) -> str | None:
        """The task of the last model's head."""

    def prepare(self, texts: TextBatch, epoch: int = 0) -> TaskBatch:
        """Add to a batch its rows and what is asked about it."""


class LabelledData(HeadData, Protocol):
    """Texts that all have a label: see `LabelledTexts`."""

    models: list[str]
    bases: list[str]

    @property
    def classes(self) -> int:
        """Number of classes; 1 for numbers."""

    def answers(self, split: Split) -> Tensor:
        """The label of each text of a split, (n,)."""

    def constant_answers(self) -> Tensor:
        """The best answer to the held-out texts that is the same for all, (n,)."""


DataT = TypeVar("DataT")
_NOTHING = object()


def stream_of(trainer: Any, protocol: type[DataT]) -> DataT:
    """The data module of a run.

    Args:
        trainer: of the run.
        protocol: what is needed from it, one of those above.

    Raises:
        ValueError: the run has no data module, or one without something that is needed.
    """
    data = getattr(trainer, "datamodule", None)
    if data is None:
        raise ValueError("Expected a data module, but got none. Give the Trainer one, as `datamodule`.")
    # Looked up statically: to ask for `frozen` or `texts` would load them.
    lacking = sorted(name for name in _members(protocol) if getattr_static(data, name, _NOTHING) is _NOTHING)
    if lacking:
        raise ValueError(
            f"Expected a data module with all of `{protocol.__name__}`, but {type(data).__name__} has no "
            f"{', '.join(lacking)}. {(protocol.__doc__ or '').splitlines()[0]}"
        )
    return data


def _members(protocol: type) -> set[str]:
    contract = [base for base in protocol.__mro__ if base not in (Protocol, Generic, object)]
    names = (name for base in contract for name in (*vars(base), *getattr(base, "__annotations__", ())))
    return {name for name in names if not name.startswith("_")}
