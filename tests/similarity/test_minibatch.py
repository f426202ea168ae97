from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from similarity.functional.hsic import minibatch_cka
from similarity.minibatch import MinibatchCKA
from tests.runs import related_rows

LAYERS, ROWS, BATCH = 2, 48, 8


def filled(order: list[int], metric: MinibatchCKA | None = None) -> MinibatchCKA:
    """The metric after some of the six batches."""
    x, y = related_rows(LAYERS, ROWS, 5, 3)
    metric = metric or MinibatchCKA(LAYERS, LAYERS)
    for batch in order:
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        metric.update(x[:, rows], y[:, rows])
    return metric


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(ROWS // BATCH)), cut=st.integers(0, ROWS // BATCH))
def test_any_order_and_any_ranks_give_the_same(order: list[int], cut: int) -> None:
    expected = minibatch_cka(*related_rows(LAYERS, ROWS, 5, 3), BATCH)
    torch.testing.assert_close(filled(order).compute(), expected, rtol=0, atol=1e-12)
    first, second = filled(order[:cut]), filled(order[cut:])
    for name in ("xy", "xx", "yy", "batches"):
        setattr(first, name, getattr(first, name) + getattr(second, name))
    first._update_count += 1
    torch.testing.assert_close(first.compute(), expected, rtol=0, atol=1e-10)


def test_batches_are_counted_and_state_survives() -> None:
    metric = pickle.loads(pickle.dumps(filled([0, 1, 2])))
    assert metric.batches == 3
    value = metric.compute()
    half = torch.nn.ModuleList([metric]).to(torch.float16)[0]
    assert half.xy.dtype == torch.float64
    torch.testing.assert_close(half.compute(), value, rtol=0, atol=0)
    with torch.inference_mode():
        metric.reset()
    torch.testing.assert_close(filled([0, 1, 2], metric).compute(), value, rtol=0, atol=0)


def test_called_it_gives_the_value_of_the_batch_and_adds_it() -> None:
    x, y = related_rows(LAYERS, ROWS, 5, 3)
    metric = MinibatchCKA(LAYERS, LAYERS)
    for rows in (slice(0, 20), slice(20, 48)):
        torch.testing.assert_close(metric(x[:, rows], y[:, rows]), minibatch_cka(x[:, rows], y[:, rows], 48))
    assert metric.batches == 2


def test_refusals() -> None:
    metric = MinibatchCKA(LAYERS, LAYERS)
    x, y = related_rows(LAYERS, 3, 5, 3)
    with pytest.raises(ValueError, match=r"at least 4 rows, but `x` and `y` have 3.*leave out a last batch"):
        metric.update(x, y)
    metric.reset()
    with pytest.warns(UserWarning, match="before the"), pytest.raises(ValueError, match="at least one batch"):
        metric.compute()
