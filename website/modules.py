"""The reference from docstrings: a page for each package."""

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["nav", "pages"]

ROOT = Path(__file__).parent.parent
FOLDER = "reference/modules"


def nav() -> list[Any]:
    """The pages in the navigation: packages, and within each its folders."""
    return [{top: [{".".join(part.parts): _place(part)} for part in _packages(top)]} for top in _tops()]


def pages() -> dict[str, str]:
    """A page for each folder with modules, which mkdocstrings fills."""
    return {_place(package): _page(package) for top in _tops() for package in _packages(top)}


def _tops() -> list[str]:
    """The packages that are installed, as `pyproject.toml` names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]


def _packages(top: str) -> list[Path]:
    return sorted({path.parent.relative_to(ROOT) for path in (ROOT / top).rglob("*.py") if path.stem != "__init__"})


def _modules(package: Path) -> list[str]:
    names = sorted(path.stem for path in (ROOT / package).glob("*.py"))
    return [".".join([*package.parts, name]) for name in names if name != "__init__"]


def _place(package: Path) -> str:
    return f"{FOLDER}/{'.'.join(package.parts)}.md"


def _page(package: Path) -> str:
    sections = [f"## {name.rpartition('.')[2]}\n\n::: {name}\n" for name in _modules(package)]
    return "\n".join([f"# {'.'.join(package.parts)}\n", *sections])
