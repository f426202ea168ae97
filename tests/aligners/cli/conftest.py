"""What several tests of commands share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from aligners.cli.study import run_cells

if TYPE_CHECKING:
    from tests.cells import Inline


@pytest.fixture
def cells_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undrawn: None) -> Inline:
    """Studies run in the test's folder, and their cells in this process, one after another; nothing is drawn."""
    from tests.cells import Inline

    from aligners.cli.cells import running

    executor = Inline()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_RUN_GROUP", "another")
    monkeypatch.setattr(run_cells, "make_executor", lambda *_: executor)
    # Python collects garbage by itself; for all that is imported here, it would take as long as many a cell.
    monkeypatch.setattr(running, "gc", SimpleNamespace(collect=lambda: 0))
    return executor
