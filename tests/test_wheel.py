"""What is built is enough: installed into a folder of its own, it runs from an empty one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.aligners.cli.small_study import forked_workers, study_file
from tests.processes import HANGS, ROOT, Started
from tests.world import World

import aligners
from aligners.cli import table

ROOTS = ("aligners", "callbacks", "datamodules")  # folders of the design card; what is installed is `aligners`

CHAIN = """
import json, runpy, sys
script, commands = sys.argv[1:]
for words in json.loads(commands):
    print("aligners", *words[:2])
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, words
"""


def run(*words: str | Path, folder: Path, path: Path | None = None) -> str:
    """What a command prints that finds modules in `path` before those of the environment."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WANDB_SERVICE")}
    own |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the project from a copy of its sources, by way of a wheel."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for name in ROOTS:
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--no-compile", "--target", target, ".", folder=sources)
    return target


def test_it_brings_everything_that_is_no_test(installed: Path) -> None:
    kinds = {".py", ".yaml", ".j2", ".css", ".js", ".typed", ".json", ".safetensors"}

    def files(folder: Path) -> set[str]:
        found = set()
        for path in folder.rglob("*"):
            if path.suffix in kinds or path.name == "py.typed":
                found.add(str(path.relative_to(folder)))
        return found

    expected = files(ROOT / "aligners")
    for name in ROOTS[1:]:
        expected |= {f"{name}/{file}" for file in files(ROOT / name)}
    assert files(installed / "aligners") == expected
    assert {path.name for path in installed.iterdir()} == {
        "aligners",
        "bin",
        f"aligners-{aligners.__version__}.dist-info",
    }


@pytest.mark.slow
def test_a_project_may_have_packages_of_the_same_names(installed: Path, tmp_path: Path) -> None:
    """Lightning's users have `datamodules` and `callbacks` of their own, which must win where they are imported."""
    for name in ROOTS[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    code = """
import callbacks, datamodules
import aligners.api
from aligners.callbacks.best import BestPerSite
from aligners.datamodules.paired_activations import PairedActivations
print(callbacks.MINE and datamodules.MINE, aligners.__file__)
"""
    said = run(sys.executable, "-c", code, folder=tmp_path, path=installed).split(maxsplit=1)
    assert said[0] == "True"
    assert Path(said[1].strip()).is_relative_to(installed)


@contextmanager
def nothing_else(installed: Path) -> Iterator[None]:
    """Within it, all of the project that this process finds is what was installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]
    sys.path[:] = [str(installed), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    sys.meta_path[:] = [found for found in sys.meta_path if "editable" not in getattr(found, "__module__", "")]
    with forked_workers():
        try:
            yield
        finally:  # a command ends by SystemExit
            assert Path(sys.modules["aligners"].__file__ or "").is_relative_to(installed)


@pytest.mark.slow
def test_it_runs_from_an_empty_folder(installed: Path, world: World, tmp_path: Path) -> None:
    """Four commands, one after the other in one process."""
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.enable_progress_bar", "false"]
    text = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.held_out_types", "0"]
    models = ["--data.model_x", world.model_x, "--data.model_y", world.model_y, "--data.max_length", "64"]
    fit = {"options": {"model": {"aligners": {"linear": {"class_path": "Linear"}}}, "data": {"sites": [1]}}}
    file = study_file(world, tmp_path, fit=fit, inject={"options": {"closed_form": []}})
    assert len(yaml.safe_load(Path(file).read_text())["models"]["names"]) == 2  # so that it has two cells
    commands = [
        ["train", "fit", "--config", "inn", *few, *text, *models, "--data.sites", "1", "--run", "fit"],
        ["evaluate", "inject", "--checkpoints+", "fit/aligners.safetensors", "--closed_form", "[]", "--run", "report"],
        ["evaluate", "show", "report"],
        ["study", "run", file],
    ]
    (tmp_path / "chain.py").write_text(CHAIN)
    given = [str(installed / "bin" / "aligners"), json.dumps(commands)]
    started = Started(
        tmp_path, str(tmp_path / "chain.py"), *given,
        around=partial(nothing_else, installed), environment={"WANDB_MODE": "disabled"},
    )  # fmt: skip
    assert started.end() == 0, started.said()[-3000:]
    assert "inn" in started.printed()[0].split("aligners evaluate show\n")[1]
    assert (tmp_path / "runs" / "small" / "report" / "report.html").is_file()


def test_the_scripts_and_the_command_have_one_table(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an interpreter of its own."""
    said = run(installed / "bin" / "aligners", "--help", folder=tmp_path, path=installed)
    for script in ("train", "evaluate", "study"):
        getattr(table, script)(["--help"])
        by_script = capsys.readouterr().out
        assert by_script.replace(f"{script}.py", f"aligners {script}").strip() in said
        assert f"from aligners.cli.table import {script}\n" in (ROOT / f"{script}.py").read_text()
    code = "import importlib.util; print(importlib.util.find_spec('aligners').origin)"
    where = run(sys.executable, "-c", code, folder=tmp_path, path=installed)
    assert Path(where).is_relative_to(installed)
