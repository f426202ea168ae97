"""Tutorials: scripts in jupytext's percent format, run and turned into pages with their figures."""

from __future__ import annotations

import os
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbformat import NotebookNode

__all__ = ["executed", "page", "pages"]

ROOT = Path(__file__).parent.parent
FOLDER = "tutorials"
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
    client.execute(env={"ALIGNERS_TUTORIAL_SIZE": "small", **os.environ, "PYTHONPATH": paths})
    return notebook


def page(notebook: NotebookNode) -> tuple[str, dict[str, bytes]]:
    """Write an executed tutorial as Markdown.

    Returns:
        The text, and its pictures by name. What went to stderr is left out.
    """
    for cell in notebook.cells:
        cell["outputs"] = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    return text, resources["outputs"]


def pages() -> dict[str, str | bytes]:
    """A page for each tutorial, and its pictures, by their places in the site."""
    made: dict[str, str | bytes] = {}
    for path in sorted((ROOT / FOLDER).glob("*.py")):
        text, pictures = page(executed(path))
        renamed = {name: f"{path.stem}_{name}" for name in pictures}
        for name, own in renamed.items():
            text = text.replace(f"({name})", f"({own})")
        made |= {f"{FOLDER}/{own}": pictures[name] for name, own in renamed.items()}
        made[f"{FOLDER}/{path.stem}.md"] = text
    return made
