from __future__ import annotations

import pytest

from datamodules.batches import limited
from tests.runs import quiet_trainer


@pytest.mark.parametrize(("limit", "count"), [(1.0, 10), (0.35, 3), (4, 4), (40, 10)])
def test_a_limit_is_a_number_of_batches_or_a_share(limit: float, count: int) -> None:
    assert limited(10, quiet_trainer(limit_train_batches=limit), "train") == count


def test_a_limit_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`trainer\.limit_test_batches` to leave at least one of 10 .*got 0\.001"):
        limited(10, quiet_trainer(limit_test_batches=0.001), "test")
