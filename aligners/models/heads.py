"""The head of a classifier: which modules belong to it, and how to replace them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

__all__ = ["head_parts", "outside", "with_head"]


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
