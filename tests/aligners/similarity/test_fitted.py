"""CCA, SVCCA, PWCCA, regression and neurons: measures from moments beside their definitions, and on held-out rows."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references import measures as reference
from tests.rows import CASES, grid, paired, rows_of
from torch import Tensor

from aligners.similarity.algebra import moments
from aligners.similarity.algebra.grid import GridSums, grid_moments
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional.canonical_correlations import (
    Whitening,
    canonical,
    canonical_chance,
    nuclear_norm,
    regression_chance,
    whitening,
    whitenings,
)
from aligners.similarity.functional.cca import SharedMoments, cca, cca_held_out, pwcca, r2_cca, r2_svcca, svcca
from aligners.similarity.functional.cka import linear_cka, minibatch_cka, unbiased_cka
from aligners.similarity.functional.matching import hard_matching, soft_matching
from aligners.similarity.functional.regression import (
    localization,
    mixedsim,
    mixedsim_held_out,
    neuronsim,
    r2,
    r2_held_out,
)
from aligners.similarity.functional.shape import angular_shape, nbs
from aligners.similarity.outcome import evaluate

Measure = Callable[..., Tensor]
Reference = Callable[..., float]
ENOUGH = [case for case in CASES if case not in ("few", "barely")]
SVCCA_STANDARDISED, PWCCA_STANDARDISED = (partial(each, share=0.9, standardised=True) for each in (svcca, pwcca))
MEASURES: dict[str, tuple[Measure, Reference, list[str]]] = {
    "cca": (cca, reference.mean_cca, ENOUGH),
    "svcca": (svcca, partial(reference.mean_cca, share=0.99), ENOUGH),
    "svcca .9": (partial(svcca, share=0.9), partial(reference.mean_cca, share=0.9), ENOUGH),
    "svcca .6": (partial(svcca, share=0.6), partial(reference.mean_cca, share=0.6), ["few", "barely"]),
    "r2_cca": (r2_cca, reference.r2_cca, ENOUGH),
    "r2_svcca .9": (partial(r2_svcca, share=0.9), partial(reference.r2_cca, share=0.9), ENOUGH),
    "pwcca": (pwcca, partial(reference.pwcca, share=0.99), ENOUGH),
    "pwcca 1": (partial(pwcca, share=1.0), reference.pwcca, ENOUGH),
    "svcca standardised": (SVCCA_STANDARDISED, partial(reference.svcca_standardised, share=0.9), ENOUGH),
    "pwcca standardised": (PWCCA_STANDARDISED, partial(reference.pwcca_standardised, share=0.9), ENOUGH),
    "pwcca .6": (partial(pwcca, share=0.6), partial(reference.pwcca, share=0.6), ["few", "barely"]),
    "r2": (r2, reference.r2, [*ENOUGH, "barely"]),
    "mixedsim": (mixedsim, reference.mixedsim, [*ENOUGH, "barely"]),
    "neuronsim": (neuronsim, reference.neuronsim, list(CASES)),
}
HELD_OUT = [(r2_held_out, reference.r2_held_out), (mixedsim_held_out, reference.mixedsim_held_out)]


def rotation(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(paired(d, d, d, seed)[0][0])[0]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (*_, cases) in MEASURES.items() for case in cases])
def test_they_are_their_definitions(name: str, case: str) -> None:
    measure, definition, _ = MEASURES[name]
    x, y = rows_of(case)
    expected = grid(definition, x, y)
    close(measure(x, y), expected)
    if (name, case) not in (("r2", "barely"), ("mixedsim", "barely")):  # X has too few rows to regress on there
        close(measure(y, x), grid(definition, y, x))
    if "far" not in case:  # float32 cannot hold such rows
        close(measure(x.float(), y.float()), expected, 1e-4)
        if case in ENOUGH and not name.startswith("r2_"):
            close(measure(x, x).diagonal(), torch.ones(3).double(), 1e-12)


@pytest.mark.parametrize("case", ENOUGH)
@pytest.mark.parametrize(("share", "standardised"), [(0.9, False), (1.0, False), (0.9, True)])
def test_held_out_they_are_the_correlations_of_the_fitted_directions(
    case: str, share: float, standardised: bool
) -> None:
    (x, x_new), (y, y_new) = (halves(rows) for rows in rows_of(case))
    moments = grid_moments(x, y), grid_moments(x_new, y_new)

    def mean(*rows: np.ndarray) -> float:
        return float(reference.held_out_correlations(*rows, share, standardised)[0].mean())

    def weighted(*rows: np.ndarray) -> float:
        rho, alpha = reference.held_out_correlations(*rows, share, standardised)
        return float(rho @ alpha / alpha.sum())

    fitted, held_out = map(SharedMoments, moments)
    found = fitted.correlations("SVCCA", share, held_out, standardised=standardised)
    close(cca_held_out(*moments) if share == 1 else found.mean(), grid(mean, x, y, x_new, y_new))
    close(found.weighted(), grid(weighted, x, y, x_new, y_new))


@pytest.mark.parametrize(("measure", "expected"), HELD_OUT)
@pytest.mark.parametrize("case", ENOUGH)
def test_held_out_they_are_the_fitted_regression_on_new_rows(measure: Measure, expected: Reference, case: str) -> None:
    (x, x_new), (y, y_new) = (halves(rows) for rows in rows_of(case))
    rows = x, y, x_new + 0.1 * x.std(1, keepdim=True), y_new
    close(measure(grid_moments(*rows[:2]), grid_moments(*rows[2:])), grid(expected, *rows))


def test_of_unrelated_rows_held_out_values_are_not_clamped() -> None:
    x, y = torch.randn(2, 10, 200, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fitted, held_out = (grid_moments(*rows) for rows in zip(halves(x), halves(y), strict=True))
    for measure in (cca_held_out, mixedsim_held_out, r2_held_out):
        assert (measure(fitted, held_out) < 0).any()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3), order=st.permutations(range(6)))
def test_what_they_bear(seed: int, factor: float, order: list[int]) -> None:
    x, y = paired(60, seed=seed)
    turn_x, turn_y = rotation(6, seed + 1), rotation(5, seed)
    stretched = x @ (rotation(6, seed) * torch.logspace(-1.5, 1.5, 6, dtype=torch.float64)) @ turn_x + 5
    stretched_y = y @ (turn_y * torch.logspace(-2, 2, 5, dtype=torch.float64)) - 7
    turned = factor * x @ turn_x + 5
    signed = factor * (x[..., order] * torch.tensor([1, -1, 1, -1, 1, 1])) + 3
    scaled = x[..., order] * torch.tensor([factor, -1, 1, -5, 0.1, 1], dtype=torch.float64) + 3
    nine = partial(svcca, share=0.9)
    for measure, moved_x, moved_y in (
        *((each, turned, y) for each in (linear_cka, unbiased_cka, partial(minibatch_cka, batch=15))),
        (cca, stretched, y),  # any invertible map
        (nine, turned, y),  # rotations and a factor
        (SVCCA_STANDARDISED, scaled, -y / (1 + y.std(1, keepdim=True))),  # order and scales of neurons
        (pwcca, signed, y @ turn_y),  # rotations of Y, permutations and signs of X
        (r2, turned, stretched_y),
        (mixedsim, scaled, stretched_y),
        (neuronsim, scaled, y),
    ):
        close(measure(moved_x, moved_y), measure(x, y))  # type: ignore[operator]
    close(neuronsim(y, scaled), neuronsim(y, x))
    for symmetric in (cca, svcca, linear_cka, unbiased_cka):
        close(symmetric(y, x).T, symmetric(x, y), 1e-10)
    for of_neurons in (mixedsim, neuronsim):
        assert ((of_neurons(x @ turn_x, y) - of_neurons(x, y)).abs() > 1e-6).all()


def test_refusals() -> None:
    x, y = paired(30)
    flat, one_constant, constants = y.clone(), x.clone(), x.clone()
    flat[1, :, 2], one_constant[0, :, 1], constants[:2, :, 3:] = 1.1, 0.1, 1 / 3
    for measure, rows, says in (
        (cca, (x[:, :7], y[:, :7]), r"hold 7 for 6 and 5: 5 correlations would be 1.*at least 12 rows.*lower `share`"),
        (pwcca, (x[:, :4], y[:, :4]), "hold 4 for 3 and 3: 3 correlations"),
        (r2, (x[:, :6], y[:, :6]), "at least 7 for the 5 features of `y`, but `moments` hold 6"),
        (mixedsim, (x[:, :6], y[:, :6]), "at least 7 for the 5 features of `y`, but `moments` hold 6"),
        (neuronsim, (x[:, :2], y[:, :2]), "at least 3 rows, but `moments` hold 2"),
        (cca, (x, flat), r"`y` has 1 constant ones in layers \[1\]"),
        (r2, (y, one_constant), "`y` has 1 constant ones"),
        (mixedsim, (y, one_constant), "`y` has 1 constant ones"),
        (mixedsim, (one_constant, y), r"Mixed similarity, but `x` has 1 constant ones in layers \[0\]"),
        (neuronsim, (constants, y), r"`x` has 6 constant ones in layers \[0, 1\]"),
        (svcca, (torch.full_like(x, 0.3), y), r"`x` has only constant features in layers \[0, 1, 2\]"),
        (SVCCA_STANDARDISED, (x, flat), r"`y` has 1 constant ones in layers \[1\]"),
        *((partial(svcca, share=share), (x, y), "`share` to be above 0 and at most 1") for share in (0, 1.5, np.nan)),
    ):
        with pytest.raises(ValueError, match=says):
            measure(*rows)  # type: ignore[operator]
    assert svcca(x, flat).isfinite().all()
    assert r2(one_constant, y).isfinite().all()


def test_held_out_rows_that_say_nothing_are_refused() -> None:
    x, y = paired(30)
    fitted, two = grid_moments(x, y), grid_moments(x[:, :2], y[:, :2])
    still_x, still_y = (rows[:, :1].expand(-1, 5, -1) for rows in (x, y))
    for measure, held_out, says in (
        (cca_held_out, grid_moments(still_x, y[:, :5]), "are constant on its 5 rows"),
        (cca_held_out, two, "Held-out CCA expects at least 3 rows"),
        (mixedsim_held_out, grid_moments(x[:, :5], still_y), "predictions that vary on the rows of `held_out`"),
        (mixedsim_held_out, grid_moments(still_x, y[:, :5]), "Held-out mixed similarity, but `x` has 18 constant ones"),
    ):
        with pytest.raises(ValueError, match=says):
            measure(fitted, held_out)  # type: ignore[operator]
    with pytest.raises(ValueError, match="differ from the mean of `fitted`"):
        r2_held_out(fitted._replace(mean_x=x[:, 0]), grid_moments(x[:, :1], y[:, :1]))


# ---------------------------------------------------------------------- the catalogue

SHARE = 0.9
FUNCTIONS = {
    "cca": cca,
    "svcca": partial(svcca, share=SHARE),
    "r2_cca": r2_cca,
    "r2_svcca": partial(r2_svcca, share=SHARE),
    "pwcca": partial(pwcca, share=SHARE),
    "svcca_standardised": SVCCA_STANDARDISED,
    "pwcca_standardised": PWCCA_STANDARDISED,
    "cka": linear_cka,
    "unbiased_cka": unbiased_cka,
    "r2": r2,
    "mixedsim": mixedsim,
    "neuronsim": neuronsim,
    "nbs": nbs,
    "angular_shape": angular_shape,
    "hard_matching": hard_matching,
    "soft_matching": soft_matching,
}


def accumulated(x: Tensor, y: Tensor) -> SharedMoments:
    """What three batches of rows leave behind."""
    sums = GridSums.zeros(3, 6, 2, 5)
    for rows in zip(x.split(25, 1), y.split(25, 1), strict=True):
        sums.add_(*rows)
    return SharedMoments(sums.moments())


def test_over_batches_each_measure_on_moments_is_its_function_of_all_rows() -> None:
    x, y = paired(60)
    assert {name for name, measure in catalogue().items() if measure.family == "moments"} == set(FUNCTIONS)
    for name, function in FUNCTIONS.items():
        close(catalogue(SHARE)[name].compute(accumulated(x + 1000, y)), function(x + 1000, y), 1e-9)


# ---------------------------------------------------------------------- what measures share


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [grid_moments(*paired(90, seed=seed)) for seed in (0, 1)]

    def every_figure() -> dict[str, Tensor]:
        measures = {name: catalogue(SHARE)[name] for name in FUNCTIONS}
        found = {name: evaluate(measure, SharedMoments(given[0])) for name, measure in measures.items()}
        held_out = {f.__name__: f(*given) for f in (cca_held_out, r2_held_out, mixedsim_held_out)}
        return {f"{name} {way}": values for name, grids in found.items() for way, values in grids.items()} | held_out

    whole = every_figure()
    monkeypatch.setattr(moments, "TILE", 1)
    for name, values in every_figure().items():
        torch.testing.assert_close(values, whole[name], rtol=1e-12, atol=1e-12, msg=name)


def test_what_is_remembered_is_what_is_computed_alone() -> None:
    x, y = paired(60)
    fitted, measure = grid_moments(x, y), catalogue(SHARE)["pwcca"]
    others = [SharedMoments(grid_moments(*(rows[:, :n] for rows in paired(40, seed=1)))) for n in (40, 20)]
    for start in (SharedMoments(fitted), SharedMoments(fitted.swap()).swap()):
        for _ in range(2):
            both = evaluate(measure, start)
            for share in (SHARE, 0.5):
                close(start.correlations("SVCCA", share).mean(), svcca(x, y, share=share), 1e-12)
            close(both["forward"], pwcca(x, y, share=SHARE), 1e-12)
            close(both["backward"], pwcca(y, x, share=SHARE).mT, 1e-12)
            for tested in others:
                for one, other in ((start, tested), (start.swap(), tested.swap())):
                    alone = SharedMoments(one.moments).correlations("PWCCA", SHARE, SharedMoments(other.moments))
                    close(one.correlations("PWCCA", SHARE, other).weighted(), alone.weighted(), 1e-12)


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many matrices each decomposition was called with."""
    counts: Counter[str] = Counter()

    def counted(name: str, decompose: Callable[..., Any], matrix: Tensor, **options: Any) -> Any:
        counts[name] += math.prod(matrix.shape[:-2])
        return decompose(matrix, **options)

    for name in ("eigh", "svd", "svdvals"):
        monkeypatch.setattr(torch.linalg, name, partial(counted, name, getattr(torch.linalg, name)))
    return counts


