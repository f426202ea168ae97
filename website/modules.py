"""The reference from docstrings: a page for each package."""

from pathlib import Path
from typing import Any

__all__ = ["nav", "pages"]

ROOT = Path(__file__).parent.parent
FOLDER = "reference/modules"
PACKAGES = {"aligners": "aligners", "aligners.callbacks": "callbacks", "aligners.datamodules": "datamodules"}
"""Name -> folder of each package that has an entry of its own in the navigation."""


def nav() -> list[Any]:
    """The pages in the navigation: packages, and within each its folders."""
    entries = []
    for top in PACKAGES:
        entries.append({top: [{name: _place(name)} for name in _folders(top)]})
    return entries


def pages() -> dict[str, str]:
    """A page for each folder with modules, which mkdocstrings fills."""
    made = {}
    for top in PACKAGES:
        for name, folder in _folders(top).items():
            made[_place(name)] = _page(name, folder)
    return made


def _folders(top: str) -> dict[str, Path]:
    """Name -> folder of the packages within one, itself among them, that hold modules."""
    root = ROOT / PACKAGES[top]
    found = {}
    for path in sorted(root.rglob("*.py")):
        if path.stem != "__init__":
            name = ".".join([top, *path.parent.relative_to(root).parts])
            found[name] = path.parent
    return dict(sorted(found.items()))


def _place(name: str) -> str:
    return f"{FOLDER}/{name}.md"


def _page(name: str, folder: Path) -> str:
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    sections = [f"## {module}\n\n::: {name}.{module}\n" for module in modules]
    return "\n".join([f"# {name}\n", *sections])
