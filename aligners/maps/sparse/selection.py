"""Which latents of a sparse dictionary a row keeps, and which of them are dead."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Selection = Literal["batch_topk", "l1"]

HALVINGS = 60  # of an interval, after which float64 has no numbers in between


def least_kept(sizes: Tensor, active: int) -> Tensor:
    """Return the least of the N·k largest sizes of each site: what keeps k latents a row on average.

    Reference: Bussmann, Leask and Nanda 2024, "BatchTopK Sparse Autoencoders", arXiv 2412.06410, section 3.

    Args:
        sizes: at least 0, (S, N, m).
        active: k, at most m.

    Returns:
        (S, 1, 1).
    """
    _, rows, latents = sizes.shape
    below = rows * (latents - active)
    # from below: a selection takes less time than a sort of what is kept
    least = sizes.flatten(1).kthvalue(below + 1).values
    return least[:, None, None]


def least_kept_of_gaussians(mean: Tensor, deviation: Tensor, active: int) -> Tensor:
    """Return the threshold that k latents a row exceed on average, if the sizes of each are Gaussian.

    Args:
        mean: of each latent's sizes before negative ones are cut, (S, 1, m).
        deviation: theirs, above 0.
        active: k.

    Returns:
        (S, 1, 1); 0 where fewer than k latents are positive.
    """
    low = torch.zeros_like(mean[..., :1])
    reach = mean + 10 * deviation
    high = reach.amax(-1, keepdim=True).clamp(min=0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = torch.special.ndtr((mean - middle) / deviation)
        too_many = above.sum(-1, keepdim=True) > active
        low = torch.where(too_many, middle, low)
        high = torch.where(too_many, high, middle)
    return high


def products(codes: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return codes @ W for several W by adding up the rows of active latents alone, which are few.

    Args:
        codes: (S, N, m).
        weights: (S, m, d) each.

    Returns:
        (S, N, d) each.
    """
    sites, rows, latents = codes.shape
    active = codes != 0
    site, row, latent = active.nonzero(as_tuple=True)
    number = active.sum(2).flatten()
    first = number.cumsum(0) - number
    sums = []
    for weight in weights:
        sum_of_rows = nn.functional.embedding_bag(
            site * latents + latent,
            weight.flatten(0, 1),
            first,
            mode="sum",
            per_sample_weights=codes[site, row, latent],
        )
        sums.append(sum_of_rows.view(sites, rows, -1))
    return sums