def test_measures_share_what_they_decompose(decomposed: Counter[str]) -> None:
    first, second = (SharedMoments(grid_moments(*paired(60, seed=seed))) for seed in (0, 1))
    names = sorted(FUNCTIONS, key=lambda name: catalogue(SHARE)[name].symmetric)  # as a pass computes them
    for name in names:
        evaluate(catalogue(SHARE)[name], first)
    # 3 + 2 layers, standardised or not, whatever the share; 3 x 2 pairs for CCA and for shapes, and for SVCCA and PWCCA
    assert decomposed == {"eigh": 2 * 5, "svdvals": 2 * 6, "svd": 2 * 6}
    for name in names:
        if (measure := catalogue(SHARE)[name]).held_out is not None:
            evaluate(measure._replace(compute=measure.held_out), first, second)
    assert decomposed == {"eigh": 2 * 5, "svdvals": 2 * 6, "svd": 5 * 6}
    assert first.white_x.nuclear_norm().shape == (3,)
    assert decomposed == {"eigh": 2 * 5, "svdvals": 2 * 6, "svd": 5 * 6}  # the components' eigenvalues are known


def test_each_measure_is_refused_by_its_own_name() -> None:
    few, enough, short = (SharedMoments(grid_moments(*paired(n))) for n in (3, 50, 2))
    for name in ("SVCCA", "PWCCA") * 2:
        measure = catalogue()[name.lower()]
        with pytest.raises(ValueError, match=f"^{name} expects more rows"):
            measure.compute(few)
        with pytest.raises(ValueError, match=f"^Held-out {name} expects at least 3 rows"):
            measure.held_out(enough, short)  # type: ignore[misc]


