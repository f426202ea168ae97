"""A model whose weights are not read before something is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.models.calling import Caller
from aligners.models.hooks import blocks_of
from aligners.models.loading.placement import check_placement
from aligners.models.model import FrozenModel

__all__ = ["SleepingModel"]

WITH_WEIGHTS = ("model", "blocks", "_caller")  # what is not there before they are read


class SleepingModel(FrozenModel):
    """A `FrozenModel` that reads its weights when they are first asked for.

    Where all states come from a store that is never.

    Args:
        skeleton: the model without weights, on the meta device.
        tokenizer: its tokenizer, if there is one.
        name: Hub id or folder.
        revision: revision on the Hub.
        fingerprint: of the weights, which must be theirs once they are read.
        read: reads the model.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        revision: str | None,
        fingerprint: str,
        read: Callable[[], PreTrainedModel],
    ) -> None:
        super().__init__(skeleton, tokenizer, name=name, revision=revision)
        self._dtype, self._place, self._read = skeleton.dtype, torch.device("cpu"), read
        self.fingerprint = fingerprint
        for part in WITH_WEIGHTS:
            del self.__dict__[part]

    def __getattr__(self, name: str) -> Any:
        """Read the weights when something is asked for that has them.

        Raises:
            ValueError: they are not those that were expected, or cannot be read.
        """
        if name not in WITH_WEIGHTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._wake()
        return self.__dict__[name]

    @property
    def awake(self) -> bool:
        """Whether the weights have been read."""
        return "model" in self.__dict__

    @property
    def device(self) -> torch.device:
        """The device of the inputs, where the weights are or will be."""
        return super().device if self.awake else self._place

    @property
    def sharded(self) -> bool:
        """Never."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self._dtype

    def to(self, device: torch.device | str) -> Self:
        """Move the weights, now or when they are read."""
        if self.awake:
            return super().to(device)
        self._place = torch.device(device)
        return self

    def _check_placement(self) -> None:
        """The weights are nowhere yet."""

    def _wake(self) -> None:
        model, known = self._read().eval().requires_grad_(False), self.__dict__.pop("fingerprint")
        self.model, self.blocks, self._caller = model, blocks_of(model), Caller(model)
        check_placement(model, self.blocks)
        if self.fingerprint != known:
            raise ValueError(
                f"Expected the weights of {self.name} that were read before, of fingerprint {known}, but its files "
                f"hold others, of {self.fingerprint}. They were changed without a change of their dates: `touch` them."
            )
        self.to(self._place)
