import signal
from pathlib import Path

import pytest
from tests.torture import Torture


@pytest.mark.slow
def test_what_is_stopped_by_force_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    torture = Torture(tmp_path, wandb="disabled")
    torture.stop("fit", signal.SIGKILL)
    torture.stop("stitch", signal.SIGTERM)
    torture.fill("fit")
    assert torture.faults == []
    assert sum(count for what, count in torture.counts.items() if "bit-identical" in what) == 3
