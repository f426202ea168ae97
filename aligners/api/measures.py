"""Measures of paired rows x (N, d_x) and y (N, d_y): `aligners.similarity.functional` for one pair of sites.

`docs/measures.md` says what each measure means, which changes of coordinates it ignores, and how many rows it needs.
All take NumPy arrays or tensors, and raise a `ValueError` for rows that are not paired, not finite or too few.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.api.arrays import Array, rows, rows_of_both
from aligners.api.groups import Groups, numbered
from aligners.errors import UserError, check_known
from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.catalogue import catalogue
from aligners.similarity.controls import Sample
from aligners.similarity.functional import cca as correlations
from aligners.similarity.functional import cka as linear
from aligners.similarity.functional import (
    kernels,
    matching,
    neighbours,
    predictivity,
    regression,
    shape,
)
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.functional.retrieval import retrieval_scores

__all__ = [
    "Retrieved",
    "angular_shape",
    "angular_shape_distance",
    "cca",
    "cka",
    "cknna",
    "hard_matching",
    "jaccard_knn",
    "linear_predictivity",
    "mean_minibatch_cka",
    "measure",
    "minibatch_cka",
    "mixedsim",
    "mutual_knn",
    "nbs",
    "neuronsim",
    "procrustes_distance",
    "pwcca",
    "pwcca_standardised",
    "r2",
    "r2_cca",
    "r2_svcca",
    "rbf_cka",
    "retrieval",
    "rsa",
    "rsa_centred",
    "rsa_spearman",
    "soft_matching",
    "svcca",
    "svcca_standardised",
    "unbiased_cka",
]


def _one(formula: Callable[..., Tensor], x: Array, y: Array, **options: Any) -> float:
    """Compute, for a single pair of layers, a formula that takes all pairs."""
    of_x, of_y = rows_of_both(x, y)
    if len(of_x) > 1:
        raise UserError(
            f"Expected rows of one site, but got {len(of_x)} sites. Give the rows of one site at a time."
        )
    if "groups" in options:
        options["groups"] = numbered(options["groups"], of_x.shape[1])
    return float(formula(of_x, of_y, **options))


def cka(x: Array, y: Array) -> float:
    """Linear CKA (Kornblith et al. 2019): biased upwards where rows are few for the width."""
    return _one(linear.linear_cka, x, y)


def unbiased_cka(x: Array, y: Array) -> float:
    """Linear CKA by the unbiased HSIC of all rows: 0 on average for unrelated rows, and possibly below."""
    return _one(linear.unbiased_cka, x, y)


def minibatch_cka(x: Array, y: Array, batch: int = 32) -> float:
    """Unbiased CKA whose HSICs are averaged over batches of rows (Nguyen et al. 2021)."""
    return _one(linear.minibatch_cka, x, y, batch=batch)


def mean_minibatch_cka(x: Array, y: Array, batch: int = 32) -> float:
    """Mean of the unbiased CKAs of batches of rows, as Brown et al. 2023 average them."""
    return _one(linear.mean_minibatch_cka, x, y, batch=batch)


def rbf_cka(x: Array, y: Array, width: float = 0.5) -> float:
    """CKA with an RBF kernel of `width` median distances; time grows with N²."""
    return _one(kernels.rbf_cka, x, y, width=width)


def cca(x: Array, y: Array) -> float:
    """Mean canonical correlation."""
    return _one(correlations.cca, x, y)


def svcca(x: Array, y: Array, share: float = 0.99) -> float:
    """Mean canonical correlation between principal components that hold a share of the variance."""
    return _one(correlations.svcca, x, y, share=share)


def svcca_standardised(x: Array, y: Array, share: float = 0.99) -> float:
    """`svcca` of features divided by their deviations, as the code released with Wu et al. 2020 has it."""
    return _one(correlations.svcca, x, y, share=share, standardised=True)


def pwcca(x: Array, y: Array, share: float = 0.99) -> float:
    """Mean canonical correlation, weighted by how much of X each direction accounts for; not symmetric."""
    return _one(correlations.pwcca, x, y, share=share)


def pwcca_standardised(x: Array, y: Array, share: float = 0.99) -> float:
    """`pwcca` between components of features divided by their deviations; not symmetric."""
    return _one(correlations.pwcca, x, y, share=share, standardised=True)


def r2_cca(x: Array, y: Array) -> float:
    """Mean squared canonical correlation (Ren et al. 2023, Table 2)."""
    return _one(correlations.r2_cca, x, y)


def r2_svcca(x: Array, y: Array, share: float = 0.99) -> float:
    """Mean squared correlation of SVCCA (Ren et al. 2023, Table 2)."""
    return _one(correlations.r2_svcca, x, y, share=share)


def r2(x: Array, y: Array) -> float:
    """Share of X's variance that a least-squares regression on Y explains: a map from Y to X; not symmetric."""
    return _one(regression.r2, x, y)


def neuronsim(x: Array, y: Array) -> float:
    """Mean over neurons of X of the largest absolute correlation with a neuron of Y; not symmetric."""
    return _one(regression.neuronsim, x, y)


def mixedsim(x: Array, y: Array) -> float:
    """Mean over neurons of X of the multiple correlation with all of Y; not symmetric."""
    return _one(regression.mixedsim, x, y)


def rsa(x: Array, y: Array, kernel: kernels.Kernel = "cosine") -> float:
    """Correlation of the similarities between rows; time grows with N² for `euclidean`."""
    return _one(kernels.rsa, x, y, kernel=kernel)


def rsa_centred(x: Array, y: Array) -> float:
    """`rsa` of the cosines of rows less their mean, which then does not count."""
    return _one(kernels.rsa, x, y, kernel="centred_cosine")


