"""Reads the tables that are kept beside the code as YAML files."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

# libyaml's, where PyYAML has it: a tenth of the time
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def table_beside(module: str, name: str) -> Any:
    """Read a YAML file in the folder of a module, once; nobody may change what is returned.

    Args:
        module: the module's `__file__`.
        name: name of the file.
    """
    content = Path(module).with_name(name).read_text(encoding="utf-8")
    return yaml.load(content, LOADER)
