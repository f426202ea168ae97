"""Generalised Procrustes and MAXVAR: planted truths, noise, null directions, too few rows."""

import pytest
import torch
from torch import Tensor

from aligners.fitting.universe.joint import JointMoments, directions, generalised_procrustes, maxvar, paired_rows
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
    summed = torch.einsum("isna,isab->snb", centred, weights).repeat(MODELS, 1, 1)
    expected = moments_of(states, summed)
    each = moments_of(states, (centred @ weights).flatten(0, 1))
    for name in ("xx", "yy", "xy"):
        torch.testing.assert_close(getattr(found.with_sum(weights), name), getattr(expected, name))
        torch.testing.assert_close(getattr(found.mapped(weights), name), getattr(each, name))


def test_rotated_copies_are_rotated_onto_each_other() -> None:
    states, turned = copies(rotations()), rotations()
    found = generalised_procrustes(joint(states))
    maps = torch.einsum("isab,jscb->ijsac", found, found)
    torch.testing.assert_close(maps, torch.einsum("isba,jsbc->ijsac", turned, turned), atol=1e-6, rtol=0)
    assert fvu(states, found, found.mT).max() < 1e-12


def test_the_space_has_the_principal_axes_of_the_mean() -> None:
    moments = joint(copies(rotations(), noise=0.5))
    covariance = moments.with_sum(generalised_procrustes(moments)).yy[:SITES] / moments.n
    values = covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(covariance, torch.diag_embed(values), atol=1e-6, rtol=0)
    assert bool((values.diff() < 0).all())


def test_procrustes_is_a_fixed_point_and_better_than_a_hub() -> None:
    states = copies(rotations(), noise=2.0)
    moments = joint(states)
    found = generalised_procrustes(moments)

    def agreement(r: Tensor) -> Tensor:
        return torch.einsum("isab,ijsac,jscb->s", r, moments.scatter, r)

    u, _, vh = torch.linalg.svd(moments.scatter[:, 0])  # each onto the first model alone
    assert bool((agreement(found) > agreement(u @ vh)).all())
    for i in range(MODELS):
        others = sum(moments.scatter[i, j] @ found[j] for j in range(MODELS) if j != i)
        u, _, vh = torch.linalg.svd(others)
        torch.testing.assert_close(u @ vh, found[i], atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("rows", [3, 5])
def test_procrustes_of_few_rows_is_orthogonal_and_exact_where_the_rows_say_anything(rows: int) -> None:
    states = copies(rotations(), rows=rows)
    found = generalised_procrustes(joint(states))
    torch.testing.assert_close(found @ found.mT, torch.eye(WIDTH, dtype=torch.float64).expand_as(found))
    assert fvu(states, found, found.mT).max() < 1e-9


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
