"""The reference from docstrings: a page for each package."""

from pathlib import Path
from typing import Any

from aligners import api

__all__ = ["nav", "pages"]

ROOT = Path(__file__).parent.parent
FOLDER = "reference/modules"
PACKAGES = {
    "aligners": "aligners",
    "aligners.callbacks": "callbacks",
    "aligners.datamodules": "datamodules",
}
"""Name -> folder of each package that has an entry of its own in the navigation."""
OF_API = {
    "Maps": [
        "Linear",
        "Ridge",
        "Procrustes",
        "INN",
        "MLP",
        "Identity",
        "Mean",
        "Permutation",
        "ReducedRank",
        "SoftMatching",
        "NearestNeighbours",
        "KernelRidge",
        "Relative",
        "CCA",
        "SVCCA",
        "PWCCA",
    ],
    "Measures": ["cka", "unbiased_cka", "cca", "r2", "rsa", "retrieval", "measure"],
    "Models": ["states", "inject", "load", "load_texts", "TextSource", "Injected"],
    "After an update": [
        "compare",
        "carry",
        "steer",
        "Head",
        "Direction",
        "Dictionary",
        "read_artefacts",
    ],
}
"""Heading -> names of `aligners.api`, the most used first; what is not named here comes last."""


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
    made[_place("aligners.api")] = _page_of_api()
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
    modules = sorted(
        path.stem for path in folder.glob("*.py") if path.stem != "__init__"
    )
    sections = [f"## {module}\n\n::: {name}.{module}\n" for module in modules]
    return "\n".join([f"# {name}\n", *sections])


def _page_of_api() -> str:
    """What `aligners.api` offers, and nothing else; for what is made elsewhere, where it is explained."""
    groups = {title: list(names) for title, names in OF_API.items()}
    named = {name for names in groups.values() for name in names}
    groups["More"] = [name for name in api.__all__ if name not in named]
    lines = [
        "# aligners.api\n",
        "Explained with examples in [From Python](../../python.md).\n",
    ]
    for title, names in groups.items():
        lines.append(f"## {title}\n")
        lines += [_entry_of_api(name) for name in names]
    return "\n".join(lines)


def _entry_of_api(name: str) -> str:
    home = getattr(api, name).__module__
    if not home.startswith("aligners.api."):
        return f"### {name}\n\nSee [`{home}.{name}`][{home}.{name}].\n"
    chosen = {"show_root_heading": "true", "show_root_full_path": "false"}
    options = [f"      {option}: {value}\n" for option, value in chosen.items()]
    return f"::: {home}.{name}\n    options:\n{''.join(options)}"
