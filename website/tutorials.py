"""Tutorials: scripts in jupytext's percent format, run and turned into pages with their figures."""

import os
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode

__all__ = ["executed", "page", "pages"]

ROOT = Path(__file__).parent.parent
FOLDER = "tutorials"
SMALL = """
!!! note ""
    Run when this page was built, with smaller models and trainings than `python tutorials/{name}.py` takes.

"""
SECONDS = 300  # a cell that takes longer hangs


def executed(path: Path) -> NotebookNode:
    """Run a tutorial from the repository's root.

    Args:
        path: of the script.

    Returns:
        The notebook with all outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook = jupytext.read(path)
    found = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT), *([found] if found else [])])
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.extra_arguments = ["--log-level=ERROR"]  # of the kernel, which warns of its own connection
    client.execute(env={"ALIGNERS_TUTORIAL_SIZE": "small", **os.environ, "PYTHONPATH": paths})
    return notebook


def page(notebook: NotebookNode) -> tuple[str, dict[str, bytes]]:
    """Write an executed tutorial as Markdown.

    Returns:
        The text, and its pictures by name. What went to stderr is left out.
    """
    for cell in notebook.cells:
        cell["outputs"] = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    return _described(text), resources["outputs"]


def pages() -> dict[str, str | bytes]:
    """A page for each tutorial, and its pictures, by their places in the site."""
    made: dict[str, str | bytes] = {}
    for path in sorted((ROOT / FOLDER).glob("*.py")):
        text, pictures = page(executed(path))
        for name, picture in pictures.items():
            own = f"{path.stem}_{name}"
            text = text.replace(f"({name})", f"({own})")
            made[f"{FOLDER}/{own}"] = picture
        title, _, rest = text.lstrip().partition("\n")
        made[f"{FOLDER}/{path.stem}.md"] = f"{title}\n{SMALL.format(name=path.stem)}{rest}"
    return made


def _described(text: str) -> str:
    """The page with the heading above each picture as its text."""
    heading, code, lines = "", False, []
    for line in text.split("\n"):
        code ^= line.startswith("```")
        if not code and line.startswith("#"):
            heading = line.lstrip("# ")
        lines.append(line.replace("![png]", f"![Figure: {heading}]"))
    return "\n".join(lines)
