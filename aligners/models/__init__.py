"""Pretrained models that never train: load them, read their states, inject other states.

Importing this package loads nothing, so that what only names a model works without transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aligners.models.loading.load_models import load_frozen
    from aligners.models.model import FrozenModel

__all__ = ["FrozenModel", "load_frozen"]

_HOMES = {
    "FrozenModel": "aligners.models.model",
    "load_frozen": "aligners.models.loading.load_models",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
