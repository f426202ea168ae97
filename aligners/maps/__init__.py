"""Maps between the hidden states of two models: closed forms and networks, each a bank over site pairs."""

from aligners.maps.affine import AffineLayer, LowRank, Orthogonal
from aligners.maps.base import Aligner
from aligners.maps.by_rows.kernel_ridge import KernelRidge
from aligners.maps.by_rows.nearest_neighbours import NearestNeighbours
from aligners.maps.by_rows.relative import Relative
from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.from_moments.reduced_rank import ReducedRank
from aligners.maps.from_moments.soft_matching import SoftMatching
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Mean, Permutation, Procrustes, Ridge
from aligners.maps.mlp import MLP, FreeForm
from aligners.maps.sparse.sparse_aligner import SparseAligner

__all__ = [
    "CCA", "INN", "MLP", "PWCCA", "SVCCA", "AffineLayer", "Aligner", "FreeForm", "Identity", "KernelRidge", "Linear",
    "LowRank", "Mean", "NearestNeighbours", "Orthogonal", "Permutation", "Procrustes", "ReducedRank", "Relative",
    "Ridge", "SoftMatching", "SparseAligner",
]  # fmt: skip
