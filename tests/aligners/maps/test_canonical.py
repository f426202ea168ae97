from typing import Any

import numpy as np
import pytest
import torch
from tests.references.maps import Canonical, canonical, canonical_map, carrying, components, fvu, mse
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor

from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.linear import Affine, Linear

SITES = 2
SHAPES = [(6, 6), (4, 7), (7, 4)]


def uneven_rows(d_x: int, d_y: int, n: int = 200) -> tuple[Tensor, Tensor]:
    """Related rows whose principal components hold very unequal shares of the variance."""
    x, y = related_rows(SITES, n, d_x, d_y)
    return x * torch.logspace(1, -2, d_x).double(), y * torch.logspace(-2, 1, d_y).double()


def agree(aligner: Affine, x: Tensor, y: Tensor, weights: list[np.ndarray]) -> None:
    """The map is x ↦ (x − x̄) W + ȳ, site by site."""
    mapped = aligner(x).numpy()
    for site, weight in enumerate(weights):
        a, b = x[site].numpy(), y[site].numpy()
        expected = (a - a.mean(0)) @ weight + b.mean(0)
        np.testing.assert_allclose(mapped[site], expected, rtol=0, atol=1e-8 * np.abs(b).max())


def cut(found: Canonical, directions: int | None) -> Canonical:
    return Canonical(found.h[:, :directions], found.k[:, :directions], found.rho[:directions])


def defined(kind: type[Affine], a: np.ndarray, b: np.ndarray, options: dict[str, Any]) -> tuple[np.ndarray, dict]:
    """The map of one site by its definition, and what is found of it."""
    shrink, directions = options.get("shrink", False), options.get("directions")
    if kind is SVCCA:
        axes_x, axes_y = components(a, options["share"]), components(b, options["share"])
        small_x, small_y = a @ axes_x, b @ axes_y
        found = cut(canonical(small_x, small_y), directions)
        weight = canonical_map(small_x, small_y, found, shrink)
        mapped = (small_x - small_x.mean(0)) @ weight + small_y.mean(0)
        more = {"components_x": axes_x.shape[1], "components_y": axes_y.shape[1], "reduced_mse": mse(mapped, small_y)}
        more["reduced_fvu"] = fvu(mapped, small_y, small_y.mean(0))
        weight = axes_x @ weight @ axes_y.T
    else:
        every, more = canonical(a, b), {}
        found = cut(every, directions) if kind is CCA else carrying(a, every, options["share"])
        weight = canonical_map(a, b, found, shrink)
        if kind is PWCCA:
            whole, kept = (np.abs(some.h.T @ (a - a.mean(0))).sum() for some in (every, found))
            more = {"alpha_share": kept / whole}
            assert options["share"] <= more["alpha_share"] < 1
    return weight, {"directions": len(found.rho), "mean_correlation": found.rho.mean(), **more}


@pytest.mark.parametrize(("d_x", "d_y"), SHAPES)
@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((CCA, {"directions": directions}) for directions in (None, 3)),
        *((SVCCA, {"share": a, "directions": b}) for a, b in ((0.9, None), (0.999, 1), (1.0, 3))),
        *((PWCCA, {"share": share}) for share in (0.5, 0.8)),
    ],
)
def test_they_are_their_definitions(d_x: int, d_y: int, shrink: bool, kind: Any, options: dict[str, Any]) -> None:
    x, y = related_rows(SITES, 200, d_x, d_y) if kind is CCA else uneven_rows(d_x, d_y)
    aligner = fitted(kind(SITES, d_x, d_y, shrink=shrink, **options), x, y)
    found, weights = aligner.findings(), []
    for site, (a, b) in enumerate(zip(x.numpy(), y.numpy(), strict=True)):
        weight, expected = defined(kind, a, b, {**options, "shrink": shrink})
        weights.append(weight)
        assert {name: values[site] for name, values in found.items()} == pytest.approx(expected, rel=1e-8, abs=1e-10)
    agree(aligner, x, y, weights)
    assert (aligner.invertible, aligner.bijective) == (not shrink, False)