# ---------------------------------------------------------------------- whitening and chance


@pytest.mark.parametrize("kind", ["tall", "deficient", "scaled"])
@pytest.mark.parametrize("share", [1.0, 0.9, 0.4])
def test_a_shared_decomposition_gives_each_share_its_whitening(kind: str, share: float) -> None:
    scatter = grid_moments(*rows_of(kind)).xx
    shared = whitenings(scatter)
    for standardised in (True, False):
        shared(0.99, standardised)  # which decomposes
        white = shared(share, standardised)
        alone = whitening(scatter, share=share, standardised=standardised)
        assert torch.equal(white.rank, alone.rank)
        assert white.ranks().tolist() == white.rank.tolist()
        assert torch.equal(white.in_use(), alone.in_use())
        units = white.in_use().mT @ scatter @ white.in_use()
        for one, rank in zip(units, white.rank.tolist(), strict=True):
            known = torch.zeros_like(one)
            known[:rank, :rank] = torch.eye(rank)
            close(one, known, 1e-9)
    rounding = 1e-9 if kind == "scaled" else 1e-12  # eigenvalues from 1 to 1e-12
    alone = whitenings(scatter).nuclear_norm()
    torch.testing.assert_close(shared.nuclear_norm(), alone, rtol=rounding, atol=0)
    for layer, norm in zip(scatter.numpy(), alone.tolist(), strict=True):
        values = np.linalg.eigvalsh(layer)
        kept = values[values > len(values) * np.finfo(float).eps * values[-1]]
        assert norm == pytest.approx(np.sqrt(kept).sum(), rel=rounding)


