"""The documentation names files that are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.shell import ROOT

FILES = re.compile(
    r"(?<![\w/])(?:aligners|benchmarks|callbacks|commands|configs|datamodules|finetuning|frozen|probing|reports|sharing|similarity|storage|studies|tests)"
    r"/[\w/]+\.\w+"
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_are_there(page: Path) -> None:
    text = page.read_text().split("\n## Adding things")[0]  # which is about files that are yet to be written
    missing = [name for name in FILES.findall(text) if not (ROOT / name).exists()]
    assert not missing


def test_the_walks_pass_no_file_twice() -> None:
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    walks = [part for part in text.split("\n## ") if part.startswith("From the command to")]
    assert len(walks) == 2
    for walk in walks:
        steps = re.findall(r"^\d\..*(?:\n   .*)*", walk, re.MULTILINE)
        named = [name for step in steps for name in FILES.findall(step)]
        assert len(named) > 10
        assert len(set(named)) == len(named)


def test_the_citation_has_the_version_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert cited == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