@pytest.mark.parametrize("options", [{}, {"directions": 1}])
@pytest.mark.parametrize("kind", [CCA, SVCCA])
def test_the_way_back_is_the_map_that_the_same_fit_gives_from_y_to_x(kind: Any, options: dict[str, int]) -> None:
    x, y = uneven_rows(6, 5)
    there, back = fitted(kind(SITES, 6, 5, **options), x, y), fitted(kind(SITES, 5, 6, **options), y, x)
    torch.testing.assert_close(there.inverse(y), back(y), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there(x), back.inverse(x), rtol=1e-6, atol=1e-8)
    again = there(there.inverse(there(x)))  # within the directions, back and forth changes nothing
    torch.testing.assert_close(again, there(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_on_a_hyperplane_lose_that_direction_alone(dtype: torch.dtype) -> None:
    """Behind a LayerNorm, rows sum to zero; in single precision, up to rounding."""
    x, y = (torch.nn.functional.layer_norm(rows.to(dtype), (8,)) for rows in related_rows(SITES, 300, 8, 8))
    ridged = fitted(Linear(SITES, 8, 8, ridge=1e-10), x, y)
    aligner = fitted(CCA(SITES, 8, 8, shrink=True), x, y)
    assert aligner.findings()["directions"] == [7, 7]
    torch.testing.assert_close(
        aligner(x.double()), ridged(x.double()), atol=1e-6 if dtype == torch.float64 else 1e-4, rtol=0
    )
    for kept in (CCA(SITES, 8, 8), SVCCA(SITES, 8, 8), PWCCA(SITES, 8, 8)):
        fitted(kept, x, y)
        assert kept.weight.abs().max() < 10
        assert kept.weight_back.abs().max() < 10
    if dtype == torch.float64:
        weights = [canonical_map(a, b, canonical(a, b), False) for a, b in zip(x.numpy(), y.numpy(), strict=True)]
        agree(fitted(CCA(SITES, 8, 8), x, y), x, y, weights)


def test_sites_of_unequal_rank_do_not_mix() -> None:
    x, y = related_rows(3, 200, 6, 6)
    x[1] = torch.nn.functional.layer_norm(x[1], (6,))
    y[2, :, 3:] = y[2, :, :3] @ torch.tensor([[1.0, 2, 0], [0, 1, 1], [3, 0, 1]]).double()
    for kind, options in ((CCA, {}), (SVCCA, {"share": 0.95}), (PWCCA, {"share": 0.9})):
        bank = fitted(kind(3, 6, 6, **options), x, y)
        if kind is CCA:
            assert bank.findings()["directions"] == [6, 5, 3]
        for site in range(3):
            one = slice(site, site + 1)
            alone = fitted(kind(1, 6, 6, **options), x[one], y[one])
            torch.testing.assert_close(bank.weight[one], alone.weight, rtol=1e-9, atol=1e-10)
            for name, value in alone.findings().items():
                assert bank.findings()[name][site] == pytest.approx(value[0], rel=1e-9), name


@pytest.mark.parametrize("kind", [CCA, SVCCA, PWCCA])
def test_too_few_rows_are_refused_with_their_number(kind: Any) -> None:
    """X and Y of 6 and 5 directions in n − 1 dimensions: one more row than 11 keeps them apart."""
    options: dict[str, Any] = {"share": 1.0} if kind is SVCCA else {}
    x, y = related_rows(SITES, 12, 6, 5)
    fitted(kind(SITES, 6, 5, **options), x, y)
    for n, ones in ((11, 1), (6, 5)):
        with pytest.raises(ValueError, match=rf"at least 1[12] fitting rows.*pair number 0, but got {n}: {ones} canon"):
            fitted(kind(SITES, 6, 5, **options), x[:, :n], y[:, :n])
    if kind is not SVCCA:
        assert kind(SITES, 6, 5).rows_needed == 12


def test_what_cannot_be_solved_is_refused() -> None:
    x, y = related_rows(SITES, 50, 6, 6)
    x[1, :, 2] = 0.1
    for kind in (CCA, PWCCA):
        with pytest.raises(ValueError, match=r"every neuron of X.*1 of 6 neurons are constant.*pair number 1"):
            fitted(kind(SITES, 6, 6), x, y)
    fitted(SVCCA(SITES, 6, 6), x, y)  # a principal component that holds nothing is left out
    x[1] = 0.1
    with pytest.raises(ValueError, match=r"states of X to vary.*6 of 6 neurons.*pair number 1"):
        fitted(SVCCA(SITES, 6, 6), x, y)
    x, y = related_rows(SITES, 50, 6, 6)
    x[1] = torch.nn.functional.layer_norm(x[1], (6,))
    with pytest.raises(ValueError, match=r"`directions` = 6 .* site pair number 1 has 5"):
        fitted(CCA(SITES, 6, 6, directions=6), x, y)
    y[0, 3, 1] = torch.inf
    with pytest.raises(ValueError, match=r"states of Y to vary.*not finite at site pair number 0"):
        fitted(SVCCA(SITES, 6, 6), x, y)


def test_bad_options_are_refused() -> None:
    for kind, options, says in (
        (CCA, {"directions": 0}, r"`directions`.*at most 5.*got 0"),
        (SVCCA, {"directions": 6}, r"`directions`.*at most 5.*got 6"),
        (SVCCA, {"share": 0.0}, r"`share` to be above 0 and at most 1, but got 0"),
        (PWCCA, {"share": 1.5}, r"`share`.*1\.5"),
    ):
        with pytest.raises(ValueError, match=says):
            kind(1, 6, 5, **options)  # type: ignore[arg-type]
