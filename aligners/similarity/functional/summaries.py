"""Numbers about a layer or about two whole models, drawn from moments or from measures of all layer pairs."""

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.moments import decomposed


def nuclear_norm(scatter: Tensor) -> Tensor:
    """‖X‖_* of the centred rows of each layer as a measure of complexity (Ren et al. B.2).

    The sum of the singular values, in the states' own units; it grows with √n and with the rank. Invariant to
    rotations and translation. Feature side: roots of the eigenvalues of XᵀX, one decomposition per layer.
    Rounding leaves eigenvalues of order d ε λ_max where there is exactly none (after a LayerNorm, or with fewer
    rows than features), whose roots would be 1e-8 of the largest singular value: those are not counted.

    Args:
        scatter: XᵀX of centred rows, (L, d, d).

    Returns:
        (L,).

    Raises:
        ValueError: a scatter that is not finite, or a decomposition that does not converge.
    """
    norms = []
    for layer in scatter:  # one at a time, for the memory
        values = decomposed(
            "eigendecomposition behind a nuclear norm", torch.linalg.eigvalsh, layer
        )
        rounding = layer.shape[-1] * torch.finfo(layer.dtype).eps * values[..., -1:]
        norms.append(torch.where(values > rounding, values, 0).sqrt().sum(-1))
    return torch.stack(norms)


def localization(neuronsim: Tensor, svsim: Tensor, left_out: Tensor) -> Tensor:
    """Localization score of every layer of X: mean neuronsim less mean svsim to all other layers (Wu et al. §5.1).

    Positive where a layer's similarity to others sits in single neurons rather than in subspaces.

    Args:
        neuronsim: (L, M) of L layers to M others.
        svsim: (L, M), SVCCA of the same pairs.
        left_out: (L, M) boolean, true where the pair is not to count: a layer with itself.

    Returns:
        (L,).

    Raises:
        ValueError: a layer with no other.
    """
    others = (~left_out).sum(-1)
    if (others == 0).any():
        raise UserError(
            "Expected another layer for every layer, but `left_out` leaves none to "
            f"{(others == 0).nonzero()[:, 0].tolist()}. Give more layers or models."
        )
    return (neuronsim - svsim).masked_fill(left_out, 0).sum(-1) / others


def angular_distance(cka: Tensor) -> Tensor:
    """√Σ_l arccos(CKA_l)² over the layers of two models of one depth (Brown et al., eq. 2), ().

    In radians: 0 where every layer matches its partner, at most √L · π/2 for a CKA that is not negative. A metric
    for the linear CKA (Williams et al. 2021), which an unbiased estimate only approaches.

    Args:
        cka: (L, L), any CKA of all layer pairs; only its diagonal counts.

    Raises:
        ValueError: a CKA outside [-1, 1] by more than the 1e-12 that rounding explains.
    """
    diagonal = cka.diagonal()
    outside = ~(diagonal.abs() <= 1 + 1e-12)
    if outside.any():
        layer = int(outside.nonzero()[0])
        raise UserError(
            f"Expected `cka` in [-1, 1], but layer {layer} has {float(diagonal[layer])}. "
            "An unbiased estimate exceeds 1 where rows are few: give more rows, or use linear CKA."
        )
    return diagonal.clamp(-1, 1).arccos().norm()
