"""Opens a file for the user, where there is a desktop to open it on."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Literal

__all__ = ["Wanted", "open_where_there_is_a_desktop"]

Wanted = Literal["auto", "true", "false"]


def open_where_there_is_a_desktop(path: Path, wanted: Wanted = "auto") -> bool:
    """Open a file in the browser, and tell whether it was.

    Args:
        path: of the file.
        wanted: `auto`: where a person sits at a desktop; `true`: wherever a browser is found; `false`: never.
    """
    if wanted == "false" or (wanted == "auto" and not _desktop()):
        return False
    return webbrowser.open(path.resolve().as_uri())


def _desktop() -> bool:
    """Whether the process has a terminal, on this machine, and a display."""
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
