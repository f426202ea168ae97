import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import HANGS, ROOT

from aligners.cli import table
from aligners.cli.command import Command
from aligners.cli.train import fit


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the command `fit` gets: the name of its parser and the words."""
    got: list[object] = []
    table.known_options("train", "fit")  # of the command itself
    command = Command(lambda run: got.append((run.parser.prog, run.words)), "fit")
    monkeypatch.setattr(fit, "fit", command)
    return got


def test_the_first_word_says_what_runs_by_default_of_those_of_the_process(
    seen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    table.train(["fit", "--run", "x"])
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--run", "y"])
    table.train()
    assert seen == [("train.py fit", ["--run=x"]), ("train.py fit", ["--run=y"])]


def test_shapes_of_batches_are_not_kept_for_ever(seen: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    table.train(["fit"])
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    table.train(["fit"])
    assert os.environ[name] == "64"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no such segments")
@pytest.mark.parametrize(
    ("torch", "name"), [("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"), ("2.13.0+cu130", "PYTORCH_ALLOC_CONF")]
)
def test_segments_of_gpu_memory_grow_unless_the_user_sets_them(
    torch: str, name: str, seen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]
    monkeypatch.setattr(table, "version", {"torch": torch}.__getitem__)
    for taken in (None, *names):
        for each in names:
            monkeypatch.setenv(each, "")  # so that it is put back
            monkeypatch.delenv(each)
        if taken is not None:
            monkeypatch.setenv(taken, "backend:native")
        table.train(["fit"])
        found = {each: os.environ[each] for each in names if each in os.environ}
        assert found == ({name: "expandable_segments:True"} if taken is None else {taken: "backend:native"})


@pytest.mark.parametrize("script", ["train", "evaluate", "study"])
def test_every_command_has_the_same_shape(script: str) -> None:
    for name, (_, said) in table.COMMANDS[script].items():
        command = table.find(script, name)
        assert isinstance(command, Command)
        parser = command.parser()
        assert (command.work.__name__, parser.description[-1]) == (name, ".")
        assert [action.dest for action in parser._actions if not action.help] == []  # every option is explained
        assert said.endswith(".")


def test_help_lists_every_command_and_imports_none() -> None:
    code = """
import sys
from aligners.cli import table
for script in table.COMMANDS:
    getattr(table, script)(["--help"])
    print("---")
assert not {"torch", "lightning", "wandb", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    for said, commands in zip(done.stdout.split("---"), table.COMMANDS.values(), strict=False):
        assert {line.split()[0] for line in said.splitlines() if line.startswith("  ")} == set(commands)


def test_every_command_says_that_it_begins_before_anything_is_imported() -> None:
    for script, commands in table.COMMANDS.items():
        for name in commands:
            table.known_options(script, name)
    code = """
import sys
from aligners.cli import table

def imports(**_):
    assert not {"torch", "lightning", "wandb", "transformers"} & set(sys.modules)
    raise InterruptedError

table.import_first = imports
for script, commands in table.COMMANDS.items():
    for name in commands:
        about = table.known_options(script, name)
        try:
            getattr(table, script)([name, *["x"] * about["positional"]])
        except InterruptedError:
            print(script, name, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    every = [f"{script} {name}" for script, commands in table.COMMANDS.items() for name in commands]
    assert said[1::2] == every
    assert set(said[::2]) == {"Loading models ...", "Loading ..."}
    assert said[said.index("train fit") - 1] == "Loading models ..."


def test_help_of_all_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        table.train(["fit", "--help", "all"])
    assert not done.value.code
    shown = capsys.readouterr().out
    assert "usage: train.py fit [options]" in shown
    assert "Fit aligners between the states of two frozen models" in shown
    for option in ("--model.aligners", "--data.sites", "--run", "--sites_at_once", "--ckpt_path"):
        assert option in shown


# Folder of configs -> its command, and what some of its files set.
OF_FOLDERS = {
    "finetune": ("train finetune", "variants:"),
    "inject": ("evaluate inject", "closed_form:"),
    "probe": ("train probe", "tasks:"),
    "similarity": ("evaluate similarity", "permutations:"),
    "surgery": ("evaluate surgery", "bases:"),
    "train": ("train fit", "aligners:"),
}
BARE = ("show", "share")  # have no configuration
CONFIGS = sorted(file for folder in OF_FOLDERS for file in (ROOT / "aligners" / "configs" / folder).glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.stem}-{path.stem}")
def test_a_config_is_understood(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, option = OF_FOLDERS[config.parent.stem]
    if config.stem.startswith("stitching"):
        command, option = "train stitch", "layers:"
    script, name = command.split()
    with pytest.raises(SystemExit) as done:
        getattr(table, script)([name, "--config", str(config), "--print_config"])
    assert not done.value.code
    assert option in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "name"), [(s, name) for s in ("train", "evaluate") for name in table.COMMANDS[s] if name not in BARE]
)
def test_a_config_holds_every_option_so_that_it_can_be_read_again(
    script: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        getattr(table, script)([name, "--print_config"])
    said = capsys.readouterr()
    assert not done.value.code
    assert "Unable" not in said.out + said.err


@pytest.mark.parametrize(("words", "said"), [([], "got nothing"), (["fti"], "got 'fti'")])
def test_another_word_is_an_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        table.train(words)
    assert done.value.code == 2
    assert said in capsys.readouterr().err
