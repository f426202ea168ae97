"""Maps between the hidden states of two models, and everything that fits, injects, measures and reports them.

Importing this package needs torch and SciPy alone; the rooms below it (`aligners.fitting`, `aligners.injection` and so
on) need Lightning and transformers too.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from aligners.maps.affine import AffineLayer, LowRank, Orthogonal
from aligners.maps.base import Aligner
from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.free_form import FreeForm
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Mean, Procrustes, Ridge
from aligners.maps.mlp import MLP
from aligners.maps.permutation import Permutation

if TYPE_CHECKING:
    from aligners.fitting.storage.bank import load_bank
    from aligners.fitting.universe.through import ThroughSpace

__all__ = [
    "CCA", "INN", "MLP", "PWCCA", "SVCCA", "AffineLayer", "Aligner", "FreeForm", "Identity", "Linear", "LowRank",
    "Mean", "Orthogonal", "Permutation", "Procrustes", "Ridge", "ThroughSpace", "load_bank",
]  # fmt: skip
_ON_FIRST_USE = {"load_bank": "aligners.fitting.storage.bank", "ThroughSpace": "aligners.fitting.universe.through"}

try:
    __version__ = version("aligners")  # that of pyproject.toml
except PackageNotFoundError:  # run from a folder, and never installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
