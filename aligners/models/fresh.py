"""Re-initialises a model, or parts of it, by the model's own recipe."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aligners.models.loading.placement import place_like

__all__ = ["drawn", "untrained"]


def untrained(model: PreTrainedModel, seed: int, options: Mapping[str, Any]) -> PreTrainedModel:
    """Make a model of the same config, with weights drawn from `seed` on the CPU, so that they are equal everywhere.

    No other random number is affected. It has the data type of `model` and is placed like it.

    Args:
        model: the model whose config, data type and placement are taken.
        seed: of the weights.
        options: further arguments of the model's class.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        fresh: Any = type(model)(copy.deepcopy(model.config), **options)
    return place_like(fresh.to(model.dtype), model)


def drawn(model: PreTrainedModel, names: Iterable[str], seed: int) -> dict[str, nn.Module]:
    """Copy parts of a model, with weights drawn from `seed` on the CPU and then moved to the devices of the parts.

    No other random number is affected.

    Args:
        model: the model, which stays unchanged.
        names: paths of the parts, in the order of drawing.
        seed: of the weights.
    """
    own = {name: model.get_submodule(name) for name in names}
    fresh = {name: copy.deepcopy(part).cpu() for name, part in own.items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # A copied weight has lost transformers' mark of a loaded one, which would keep it as it is.
        for part in fresh.values():
            part.apply(model._init_weights)
    return {name: _moved_like(part, own[name]) for name, part in fresh.items()}


def _moved_like(part: nn.Module, other: nn.Module) -> nn.Module:
    """Move every weight of `part` to the device of its counterpart in `other`."""
    for mine, theirs in zip(_tensors(part), _tensors(other), strict=True):
        mine.data = mine.data.to(theirs.device)
    return part


def _tensors(part: nn.Module) -> Iterator[Tensor]:
    yield from part.parameters()
    yield from part.buffers()
