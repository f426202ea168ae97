"""Which models something belongs to: compared by fingerprint, and declared for others on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aligners.models.embedded.classifier import Recipe
from aligners.models.model import FrozenModel
from datamodules.layers import LayerActivations
from datamodules.text.sources import TextSource

__all__ = ["Identity", "identities", "listed", "refuse_others"]

Identity = dict[str, Any]  # name, revision, fingerprint


def identities(models: Sequence[str | FrozenModel], data: Mapping[str, Any]) -> list[Identity]:
    """Name, revision and fingerprint of models.

    Args:
        models: loaded ones, or names, which are loaded now.
        data: options of a data module, of which those that decide what a name means are taken: the precision, and the
            texts and sizes of embedded models.
    """
    return [(model if isinstance(model, FrozenModel) else _loaded(model, data)).identity() for model in models]


def _loaded(name: str, data: Mapping[str, Any]) -> FrozenModel:
    options: dict[str, Any] = {"max_length": 2, "dtype": data.get("dtype", "float32")}  # nothing is read
    for part, kind in (("text", TextSource), ("recipe", Recipe)):
        if part in data:
            options[part] = kind(**data[part])
    return LayerActivations([name], **options).frozen[0]


def refuse_others(belongs: Sequence[Identity], present: Sequence[Identity], what: str) -> None:
    """Raise unless models are those that something belongs to, in the same order.

    Raises:
        ValueError: says which differ, and how to use it all the same.
    """
    if len(belongs) == len(present) and all(
        a["fingerprint"] == b["fingerprint"] for a, b in zip(belongs, present, strict=True)
    ):
        return
    raise ValueError(
        f"Expected `models` to be those that {what} belongs to, {listed(belongs)}, but got {listed(present)}. Name "
        "them in this order, or say `other_models=True` to use it with others all the same: every number in its card "
        "is then about other models."
    )


def listed(models: Sequence[Identity]) -> str:
    """Names and the beginnings of fingerprints."""
    return ", ".join(f"{model['name']} (fingerprint {model['fingerprint'][:12]})" for model in models) or "none"
