"""Maps between the hidden states of two models, and the modules that fit and evaluate them.

Importing this package needs torch and SciPy alone; `aligners.alignment` and `aligners.injection` need Lightning too.
"""

from aligners.affine import AffineLayer, LowRank, Orthogonal
from aligners.base import Aligner
from aligners.canonical import CCA, PWCCA, SVCCA
from aligners.inn import INN
from aligners.linear import Identity, Linear, Mean, Procrustes
from aligners.mlp import MLP
from aligners.permutation import Permutation
from aligners.storage import load_alignment

__all__ = [
    "CCA", "INN", "MLP", "PWCCA", "SVCCA", "AffineLayer", "Aligner", "Identity", "Linear", "LowRank", "Mean",
    "Orthogonal", "Permutation", "Procrustes", "load_alignment",
]  # fmt: skip