def test_ranks_drop_deficient_directions_alone_whatever_the_scale_and_shares_are_of_the_variance() -> None:
    moments = grid_moments(*rows_of("deficient"))
    assert whitening(moments.xx).rank.tolist() == [5, 5, 5]
    assert whitening(moments.yy).rank.tolist() == [5, 5]
    x, y = rows_of("scaled")
    assert whitening(grid_moments(1e6 * x, y).xx).rank.tolist() == [6, 6, 6]
    scatter = torch.diag(torch.tensor([90.0, 9.0, 0.9, 0.1], dtype=torch.float64))
    ranks = {share: int(whitening(scatter, share=share).rank) for share in (0.5, 0.9, 0.91, 0.99, 0.995, 1.0)}
    assert ranks == {0.5: 1, 0.9: 1, 0.91: 2, 0.99: 2, 0.995: 3, 1.0: 4}


def test_directions_without_correlation_do_not_leave_a_smaller_rank() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    weight = torch.stack([eye, eye * torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)])
    white = Whitening(weight, torch.tensor([4, 2]))
    found = canonical(white, white, torch.zeros(2, 4, 4, dtype=torch.float64))
    assert not found.rho.any()
    torch.testing.assert_close(found.a.mT @ found.a, weight, rtol=0, atol=1e-12)


