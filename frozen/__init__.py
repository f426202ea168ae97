"""Pretrained models that never train: load them, read their states, inject other states."""

from frozen.loading.models import load_frozen
from frozen.model import FrozenModel

__all__ = ["FrozenModel", "load_frozen"]
