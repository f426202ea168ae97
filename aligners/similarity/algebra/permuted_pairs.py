"""Sums over pairs of rows of X with those of Y in other orders: what nulls of HSIC, RSA and RBF CKA are made of."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.similarity.algebra.pairs import (
    BLOCK,
    Kernel,
    PairSums,
    Rows,
    inner,
    kernel_pair_sums,
    linear_pair_sums,
    squared_products,
)

MOST_KEPT = 2**27  # entries of Gram matrices that are kept for all orders, 1 GiB
LOOK_UP = (
    80  # multiplications that take as long as looking one entry of a Gram matrix up
)

Order = Tensor | slice  # of rows, (N,), or all of them as they are


class PermutedPairs:
    """Sums over pairs of rows, as `linear_pair_sums` and `kernel_pair_sums` have them, with Y's rows in any order.

    An order changes the products of X with Y alone. They come from Gram matrices, made once and looked up in that
    order, where these are small enough and the cheaper way; else linear kernels have the products of their features,
    and others are computed again.

    Args:
        x: (L_x, N, d_x).
        y: (L_y, N, d_y).
        kernels: of X and of Y, as in `kernel_pair_sums`; None: linear.
    """

    def __init__(
        self, x: Rows, y: Rows, kernels: tuple[Kernel, Kernel] | None = None
    ) -> None:
        self._x = x
        self._y = y
        self._kernels = kernels

    @cached_property
    def sums(self) -> PairSums:
        """The sums of the rows as they are."""
        if self._kernels is None:
            return linear_pair_sums(self._x, self._y)
        return kernel_pair_sums(self._x, self._y, *self._kernels)

    def of(self, order: Order) -> PairSums:
        """The sums where row i of X is paired with row `order[i]` of Y."""
        if isinstance(order, slice):
            return self.sums
        if self._looks_up:
            products = self._looked_up(order)
        elif self._kernels is None:
            products = self._multiplied(order)
        else:
            y = self._y[:, order]  # type: ignore[index]
            products = kernel_pair_sums(self._x, y, *self._kernels).xy
        rows_y = self.sums.rows_y[:, order]
        return self.sums._replace(xy=products, rows_y=rows_y)

    @property
    def _looks_up(self) -> bool:
        """Whether Gram matrices are kept."""
        layers_x, n, d_x = self._x.shape
        layers_y, _, d_y = self._y.shape
        if n * n * (layers_x + layers_y) > MOST_KEPT:
            return False
        return self._kernels is not None or n * LOOK_UP <= d_x * d_y

    @cached_property
    def _grams(self) -> tuple[Tensor, Tensor]:
        """The kernels of X and of Y, (L, N, N) each, with zero diagonals."""
        of_x, of_y = self._kernels or (inner, inner)
        return _gram(self._x, of_x), _gram(self._y, of_y)

    def _looked_up(self, order: Tensor) -> Tensor:
        """Σ K_ij L_ij, (L_x, L_y), from Gram matrices."""
        of_x, of_y = self._grams
        total = torch.zeros(
            len(of_x), len(of_y), dtype=torch.float64, device=order.device
        )
        for start in range(0, len(order), BLOCK):
            some = slice(start, start + BLOCK)
            rows = of_y[:, order[some]]
            paired = rows.index_select(2, order)
            total += of_x[:, some].flatten(1) @ paired.flatten(1).mT
        return total

    def _multiplied(self, order: Tensor) -> Tensor:
        """Σ K_ij L_ij, (L_x, L_y), from features: ‖XᵀY‖² − Σ‖x_i‖²‖y_i‖²."""
        x, squares_x = self._features_x
        y, squares_y = self._features_y
        same = squares_x @ squares_y[:, order].mT
        return squared_products(x, y[:, order]) - same

    @cached_property
    def _features_x(self) -> tuple[Tensor, Tensor]:
        return _features(self._x)

    @cached_property
    def _features_y(self) -> tuple[Tensor, Tensor]:
        return _features(self._y)


def _features(rows: Rows) -> tuple[Tensor, Tensor]:
    """Rows (L, N, d) in float64 and their squared lengths (L, N)."""
    features = rows[:, :].double()
    return features, torch.linalg.vecdot(features, features)


def _gram(rows: Rows, kernel: Kernel) -> Tensor:
    """A kernel of all rows with all, (L, N, N) float64, with zeros on the diagonals."""
    layers, n, _ = rows.shape
    gram = torch.empty(layers, n, n, dtype=torch.float64, device=rows.device)
    every = rows[:, :]
    for start in range(0, n, BLOCK):
        some = slice(start, start + BLOCK)
        gram[:, some] = kernel(every[:, some], every)
    gram.diagonal(dim1=1, dim2=2).zero_()
    return gram


class OfPairs(NamedTuple):
    """A measure made of sums over pairs of rows, for Y's rows in any order.

    Attributes:
        pairs: the sums.
        finish: from the sums and the order that they are of to the value, (L_x, L_y).
    """

    pairs: PermutedPairs
    finish: Callable[[PairSums, Order], Tensor]

    def value(self, order: Order = slice(None)) -> Tensor:
        """Return the value, (L_x, L_y)."""
        return self.finish(self.pairs.of(order), order)
