"""What mkdocs calls: pages that are generated from the code join those of docs/."""

import time
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import families, invariances, modules, options, tutorials
from website.drawings import with_drawings, with_figures

__all__ = ["on_config", "on_files", "on_page_markdown"]

GENERATED: dict[str, Callable[[], dict[str, str | bytes]]] = {
    "model families": lambda: {"reference/families.md": families.page()},
    "measures": lambda: {"reference/measures.md": invariances.page()},
    "options of the commands": lambda: {**options.pages()},
    "modules": lambda: {**modules.pages()},
    "tutorials": tutorials.pages,
}
BEGUN = time.monotonic()
LOG = get_plugin_logger("website")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages where the navigation names their folder, and the repository's address into the header."""
    project = tomllib.loads(
        Path(config.config_file_path)
        .with_name("pyproject.toml")
        .read_text(encoding="utf-8")
    )
    config.repo_url = project["project"].get("urls", {}).get("Repository")
    config.nav = _filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and their pictures."""
    for number, (name, generate) in enumerate(GENERATED.items(), 1):
        LOG.info(
            f"Generating part {number} of {len(GENERATED)}: {name}, {time.monotonic() - BEGUN:.0f} s"
        )
        for place, content in generate().items():
            files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Draw what the page shows as SVG, box its figures, and log the progress every ten pages."""
    pages = files.documentation_pages()
    number = pages.index(page.file) + 1
    if number % 10 == 0 or number == len(pages):
        LOG.info(
            f"Page {number} of {len(pages)}: {page.file.src_uri}, {time.monotonic() - BEGUN:.0f} s"
        )
    place = PurePosixPath(page.file.src_uri).parent

    def image(path: str) -> bytes:
        """Of the files of docs/, and of those that are generated."""
        return files.src_uris[normpath(str(place / path))].content_bytes

    return with_figures(with_drawings(markdown, Path(config.docs_dir) / place), image)


def _filled(entry: Any) -> Any:
    """The navigation with the names of generated folders replaced by their pages."""
    if isinstance(entry, list):
        return [_filled(each) for each in entry]
    if isinstance(entry, dict):
        return {title: _filled(each) for title, each in entry.items()}
    return {"reference/options": options.nav, "reference/modules": modules.nav}.get(
        entry, lambda: entry
    )()
