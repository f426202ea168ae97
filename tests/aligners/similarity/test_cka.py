"""Linear CKA from moments, and unbiased HSIC and minibatch CKA from batches of rows."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.references import kernels, measures
from tests.rows import CASES, grid, paired, rows_of
from tests.runs import related_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aligners.similarity.algebra import pairs
from aligners.similarity.algebra.pairs import centred, feature_pair_sums, gram_pair_sums
from aligners.similarity.functional.cka import (
    angular_distance,
    linear_cka,
    mean_minibatch_cka,
    minibatch_cka,
    unbiased_cka,
    unbiased_hsic,
)

Measure = Callable[..., Tensor]
MEASURES = {linear_cka: measures.linear_cka, unbiased_cka: measures.unbiased_cka}


def related(n: int, d_x: int = 6, d_y: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of three layers of X and two of Y."""
    x, y = related_rows(3, n, d_x, d_y, seed)
    return x, y[:2]


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    return kernels.hsic_1(x @ x.T, y @ y.T)


def of_batches(x: Tensor, y: Tensor, batch: int) -> Tensor:
    return grid(lambda a, b: kernels.minibatch_cka(a, b, batch), x, y)


def mean_of_batches(x: Tensor, y: Tensor, batch: int) -> Tensor:
    return grid(lambda a, b: kernels.mean_minibatch_cka(a, b, batch), x, y)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("case", CASES)
