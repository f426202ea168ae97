"""Retrieval of held-out rows: which are drawn, and what the columns say; for ranks see `tests/contracts/`."""

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from tests.references.retrieval import retrieval_scores
from torch import Tensor

from aligners.datamodules.rows.token_pairs import row_keys
from aligners.fitting import heldout_retrieval
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS, HeldOutRows

SITES, TEXTS, LENGTH, D_X, D_Y = 2, 12, 7, 4, 5
FEW, MOST = 20, 60


def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of X and of Y, their texts, and their places in them; at the second site Y has many equal rows."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SITES, TEXTS * LENGTH, width, generator=draw) for width in (D_X, D_Y))
    y[1, ::3] = y[1, 0].clone()
    return x, y, torch.arange(TEXTS).repeat_interleave(LENGTH), torch.arange(LENGTH).repeat(TEXTS)


def mapped_by(x: Tensor) -> Tensor:
    """A map that is right at times: it depends on the row alone."""
    _, y, *_ = rows()
    whole, _, *_ = rows()
    index = (x[:1, :, None] == whole[:1, None]).all(-1)[0].int().argmax(-1)
    return y[:, index] + 0.7 * torch.cat([x, x[..., :1]], -1)


def columns(order: Tensor, batches: int, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """The columns when rows come in this order and in so many batches."""
    x, y, text, place = rows()
    drawn = HeldOutRows(SITES, D_X, D_Y, seed, torch.device(device))
    for part in order.tensor_split(batches):
        drawn.add(x[:, part], y[:, part], text[part], place[part])
    return drawn.columns(mapped_by(drawn.end()))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldout_retrieval, "QUERIES", FEW)
    monkeypatch.setattr(heldout_retrieval, "MOST", MOST)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected) == set(RETRIEVAL_COLUMNS)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.usefixtures("small")
def test_the_columns_are_those_of_the_rows_with_the_smallest_keys() -> None:
    x, y, text, place = rows()
    found = columns(torch.arange(x.shape[1]), 1)
    order = row_keys(0, text, place).argsort()
    queries, most = order[:FEW], order[:MOST]
    assert found["queries"].tolist() == [FEW] * SITES
    for s in range(SITES):
        mapped = mapped_by(x[:, queries])[s].double().numpy()
        for among, kept in (("", queries), ("_all", most)):
            candidates = y[s, kept].double().numpy()
            assert found[f"candidates{among}"][s] == len(np.unique(candidates, axis=0))
            for end, centred in ((among, False), (f"{among}_centred", True)):
                expected = retrieval_scores(mapped, candidates, centred=centred)
                for name, scores in zip(("top1", "top10", "mrr"), expected, strict=True):
                    assert found[f"{name}{end}"][s] == pytest.approx(scores.mean())
    assert found["candidates_all"][1] < found["candidates_all"][0] == MOST
    assert 0.1 < found["top1"][0] < 1


@pytest.mark.usefixtures("small")
def test_an_interval_is_that_of_texts_left_out_one_at_a_time() -> None:
    x, y, text, place = rows()
    found, order = columns(torch.arange(x.shape[1]), 1), row_keys(0, text, place).argsort()[:FEW]
    scores = retrieval_scores(mapped_by(x[:, order])[0].double().numpy(), y[0, order].double().numpy())[0]
    owner = text[order].numpy()
    left_out = np.array([scores[owner != t].mean() for t in np.unique(owner)])
    error = np.sqrt((len(left_out) - 1) * left_out.var())
    assert 0 < found["top1_low"][0] < found["top1"][0] < found["top1_high"][0] <= 1
    half = float(found["top1"][0] - found["top1_low"][0])
    assert half == pytest.approx(error * student.ppf(0.975, len(left_out) - 1), rel=1e-6)


def test_an_interval_ends_at_0_and_1() -> None:
    drawn = HeldOutRows(1, D_Y, D_Y, 0, torch.device("cpu"))
    y = torch.randn(1, 8, D_Y, generator=torch.Generator().manual_seed(0))
    drawn.add(y, y, torch.arange(8) // 4, torch.arange(8) % 4)
    wrong = (drawn.end() == y[:, 4:, None]).all(-1).any(1)  # the rows of the second text
    found = drawn.columns(drawn.end().where(~wrong[..., None], -drawn.end()))
    assert (found["top1"], found["top1_low"], found["top1_high"]) == (0.5, 0, 1)


@pytest.mark.usefixtures("small")
def test_batches_and_order_make_no_difference_and_the_seed_does() -> None:
    plain = torch.arange(TEXTS * LENGTH)
    expected = columns(plain, 1)
    same(columns(torch.randperm(len(plain), generator=torch.Generator().manual_seed(1)), 9), expected)
    assert columns(plain, 1, seed=1)["mrr"][0] != expected["mrr"][0]


def test_fewer_candidates_where_these_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldout_retrieval, "QUERIES", FEW)
    monkeypatch.setattr(heldout_retrieval, "NUMBERS", SITES * D_Y * 30)
    found = columns(torch.arange(TEXTS * LENGTH), 2)
    assert found["candidates_all"][0] == 30


def test_one_text_has_no_interval() -> None:
    drawn = HeldOutRows(1, D_Y, D_Y, 0, torch.device("cpu"))
    y = torch.randn(1, 5, D_Y, generator=torch.Generator().manual_seed(0))
    drawn.add(y, y, torch.zeros(5, dtype=torch.int64), torch.arange(5))
    found = drawn.columns(drawn.end())
    assert found["top1"] == 1
    assert found["top1_low"].isnan()
    assert found["top1_high"].isnan()
