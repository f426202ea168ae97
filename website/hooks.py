"""What mkdocs calls: pages that are generated from the code join those of docs/."""

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import families, invariances, modules, options, tutorials
from website.drawings import with_drawings

__all__ = ["on_config", "on_files", "on_page_markdown"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages where the navigation names their folder, and the repository's address into the header."""
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text(encoding="utf-8"))
    config.repo_url = project["project"].get("urls", {}).get("Repository")
    config.nav = _filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and their pictures."""
    made: dict[str, str | bytes] = {
        "reference/families.md": families.page(),
        "reference/measures.md": invariances.page(),
        **options.pages(),
        **modules.pages(),
        **tutorials.pages(),
    }
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw what the page shows as SVG."""
    return with_drawings(markdown, (Path(config.docs_dir) / page.file.src_uri).parent)


def _filled(entry: Any) -> Any:
    """The navigation with the names of generated folders replaced by their pages."""
    if isinstance(entry, list):
        return [_filled(each) for each in entry]
    if isinstance(entry, dict):
        return {title: _filled(each) for title, each in entry.items()}
    return {"reference/options": options.nav, "reference/modules": modules.nav}.get(entry, lambda: entry)()
