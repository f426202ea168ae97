"""Which module needs which: no circle, whether an import runs or is there for its types alone."""

import ast
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.processes import ROOT

PACKAGES = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["isort"]["known-first-party"]
)


def modules(root: Path) -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    files = [*root.glob("*.py"), *(file for package in PACKAGES for file in (root / package).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports outside its functions."""
    body = [ast.parse(file.read_text())]
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            yield from submodules or {node.module} & known.keys()
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body += ast.iter_child_nodes(node)


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle; none, if there is no such circle."""
    known = modules(root)
    try:
        TopologicalSorter({name: set(imported(file, known)) for name, file in known.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def room(module: str) -> str:
    """The room that a module is in: a folder of `aligners`, or another root."""
    return ".".join(module.split(".")[: 2 if module.startswith("aligners.") else 1])


def test_no_module_needs_one_that_needs_it() -> None:
    assert circle(ROOT) == []


def test_no_room_needs_one_that_needs_it() -> None:
    known = modules(ROOT)
    needs: dict[str, set[str]] = {}
    for name, file in known.items():
        needs.setdefault(room(name), set()).update(room(other) for other in imported(file, known))
    for name, others in needs.items():
        others -= {name, "aligners"}  # what `aligners` itself offers is made in the rooms
    TopologicalSorter(needs).prepare()


def test_rooms_are_few_and_small() -> None:
    assert sum(folder.is_dir() and any(folder.glob("*.py")) for folder in (ROOT / "aligners").iterdir()) <= 12
    folders = {file.parent for file in modules(ROOT).values()} - {ROOT}
    sizes = {folder.relative_to(ROOT): len([*folder.glob("[a-z]*.py")]) for folder in folders}
    assert {str(folder): size for folder, size in sizes.items() if size > 12} == {}


@pytest.mark.parametrize("second", ["import aligners.a", "if TYPE_CHECKING:\n    from aligners import a"])
def test_a_circle_is_seen(tmp_path: Path, second: str) -> None:
    (tmp_path / "aligners").mkdir()
    a, b, c = (
        "from aligners.b import something",
        f"{second}\n\ndef later():\n    import aligners.c",
        "import aligners.b",
    )
    for name, code in {"__init__": "", "a": a, "b": b, "c": c}.items():
        (tmp_path / "aligners" / f"{name}.py").write_text(code)
    assert set(circle(tmp_path)) == {"aligners.a", "aligners.b"}
