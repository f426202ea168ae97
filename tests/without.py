"""A process without some packages that are installed: `python -m tests.without transformers,wandb CODE`."""

import importlib.metadata
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class Missing:
    """Finds no module of some packages, and says as Python does that there is none."""

    def __init__(self, packages: list[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def hide(packages: list[str]) -> None:
    """Hide packages, and that they are installed."""
    of_name = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return of_name(name)

    importlib.metadata.Distribution.from_name = from_name  # type: ignore[method-assign, assignment]
    sys.meta_path.insert(0, Missing(packages))  # type: ignore[arg-type]


if __name__ == "__main__":
    hide(sys.argv[1].split(","))
    exec(sys.argv[2])
