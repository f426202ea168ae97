"""Which latents of a sparse dictionary a row keeps, and which of them are dead."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
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
    flat = sizes.detach().flatten(1)
    # from below: a selection takes less time than a sort of what is kept
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        # which takes an eighth of the time that kthvalue takes
        ordered = np.partition(flat.numpy(), below, axis=1)
        least = torch.from_numpy(ordered[:, below].copy())
    else:
        least = flat.kthvalue(below + 1).values
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


def products(
    codes: Tensor, weights: Sequence[Tensor], most: int | None = None
) -> list[Tensor]:
    """Return codes @ W for several W by adding up the rows of active latents alone, which are few.

    Args:
        codes: (S, N, m).
        weights: (S, m, d) each.
        most: how many codes are not zero, at most; any beyond are left out. A GPU then does not have to tell their
            number to the host, which would wait for it. Default: all count.

    Returns:
        (S, N, d) each.
    """
    sites, rows, latents = codes.shape
    active = codes != 0
    if most is None:
        places = active.nonzero()
        values = codes[tuple(places.T)]
    else:
        places = active.nonzero_static(size=most, fill_value=-1)
        values = codes[tuple(places.T)] * (places[:, 0] >= 0)
        places = places.clamp(min=0)
    number = active.sum(2).flatten()
    first = number.cumsum(0) - number
    rows_of_all = places[:, 0] * latents + places[:, 2]
    sums = []
    for weight in weights:
        added = sums_of_rows(weight, rows_of_all, values, first)
        sums.append(added.view(sites, rows, -1))
    return sums


def sums_of_rows(
    weight: Tensor, chosen: Tensor, values: Tensor, first: Tensor
) -> Tensor:
    """Add up rows of all sites' weights (S, m, d), each times a value.

    Args:
        weight: of which.
        chosen: n numbers of rows, counted through all sites.
        values: n factors.
        first: of each sum, its first place among the n; the last sum ends with them.

    Returns:
        (sums, d).
    """
    return nn.functional.embedding_bag(
        chosen, weight.flatten(0, 1), first, mode="sum", per_sample_weights=values
    )
