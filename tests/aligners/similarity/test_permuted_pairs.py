"""Sums over pairs of rows in other orders against those of the reordered rows, by every route."""

from collections.abc import Callable

import pytest
import torch
from tests.runs import related_rows

from aligners.similarity.algebra import permuted_pairs
from aligners.similarity.algebra.permuted_pairs import OfPairs
from aligners.similarity.functional.cka import hsic_pairs, unbiased_hsic
from aligners.similarity.functional.kernels import (
    rbf_cka,
    rbf_cka_pairs,
    rsa,
    rsa_pairs,
    rsa_spearman,
    rsa_spearman_pairs,
)

# entries that are kept, and what looking one up costs: Gram matrices, or features and kernels made again
ROUTES = [(10**9, 0), (0, 0)]


@pytest.fixture(params=ROUTES, ids=["looked_up", "made_again"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    most, cost = request.param
    monkeypatch.setattr(permuted_pairs, "MOST_KEPT", most)
    monkeypatch.setattr(permuted_pairs, "LOOK_UP", cost)
    monkeypatch.setattr(permuted_pairs, "BLOCK", 32)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    ("made_of", "formula", "options"),
    [
        (rsa_pairs, rsa, {}),
        (rsa_pairs, rsa, {"kernel": "centred_cosine"}),
        (rsa_pairs, rsa, {"kernel": "linear"}),
        (rsa_pairs, rsa, {"kernel": "euclidean"}),
        (rsa_spearman_pairs, rsa_spearman, {}),
        (rbf_cka_pairs, rbf_cka, {}),
        (rbf_cka_pairs, rbf_cka, {"unbiased": True}),
    ],
)
def test_an_order_is_that_of_the_rows(
    made_of: Callable[..., OfPairs], formula: Callable[..., torch.Tensor], options: dict[str, object]
) -> None:
    x, y = related_rows(3, 75, 5, 4)
    x, y = x + 3, y[:2] - 1
    made = made_of(x, y, **options)
    assert torch.equal(made.value(), formula(x, y, **options))
    for seed in range(3):
        order = torch.randperm(75, generator=torch.Generator().manual_seed(seed))
        expected = formula(x, y[:, order], **options)
        torch.testing.assert_close(made.value(order), expected, rtol=1e-11, atol=1e-11)
        assert (expected - made.value()).abs().max() > 1e-3


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_sums_of_hsic_are_those_of_the_rows(dtype: torch.dtype) -> None:
    x, y = (rows.to(dtype) for rows in related_rows(3, 70, 5, 4))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    found = hsic_pairs(x, y).of(order)
    expected = hsic_pairs(x, y[:, order]).sums
    precise = 1e-11 if dtype == torch.float64 else 1e-5
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=precise, atol=precise * float(b.abs().max()))
    assert torch.equal(unbiased_hsic(x, y).xy.isfinite(), torch.ones(3, 3, dtype=torch.bool)[:, : len(y)])
