"""Rows of known sparse features, in plain NumPy."""

import numpy as np
import torch
from torch import Tensor


def planted_rows(
    *, d_x: int, d_y: int, features: int, own: int, rows: int, seed: int, rows_seed: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x (1, rows, d_x), y (1, rows, d_y) and the directions (features, d) of each, in float64.

    The first `own` features are X's alone, as many after them Y's. Each of all is there in one of twelve rows.
    """
    draw = np.random.default_rng(seed)
    of_x, of_y = draw.normal(size=(features, d_x)), draw.normal(size=(features, d_y))
    of_x /= np.linalg.norm(of_x, axis=1, keepdims=True)
    of_y /= np.linalg.norm(of_y, axis=1, keepdims=True)
    of_y[:own] = 0
    of_x[own : 2 * own] = 0
    draw = np.random.default_rng(rows_seed)
    codes = draw.uniform(0.5, 1.5, (rows, features)) * (draw.random((rows, features)) < 1 / 12)
    x = codes @ of_x + 0.02 * draw.normal(size=(rows, d_x))
    y = 5 * (codes @ of_y + 0.02 * draw.normal(size=(rows, d_y))) + 2
    return (*(torch.from_numpy(states[None]) for states in (x, y)), torch.from_numpy(of_x), torch.from_numpy(of_y))