def rsa_spearman(x: Array, y: Array, kernel: kernels.RankedKernel = "cosine") -> float:
    """Spearman's correlation of the similarities between rows; time grows with N², memory with N."""
    return _one(kernels.rsa_spearman, x, y, kernel=kernel)


def nbs(x: Array, y: Array) -> float:
    """Normalised Bures similarity, ‖XᵀY‖_* / (‖X‖ ‖Y‖): the cosine of rows that are turned onto each other."""
    return _one(shape.nbs, x, y)


def angular_shape(x: Array, y: Array) -> float:
    """1 − `angular_shape_distance` / (π/2): a score between 0 and 1."""
    return _one(shape.angular_shape, x, y)


def angular_shape_distance(x: Array, y: Array) -> float:
    """The angle between centred rows that are turned onto each other, in radians (Williams et al. 2021)."""
    return _one(shape.angular_shape_distance, x, y)


def procrustes_distance(x: Array, y: Array, scaled: bool = True) -> float:
    """Distance of centred rows that are turned onto each other; of length 1, unless `scaled` is false."""
    return _one(shape.procrustes_distance, x, y, scaled=scaled)


def hard_matching(x: Array, y: Array) -> float:
    """Mean correlation of neurons under the best one-to-one matching."""
    return _one(matching.hard_matching, x, y)


def soft_matching(x: Array, y: Array) -> float:
    """Correlation of neurons under the best transport (Khosla and Williams 2024): widths may differ."""
    return _one(matching.soft_matching, x, y)


def linear_predictivity(
    x: Array,
    y: Array,
    groups: Groups | None = None,
    folds: int = predictivity.FOLDS,
    ridge: float = 0.0,
) -> float:
    """Cross-validated R² of a regression of X on Y; not symmetric. Rows of one of `groups` (N,) are in one fold."""
    formula = predictivity.linear_predictivity
    return _one(formula, x, y, groups=groups, folds=folds, ridge=ridge)


def mutual_knn(
    x: Array, y: Array, k: int = neighbours.K, groups: Groups | None = None
) -> float:
    """Mean share of the `k` nearest rows, by the cosine, that a row and its partner have in common (Huh et al. 2024).

    Time grows with N², memory with N. Rows of the same of `groups` (N,), such as texts, are no neighbours.
    """
    return _one(neighbours.mutual_knn, x, y, k=k, groups=groups)


def jaccard_knn(
    x: Array, y: Array, k: int = neighbours.K, groups: Groups | None = None
) -> float:
    """Mean over rows of the intersection of these sets of `k` rows over their union; `groups` as in `mutual_knn`."""
    return _one(neighbours.jaccard_knn, x, y, k=k, groups=groups)


def cknna(
    x: Array, y: Array, k: int = neighbours.K, groups: Groups | None = None
) -> float:
    """CKA of cosines between mutual neighbours alone (Huh et al. 2024); `groups` as in `mutual_knn`."""
    return _one(neighbours.cknna, x, y, k=k, groups=groups)


class Retrieved(NamedTuple):
    """How well mapped rows find their partners among all rows of Y.

    Attributes:
        top1: share of the mapped rows whose partner is the nearest.
        top10: share of those whose partner is among the ten nearest.
        mrr: mean of 1 / the place of the partner, the nearest having place 1.
        n: number of rows.
    """

    top1: float
    top10: float
    mrr: float
    n: int


def retrieval(mapped: Array, y: Array, *, centred: bool = False) -> Retrieved:
    """Tell how often the row of `y` that is nearest to a mapped row, by the cosine, is its partner.

    Equal rows of `y` are one candidate, and others that are equally near share their places: a map to one point has the
    scores of chance. Time grows with N², memory with N.

    Args:
        mapped: (N, d) rows that a map has given.
        y: (N, d) their partners.
        centred: subtract the mean of `y` from both first.
    """
    of_map, of_y = rows(mapped, "mapped"), rows(y, "y")
    if of_map.shape != of_y.shape or len(of_y) > 1:
        shapes = f"{_shape(of_map)} and {_shape(of_y)}"
        raise UserError(
            "Expected `mapped` and `y` of one shape (N, d), row by row what a map gives and what it should be, but got "
            f"{shapes}. Map the rows of X into Y's space first, and give one site at a time."
        )
    partners = of_y[0].to(of_map.device)
    scores = retrieval_scores(of_map[0], partners, centred=centred)
    top1, top10, mrr = scores.mean(-1).tolist()
    return Retrieved(top1, top10, mrr, of_y.shape[1])


def _shape(rows: Tensor) -> tuple[int, ...]:
    """(N, d) of one site, (S, N, d) of several."""
    if len(rows) == 1:
        return tuple(rows.shape[1:])
    return tuple(rows.shape)


def measure(name: str, x: Array, y: Array) -> float:
    """Compute any measure of the catalogue by its name, or your own; see `aligners.similarity.catalogue.register`.

    Raises:
        ValueError: there is no such measure, or it needs more than rows: attention weights.
    """
    known = {
        known: entry for known, entry in catalogue().items() if entry.family in FAMILIES
    }
    check_known(known, name=name)
    chosen = known[name]

    def formula(x: Tensor, y: Tensor) -> Tensor:
        return chosen.compute(_kept(chosen.family, x, y))

    return _one(formula, x, y)


FAMILIES = ("moments", "batches", "rows")


def _kept(family: str, x: Tensor, y: Tensor) -> Any:
    """Return what measures of a family are computed from, for all rows in one batch."""
    if family == "moments":
        return SharedMoments(grid_moments(x, y))
    if family == "batches":
        return linear.unbiased_hsic(x, y)
    return Sample(x, y, torch.arange(x.shape[1], device=x.device))
