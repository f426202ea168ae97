"""Which module needs which: no circle, whether an import runs or is there for its types alone."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tests.processes import ROOT

OUTSIDE = ("callbacks", "datamodules")  # rooms of `aligners` whose folders stand beside it
PACKAGES = ("aligners", *OUTSIDE, "website")


def dotted(file: Path) -> str:
    """The name by which a module is imported, from its path in the repository."""
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    return f"aligners.{name}" if file.parts[0] in OUTSIDE else name


def modules(root: Path) -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    files = [*root.glob("*.py")]
    for package in PACKAGES:
        files += (root / package).rglob("*.py")
    return {dotted(file.relative_to(root)): file for file in files}


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
    """The room that a module is in: a package of `aligners`, or another root."""
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
    folders = [folder for folder in (ROOT / "aligners").iterdir() if not folder.is_symlink()]
    assert sum(folder.is_dir() and any(folder.glob("*.py")) for folder in folders) <= 12
    folders = {file.parent for file in modules(ROOT).values()} - {ROOT}
    sizes = {folder.relative_to(ROOT): len([*folder.glob("[a-z]*.py")]) for folder in folders}
    assert {str(folder): size for folder, size in sizes.items() if size > 12} == {}


def test_every_module_imports_the_others_as_they_are_installed() -> None:
    """`datamodules` and `callbacks` alone may be packages of the user's."""
    bare = re.compile(rf"^ *(?:from|import) (?:{'|'.join(OUTSIDE)})\b", re.MULTILINE)
    assert [name for name, file in modules(ROOT).items() if bare.search(file.read_text())] == []


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