def test_what_cannot_be_whitened_is_refused() -> None:
    scatter = grid_moments(*paired(30)).xx
    for wrong, options, says in (
        (torch.zeros(1, 1, dtype=torch.float64), {}, "values that are not finite"),
        (scatter * torch.nan, {}, "values that are not finite"),
        (scatter, {"share": 0}, "Expected `share`"),
        (scatter, {"tolerance": 1}, "Expected `tolerance`"),
    ):
        with pytest.raises(ValueError, match=says):
            whitening(wrong, **options)


def test_a_failed_decomposition_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    m = grid_moments(*paired(30))
    white = whitening(m.xx[:2]), whitening(m.yy)
    with pytest.raises(ValueError, match="values that are not finite"):
        canonical(*white, torch.full_like(m.xy[0], torch.nan))

    def fail(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    for name in ("svd", "svdvals", "eigh"):
        monkeypatch.setattr(torch.linalg, name, fail)
    for directions in (True, False):
        with pytest.raises(ValueError, match="SVD behind canonical correlations did not converge: no convergence"):
            canonical(*white, m.xy[0], directions=directions)
    with pytest.raises(ValueError, match="eigendecomposition behind a whitening did not converge"):
        whitening(m.xx)


def independent(n: int, d_x: int, d_y: int, skewed: bool) -> tuple[Tensor, Tensor]:
    """Ten draws as layers, each side with a falling spectrum turned at random."""
    draw = torch.Generator().manual_seed(0)

    def rows(d: int) -> Tensor:
        normal = torch.randn(10, n, d, generator=draw, dtype=torch.float64)
        turn, _ = torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64))
        return (normal.exp() if skewed else normal) * torch.logspace(0, -1, d, dtype=torch.float64) @ turn

    return rows(d_x), rows(d_y)


