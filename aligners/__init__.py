"""Maps between the hidden states of two models: the maps (`aligners.maps`), and the modules that fit and evaluate them.

`aligners.api` has maps and measures on plain arrays. Importing this package needs torch and SciPy alone; the
LightningModules in `aligners.fitting`, `aligners.injection` and `aligners.injection.stitching` need Lightning too, and
`load_bank`, which is imported when it is asked for, what describes data.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aligners import maps
from aligners.fitting.universe.through import ThroughSpace

__all__ = ["ThroughSpace", "load_bank", "maps"]

try:
    __version__ = version("aligners")  # that of pyproject.toml
except PackageNotFoundError:  # run from a folder, and never installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name == "load_bank":
        from aligners.fitting.storage.bank import load_bank

        return load_bank
    if name in maps.__all__:  # `aligners.INN` and so on: class paths in configurations that have been written
        return getattr(maps, name)
    raise AttributeError(f"module 'aligners' has no attribute {name!r}")
