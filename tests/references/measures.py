"""The measures as their definitions read, one pair of layers at a time, on full matrices in NumPy and SciPy float64.

Gram matrices where the code has moments, orthonormal bases from an SVD of the rows where it whitens, least
squares on the rows where it projects.
"""

from collections.abc import Callable

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from tests.references.kernels import biased_cka, hsic_1

Array = NDArray[np.float64]
RANK = 1e-5  # smallest singular value of the rows that counts, relative to the largest


def linear_cka(x: Array, y: Array) -> float:
    """HSIC of doubly centred Gram matrices over the root of their own (Kornblith et al. 2019)."""
    # Translating the rows first changes nothing in the definition and keeps its products from cancelling.
    return biased_cka(*((z - z[0]) @ (z - z[0]).T for z in (x, y)))


def unbiased_cka(x: Array, y: Array) -> float:
    """HSIC₁(K, L) / √(HSIC₁(K, K) HSIC₁(L, L))."""
    k, gram = ((z - z[0]) @ (z - z[0]).T for z in (x, y))
    return hsic_1(k, gram) / float(np.sqrt(hsic_1(k, k) * hsic_1(gram, gram)))


def canonical_variables(x: Array, y: Array, share: float = 1.0) -> tuple[Array, Array, Array]:
    """Correlations, and the maps from centred rows to orthonormal canonical variables of X and of Y."""
    (basis_x, map_x), (basis_y, map_y) = _basis(x, share), _basis(y, share)
    u, rho, vh = scipy.linalg.svd(basis_x.T @ basis_y, full_matrices=False)
    return rho, map_x @ u, map_y @ vh.T


def mean_cca(x: Array, y: Array, share: float = 1.0) -> float:
    """Mean canonical correlation; SVCCA with a share of the variance below 1."""
    return float(canonical_variables(x, y, share)[0].mean())


def r2_cca(x: Array, y: Array, share: float = 1.0) -> float:
    """‖Q_YᵀQ_X‖² / min(rank X, rank Y), of all or of the leading directions (Ren et al., Table 2)."""
    return float(np.square(canonical_variables(x, y, share)[0]).mean())


def pwcca(x: Array, y: Array, share: float = 1.0) -> float:
    """Σα_iρ_i / Σα_i with α_i = Σ_j |⟨h_i, x_j⟩| (Morcos et al. 2018)."""
    rho, a, _ = canonical_variables(x, y, share)
    return float(rho @ _alpha(x, a) / _alpha(x, a).sum())


def svcca_standardised(x: Array, y: Array, share: float) -> float:
    """SVCCA of z-scored features, as `CCA` of `corr_methods.py` released with Wu et al. 2020 has it."""
    return mean_cca(_standardised(x), _standardised(y), share)


def pwcca_standardised(x: Array, y: Array, share: float) -> float:
    """Directions of z-scored features, weights of the features as they are (the same code)."""
    rho, a, _ = canonical_variables(_standardised(x), _standardised(y), share)
    alpha = np.abs((_standardised(x) @ a).T @ (x - x.mean(0))).sum(1)
    return float(rho @ alpha / alpha.sum())


def held_out_correlations(
    x: Array, y: Array, x_new: Array, y_new: Array, share: float = 1.0, standardised: bool = False
) -> tuple[Array, Array]:
    """Pearson correlation on new rows of each pair of canonical variables, and the weights α, of the fitting rows.

    `standardised`: the directions are those of features divided by their deviations on the fitting rows.
    """
    scale_x, scale_y = (rows.std(0) if standardised else np.ones(rows.shape[1]) for rows in (x, y))
    _, a, b = canonical_variables(x / scale_x, y / scale_y, share)
    a, b = a / scale_x[:, None], b / scale_y[:, None]
    pairs = zip((x_new @ a).T, (y_new @ b).T, strict=True)
    return np.array([np.corrcoef(u, v)[0, 1] for u, v in pairs]), _alpha(x, a)


def r2(x: Array, y: Array) -> float:
    """1 − ‖X − X̂‖²/‖X‖² of centred rows, X̂ the least-squares prediction from Y."""
    predicted = _regression(y, x)(y)
    return float(1 - ((x - predicted) ** 2).sum() / ((x - x.mean(0)) ** 2).sum())


def r2_held_out(x: Array, y: Array, x_new: Array, y_new: Array) -> float:
    """The same on new rows, about the mean of the fitting rows."""
    residual = x_new - _regression(y, x)(y_new)
    return float(1 - (residual**2).sum() / ((x_new - x.mean(0)) ** 2).sum())


def mixedsim(x: Array, y: Array) -> float:
    """Mean over neurons of X of the correlation between it and its prediction from Y."""
    return mixedsim_held_out(x, y, x, y)


def mixedsim_held_out(x: Array, y: Array, x_new: Array, y_new: Array) -> float:
    """The same on new rows."""
    pairs = zip(x_new.T, _regression(y, x)(y_new).T, strict=True)
    return float(np.mean([np.corrcoef(neuron, predicted)[0, 1] for neuron, predicted in pairs]))


def neuronsim(x: Array, y: Array) -> float:
    """Mean over neurons of X of the largest absolute correlation with a neuron of Y."""
    correlations = np.corrcoef(x.T, y.T)[: x.shape[1], x.shape[1] :]
    return float(np.abs(correlations).max(1).mean())


def nuclear_norm(x: Array) -> float:
    """Sum of the singular values of the centred rows."""
    return float(np.linalg.norm(x - x.mean(0), "nuc"))


def localization(neuron: Array, subspace: Array, left_out: NDArray[np.bool_]) -> list[float]:
    """Mean neuronsim less mean svsim to all other layers, layer by layer."""
    rows = zip(neuron, subspace, left_out, strict=True)
    return [float(np.mean(a[~out]) - np.mean(b[~out])) for a, b, out in rows]


def angular_distance(cka: Array) -> float:
    """√Σ_l arccos(CKA_l)²."""
    return float(np.sqrt(sum(np.arccos(cka[layer, layer]) ** 2 for layer in range(len(cka)))))


def _basis(x: Array, share: float) -> tuple[Array, Array]:
    """Orthonormal basis of the centred columns, and the map from centred rows to it.

    Of scaled columns for a share of 1, since then only the span counts; of the principal components otherwise.
    """
    centred = x - x.mean(0)
    scale = np.sqrt((centred**2).sum(0)) if share == 1 else np.ones(x.shape[1])
    u, s, vh = scipy.linalg.svd(centred / scale, full_matrices=False)
    kept = int((s > RANK * s[0]).sum())
    if share < 1:
        kept = min(kept, int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), share)) + 1)
    return u[:, :kept], (vh[:kept] / s[:kept, None]).T / scale[:, None]


def _standardised(x: Array) -> Array:
    return (x - x.mean(0)) / x.std(0)


def _alpha(x: Array, a: Array) -> Array:
    centred = x - x.mean(0)
    return np.abs((centred @ a).T @ centred).sum(1)


def _regression(y: Array, x: Array) -> Callable[[Array], Array]:
    """The least-squares prediction of X from Y with an intercept."""
    scale = (y - y.mean(0)).std(0)
    weight = np.linalg.lstsq((y - y.mean(0)) / scale, x - x.mean(0), rcond=RANK)[0]
    return lambda new: (new - y.mean(0)) / scale @ weight + x.mean(0)
