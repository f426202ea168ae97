"""Maps of vectors, beside plain NumPy in float64."""

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes

from aligners.errors import UserError
from aligners.fitting.migration import vector_maps
from aligners.fitting.migration.vector_maps import MAPS, Pairs, fit_vectors, names_of, not_possible

DRAW = np.random.default_rng(0)
X = DRAW.normal(1, 2, (400, 6)).astype(np.float32)
TURN = np.linalg.qr(DRAW.normal(size=(6, 6)))[0]


def pairs(d_y: int = 6, noise: float = 0.1) -> Pairs:
    y = np.concatenate([X @ TURN, X @ TURN], 1)[:, :d_y] + 3
    return Pairs(X, (y + noise * DRAW.normal(size=y.shape)).astype(np.float32))


def plain(name: str, given: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Weight and offset of a map."""
    x, y = given.x.astype(float), given.y.astype(float)
    mean_x, mean_y = x.mean(0), y.mean(0)
    if name == "linear":
        weight = np.linalg.lstsq(x - mean_x, y - mean_y, rcond=None)[0]
    else:
        weight, total = orthogonal_procrustes(x - mean_x, y - mean_y)
        if name == "scaled_procrustes":
            weight = weight * total / np.square(x - mean_x).sum()
    return weight, mean_y - mean_x @ weight


@pytest.mark.parametrize("name", ["procrustes", "scaled_procrustes", "linear"])
def test_closed_forms_are_those_of_numpy(name: str) -> None:
    given = pairs()
    fitted = fit_vectors(name, given.at(slice(300)), given.at(slice(300, None)), normalised=False)
    weight, offset = plain(name, given.at(slice(300)))
    np.testing.assert_allclose(fitted.weight.numpy(), weight, atol=2e-5)
    np.testing.assert_allclose(fitted.mapped(X), X @ weight + offset, atol=1e-4)


NETWORKS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mlp", "inn")]


@pytest.mark.parametrize("name", [*(name for name in MAPS if name not in ("mlp", "inn")), *NETWORKS])
def test_every_map_finds_a_rotation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_maps, "STEPS", 60)
    given = pairs(noise=0.01)
    fitted = fit_vectors(name, given.at(slice(300)), given.at(slice(300, None)), normalised=False)
    mapped = fitted.mapped(given.x[300:])
    assert np.square(mapped - given.y[300:]).mean() < 0.2 * given.y[300:].var()
    unit = fit_vectors(name, given.at(slice(300)), given.at(slice(300, None)), normalised=True)
    np.testing.assert_allclose(np.linalg.norm(unit.mapped(X), axis=1), 1, atol=1e-6)


def test_neither_parts_nor_types_change_vectors() -> None:
    given = pairs(4)
    fitted = fit_vectors("ridge", given.at(slice(300)), given.at(slice(300, None)), normalised=False)
    whole = fitted.mapped(X)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(np.concatenate([fitted.mapped(X[:7]), fitted.mapped(X[7:])]), whole, atol=1e-5)
    np.testing.assert_allclose(fitted.mapped(X.astype(np.float64)), whole, atol=1e-5)
    half = X.astype(np.float16)
    np.testing.assert_array_equal(fitted.mapped(half), fitted.mapped(half.astype(np.float32)))
    with pytest.raises(UserError, match="vectors of width 6"):
        fitted.mapped(X[:, :3])


def test_what_cannot_be_fitted_is_known_beforehand() -> None:
    assert "ridge does with fewer" in str(not_possible("linear", 64, 32, 60))
    assert not_possible("linear", 64, 32, 65) is None
    assert not_possible("ridge", 64, 32, 20) is None
    assert "equal widths" in str(not_possible("inn", 64, 32, 1000))
    with pytest.raises(UserError, match="`maps`"):
        names_of(["linear", "cca"])
    with pytest.raises(UserError, match="got none"):
        names_of([])
