from typing import Any

import numpy as np
import pytest
import torch
from tests.references.maps import procrustes, ridge_regression
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor

from aligners.maps.baselines import GaussianStates, random_labels
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Procrustes, Ridge
from aligners.maps.mlp import MLP, FreeForm
from aligners.maps.solvers import RIDGES, STRENGTHS
from aligners.maps.solvers import ridge_regression as ridge_regression_of_moments
from aligners.similarity.algebra.moments import Moments, moments_of
from aligners.similarity.functional.regression import r2

SITES = 2


def numpy_rows(x: Tensor, y: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(a.numpy(), b.numpy()) for a, b in zip(x, y, strict=True)]


@pytest.mark.parametrize(
    ("n", "d_x", "d_y", "ridge"),
    [
        (6, 10, 10, 1e-2),  # fewer rows than dimensions: the ridge decides
        (11, 10, 10, 0.0),  # just enough rows: the fit is exact
        (400, 10, 10, 0.0),
        (400, 10, 10, 1e-2),
        (400, 10, 4, 1e-6),
        (400, 4, 10, 1e-6),
    ],
)
def test_linear_is_ridge_regression(n: int, d_x: int, d_y: int, ridge: float) -> None:
    x, y = related_rows(SITES, n, d_x, d_y)
    aligner = fitted(Linear(SITES, d_x, d_y, ridge=ridge), x, y)
    mapped = aligner(x).numpy()
    for site, (a, b) in enumerate(numpy_rows(x, y)):
        weight, bias = ridge_regression(a, b, ridge)
        np.testing.assert_allclose(mapped[site], a @ weight + bias, atol=1e-7)
        if n == d_x + 1:
            np.testing.assert_allclose(mapped[site], b, atol=1e-6)


@pytest.mark.parametrize(("n", "d_x", "d_y"), [(9, 12, 12), (14, 12, 5), (60, 5, 12)])
def test_ridge_takes_the_strength_with_the_least_error_on_validation_rows(n: int, d_x: int, d_y: int) -> None:
    x, y = related_rows(SITES, n + 40, d_x, d_y)
    y = y + 0.5 * y.std() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    x[1, n:] += 1  # other means than those of the fitting rows
    y[1, n:] += 3
    aligner = Ridge(SITES, d_x, d_y).double()
    aligner.fit(moments_of(x[:, :n], y[:, :n]), moments_of(x[:, n:], y[:, n:]))
    mapped = aligner(x).numpy()
    for site, (a, b) in enumerate(numpy_rows(x, y)):
        fits = {}
        for ridge in STRENGTHS:
            for common in (False, True):
                fits[ridge, common] = ridge_regression(a[:n], b[:n], ridge, common)
        errors = {way: np.square(a[n:] @ w + bias - b[n:]).sum() for way, (w, bias) in fits.items()}
        best = min(errors, key=lambda way: errors[way])
        assert aligner.ridge[site].item() == pytest.approx(best[0])
        np.testing.assert_allclose(mapped[site], a @ fits[best][0] + fits[best][1], atol=1e-7)
    assert len({*aligner.ridge.tolist()} - {min(STRENGTHS), max(STRENGTHS)}) > 0  # a choice was made
    found = {"ridge": pytest.approx(aligner.ridge.tolist(), rel=1e-6), "ridge_chosen_by": "40 validation rows"}
    edges = {min(STRENGTHS): "smallest", max(STRENGTHS): "largest"}
    at_edges = [edges.get(strength) for strength in aligner.findings()["ridge"]]
    if any(at_edges):
        found["ridge_at_the_edge"] = at_edges
    assert aligner.findings() == found
    aligner.fit(moments_of(x[:, :n], y[:, :n]))
    assert aligner.findings()["ridge_chosen_by"] == "generalised cross-validation on the fitting rows"


