"""Studies whose cells are divided among several processes."""

from pathlib import Path

import pandas as pd
import pytest
from tests.aligners.cli.small_study import study_file
from tests.world import World

from aligners.cli.table import study


@pytest.mark.slow
@pytest.mark.usefixtures("cells_here")
def test_two_processes_for_a_cell_make_what_one_makes(world: World, tmp_path: Path) -> None:
    maps = {"linear": "Linear", "mlp": {"class_path": "MLP", "init_args": {"hidden": [8]}}}
    fit = {"options": {"model": {"aligners": maps}, "trainer": {"max_epochs": 1}, "data": {"sites": [1, 2]}}}
    file = study_file(world, tmp_path, fit=fit, inject=None)  # that ranks inject alike: tests/test_commands.py
    for devices, name in (("1", "one"), ("2", "two")):
        study(["run", file, "--folder", name, "--cell_devices", devices])
    frames = [pd.read_parquet(tmp_path / name / "tables" / "fit.parquet") for name in ("one", "two")]
    shared = [name for name in frames[0].select_dtypes("number").columns if "seconds" not in name]
    assert {"fvu", "mse"} <= {*shared}
    pd.testing.assert_frame_equal(frames[1][shared], frames[0][shared], rtol=1e-4, atol=1e-5)
    logs = [log.read_text() for log in (tmp_path / "two").glob("cells/*/log.txt")]
    assert [log.count("MEMBER: 2/2") for log in logs] == [1]
