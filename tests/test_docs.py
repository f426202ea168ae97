"""The documentation names files that are there."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.processes import ROOT

import aligners

FILES = re.compile(
    r"(?<![\w/])(?:aligners|benchmarks|callbacks|commands|configs|datamodules|finetuning|frozen|probing|reports|sharing|similarity|storage|studies|tests)"
    r"/[\w/]+\.\w+"
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_are_there(page: Path) -> None:
    text = page.read_text().split("# Adding things")[0]  # which is about files that are yet to be written
    missing = [name for name in FILES.findall(text) if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_fit_a_page(page: Path) -> None:
    """At 1,280 pixels a block has room for 75 characters beside its button; recipes and the first pages keep to it."""
    whole = page.parent.name == "howto" or page.name in ("README.md", "index.md", "installation.md", "questions.md")
    for block in re.findall(r"^```[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        commands = [line for line in lines if line.startswith(("python ", "aligners ", "pip ")) or line.endswith("\\")]
        assert [line for line in (lines if whole else commands) if len(line) > 75] == []


def test_the_walks_pass_no_file_twice() -> None:
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    walks = [part for part in text.split("\n## ") if part.startswith("From the command to")]
    assert len(walks) == 2
    for walk in walks:
        steps = re.findall(r"^\d\..*(?:\n   .*)*", walk, re.MULTILINE)
        named = [name for step in steps for name in FILES.findall(step)]
        assert len(named) > 10
        assert len(set(named)) == len(named)


def test_the_citation_and_the_package_have_the_version_of_the_project() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## ([\d.]+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert cited == project["version"] == aligners.__version__ == newest[1]
