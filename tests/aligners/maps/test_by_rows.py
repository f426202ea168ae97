"""Maps that keep rows, against their definitions, and what each must not depend on."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.references.maps import kernel_ridge, nearest_neighbours
from tests.runs import related_rows
from torch import Tensor

from aligners import api
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.by_rows.kernel_ridge import KernelRidge
from aligners.maps.by_rows.nearest_neighbours import NearestNeighbours
from aligners.maps.by_rows.relative import Relative
from aligners.similarity.algebra.moments import moments_of

SITES = 2
EVERY: list[tuple[type[ByRows], dict[str, Any]]] = [
    (NearestNeighbours, {"k": 4}),
    (KernelRidge, {"landmarks": 20}),
    (Relative, {"anchors": 12}),
    (Relative, {"anchors": 12, "decode": "inverse"}),
]
every = pytest.mark.parametrize(("kind", "options"), EVERY)


def fitted(aligner: ByRows, x: Tensor, y: Tensor, validation: PairedRows | None = None) -> ByRows:
    kept = PairedRows.drawn(x, y, aligner.rows, aligner.seed)
    aligner.double().fit(moments_of(x, y), kept, validation)
    return aligner


@pytest.mark.parametrize("weighted", [False, True])
def test_neighbours_are_the_definition(weighted: bool) -> None:
    x, y = related_rows(SITES, 70, 5, 3)
    new, _ = related_rows(SITES, 30, 5, 3, seed=1)
    found = fitted(NearestNeighbours(SITES, 5, 3, k=4, weighted=weighted), x, y)(new)
    for site in range(SITES):
        expected = nearest_neighbours(x[site].numpy(), y[site].numpy(), new[site].numpy(), 4, weighted)
        np.testing.assert_allclose(found[site].numpy(), expected, atol=1e-12)


def test_one_neighbour_gives_a_fitting_row_its_own_partner() -> None:
    x, y = related_rows(SITES, 70, 5, 3)
    assert torch.equal(fitted(NearestNeighbours(SITES, 5, 3, k=1), x, y)(x), y)


def test_kernel_ridge_is_the_definition() -> None:
    of_x, of_y = related_rows(SITES, 145, 4, 3)
    (x, other, new), (y, others, _) = (rows.split([90, 25, 30], 1) for rows in (of_x, torch.tanh(of_y)))
    validation = PairedRows(other, others)
    aligner = KernelRidge(SITES, 4, 3, landmarks=20, width=0.7, seed=5)
    kept = PairedRows.drawn(x, y, 90, 5).x[:, :20]
    mapped = fitted(aligner, x, y, validation)
    for site in range(SITES):
        landmarks, (a, b) = kept[site].numpy(), (x[site].numpy(), y[site].numpy())
        distances = np.linalg.norm(landmarks[:, None] - landmarks[None], axis=-1)[np.triu_indices(20, 1)]
        sigma = 0.7 * np.sort(distances)[(len(distances) - 1) // 2]
        # the penalty is relative to the mean variance of whitened features
        kernel = np.exp(-((landmarks[:, None] - landmarks[None]) ** 2).sum(-1) / (2 * sigma**2))
        of_rows = np.exp(-((a[:, None] - landmarks[None]) ** 2).sum(-1) / (2 * sigma**2))
        centred = of_rows - of_rows.mean(0)
        level = np.trace(np.linalg.solve(kernel, centred.T @ centred)) / 20

        def error(strength: float, rows: PairedRows = validation, site: int = site) -> float:
            image = kernel_ridge(a, b, rows.x[site].numpy(), landmarks, sigma, strength * level)  # noqa: B023
            return float(((image - rows.y[site].numpy()) ** 2).sum())

        chosen = float(mapped.ridge[site])  # type: ignore[arg-type]
        expected = kernel_ridge(a, b, new[site].numpy(), landmarks, sigma, chosen * level)
        np.testing.assert_allclose(mapped(new)[site].numpy(), expected, atol=1e-6)
        for factor in (100.0, 0.01):
            assert error(chosen) <= error(chosen * factor) + 1e-9


def test_the_inverse_of_relative_representations_is_exact_for_a_rotation() -> None:
    x, _ = related_rows(1, 90, 6, 6)
    x = x - x.mean(1, keepdim=True)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    y = 3 * x @ turn + 5
    aligner = fitted(Relative(1, 6, 6, anchors=12, decode="inverse", tolerance=1e-6), x, y)
    torch.testing.assert_close(aligner(x), y)
    few = fitted(Relative(1, 6, 6, anchors=4, decode="inverse", tolerance=1e-6), x, y)
    assert not torch.allclose(few(x), y)  # four anchors do not span six dimensions


def test_relative_least_squares_depends_on_directions_alone() -> None:
    x, y = related_rows(1, 90, 5, 4)
    x = x - x.mean(1, keepdim=True)
    aligner = fitted(Relative(1, 5, 4, anchors=12), x, y)
    torch.testing.assert_close(aligner(7 * x + 0.0), aligner(x), atol=1e-3, rtol=0)  # up to the mean, which is zero
    relative = (x / x.norm(dim=-1, keepdim=True))[0].numpy()
    best = np.linalg.lstsq(np.column_stack([relative, np.ones(90)]), y[0].numpy(), rcond=None)[0]
    error = ((np.column_stack([relative, np.ones(90)]) @ best - y[0].numpy()) ** 2).sum()
    found = float((aligner(x) - y).square().sum())
    assert error <= found < 1.1 * error  # least squares on directions, but for the ridge and the rows it is chosen on


@every
def test_a_rotation_of_x_changes_nothing(kind: type[ByRows], options: dict[str, Any]) -> None:
    x, y = related_rows(SITES, 80, 5, 4)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    turned = 3 * x @ turn - 1
    expected = fitted(kind(SITES, 5, 4, **options), x, y)(x)
    torch.testing.assert_close(fitted(kind(SITES, 5, 4, **options), turned, y)(turned), expected, rtol=0, atol=1e-6)


@every
def test_few_rows_at_a_time_change_nothing(
    kind: type[ByRows], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = related_rows(SITES, 80, 5, 4)
    aligner = fitted(kind(SITES, 5, 4, **options), x, y)
    expected = aligner(x)
    monkeypatch.setattr("aligners.maps.by_rows.kept_rows.AT_ONCE", 1000)
    torch.testing.assert_close(aligner(x), expected)


def test_a_draw_is_of_numbers_and_seed_alone_and_fewer_rows_are_its_first() -> None:
    x, y = related_rows(1, 80, 5, 4)
    whole, some = PairedRows.drawn(x, y, 80, 3), PairedRows.drawn(x, y, 20, 3)
    assert torch.equal(whole.x[:, :20], some.x)
    assert torch.equal(whole.y[:, :20], some.y)
    assert not torch.equal(PairedRows.drawn(x, y, 20, 4).x, some.x)
    assert len(whole.x[0].unique(dim=0)) == 80


@every
def test_arrays_save_and_load_and_choose_on_the_last_tenth(
    kind: type[ByRows], options: dict[str, Any], tmp_path: Any
) -> None:
    x, y = (part.numpy() for part in related_rows(1, 80, 5, 4))
    made = getattr(api, kind.__name__)(**options).fit(x[0], y[0])
    bank = kind(1, 5, 4, **options).double()
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    if bank.chooses:
        parts = [PairedRows.drawn(a[:, rows], b[:, rows], 80, 0) for rows in (slice(72), slice(72, None))]
        bank.fit(moments_of(a, b), *parts)
    else:
        fitted(bank, a, b)
    np.testing.assert_allclose(made.predict(x[0]), bank(a)[0].numpy())
    made.save(tmp_path / "map.safetensors")
    again = api.ArrayMap.load(tmp_path / "map.safetensors")
    assert type(again) is type(made)
    np.testing.assert_array_equal(again.predict(x[0]), made.predict(x[0]))


@every
def test_what_cannot_be_fitted_is_refused(kind: type[ByRows], options: dict[str, Any]) -> None:
    x, y = related_rows(1, 80, 5, 4)
    with pytest.raises(ValueError, match=r"needs rows of the fit.*`train\.py fit`"):
        kind(1, 5, 4, **options).fit(moments_of(x, y))
    with pytest.raises(ValueError, match="expects at least"):
        fitted(kind(1, 5, 4, **options), x[:, :3], y[:, :3])


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (NearestNeighbours, {"k": 0}, "k"), (NearestNeighbours, {"k": 9, "rows": 8}, "k"),
        (KernelRidge, {"width": 0.0}, "width"), (KernelRidge, {"landmarks": 1}, "landmarks"),
        (Relative, {"decode": "other"}, "decode"), (Relative, {"tolerance": 1.0}, "tolerance"),
        (Relative, {"anchors": 3, "rows": 2}, "anchors"), (KernelRidge, {"rows": 1}, "rows"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(kind: type[ByRows], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}`"):
        kind(1, 5, 4, **options)


def test_equal_rows_have_no_kernel() -> None:
    x, y = related_rows(1, 40, 5, 4)
    with pytest.raises(ValueError, match="median distance above 0"):
        fitted(KernelRidge(1, 5, 4), torch.ones_like(x), y)
