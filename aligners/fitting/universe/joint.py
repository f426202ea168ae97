"""Moments of k models on the same rows: all that the closed forms of a universe need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.similarity.algebra.moments import Moments

__all__ = ["JointMoments", "all_pairs", "paired_rows"]


class JointMoments(NamedTuple):
    """Centred second moments of n rows of k models at S sites, in float64.

    Attributes:
        n: number of rows, ().
        mean: (k, S, d).
        scatter: Σ (x_i − x̄_i)(x_j − x̄_j)ᵀ of models i and j, (k, k, S, d, d).
    """

    n: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, moments: Moments, models: int) -> Self:
        """Arrange the moments of all pairs of models.

        Args:
            moments: of `paired_rows`.
            models: k.
        """
        pairs = all_pairs(models)
        by_pair = [part.unflatten(0, (len(pairs), -1)) for part in moments[1:]]
        mean_x, mean_y, xx, yy, xy = by_pair
        mean = mean_x.new_zeros(models, *mean_x.shape[1:])
        scatter = xx.new_zeros(models, models, *xx.shape[1:])
        for p, (i, j) in enumerate(pairs):
            mean[i], mean[j] = mean_x[p], mean_y[p]
            scatter[i, i], scatter[j, j] = xx[p], yy[p]
            scatter[i, j], scatter[j, i] = xy[p], xy[p].mT
        return cls(moments.n, mean, scatter)

    @property
    def variance(self) -> Tensor:
        """Mean variance over the dimensions of each model at each site, (k, S)."""
        own = self.scatter.diagonal(dim1=0, dim2=1).movedim(-1, 0)
        return own.diagonal(dim1=-2, dim2=-1).mean(-1) / self.n

    def scaled(self) -> Self:
        """The moments of states divided by their root mean variance, one number for each model and site."""
        scale = self.variance.sqrt()[..., None]
        return self._replace(mean=self.mean / scale, scatter=self.scatter / (scale[:, None] * scale[None])[..., None])

    def own(self) -> Moments:
        """The moments of every model with itself, at k · S places, model after model."""
        own = self.scatter.diagonal(dim1=0, dim2=1).movedim(-1, 0).flatten(0, 1)
        mean = self.mean.flatten(0, 1)
        return Moments(self.n, mean, mean, own, own, own)

    def mapped(self, weights: Tensor) -> Moments:
        """The moments of every model's states with (x_i − x̄_i) W_i, at k · S places, model after model.

        Args:
            weights: W, (k, S, d, d).
        """
        own, each = self.own(), weights.flatten(0, 1)
        xy = own.xx @ each
        return own._replace(mean_y=torch.zeros_like(own.mean_y), yy=each.mT @ xy, xy=xy)

    def with_sum(self, weights: Tensor) -> Moments:
        """The moments of every model's states with Σ_i (x_i − x̄_i) W_i, at k · S places, model after model.

        Args:
            weights: W, (k, S, d, d).
        """
        xy = torch.einsum("ijsab,jsbc->isac", self.scatter, weights)
        yy = torch.einsum("isba,isbc->sac", weights, xy).expand_as(xy)
        own = self.own()
        return own._replace(mean_y=torch.zeros_like(own.mean_y), yy=yy.flatten(0, 1), xy=xy.flatten(0, 1))


def all_pairs(models: int) -> Sequence[tuple[int, int]]:
    """Every model with each later one, by number."""
    return list(combinations(range(models), 2))


def paired_rows(states: Tensor, models: int) -> tuple[Tensor, Tensor]:
    """The rows of all pairs of models: k · S places, model after model, become k (k − 1) / 2 · S, pair after pair.

    Args:
        states: (k · S, N, d).
        models: k.
    """
    each = states.unflatten(0, (models, -1))
    first, second = (list(numbers) for numbers in zip(*all_pairs(models), strict=True))
    return each[first].flatten(0, 1), each[second].flatten(0, 1)
