from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references import kernels as reference
from tests.rows import grid
from tests.runs import related_rows
from torch import Tensor

from aligners.similarity.functional.kernels import Kernel, rbf_cka, rsa

D_X, D_Y = 6, 4
KERNELS = get_args(Kernel)
MEASURES = {kernel: (partial(rsa, kernel=kernel), partial(reference.rsa, kernel=kernel)) for kernel in KERNELS}
MEASURES["rbf"] = partial(rbf_cka, width=0.7), partial(reference.rbf_cka, width=0.7)
UNBIASED = {"width": 0.7, "unbiased": True}
MEASURES["rbf_unbiased"] = partial(rbf_cka, **UNBIASED), partial(reference.rbf_cka, **UNBIASED)
every_measure = pytest.mark.parametrize("name", MEASURES)


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of three layers of X and two of Y, of standard deviation 1 and a mean not far from it."""
    x, y = (states / states.std() for states in related_rows(3, n, D_X, D_Y, seed))
    return x, y[:2]


def rotation(d: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q


def is_its_definition(name: str, x: Tensor, y: Tensor, tolerance: float = 1e-8) -> None:
    measure, definition = MEASURES[name]
    torch.testing.assert_close(measure(x, y), grid(definition, x, y), rtol=0, atol=tolerance)


@every_measure
@pytest.mark.parametrize("n", [4, 91, 300])
def test_they_are_what_the_definitions_say(name: str, n: int) -> None:
    x, y = rows(n)
    is_its_definition(name, x, y)
    is_its_definition(name, x.float(), y.float(), 1e-8 if name in KERNELS else 1e-4)
    if n == 91:
        is_its_definition(name, x + 1000, y - 1000)


@every_measure
def test_rank_deficient_badly_scaled_and_repeated_rows(name: str) -> None:
    x, y = rows(80)
    if name in ("euclidean", "rbf", "rbf_unbiased"):
        is_its_definition(name, 1000 * x[:, torch.arange(80) // 2], y)
    x[:, :, 3:] = x[:, :, :3] @ rotation(3)
    x[:, :, 0] *= 1e6
    is_its_definition(name, x, y)


@every_measure
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 100), scale=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
def test_invariances(name: str, seed: int, scale: float, shift: float) -> None:
    measure, (x, y) = MEASURES[name][0], rows(30, seed)
    turned, value = scale * x @ rotation(D_X, seed), measure(x, y)
    torch.testing.assert_close(measure(turned, y), value, rtol=0, atol=1e-9)
    torch.testing.assert_close(measure(y, x), value.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(measure(x, x).diag(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
    if name in ("centred_cosine", "euclidean", "rbf", "rbf_unbiased"):
        torch.testing.assert_close(measure(turned + shift * scale, y), value, rtol=0, atol=1e-7)
    else:  # the mean counts
        assert (measure(x - x.mean(1, keepdim=True), y) - value).abs().max() > 1e-3


def test_refusals() -> None:
    x, y = rows(30)
    zero, constant, repeated, line = x.clone(), x.clone(), y.clone(), y.clone()
    zero[2, 7], constant[1], repeated[0, 5:] = 0, 1 / 3, y[0, 5]
    line[0] = y[0, :1] * torch.linspace(1, 9, 30, dtype=torch.float64)[:, None]
    for measure, given_rows, says in (
        (partial(rsa, kernel="rbf"), (x, y), "`kernel` to be one of cosine, .*euclidean, but got 'rbf'"),
        (rsa, (x[:, :2], y[:, :2]), "RSA expects at least 3 rows"),
        (rbf_cka, (x[:, :3], y[:, :3]), "RBF CKA expects at least 4 rows"),
        (partial(rbf_cka, width=0), (x, y), r"`width`.*got 0"),
        (rsa, (x / 0, y), "finite"),
        (rsa, (zero, y), r"rows that are not zero.* `x` has 1 rows of zeros in layers \[2\]"),
        (rsa, (x, line), r"similarities to one another differ.* `y` .* layers \[0\]"),
        (rbf_cka, (constant, y), r"median distance above 0.* `x` .* layers \[1\]"),
        (rbf_cka, (x, repeated), r"no row that most rows repeat.* `y` .* layers \[0\]"),
    ):
        with pytest.raises(ValueError, match=says):
            measure(*given_rows)  # type: ignore[operator]
    assert rsa(zero, y, "linear").isfinite().all()
    assert rsa(x, line, "euclidean").isfinite().all()


@pytest.mark.parametrize("kernel", ["cosine", "linear", "euclidean"])
@pytest.mark.parametrize("value", [0.1, 1e6 / 3])
def test_similarities_that_are_all_equal_are_refused(kernel: Kernel, value: float) -> None:
    x, y = rows(30)
    y[1] = value
    axes = torch.eye(30, dtype=torch.float64)[None]  # every two rows at right angles, at one distance
    for states, layer in ((y, 1), (3 * axes, 0)):
        with pytest.raises(ValueError, match=rf"similarities to one another differ.* `y` .* layers \[{layer}\]"):
            rsa(x, states, kernel)
