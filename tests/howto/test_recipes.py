"""The recipes of docs/howto: the commands of each page run as they stand, with smaller models, texts and trainings."""

import re
import runpy
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from tests.cells import Inline
from tests.processes import ROOT
from tests.shell import printed

from aligners.cli.study import run_cells as running
from aligners.cli.table import COMMANDS, evaluate, study, train
from aligners.studies.executors import make_executor

HOWTO = ROOT / "docs" / "howto"
RECIPES = sorted(page.stem for page in HOWTO.glob("*.md") if page.stem != "index")
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = {"train.py": train, "evaluate.py": evaluate, "study.py": study}
TINY = {"layers": 2, "width": 16, "steps": 4, "batch": 2, "vocabulary": 300}
MODEL = re.compile(r"\"?(embedded-gpt:[^:,\" \]]+):?([\w=]*)\"?")
TEXT = {"max_texts": 80, "max_held_out": 20}
SHORT = {"max_epochs": 1, "limit_train_batches": 2}
MINUTES = re.compile(r"^\*\*Takes (\d):(\d\d) minutes\*\* on two cores", re.MULTILINE)
# Another machine, as the pages say for one without GPUs or a cluster.
HERE = {"cuda:0": "cpu", "cuda:1": "cpu", "--trainer.accelerator gpu": "--trainer.accelerator cpu"}
if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
    # On processors with AMX its attention fails: "pack_vnni2 is only supported when avx512 is supported".
    HERE["bfloat16"] = "float32"


class Block(NamedTuple):
    """What stands between fences: its language, the file that it is, its text."""

    language: str
    file: str
    text: str


def blocks(recipe: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((HOWTO / f"{recipe}.md").read_text(encoding="utf-8"))]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block, as the shell would split them."""
    for line in text.replace("\\\n", " ").strip().splitlines():
        python, *words = shlex.split(line)
        assert python == "python"
        yield words


def smaller(words: list[str]) -> list[str]:
    """The command with what makes it small."""
    if words[0] not in SCRIPTS:
        return words
    script, name = words[:2]
    if script == "study.py":
        return words
    if name in ("share", "show", "migrate"):
        return words
    words = [with_tiny_models(word) for word in words]
    added = flat("data.text", {"max_held_out": 20} if "--checkpoints+" in words else TEXT)
    added |= flat("trainer", SHORT if name == "fit" else {})
    added |= {} if name != "similarity" or "--measures" in words else {"--measures": "[cka, r2]"}
    return [*words, "--trainer.logger", "false", *(part for item in added.items() for part in item)]


def with_tiny_models(word: str) -> str:
    """A word with what makes the models that it names tiny; names in a list are quoted, as they have commas."""
    quotes = ['"', '"'] if word.startswith("[") else ["", ""]
    return MODEL.sub(lambda model: tiny(*model.groups()).join(quotes), word)


def quoted_tiny(script: str) -> str:
    """A script that names models, these made tiny, and reads fewer texts."""
    small = MODEL.sub(lambda model: f'"{tiny(*model.groups())}"', script)
    return small.replace("max_texts=1600", "max_texts=80, max_held_out=20")


def tiny(name: str, options: str = "") -> str:
    """The name of a model with what makes it tiny."""
    sizes = [f"{field}={size}" for field, size in TINY.items() if field not in options]
    return f"{name}:{','.join(filter(None, [options, *sizes]))}"


def flat(prefix: str, values: dict[str, Any]) -> dict[str, str]:
    return {f"--{prefix}.{name}": str(value) for name, value in values.items()}


def smaller_study(text: str) -> str:
    """The study with what makes it small."""
    content = yaml.safe_load(text)
    content["models"] = {"names": tiny(content["models"]["names"]), "seeds": 2}
    for task in content["tasks"].values():
        task["text"] |= TEXT
    if "fit" in content:
        content["fit"]["options"]["trainer"] = {**SHORT, "logger": False}
        content["inject"]["options"]["trainer"] = {"logger": False}
    content["report"] = ["similarity"]  # of all others there are tests enough
    return yaml.safe_dump(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all recipes run, with what they share of the repository."""
    return tmp_path_factory.mktemp("howto")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_does_what_it_says(recipe: str, folder: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    named: list[str] = []
    for language, file, text in blocks(recipe):
        if file:
            (folder / file).write_text(smaller_study(text) if language == "yaml" else quoted_tiny(text))
        elif language == "bash":
            for word, other in HERE.items():
                text = text.replace(word, other)
            for words in commands(text):
                perform(smaller(words), folder, monkeypatch)
                named += words
    runs = [Path(word) for word in named if word.startswith(("runs/", "shared/"))]
    assert runs
    assert all(run.exists() for run in runs)


def perform(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command: in this process, unless it needs several."""
    script, *rest = words
    if script not in SCRIPTS:
        runpy.run_path(script)
        return
    assert rest[0] in COMMANDS[script.removesuffix(".py")]
    if "--trainer.devices" in rest:
        printed(folder, script.removesuffix(".py"), *rest, ranks=2)
        return
    with monkeypatch.context() as patch:
        patch.setattr(running, "make_executor", here)
        SCRIPTS[script](rest)


def here(name: str, workers: int, gpus: list[str], folder: Path, options: dict[str, Any], devices: int) -> Inline:
    """Cells run in this process, if they could run where the recipe says."""
    if name != "slurm" or find_spec("submitit"):
        make_executor(
            name, workers, gpus, folder, {**options, **({"cluster": "local"} if name == "slurm" else {})}, devices
        )
    return Inline()


def test_there_are_fourteen_recipes_and_an_index_of_them() -> None:
    index = (HOWTO / "index.md").read_text(encoding="utf-8")
    assert len(RECIPES) == 14
    assert all(f"({recipe}.md)" in index for recipe in RECIPES)
    assert all(any(block.language == "bash" for block in blocks(recipe)) for recipe in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_that_it_takes_at_most_three_minutes(recipe: str) -> None:
    """The index says the same. `.ci/recipes` measures it."""
    minutes, seconds = MINUTES.findall((HOWTO / f"{recipe}.md").read_text(encoding="utf-8"))[0]
    assert 60 * int(minutes) + int(seconds) <= 180
    index = (HOWTO / "index.md").read_text(encoding="utf-8")
    assert re.search(rf"\({recipe}\.md\) \| {minutes}:{seconds} \|", index)
