"""Caches what a command's parser says of its options, so that help and errors need not import torch.

Each command has a file in the user's cache folder. It is valid only for the sources and packages that it was made from.
If it is missing, outdated or broken, it is made again; if it cannot be written, there is no cache.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aligners.errors import UserError
from aligners.files.atomic import write_text

PACKAGE = Path(__file__).parents[2]
PACKAGES = (
    "aligners",
    "jsonargparse",
    "lightning",
    "torch",
    "transformers",
)  # on which options and names depend
PARTS = {"help", "positional", "configs", "options", "names"}


def kept(command: str) -> dict[str, Any] | None:
    """Return what is cached of a command.

    Args:
        command: script and name, such as `train fit`.

    Returns: what `aligners.cli.known.describe_options.describe` has made; None if there is none that can be read, or it
        is of other sources or packages.
    """
    try:
        content = json.loads(_place(command).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("of") != _sources():
        return None
    about = content.get("about")
    complete = isinstance(about, dict) and about.keys() == PARTS
    return about if complete else None


def keep(command: str, about: Mapping[str, Any]) -> None:
    """Keep what `describe` has made, if the cache folder can be written to."""
    content = {"of": _sources(), "about": about}
    with suppress(OSError, RuntimeError, UserError):
        write_text(_place(command), json.dumps(content))


def _place(command: str) -> Path:
    """Return the file of a command; every checkout of the project has its own."""
    folder = os.environ.get("ALIGNERS_CACHE")
    if not folder:
        folder = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
            "aligners",
        )
    checkout = hashlib.sha256(os.fsencode(PACKAGE)).hexdigest()[:12]
    return Path(folder) / "options" / checkout / f"{command.replace(' ', '_')}.json"


def _sources() -> str:
    """Hash the versions of packages, and name, size and date of all files that describe options.

    The hash changes with edits in an editable installation.
    """
    lines = [sys.version]
    for package in PACKAGES:
        lines.append(f"{package} {version(package)}")
    lines.extend(sorted(_files()))
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _files() -> Iterator[str]:
    """A line for each source of the package; two of its folders may be links."""
    for folder, below, files in os.walk(PACKAGE, followlinks=True):
        if "__pycache__" in below:
            below.remove("__pycache__")
        for name in files:
            if not name.endswith((".py", ".yaml")):
                continue
            path = os.path.join(folder, name)
            with suppress(OSError):  # a link to nothing
                found = os.stat(path)
                yield f"{path} {found.st_size} {found.st_mtime_ns}"
