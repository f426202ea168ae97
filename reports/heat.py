"""One panel of a heat map: a value for each pair of layers, written into its cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from numpy.typing import NDArray

__all__ = ["heat_map"]

LIGHT_FROM = 0.6  # of the colour scale: above it dark letters are read better


def heat_map(
    axis: Axes, grid: NDArray[np.float64], rows: Sequence[int], columns: Sequence[int], low: float = 0, high: float = 1
) -> AxesImage:
    """Draw a grid, its first row at the bottom.

    Args:
        axis: where.
        grid: (rows, columns) values; NaN leaves a cell empty.
        rows: numbers of the layers up.
        columns: numbers of the layers across.
        low: end of the colour scale.
        high: its other end.
    """
    image = axis.imshow(grid, vmin=low, vmax=high, cmap="viridis", origin="lower", aspect="equal")
    size = 7 if max(grid.shape) <= 8 else 5.5
    light = low + LIGHT_FROM * (high - low)
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            axis.text(j, i, _short(value), ha="center", va="center", fontsize=size, color="w" if value < light else "k")
    axis.set_xticks(range(len(columns)), [str(layer) for layer in columns])
    axis.set_yticks(range(len(rows)), [str(layer) for layer in rows])
    axis.tick_params(length=0)
    return image


def _short(value: float) -> str:
    if abs(value) < 0.995:
        return f"{value:.2f}".replace("0.", ".", 1)
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0e}"
