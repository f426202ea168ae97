"""Singular values by an eigendecomposition, within the bound that they state, and where a driver is chosen."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligners.similarity.algebra import decompositions
from aligners.similarity.algebra.decompositions import singular_values, thin_svd, values_by_gram

EPSILON = torch.finfo(torch.float64).eps
SPECTRA = {
    "well-conditioned": np.linspace(1, 0.1, 40),
    "down to 1e-12": np.logspace(0, -12, 40),
    "rank-deficient": np.r_[np.linspace(1, 0.05, 30), np.zeros(10)],
    "duplicates": np.repeat([1, 0.7, 0.01, 1e-5, 0], 8),
    "close": 1 - 1e-9 * np.arange(40),
    "one": np.r_[1, np.zeros(39)],
    "large": 1e6 * np.logspace(0, -6, 40),
}


def turned(values: NDArray[np.float64], rows: int, columns: int) -> Tensor:
    """A matrix of these singular values."""
    draw = np.random.default_rng(0)
    u, _ = np.linalg.qr(draw.standard_normal((rows, len(values))))
    v, _ = np.linalg.qr(draw.standard_normal((columns, len(values))))
    return torch.from_numpy(u * values @ v.T)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (55, 40), (40, 55)])
def test_values_by_gram_keep_their_bound(name: str, rows: int, columns: int) -> None:
    known = SPECTRA[name]
    largest = known[0]
    found = values_by_gram(turned(known, rows, columns)).numpy()
    error = np.abs(found - known)
    eta = 40 * EPSILON
    with np.errstate(divide="ignore"):
        near = 2 * eta * largest**2 / known
    assert (error <= np.minimum(near, np.sqrt(2 * eta) * largest)).all()
    np.testing.assert_allclose(np.square(found).sum(), np.square(known).sum(), rtol=1e-13)
    assert (np.diff(found) <= 0).all()
    if name in ("well-conditioned", "rank-deficient", "one", "close"):  # a gap below what is not zero
        np.testing.assert_allclose(found, known, rtol=1e-12, atol=1e-13)


def test_lengths_have_digits_that_roots_of_eigenvalues_have_not() -> None:
    matrix = turned(np.r_[np.linspace(1, 0.05, 30), np.zeros(10)], 40, 40)
    roots = torch.linalg.eigvalsh(matrix.mT @ matrix).abs().sqrt()
    assert roots[:10].max() > 1e-9
    assert values_by_gram(matrix)[30:].max() < 1e-13


def test_on_a_cpu_values_are_those_of_the_svd_and_batches_those_of_each() -> None:
    matrices = torch.stack([turned(SPECTRA[name], 50, 40) for name in ("down to 1e-12", "duplicates")])
    for route in (singular_values, values_by_gram):
        alone = torch.stack([route(matrix) for matrix in matrices])
        torch.testing.assert_close(route(matrices), alone, rtol=0, atol=1e-14)
    assert torch.equal(singular_values(matrices), torch.linalg.svdvals(matrices))


class OnGPU(Tensor):
    """A CPU tensor that passes for one on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_driver_is_chosen_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    svd, asked = torch.linalg.svd, []

    def noted(matrix: Tensor, *, driver: str | None = None, **options: Any) -> Any:
        asked.append(driver)
        return svd(matrix.as_subclass(Tensor), **options)

    monkeypatch.setattr(torch.linalg, "svd", noted)
    here = turned(SPECTRA["duplicates"], 40, 40)
    there = here.as_subclass(OnGPU)
    thin_svd(here, "gesvd")
    thin_svd(there, "gesvda")
    thin_svd(there)
    monkeypatch.setattr(decompositions, "DRIVER", "gesvdj")
    u, s, vh = thin_svd(there)
    assert asked == [None, "gesvda", None, "gesvdj"]
    torch.testing.assert_close(u * s @ vh, here, rtol=0, atol=1e-14)
    assert torch.equal(singular_values(there).as_subclass(Tensor), values_by_gram(here))
