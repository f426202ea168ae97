"""Clusters of rows by k-means, and clusters of two sides matched by how each lies to the others of its side."""

import torch
from torch import Tensor

ROUNDS = 50


def k_means(
    rows: Tensor, clusters: int, draw: torch.Generator, start: Tensor | None = None
) -> Tensor:
    """Find the centres of clusters by Lloyd's algorithm, from a start by k-means++ (Arthur and Vassilvitskii 2007).

    Args:
        rows: (N, d).
        clusters: c, at most N.
        draw: what the start is drawn with.
        start: centres to start from instead, (c, d).

    Returns:
        (c, d). A cluster that loses all of its rows keeps its centre.
    """
    centres = _spread_out(rows, clusters, draw) if start is None else start
    nearest = None
    for _ in range(ROUNDS):
        before = nearest
        nearest = torch.cdist(rows, centres).argmin(1)
        if before is not None and torch.equal(nearest, before):
            break
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        counts = nearest.bincount(minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


def _spread_out(rows: Tensor, clusters: int, draw: torch.Generator) -> Tensor:
    """Draw rows as first centres, each by its squared distance from those before."""
    first = int(torch.randint(len(rows), (1,), generator=draw))
    chosen = [first]
    distances = (rows - rows[first]).square().sum(1)
    for _ in range(clusters - 1):
        # rows that are all chosen already have no distance left
        weights = distances + 1e-30
        place = int(torch.multinomial(weights, 1, generator=draw))
        chosen.append(place)
        of_place = (rows - rows[place]).square().sum(1)
        distances = torch.minimum(distances, of_place)
    return rows[chosen]


def matched_order(a: Tensor, b: Tensor, runs: int, seed: int) -> tuple[Tensor, float]:
    """Find the order of B's centres in which they lie to each other most like A's: quadratic assignment.

    The largest Σ_ij K_ij L_π(i)π(j) over `runs` random starts of FAQ (Vogelstein et al. 2015), improved by 2-opt, for
    the two matrices of inner products K and L of centred centres. It is a heuristic, and may miss the best order.

    Args:
        a: (c, d_x).
        b: (c, d_y).
        runs: number of random starts.
        seed: of these.

    Returns:
        (c,) for each centre of A the number of its partner, and the CKA of the centres in that order.
    """
    import numpy as np
    from scipy.optimize import quadratic_assignment

    kernels = []
    for centres in (a, b):
        centred = centres - centres.mean(0)
        kernel = centred @ centred.T
        kernels.append((kernel / kernel.norm()).cpu().numpy())
    draw = np.random.default_rng(seed)
    options = {"maximize": True, "rng": draw, "P0": "randomized"}
    tried = []
    for _ in range(runs):
        tried.append(quadratic_assignment(*kernels, method="faq", options=options))
    best = max(tried, key=lambda found: found.fun)
    guess = np.stack([np.arange(len(a)), best.col_ind], 1)
    options = {"maximize": True, "rng": draw, "partial_guess": guess}
    found = quadratic_assignment(*kernels, method="2opt", options=options)
    return torch.from_numpy(np.array(found.col_ind)), float(found.fun)
