"""Re-initialises a model, or parts of it, by the model's own recipe."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aligners.models.loading.placement import place_like


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
    for name, part in fresh.items():
        pairs = zip(_tensors(part), _tensors(own[name]), strict=True)
        for mine, theirs in pairs:
            mine.data = mine.data.to(theirs.device)
    return fresh


def _tensors(part: nn.Module) -> Iterator[Tensor]:
    return chain(part.parameters(), part.buffers())


def outside(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules outside the base model, by path."""
    return {name: part for name, part in model.named_children() if part is not model.base_model}


def head_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that turn states at the last site into classes, by path: the pooler, and all outside the base model.

    A final norm is not among them; it belongs to the body, as in the papers.
    """
    pooler = getattr(model.base_model, "pooler", None)
    return outside(model) | ({f"{model.base_model_prefix}.pooler": pooler} if isinstance(pooler, nn.Module) else {})


@contextmanager
def with_head(model: PreTrainedModel, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within it, these parts replace the model's own at the same paths."""
    own = {name: model.get_submodule(name) for name in parts}
    try:
        for name, part in parts.items():
            model.set_submodule(name, part)
        yield
    finally:
        for name, part in own.items():
            model.set_submodule(name, part)
