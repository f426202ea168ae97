"""Ways to carry linear heads from OLD's states to NEW's, from rows of both on the same unlabelled texts.

A head reads w·x + b on OLD. A map g: NEW → OLD pulls it back: w·g(y) + b. For an affine g that is a linear head on NEW
again, and least squares from y to x, then w, is least squares from y to w·x: the map that is best for the states on
average is the one that is best for every head's own answers. What differs between maps is how they hold back where rows
are few: towards 0, towards the identity, towards a rotation, towards a map that was fitted on tokens.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import lstsq, svd

__all__ = ["Carried", "least_squares", "procrustes", "ranked", "ridge"]

STRENGTHS = np.logspace(-6, 4, 21)  # in units of the mean variance of NEW's states


class Carried(NamedTuple):
    """Heads on NEW.

    Attributes:
        weights: (H, d).
        agreement: (H,), the correlation of their answers with OLD's on rows that they were not fitted on.
    """

    weights: np.ndarray
    agreement: np.ndarray


def correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the columns of two arrays (n, H)."""
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / np.maximum(np.sqrt((a * a).sum(0) * (b * b).sum(0)), 1e-300)


class Rows:
    """Rows of NEW, (n, d), decomposed once for many heads and strengths."""

    def __init__(self, new: np.ndarray) -> None:
        self.centred = new - new.mean(0)
        if len(new) > new.shape[1]:  # by the covariance: rows are many
            values, vectors = np.linalg.eigh(self.centred.T @ self.centred)
            kept = values > values[-1] * 1e-11
            self.s, self.v = np.sqrt(values[kept]), vectors[:, kept]
            self.u = self.centred @ self.v / self.s
        else:
            u, s, v = svd(self.centred, full_matrices=False, check_finite=False)
            kept = s > s[0] * 1e-7
            self.u, self.s, self.v = u[:, kept], s[kept], v[kept].T


def ridge(rows: Rows, answers: np.ndarray, towards: np.ndarray) -> Carried:
    """Ridge regression of OLD's answers on NEW's rows, its weights held towards `towards` instead of 0.

    The strength is each head's own: that of the least squared error on the rows left out one at a time, which is exact
    and needs no label.

    Args:
        rows: of NEW.
        answers: (n, H) of the heads on OLD.
        towards: (H, d).
    """
    n = len(answers)
    answers = answers - answers.mean(0)
    base = rows.centred @ towards.T
    rest = answers - base
    projected = rows.u.T @ rest
    squares = rows.u**2
    best, weights, held_out = (
        np.full(answers.shape[1], np.inf),
        towards.copy(),
        base.copy(),
    )
    for strength in STRENGTHS * (rows.s**2).sum() / len(rows.v):
        factor = rows.s**2 / (rows.s**2 + strength)
        leverage = squares @ factor + 1 / n
        fit = rows.u @ (factor[:, None] * projected)
        error = (rest - fit) / (1 - leverage)[:, None]
        loss = (error**2).mean(0)
        better = loss < best
        best = np.where(better, loss, best)
        found = towards.T + rows.v @ ((factor / rows.s)[:, None] * projected)
        weights[better] = found.T[better]
        held_out[:, better] = (answers - error)[:, better]
    return Carried(weights, correlation(held_out, answers))


def least_squares(new: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """The least-squares map before the heads, (H, d)."""
    return lstsq(new - new.mean(0), answers - answers.mean(0), check_finite=False)[0].T


def procrustes(new: np.ndarray, old: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The nearest rotation before the heads, (H, d)."""
    u, _, v = svd((new - new.mean(0)).T @ (old - old.mean(0)), check_finite=False)
    return heads @ (u @ v).T


def ranked(
    rows: Rows, new: np.ndarray, old: np.ndarray, heads: np.ndarray, rank: int
) -> np.ndarray:
    """The identity plus the least-squares change of this rank (reduced-rank regression), before the heads."""
    change = (old - old.mean(0)) - (new - new.mean(0))
    fit = rows.u.T @ change
    _, _, v = svd(fit, full_matrices=False, check_finite=False)
    kept = v[:rank].T @ v[:rank]
    return heads + (rows.v @ (fit / rows.s[:, None]) @ kept @ heads.T).T
