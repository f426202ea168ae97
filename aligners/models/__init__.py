"""Pretrained models that never train: load them, read their states, inject other states."""

from aligners.models.loading.load_models import load_frozen
from aligners.models.model import FrozenModel

__all__ = ["FrozenModel", "load_frozen"]
