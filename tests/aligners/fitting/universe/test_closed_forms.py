"""MAXVAR and the directions of a space: planted truths, noise, null directions, too few rows."""

import pytest
import torch
from torch import Tensor

from aligners.fitting.universe.joint import JointMoments, directions, maxvar, paired_rows
from aligners.similarity.algebra.moments import moments_of

MODELS, SITES, ROWS, WIDTH = 4, 2, 400, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copies(turned: Tensor, rows: int = ROWS, noise: float = 0.0) -> Tensor:
    """Latent states, which vary differently in every direction, in the coordinates of each model: (k · S, N, d)."""
    latent = drawn(SITES, rows, WIDTH) * torch.linspace(3, 0.5, WIDTH)
    offsets = 10 * drawn(MODELS, SITES, 1, WIDTH, seed=2)
    states = latent @ turned + offsets
    return (states + noise * drawn(*states.shape, seed=3)).flatten(0, 1)


def rotations() -> Tensor:
    return torch.linalg.qr(drawn(MODELS, SITES, WIDTH, WIDTH, seed=1)).Q


def joint(states: Tensor) -> JointMoments:
    return JointMoments.of(moments_of(*paired_rows(states, MODELS)), MODELS)


def fvu(states: Tensor, into: Tensor, back: Tensor) -> Tensor:
    """FVU of every i -> j, (k, k, S)."""
    centred = (states - states.mean(1, keepdim=True)).unflatten(0, (MODELS, SITES))
    mapped = torch.einsum("isna,isab,jsbc->ijsnc", centred, into, back)
    return (mapped - centred).square().sum((-2, -1)) / centred.square().sum((-2, -1))


def test_joint_moments_are_those_of_all_rows_side_by_side() -> None:
    states = copies(rotations(), noise=0.3)
    found = joint(states)
    centred = (states - states.mean(1, keepdim=True)).unflatten(0, (MODELS, SITES))
    torch.testing.assert_close(found.scatter, torch.einsum("isna,jsnb->ijsab", centred, centred))
    torch.testing.assert_close(found.mean.flatten(0, 1), states.mean(1))
    weights = drawn(MODELS, SITES, WIDTH, WIDTH, seed=5)
    each = moments_of(states, (centred @ weights).flatten(0, 1))
    for name in ("xx", "yy", "xy"):
        torch.testing.assert_close(getattr(found.mapped(weights), name), getattr(each, name))


def test_directions_are_axes_of_the_mean_and_what_each_model_explains_of_the_others_there() -> None:
    states = copies(rotations(), noise=2.0)
    variance, explained = directions(joint(states))
    centred = (states - states.mean(1, keepdim=True)).unflatten(0, (MODELS, SITES))
    for s in range(SITES):
        values, axes = torch.linalg.eigh(torch.cov(centred[:, s].mean(0).T, correction=0))
        torch.testing.assert_close(variance[s], values.flip(0))
        along = (centred[:, s] @ axes.flip(1)).movedim(2, 0)  # (d, k, N)
        for model in range(MODELS):
            pairs = torch.stack([along[:, model], along.sum(1) - along[:, model]], 1)
            expected = torch.stack([torch.corrcoef(pair)[0, 1] ** 2 for pair in pairs])
            torch.testing.assert_close(explained[model, s], expected)


def test_maxvar_finds_copies_under_any_linear_maps() -> None:
    states = copies(drawn(MODELS, SITES, WIDTH, WIDTH, seed=4))
    assert fvu(states, *maxvar(joint(states))).max() < 1e-9


def test_maxvar_copes_with_a_direction_that_does_not_vary() -> None:
    flat = torch.ones(WIDTH, dtype=torch.float64) / WIDTH**0.5
    states = copies(rotations())[:SITES].repeat(MODELS, 1, 1)
    states = states - (states @ flat)[..., None] * flat  # as after a LayerNorm
    into, back = maxvar(joint(states))
    assert into.isfinite().all()
    assert fvu(states, into, back).max() < 1e-9


def test_maxvar_needs_more_rows_than_dimensions_of_all_models() -> None:
    with pytest.raises(ValueError, match=r"more fitting rows than the 4 models have .* together, 24, but got 24"):
        maxvar(joint(copies(rotations(), rows=24)))
