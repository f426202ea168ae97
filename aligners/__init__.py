"""Learned maps between the hidden states of two models: everything that fits, injects, measures and reports them.

The maps are in `aligners.maps`, maps and measures on plain arrays in `aligners.api`. Importing this package loads
nothing; its maps need torch and SciPy alone, the rooms above them Lightning and transformers too.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["load_bank"]

try:
    __version__ = version("aligners")  # that of pyproject.toml
except PackageNotFoundError:  # run from a folder, and never installed
    __version__ = "unknown"

_HOMES = {
    "load_bank": "aligners.fitting.bank",
    "SharedPart": "aligners.fitting.universe.shared",
    "ThroughSpace": "aligners.fitting.universe.through",
    "TwoLinear": "aligners.fitting.universe.through",
    **dict.fromkeys(("SharedMaps", "SharedProbes", "SharedStitching", "SharedUniverse"), "aligners.reports.sharing"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for. `aligners.INN` and so on are class paths in files that have been written."""
    if not name.startswith("_"):
        home = import_module(_HOMES.get(name, "aligners.maps"))
        if name in _HOMES or name in home.__all__:
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