SCALES = [("one", 3e3), ("one", 1e5), ("all", 1e5)]
ROWS = [(32, 16), (32, 64), (32, 1600), (256, 128), (256, 512)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "n", "kind", "scale"),
    [*((d, n, kind, scale) for d, n in ROWS for kind, scale in SCALES), (256, 12_800, "all", 1e5)],
)
def test_features_of_any_scale_are_fitted_as_scikit_learn_fits_standardised_ones(
    d: int, n: int, kind: str, scale: float
) -> None:
    """A language model has features of thousands of times the size of the others, which a common penalty leaves out."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = related_rows(1, n + 300, d, d)
    y = y + 0.25 * y.std() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    grown = torch.ones(d, dtype=x.dtype)
    grown[3] = scale
    if kind == "all":
        grown = torch.logspace(0, np.log10(scale), d, dtype=x.dtype)
    fit_x, fit_y, held_x, held_y = x[:, :n], y[:, :n], x[:, n:], y[:, n:]
    moments = moments_of(fit_x * grown, fit_y)
    linear, ridge = Linear(1, d, d).double(), Ridge(1, d, d).double()
    linear.fit(moments)
    ridge.fit(moments, moments_of(held_x * grown, held_y))
    mean, deviation = fit_x[0].mean(0), fit_x[0].std(0, correction=0)
    standardised, held = (((part[0] - mean) / deviation).numpy() for part in (fit_x, held_x))
    predicted = {}
    for strength in (linear.ridge, 1e-3, 0.1):
        reference = sklearn.Ridge(alpha=n * strength, solver="cholesky").fit(standardised, fit_y[0].numpy())
        predicted[strength] = reference.predict(held)
    np.testing.assert_allclose(linear(held_x * grown)[0].numpy(), predicted[linear.ridge], atol=1e-5)
    errors = {strength: np.square(found - held_y[0].numpy()).sum() for strength, found in predicted.items()}
    assert (ridge(held_x * grown) - held_y).square().sum().item() < 1.000001 * min(errors.values())
    starts = []
    for factor in (grown, 1.0):
        network = MLP(1, d, d).double()
        network.fit(moments_of(fit_x * factor, fit_y))
        starts.append(network(held_x * factor))
    mapped, plain = ((start - held_y).square().mean().item() for start in starts)
    assert mapped < 1.15 * plain
    if n > d + 1:  # map and measure agree
        left = (linear(fit_x * grown) - fit_y).square().sum() / (fit_y - moments.mean_y).square().sum()
        assert 1 - left.item() == pytest.approx(r2(fit_y, fit_x * grown).item(), abs=1e-5)


@pytest.mark.parametrize("start", ["linear", "covariance"])
def test_the_start_of_an_inn_does_not_depend_on_the_scale_of_a_feature(start: Any) -> None:
    x, y = related_rows(1, 2000, 16, 16)
    y = y + 0.25 * y.std() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    errors = []
    for scale in (1.0, 1e4):
        grown = torch.ones(16, dtype=x.dtype)
        grown[3] = scale
        network = INN(1, 16, 16, start=start).double()
        network.fit(moments_of(x * grown, y))
        errors.append(((network(x * grown) - y).square().mean() / y.var(1).mean()).item())
    assert errors[0] < 0.2
    assert errors[1] < 1.1 * errors[0]


def test_linear_on_a_hyperplane_maps_as_the_smallest_solution_does() -> None:
    """Behind a LayerNorm, rows sum to zero: XᵀX has an exact null direction."""
    x, y = related_rows(SITES, 500, 12, 12)
    x = torch.nn.functional.layer_norm(x, (12,))
    aligner = fitted(Linear(SITES, 12, 12, ridge=1e-9), x, y)
    for site, (a, b) in enumerate(numpy_rows(x, y)):
        weight = np.linalg.pinv(a - a.mean(0), rcond=1e-8) @ (b - b.mean(0))
        np.testing.assert_allclose(aligner(x)[site].numpy(), (a - a.mean(0)) @ weight + b.mean(0), atol=1e-5)
        assert np.abs(aligner.weight[site].numpy()).max() < 10 * np.abs(weight).max()  # nothing blew up
    assert aligner.condition.isfinite().all()


def test_linear_inverse_undoes_it_where_it_can() -> None:
    x, y = related_rows(SITES, 300, 8, 8)
    aligner = fitted(Linear(SITES, 8, 8), x, y)
    assert aligner.invertible
    assert not aligner.bijective
    torch.testing.assert_close(aligner.inverse(aligner(x)), x)
    weight = ridge_regression(*numpy_rows(x, y)[1], aligner.ridge)[0]
    assert aligner.findings()["condition_number"][1] == pytest.approx(np.linalg.cond(weight), rel=1e-6)
    assert not Linear(1, 8, 4).invertible


@pytest.mark.parametrize(("d_x", "d_y"), [(8, 8), (5, 8), (8, 5)])
@pytest.mark.parametrize("scale", [False, True])
def test_procrustes_is_scipys(d_x: int, d_y: int, scale: bool) -> None:
    x, y = related_rows(SITES, 300, d_x, d_y)
    aligner = fitted(Procrustes(SITES, d_x, d_y, scale=scale), x, y)
    for site, (a, b) in enumerate(numpy_rows(x, y)):
        if d_x == d_y:
            rotation, factor = procrustes(a, b)
        else:  # SciPy's is for equal widths: zeros beside the narrower side change no distance
            wide = max(d_x, d_y)
            pad = [np.pad(m, ((0, 0), (0, wide - m.shape[1]))) for m in (a, b)]
            rotation, factor = procrustes(*pad)
            rotation = rotation[:d_x, :d_y]
        weight = rotation * (factor if scale else 1)
        np.testing.assert_allclose(aligner.weight[site].numpy(), weight, atol=1e-9)
    rotation = aligner.weight / aligner.weight.square().sum((1, 2), keepdim=True).div(min(d_x, d_y)).sqrt()
    small = rotation @ rotation.mT if d_x <= d_y else rotation.mT @ rotation
    torch.testing.assert_close(small, torch.eye(min(d_x, d_y)).double().expand_as(small))
    assert aligner.bijective == (d_x == d_y)
    if d_x <= d_y:
        torch.testing.assert_close(aligner.inverse(aligner(x)), x)


@pytest.mark.parametrize("kind", [MLP, FreeForm])
def test_networks_start_at_ridge_regression_and_have_the_size_that_is_asked_for(kind: Any) -> None:
    x, y = related_rows(SITES, 400, 6, 5)
    moments = moments_of(x, y)
    network = fitted(kind(SITES, 6, 5), x, y)
    weight, _ = ridge_regression_of_moments(moments, RIDGES)
    torch.testing.assert_close(network(x), (x - moments.mean_x[:, None]) @ weight + moments.mean_y[:, None])
    if network.invertible:
        torch.testing.assert_close(network.inverse(y), fitted(MLP(SITES, 5, 6), y, x)(y))
    sized = kind(1, 6, 5, parameters=4000)
    assert sum(parameter.numel() for parameter in sized.parameters()) == pytest.approx(4000, rel=0.03)


def test_what_cannot_be_solved_is_refused() -> None:
    x, y = related_rows(SITES, 50, 6, 6)
    x[1] = 2.0
    with pytest.raises(ValueError, match=r"number 1 is singular at ridge 0\.01.*`ridge`"):
        Linear(SITES, 6, 6, ridge=1e-2).fit(moments_of(x, y))
    with pytest.raises(ValueError, match=r"neurons are constant or not finite at site pair number 1"):
        Ridge(SITES, 6, 6).fit(moments_of(x, y))
    with pytest.raises(ValueError, match=r"`ridge`.*-1"):
        Linear(1, 6, 6, ridge=-1.0)
    with pytest.raises(ValueError, match=r"equal widths.*`d_x` is 6 and `d_y` is 5"):
        Identity(1, 6, 5)


# ---------------------------------------------------------------------- floors of an injection


def singular_moments() -> Moments:
    """With an exactly singular covariance of Y, as behind a LayerNorm."""
    x, y = related_rows(SITES, 400, 3, 5)
    return moments_of(x, torch.nn.functional.layer_norm(y, (5,)))


def test_a_text_draws_the_same_in_any_batch() -> None:
    states = GaussianStates(singular_moments(), seed=0)
    together = states([4, 2, 9], [3, 1, 2])
    assert together.shape == (SITES, 6, 5)
    apart = states([9, 4], [2, 3])
    torch.testing.assert_close(apart, together[:, [4, 5, 0, 1, 2]], rtol=0, atol=1e-6)
    other = GaussianStates(singular_moments(), seed=1)([9, 4], [2, 3])
    assert (other - apart).abs().min() > 1e-4
    rows = GaussianStates(singular_moments(), seed=0)(range(3000), [1] * 3000)  # and texts draw independently
    near = torch.corrcoef(torch.stack([rows[0, :-1, 0], rows[0, 1:, 0]]))[0, 1]
    assert abs(near) < 0.06


def test_mean_and_covariance_are_those_of_the_fitting_rows() -> None:
    given = singular_moments()
    drawn = GaussianStates(given, seed=0)(range(200), [200] * 200).double()
    found = moments_of(drawn, drawn)
    expected = given.yy / given.n
    variance = expected.diagonal(dim1=1, dim2=2)
    mean_error = (variance / found.n).sqrt()
    error = ((variance[:, :, None] * variance[:, None] + expected.square()) / found.n).sqrt()
    assert ((found.mean_x - given.mean_y).abs() < 5 * mean_error).all()
    assert ((found.xx / found.n - expected).abs() < 5 * error).all()
    # the direction in which Y never varies stays empty
    assert (drawn.sum(-1) - given.mean_y.sum(-1)[:, None]).abs().max() < 1e-4


def test_random_labels_are_uniform_and_repeatable() -> None:
    labels = random_labels(6000, 3, seed=0)
    assert labels.shape == (6000,)
    assert (labels.bincount() - 2000).abs().max() < 150
    assert torch.equal(labels, random_labels(6000, 3, seed=0))
    assert not torch.equal(labels, random_labels(6000, 3, seed=1))
