"""What a wheel holds is enough: installed into an environment of its own, it runs from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.aligners.cli.small_study import study_file
from tests.processes import HANGS, ROOT
from tests.world import World

ROOTS = ("aligners", "callbacks", "datamodules")  # the packages of the design card


def run(*words: str | Path, folder: Path) -> str:
    """What a command prints."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WANDB_SERVICE")}
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources."""
    sources, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ROOTS:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", made, ".", folder=sources)
    (file,) = made.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `aligners` of an environment with nothing of the project but the wheel; libraries are those here."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home, folder=home)
    (packages,) = home.glob("lib/python*/site-packages")
    libraries = sysconfig.get_paths()["purelib"]
    (packages / "libraries.pth").write_text(libraries)  # its own .pth files, an editable install's, do not count
    run(
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--python",
        home,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        folder=home,
    )
    return home / "bin" / "aligners"


def test_it_brings_everything_that_is_no_test(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kinds = {".py", ".yaml", ".j2", ".css", ".js", ".typed"}
    ours = (
        path for name in ROOTS for path in (ROOT / name).rglob("*") if path.suffix in kinds or path.name == "py.typed"
    )
    assert held == {str(path.relative_to(ROOT)) for path in ours}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert packages == [f"{name}*" for name in ROOTS]


def test_it_runs_from_an_empty_folder(program: Path, world: World, tmp_path: Path) -> None:
    where = run(program.parent / "python", "-c", "import aligners; print(aligners.__file__)", folder=tmp_path)
    assert Path(where).is_relative_to(program.parents[1])
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.enable_progress_bar", "false"]
    text = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.held_out_types", "0"]
    models = ["--data.model_x", world.model_x, "--data.model_y", world.model_y, "--data.max_length", "64"]
    run(program, "train", "fit", "--config", "inn", *few, *text, *models, "--run", "fit", folder=tmp_path)
    checkpoint = ["--checkpoints+", "fit/aligners.ckpt"]
    run(program, "evaluate", "inject", *checkpoint, "--closed_form", "[]", "--run", "report", folder=tmp_path)
    assert "inn" in run(program, "evaluate", "show", "report", folder=tmp_path)
    fit = {"options": {"model": {"aligners": {"linear": {"class_path": "Linear"}}}}}
    file = study_file(world, tmp_path, fit=fit, inject={"options": {"closed_form": []}})
    assert len(yaml.safe_load(Path(file).read_text())["models"]["names"]) == 2  # so that it has two cells
    run(program, "study", "run", file, folder=tmp_path)
    assert (tmp_path / "runs" / "small" / "report" / "report.html").is_file()


def test_the_scripts_and_the_command_have_one_table(program: Path, tmp_path: Path) -> None:
    said = run(program, "--help", folder=tmp_path)
    for script in ("train", "evaluate", "study"):
        by_script = run(sys.executable, ROOT / f"{script}.py", "--help", folder=tmp_path)
        assert by_script.replace(f"{script}.py", f"aligners {script}").strip() in said
