"""What two models share, latent by latent, as the definitions read: one site, one latent, one row at a time."""

from collections.abc import Sequence

import numpy as np
import scipy.stats
from numpy.typing import NDArray

Array = NDArray[np.float64]


def targets(
    codes: Array,
    decoder: Array,
    bias: Array,
    states: Array,
    latent: int,
    put_back: bool = True,
    counting: Sequence[bool] | None = None,
) -> tuple[Array, Array]:
    """The error of the dictionary, with the latent's own part if wanted, and what it and some latents rebuild."""
    errors, rebuilt = np.zeros_like(states), np.zeros_like(states)
    for row, state in enumerate(states):
        errors[row] = state - bias
        for j, code in enumerate(codes[row]):
            errors[row] -= code * decoder[j]
            if counting is None or counting[j] or j == latent:
                rebuilt[row] += code * decoder[j]
        if put_back:
            errors[row] += codes[row, latent] * decoder[latent]
    return errors, rebuilt


def beta(code: Array, direction: Array, target: Array) -> float:
    """argmin_β Σ_i ‖β f_i d − t_i‖², solved as least squares on all coordinates of all rows."""
    column = np.concatenate([value * direction for value in code])
    return float(np.linalg.lstsq(column[:, None], target.reshape(-1), rcond=None)[0][0])


def slope(code: Array, target: Array) -> tuple[Array, Array]:
    """Slope and mean of each coordinate of the target regressed on the code, with an intercept."""
    design = np.stack([code, np.ones_like(code)], 1)
    found = np.linalg.lstsq(design, target, rcond=None)[0]
    return found[0], target.mean(0)


def held_out_length(code: Array, direction: Array, centre: Array, target: Array) -> float:
    """Σ f_i u·(t_i − t̄), row by row."""
    return sum(float(f * (direction @ (t - centre))) for f, t in zip(code, target, strict=True))


def p_above(own: Sequence[float], other: Sequence[float], fired: Sequence[float], limit: float) -> float:
    """One-sided t-test of the mean over units of other − limit · own, with a freedom of its own."""
    excess = np.array(other) - limit * np.array(own)
    error = excess.std(ddof=1) / np.sqrt(len(excess))
    freedom = sum(rows > 0 for rows in fired) - 1
    return float(scipy.stats.t.sf(excess.mean() / error, freedom))


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """min over k ≥ rank of n p_(k) / k."""
    n, order = len(p), np.argsort(p)
    adjusted = [0.0] * n
    for rank, place in enumerate(order, 1):
        later = [n * p[order[k - 1]] / k for k in range(rank, n + 1)]
        adjusted[place] = min(1.0, *later)
    return adjusted


def contexts(code: Array, text: Array, place: Array, count: int, around: int) -> list[dict[str, object]]:
    """The largest codes of one latent, one of each text, ties by text, then by place; and the codes around each."""
    at = {(int(t), int(p)): float(c) for c, t, p in zip(code, text, place, strict=True)}
    found: list[dict[str, object]] = []
    for negative, of_text, here in sorted((-c, t, p) for (t, p), c in at.items() if c > 0):
        if of_text in [row["text"] for row in found]:
            continue
        window = [at.get((of_text, here + off), 0.0) for off in range(-around, around + 1)]
        row = {"code": np.float32(-negative), "text": of_text, "place": here, "window": np.float32(window)}
        found.append(row)
    return found[:count]


def top_tokens(code: Array, token: Array, count: int) -> list[tuple[int, float]]:
    """The tokens with the largest shares of the codes of one latent, ties by number."""
    total = code.sum(dtype=np.float64)
    shares = []
    for number in np.unique(token[code > 0]):
        share = code[token == number].sum(dtype=np.float64) / total
        shares.append((-np.float32(share), int(number), float(share)))
    return [(number, share) for _, number, share in sorted(shares)[:count]]
