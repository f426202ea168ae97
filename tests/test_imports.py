"""Which module needs which: no circle, whether an import runs or is there for its types alone."""

import ast
import subprocess
import sys
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
    (tmp_path / "aligners" / "__init__.py").write_text("")
    (tmp_path / "aligners" / "a.py").write_text("from aligners.b import something")
    (tmp_path / "aligners" / "b.py").write_text(f"{second}\n\ndef later():\n    import aligners.c")
    (tmp_path / "aligners" / "c.py").write_text("import aligners.b")
    assert set(circle(tmp_path)) == {"aligners.a", "aligners.b"}


BARE = [
    *(
        "aligners.models",
        "aligners.models.loading.models",
        "aligners.maps.inn",
        "aligners.maps.mlp",
        "datamodules.batches",
    ),
    *("aligners.maps.linear", "aligners.similarity.algebra.moments", "datamodules.rows.reading"),
]


def test_the_package_alone_loads_torch_and_scipy_and_what_benchmarks_need_no_data_and_no_lightning() -> None:
    loaded = "print(*{name.partition('.')[0] for name in sys.modules})"
    code = f"import sys, aligners; aligners.INN; {loaded}; import {', '.join(BARE)}; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    package, bare = (set(line.split()) for line in done.stdout.splitlines())
    assert {"aligners", "torch", "scipy"} < package
    heavy = {"lightning", "torchmetrics", "datasets", "pandas", "wandb", "matplotlib"}
    assert not package & {*heavy, "transformers", "safetensors", "datamodules", "callbacks"}
    assert "transformers" in bare
    assert not bare & heavy
