"""Which latents of a sparse dictionary a row keeps, and which of them are dead."""

from typing import Literal

import torch
from torch import Tensor

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
    rows = sizes.shape[1]
    largest = sizes.flatten(1).topk(rows * active, sorted=False)
    least = largest.values.amin(1)
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