def test_from_moments_they_are_their_definitions(measure: Measure, case: str) -> None:
    x, y = rows_of(case)
    expected = grid(MEASURES[measure], x, y)
    torch.testing.assert_close(measure(x, y), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(measure(x, x).diagonal(), torch.ones(3).double(), rtol=0, atol=1e-12)
    if "far" not in case:  # float32 cannot hold such rows
        torch.testing.assert_close(measure(x.float(), y.float()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [4, 7, 600], ids=lambda n: f"n={n}")
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_hsic_is_what_the_definition_says(n: int, offset: float) -> None:
    x, y = (rows / rows.std() for rows in related(n))
    found = unbiased_hsic(x + offset, y - offset)
    for value, expected in zip(
        found[:3], (grid(hsic, x, y), grid(hsic, x, x).diag(), grid(hsic, y, y).diag()), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("widths", [(300, 20), (4, 3)], ids=["wide", "narrow"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_minibatch_cka_is_what_the_definition_says(
    widths: tuple[int, int], dtype: torch.dtype, tolerance: float, offset: float
) -> None:
    x, y = (rows / rows.std() for rows in related(120, *widths))
    x, y = (x + offset).to(dtype), (y * 1e-3 - offset * 1e-3).to(dtype)
    for batch, (measure, expected) in product(
        (120, 50), ((minibatch_cka, of_batches), (mean_minibatch_cka, mean_of_batches))
    ):
        torch.testing.assert_close(measure(x, y, batch), expected(x, y, batch), rtol=0, atol=tolerance)
        one = torch.ones(3, dtype=torch.float64)
        torch.testing.assert_close(measure(x, x, batch).diag(), one, rtol=0, atol=1e-12)
    assert (mean_minibatch_cka(x, y, 50) - minibatch_cka(x, y, 50)).abs().max() > 1e-5


def test_rank_deficient_and_badly_scaled_rows_outliers_and_half_precision() -> None:
    x, y = related(80)
    x[:, :, 3:] = x[:, :, :3] @ related(3, 3)[0][0]
    x[:, :, 0] *= 1e6
    torch.testing.assert_close(minibatch_cka(x, y, 80), of_batches(x, y, 80), rtol=0, atol=1e-8)
    x, y = related(200, 300, 20)
    x[:, 0] *= 1e4
    torch.testing.assert_close(minibatch_cka(x.float(), y.float(), 200), of_batches(x, y, 200), rtol=0, atol=1e-5)
    x, y = (rows.bfloat16() for rows in related(40))
    torch.testing.assert_close(minibatch_cka(x, y, 40), minibatch_cka(x.double(), y.double(), 40), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [5, 256, 257, 700])
def test_both_routes_agree(n: int) -> None:
    x, y = (centred(rows)[0] for rows in related(n))
    for found, tolerance in ((gram_pair_sums(x, y), 1e-10), (gram_pair_sums(x.float(), y.float()), 1e-4)):
        for name, value in feature_pair_sums(x, y)._asdict().items():
            torch.testing.assert_close(getattr(found, name), value, rtol=tolerance, atol=1e-8, msg=name)


def test_the_cheaper_route_is_taken() -> None:
    with patch.object(pairs, "gram_pair_sums") as gram:
        for n, width in ((10, 50), (1000, 5)):
            pairs.linear_pair_sums(*torch.zeros(2, 2, n, width))
    assert [call.args[0].shape[1] for call in gram.call_args_list] == [10]


class Launched(TorchDispatchMode):
    """The operations that compute something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not func.__name__.startswith(("empty", "_unsafe_view")):
            self.names.append(func.__name__)
        return result


def launched(layers: int, n: int) -> list[str]:
    x, y = torch.randn(2, layers, n, 8 * n)
    with Launched() as mode:
        unbiased_hsic(x, y)
    assert any(name.startswith("bmm") for name in mode.names)
    return mode.names


def test_a_batch_takes_few_operations_whatever_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "BLOCK", 16)
    assert launched(2, 64) == launched(12, 64)
    blocks = len(launched(3, 64)) - len(launched(3, 16))
    assert blocks / 9 <= 9  # in place of 20: two products, two casts, sums of rows and columns, one product
    assert launched(3, 64).count("_local_scalar_dense.default") == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related(40)
    whole = gram_pair_sums(x, y)
    monkeypatch.setattr(pairs, "BLOCK", size)
    for found, expected in zip(gram_pair_sums(x, y), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)


def test_of_unrelated_rows_the_unbiased_ones_are_zero_on_average_and_often_negative() -> None:
    x, y = torch.randn(2, 20, 30, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for unbiased in (unbiased_cka(x, y), minibatch_cka(x, y, 30)):
        assert abs(float(unbiased.mean())) < 0.01
        assert (unbiased < 0).any()  # not clamped


def test_refusals() -> None:
    x, y = paired(40)
    broken, constant = x.clone(), x.clone()
    broken[1, 3, 2], constant[1] = float("nan"), 0.1
    apart = torch.full((1, 4, 2), 0.7, dtype=torch.float64)
    apart[0, 0, 0] = 3.1  # one row apart: off its diagonal the Gram matrix of x − 0.7 is 0
    for measure, rows, says in (
        (linear_cka, (x[:, :2], y[:, :2]), "at least 3 rows, but `moments` hold 2"),  # CKA would be 1
        (linear_cka, (constant, y), r"`x` has only constant features in layers \[1\]"),
        (unbiased_cka, (x[:, :3], y[:, :3]), "at least 4 rows, but `moments` hold 3"),
        (unbiased_cka, (apart, y[:, :4]), r"positive HSIC of each layer with itself.* `x` .* layers \[0\]"),
        (unbiased_hsic, (x[:, :3], y[:, :3]), "expects at least 4 rows, but `x` and `y` have 3"),
        (unbiased_hsic, (x, y[:, 1:]), "same rows"),
        (unbiased_hsic, (broken, y), r"`x` holds NaN or infinite values in layers \[1\]"),
        (minibatch_cka, (x, y, 38), "`batch` = 38 leaves one of 2 of the 40 rows"),
        (minibatch_cka, (x, y, 3), "`batch` = 3 leaves one of 3"),
        (
            mean_minibatch_cka,
            (constant, y, 20),
            r"HSIC with itself is positive, as larger ones are, but `x` .* layers \[1\]",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            measure(*rows)  # type: ignore[operator]


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 / 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_features_are_refused(value: float, dtype: torch.dtype) -> None:
    x, y = (rows.to(dtype) for rows in related(40))
    y[1] = value
    with pytest.raises(ValueError, match=r"HSIC with themselves is positive.* `y` .* layers \[1\]"):
        minibatch_cka(x, y, 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_centred_constants_are_zero_whatever_their_mean_rounds_to(dtype: torch.dtype) -> None:
    values = torch.linspace(-1e4, 1e4, 997, dtype=dtype)
    rounded = 0
    for n in (5, 7, 20, 49, 130):
        x = values.expand(1, n, -1)
        rounded += int((x.mean(1) != values).sum())
        rows, mean = centred(x)
        assert not rows.any()
        assert torch.equal(mean[0, 0], values)
    assert rounded > 0


def test_an_angular_distance_adds_up_over_matching_layers() -> None:
    x, _ = paired(30)
    y = x + 0.5 * paired(30, seed=1)[0]
    cka = linear_cka(x, y)
    torch.testing.assert_close(float(angular_distance(cka)), measures.angular_distance(np.asarray(cka)))
    assert angular_distance(torch.full((2, 2), 1 + 1e-13, dtype=torch.float64)) == 0
    torch.testing.assert_close(angular_distance(torch.zeros(4, 4)), torch.tensor(torch.pi))
    for value in (1.001, -1.1, float("nan")):
        cka[1, 1] = value
        with pytest.raises(ValueError, match=r"`cka` in \[-1, 1\], but layer 1 has"):
            angular_distance(cka)
