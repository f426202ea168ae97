"""Weights drawn anew by a model's own recipe: the whole model before any training, or its head alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from frozen.placement import place_like

__all__ = ["fresh_head", "untrained"]


def untrained(model: PreTrainedModel, seed: int, options: Mapping[str, Any]) -> PreTrainedModel:
    """A model of the same config, with weights drawn from `seed` on the CPU, so that they are the same everywhere.

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


@contextmanager
def fresh_head(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Within it, what lies outside the base model is freshly initialised, drawn from `seed` on the CPU."""
    heads = {name: part for name, part in model.named_children() if part is not model.base_model}
    fresh = {name: copy.deepcopy(part).cpu() for name, part in heads.items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # A copied weight has lost transformers' mark of a loaded one, which would keep it as it is.
        for part in fresh.values():
            part.apply(model._init_weights)
    try:
        for name, part in fresh.items():
            setattr(model, name, _moved_like(part, heads[name]))
        yield
    finally:
        for name, part in heads.items():
            setattr(model, name, part)


def _moved_like(part: nn.Module, other: nn.Module) -> nn.Module:
    """Every weight of `part` on the device of its counterpart in `other`, of the same structure."""
    for mine, theirs in zip(_tensors(part), _tensors(other), strict=True):
        mine.data = mine.data.to(theirs.device)
    return part


def _tensors(part: nn.Module) -> Iterator[Tensor]:
    yield from part.parameters()
    yield from part.buffers()
