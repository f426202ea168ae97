"""Clusters of rows by k-means, and clusters of two sides matched by how each lies to the others of its side."""

import numpy as np
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
    centres = start
    if centres is None:
        centres = _spread_out(rows, clusters, draw)
    nearest = None
    for _ in range(ROUNDS):
        before = nearest
        distances = torch.cdist(rows, centres)
        nearest = distances.argmin(1)
        if before is not None and torch.equal(nearest, before):
            break
        sums = torch.zeros_like(centres)
        sums.index_add_(0, nearest, rows)
        counts = nearest.bincount(minlength=len(centres))
        counts = counts[:, None]
        means = sums / counts.clamp(min=1)
        centres = torch.where(counts > 0, means, centres)
    return centres


def _spread_out(rows: Tensor, clusters: int, draw: torch.Generator) -> Tensor:
    """Draw rows as first centres, each by its squared distance from those before."""
    drawn = torch.randint(len(rows), (1,), generator=draw)
    first = int(drawn)
    chosen = [first]
    distances = _squared_distances(rows, first)
    for _ in range(clusters - 1):
        # rows that are all chosen already have no distance left
        weights = distances + 1e-30
        drawn = torch.multinomial(weights, 1, generator=draw)
        place = int(drawn)
        chosen.append(place)
        of_place = _squared_distances(rows, place)
        distances = torch.minimum(distances, of_place)
    return rows[chosen]


def _squared_distances(rows: Tensor, place: int) -> Tensor:
    """Squared distances of rows (N, d) from one of them, (N,)."""
    differences = rows - rows[place]
    return differences.square().sum(1)


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
    from scipy.optimize import quadratic_assignment

    kernels = _kernel(a), _kernel(b)
    draw = np.random.default_rng(seed)
    options = {"maximize": True, "rng": draw}
    starts = {**options, "P0": "randomized"}
    tried = []
    for _ in range(runs):
        found = quadratic_assignment(*kernels, method="faq", options=starts)
        tried.append(found)
    best = max(tried, key=lambda found: found.fun)

    numbers = np.arange(len(a))
    guess = np.stack([numbers, best.col_ind], 1)
    options["partial_guess"] = guess
    found = quadratic_assignment(*kernels, method="2opt", options=options)
    order = np.array(found.col_ind)
    alike = float(found.fun)
    return torch.from_numpy(order), alike


def _kernel(centres: Tensor) -> np.ndarray:
    """Inner products of centred centres (c, d), of norm 1 together: (c, c)."""
    centred = centres - centres.mean(0)
    products = centred @ centred.T
    alike = products / products.norm()
    return alike.cpu().numpy()
