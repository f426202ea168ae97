"""Tutorials: scripts in jupytext's percent format, notebooks with what they print and draw, and pages made of these.

`python -m website.tutorials` runs the scripts and keeps the notebooks beside them; building the site runs nothing.
"""

import os
import platform
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode

from aligners.api import load

__all__ = ["executed", "page", "pages"]

ROOT = Path(__file__).parent.parent
FOLDER = "tutorials"
MODEL = re.compile(r'"(embedded-[^"]+)"')
COMMAND = "make tutorials"
NOTE = """
!!! note ""
    [Download the notebook]({name}.ipynb){{: download="" }}: it runs in Jupyter where `aligners` is
    [installed](../installation.md) with its extra `demo`. The numbers and figures below are those of `{command}`, which
    took {seconds} minutes for this page on {machine}, besides making the models.

"""


def executed(path: Path, number: int = 1, count: int = 1) -> NotebookNode:
    """Run a tutorial from the repository's root, and show which cell it is at.

    Args:
        path: path of the script.
        number: number of this tutorial.
        count: of all tutorials.

    Returns:
        The notebook with what was printed and drawn, how long it took, and on which machine. What went to stderr is
        left out.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    for name in MODEL.findall(path.read_text(encoding="utf-8")):
        load(
            name
        )  # made now if it is new, so that the page shows no training of models
    notebook, begun = jupytext.read(path), time.monotonic()

    def show(cell: NotebookNode, cell_index: int) -> None:
        place = f"Tutorial {number} of {count}, {path.stem}: cell {cell_index + 1} of {len(notebook.cells)}"
        print(f"{place}, {time.monotonic() - begun:.0f} s", flush=True)

    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        record_timing=False,
        on_cell_start=show,
    )
    # The kernel warns of its own connection. Pictures are sharp on screens of a high density, too.
    client.extra_arguments = [
        "--log-level=ERROR",
        "--InlineBackend.rc={'figure.dpi': 144}",
    ]
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client.execute(env={**os.environ, "PYTHONPATH": search})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell["outputs"] = [
                output for output in cell.outputs if output.get("name") != "stderr"
            ]
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})
    notebook.metadata["run"] = {
        "seconds": round(time.monotonic() - begun),
        "machine": _machine(),
    }
    return _numbered(notebook)


def page(name: str, notebook: NotebookNode) -> tuple[str, dict[str, bytes]]:
    """Write an executed tutorial as Markdown, with a link to the notebook.

    Returns:
        The text, and its pictures by their names.
    """
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    pictures = {
        f"{name}_{own}": picture for own, picture in resources["outputs"].items()
    }
    for own in resources["outputs"]:
        text = text.replace(f"({own})", f"({name}_{own})")
    title, _, rest = _described(text).lstrip().partition("\n")
    seconds, machine = (
        notebook.metadata["run"]["seconds"],
        notebook.metadata["run"]["machine"],
    )
    taken = f"{seconds // 60}:{seconds % 60:02}"
    return title + "\n" + NOTE.format(
        name=name, command=COMMAND, seconds=taken, machine=machine
    ) + rest, pictures


def pages() -> dict[str, str | bytes]:
    """A page for each tutorial, its pictures, and its notebook, by their places in the site."""
    files: dict[str, str | bytes] = {}
    for path in sorted((ROOT / FOLDER).glob("*.ipynb")):
        text, pictures = page(path.stem, nbformat.read(path, as_version=4))
        files |= {f"{FOLDER}/{name}": picture for name, picture in pictures.items()}
        files[f"{FOLDER}/{path.stem}.md"] = text
        files[f"{FOLDER}/{path.name}"] = path.read_bytes()
    return files


def main(names: list[str]) -> None:
    """Run the tutorials of these names, or all whose code has changed, and write their notebooks."""
    scripts = [ROOT / FOLDER / f"{name}.py" for name in names] or sorted(
        (ROOT / FOLDER).glob("*.py")
    )
    for number, script in enumerate(scripts, 1):
        place = script.with_suffix(".ipynb")
        notebook = (
            None
            if names or not place.exists()
            else with_words(script, nbformat.read(place, as_version=4))
        )
        if notebook is not None:
            print(
                f"Tutorial {number} of {len(scripts)}, {script.stem}: its code has not changed",
                flush=True,
            )
        nbformat.write(notebook or executed(script, number, len(scripts)), place)


def with_words(path: Path, notebook: NotebookNode) -> NotebookNode | None:
    """A notebook with the words that its script has now, or None if the script has other code."""
    script = jupytext.read(path)
    if _code(script) != _code(notebook):
        return None
    outputs = iter(
        [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    )
    for cell in script.cells:
        if cell.cell_type == "code":
            cell["outputs"] = next(outputs)
    script.metadata = notebook.metadata
    return _numbered(script)


def _code(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def _numbered(notebook: NotebookNode) -> NotebookNode:
    """The notebook with names and numbers of cells that are the same each time."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(notebook.cells, 1):
        cell["id"] = f"cell-{number}"
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
    return notebook


def _machine() -> str:
    """The cores and the processor of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(
            line.partition(": ")[2] for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        processor = platform.machine()
    return f"{os.cpu_count()} cores ({processor.replace('(R)', '')})"


def _described(text: str) -> str:
    """The page with the heading above each picture as its text."""
    heading, code, lines = "", False, []
    for line in text.split("\n"):
        code ^= line.startswith("```")
        if not code and line.startswith("#"):
            heading = line.lstrip("# ")
        lines.append(line.replace("![png]", f"![Figure: {heading}]"))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
