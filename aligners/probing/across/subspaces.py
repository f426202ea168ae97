"""Subspaces of Y's states: what a probe reads, and others of the same dimension to set beside it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from aligners.probing.bank import Bank
from aligners.probing.edges.probes import EdgeProbes
from aligners.probing.trees.probes import StructuralProbes

__all__ = ["principal_subspaces", "random_subspaces", "read_subspaces", "swapped"]


def read_subspaces(bank: Bank) -> Tensor:
    """What each probe of a bank reads of its states: the span of its projections, and nothing outside it.

    Args:
        bank: of edge probes with a narrow projection, or of structural probes of equal rank.

    Returns:
        (A, d, k) with orthonormal columns, float32. The two spans of an edge probe are projected separately, and k is
        then twice the projection's width, at most d.
    """
    if isinstance(bank.probes, EdgeProbes):
        weight = torch.cat([cast(Tensor, each.weight) for each in bank.probes.projections], -1)
    else:
        probes = cast(StructuralProbes, bank.probes)
        weight = probes.weight[:, :, probes.kept[0]]
    return _orthonormal(weight)


def random_subspaces(like: Tensor, seed: int) -> Tensor:
    """Subspaces of the same dimension, each drawn uniformly: (A, d, k)."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _orthonormal(drawn).to(like)


def principal_subspaces(states: Tensor, k: int) -> Tensor:
    """Where states vary most: (A, N, d) -> (A, d, k)."""
    centred = states.double() - states.double().mean(1, keepdim=True)
    vectors = torch.linalg.eigh(centred.mT @ centred).eigenvectors
    return vectors[..., -k:].to(states)


def swapped(own: Tensor, other: Tensor, subspaces: Tensor | None) -> Tensor:
    """States with their part in a subspace replaced by that of others: y + V Vᵀ (g(x) − y).

    Args:
        own: (S, N, d) the states y.
        other: (S, N, d) what replaces them, g(x).
        subspaces: (S, d, k) with orthonormal columns V; None: everything is replaced.

    Returns:
        (S, N, d)
    """
    if subspaces is None:
        return other
    return own + (other - own) @ subspaces @ subspaces.mT


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns.double()).Q.to(columns)
