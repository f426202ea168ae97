"""Paired rows of every shape that a measure has to bear: few, many, deficient, badly scaled, far from the origin."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import moments_of

AlignerT = TypeVar("AlignerT", bound=Aligner)
LAYERS_X, LAYERS_Y, D_X, D_Y = 3, 2, 6, 5
CASES = ("tall", "many", "square", "deficient", "scaled", "far", "scaled and far", "barely", "few")


def paired(n: int, d_x: int = D_X, d_y: int = D_Y, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows (3, n, d_x) and (2, n, d_y) in float64 that have a few directions in common."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    common = normal(n, 3) * torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    x = common @ normal(LAYERS_X, 3, d_x) + 0.7 * normal(LAYERS_X, n, d_x) + 1
    y = common @ normal(LAYERS_Y, 3, d_y) + 0.9 * normal(LAYERS_Y, n, d_y) - 2
    return x, y


def rows_of(case: str) -> tuple[Tensor, Tensor]:
    """The rows of one of `CASES`: `few` has n < d, `barely` n = d + 1, `many` n ≫ d, `square` d_x = d_y."""
    n = {"barely": D_X + 1, "few": D_Y - 1, "many": 300}.get(case, 60)
    x, y = paired(n, D_X, D_X if case == "square" else D_Y)
    if case == "deficient":  # as after a LayerNorm, and one feature given twice
        x, y = x - x.mean(-1, keepdim=True), torch.cat([y, y[..., :1]], -1)
    if "scaled" in case:
        x = x * torch.logspace(-3, 3, x.shape[-1], dtype=torch.float64)
        y = y * torch.logspace(3, -3, y.shape[-1], dtype=torch.float64)
    if "far" in case:
        x, y = x + 1000 * x.std(1, keepdim=True), y - 1000 * y.std(1, keepdim=True)
    return x, y


def fitted(aligner: AlignerT, x: Tensor, y: Tensor) -> AlignerT:
    """An aligner in float64, fitted on rows (S, N, d_x) and (S, N, d_y)."""
    aligner.double().fit(moments_of(x, y))
    return aligner


def grid(reference: Callable[..., float], x: Tensor, y: Tensor, *more: Tensor) -> Tensor:
    """A reference of one pair of layers, at all pairs: (L_x, L_y). `more` is further rows of X and of Y."""
    new_x, new_y = more or (None, None)

    def at(i: int, j: int) -> float:
        rows = [x[i], y[j]] + ([] if new_x is None else [new_x[i], new_y[j]])
        return reference(*(np.asarray(row.double()) for row in rows))

    return torch.tensor([[at(i, j) for j in range(len(y))] for i in range(len(x))], dtype=torch.float64)


TEN = (
    "common", "unrelated", "few", "wide", "duplicates", "large mean", "outlier feature", "deficient", "heavy tails",
    "float16",
)  # fmt: skip


def data_set(name: str) -> tuple[Tensor, Tensor]:
    """One of `TEN`: rows (2, n, 6) and (2, n, 5) that a measure of two models may meet; `few` has n < d."""
    n = {"few": 9, "wide": 40}.get(name, 60)
    d = {"few": 12, "wide": 24}.get(name, D_X)
    x, y = paired(n, d, d - 1, seed=7)
    x, y = x[:2], y.clone()
    draw = torch.Generator().manual_seed(11)
    if name == "unrelated":
        y = torch.randn(y.shape, generator=draw, dtype=torch.float64)
    elif name == "duplicates":  # three of each, which are not the same in Y
        x, y = x[:, torch.arange(n) // 3], y[:, torch.arange(n) % 20]
    elif name == "large mean":
        x, y = x + 300 * x.std(1, keepdim=True), y - 300 * y.std(1, keepdim=True)
    elif name == "outlier feature":
        x[..., 0] *= 100
        y[..., 1] *= 100
    elif name == "deficient":
        x, y = x - x.mean(-1, keepdim=True), torch.cat([y, y[..., :1]], -1)
    elif name == "heavy tails":
        x, y = x**3, y**3
    elif name == "float16":
        x, y = x.half(), y.half()
    return x, y
