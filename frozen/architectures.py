"""What has to be known about a model family to read and replace its states: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Architecture", "architecture_of", "known_architectures", "register"]


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its blocks and how they talk to each other.

    A block takes its states as first argument or as `hidden_states`.

    Attributes:
        blocks: path of the list of blocks from the base model, dotted.
        returns: length of the tuple that a block returns, its states first; None: it returns a bare tensor.
        bare: arguments that build the bare encoder without the modules above the last site. Nobody reads
            them, and a checkpoint that lacks them would have them filled with noise.
        reserved_positions: how many rows of the position embeddings no token ever takes.
    """

    blocks: str
    returns: int | None = None
    bare: Mapping[str, Any] = field(default_factory=dict)
    reserved_positions: int = 0


_ARCHITECTURES: dict[str, Architecture] = {}


def register(model_type: str, architecture: Architecture) -> None:
    """Make a family known under the `model_type` of its configs; a known one is replaced."""
    _ARCHITECTURES[model_type] = architecture


def known_architectures() -> list[str]:
    """The registered values of `model_type`, sorted."""
    return sorted(_ARCHITECTURES)


def architecture_of(model_type: str) -> Architecture:
    """Look a family up.

    Raises:
        ValueError: if nobody has registered `model_type`.
    """
    if model_type not in _ARCHITECTURES:
        raise ValueError(
            f"Expected a `model_type` out of {', '.join(known_architectures())}, received {model_type!r}. "
            "Register it in one line: "
            f"frozen.architectures.register({model_type!r}, Architecture(blocks='path.to.blocks')); "
            "`FrozenModel.self_test` then says whether its states can be replaced."
        )
    return _ARCHITECTURES[model_type]


_NO_POOLER = {"add_pooling_layer": False}

register("bert", Architecture("encoder.layer", bare=_NO_POOLER))
register("distilbert", Architecture("transformer.layer"))
register("electra", Architecture("encoder.layer"))
# These two number positions from one past the padding index, which is 1.
register("mpnet", Architecture("encoder.layer", returns=1, bare=_NO_POOLER, reserved_positions=2))
register("roberta", Architecture("encoder.layer", bare=_NO_POOLER, reserved_positions=2))
