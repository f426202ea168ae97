"""Maps between the hidden states of two models, and the modules that fit and evaluate them.

Importing this package needs torch and SciPy alone; the LightningModules in `aligners.fitting`, `aligners.injection` and
`aligners.injection.stitching` need Lightning too.
"""

from importlib.metadata import PackageNotFoundError, version

from aligners.fitting.storage.bank import load_bank
from aligners.fitting.universe.universe import ThroughSpace
from aligners.maps.affine import AffineLayer, LowRank, Orthogonal
from aligners.maps.base import Aligner
from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.free_form import FreeForm
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Mean, Procrustes, Ridge
from aligners.maps.mlp import MLP
from aligners.maps.permutation import Permutation

__all__ = [
    "CCA", "INN", "MLP", "PWCCA", "SVCCA", "AffineLayer", "Aligner", "FreeForm", "Identity", "Linear", "LowRank",
    "Mean", "Orthogonal", "Permutation", "Procrustes", "Ridge", "ThroughSpace", "load_bank",
]  # fmt: skip

try:
    __version__ = version("aligners")  # that of pyproject.toml
except PackageNotFoundError:  # run from a folder, and never installed
    __version__ = "unknown"