@pytest.mark.parametrize(
    ("n", "d_x", "d_y", "skewed"), [(40, 8, 8, False), (40, 6, 20, True), (60, 20, 6, False), (300, 12, 12, True)]
)
def test_independent_data_explain_what_chance_says(n: int, d_x: int, d_y: int, skewed: bool) -> None:
    x, y = independent(n, d_x, d_y, skewed)
    moments = grid_moments(x, y)
    chance = regression_chance(moments)
    assert torch.allclose(chance, torch.tensor(d_y / (n - 1), dtype=torch.float64))
    assert float(r2(x, y).mean()) == pytest.approx(float(chance.mean()), rel=0.05)
    assert float(mixedsim(x, y).mean()) == pytest.approx(float(chance.mean()) ** 0.5, rel=0.08)
    assert regression_chance(grid_moments(x[:, :3], y[:, :3])).eq(1).all()
    whole, kept = canonical_chance(moments), canonical_chance(moments, 0.99)
    assert (kept <= whole).all()
    for found, bound in ((cca(x, y), whole), (svcca(x, y, share=0.99), kept), (pwcca(x, y, share=0.99), kept)):
        assert 0.7 < float(found.mean() / bound.mean().sqrt()) < 1.02


# ---------------------------------------------------------------------- of a layer


@pytest.mark.parametrize("case", CASES)
def test_a_nuclear_norm_is_the_sum_of_singular_values(case: str) -> None:
    moments = grid_moments(*rows_of(case))
    for rows, scatter in zip(rows_of(case), (moments.xx, moments.yy), strict=True):
        expected = torch.tensor([reference.nuclear_norm(np.asarray(layer)) for layer in rows], dtype=torch.float64)
        torch.testing.assert_close(nuclear_norm(scatter), expected, rtol=1e-8, atol=0)
    with pytest.raises(ValueError, match="nuclear norm met or gave values that are not finite"):
        nuclear_norm(torch.full((1, 2, 2), torch.inf))


def test_localization_leaves_a_layer_with_itself_out() -> None:
    x, _ = paired(30)
    neuron, subspace, own = neuronsim(x, x), linear_cka(x, x), torch.eye(3, dtype=torch.bool)
    expected = reference.localization(*(np.asarray(value) for value in (neuron, subspace, own)))
    torch.testing.assert_close(localization(neuron, subspace, own), torch.tensor(expected, dtype=torch.float64))
    elsewhere = localization(neuron + 5 * own, subspace, own)
    torch.testing.assert_close(elsewhere, localization(neuron, subspace, own))
    one = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"leaves none to \[1\]"):
        localization(one, one, torch.tensor([[True, False], [True, True]]))
