"""Names of models and paths, as others know them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligners.errors import UserError
from aligners.models.recorded.source_names import is_recorded
from aligners.reports.names import short_names


def is_local(name: str) -> bool:
    """Tell whether a name is that of a file or a folder on this machine, or of states recorded in one."""
    if is_recorded(name):
        return True
    return os.sep in name and (os.path.isabs(name) or Path(name).exists())


def public_names(models: Sequence[str], names: Sequence[str] | None) -> dict[str, str]:
    """Return the name under which others find each model.

    Args:
        models: as they are named here.
        names: as others find them, in the same order; default: as here, but folders of this machine by their short
            names, with which nothing can be loaded.

    Raises:
        ValueError: there is not one name for each.
    """
    if names is None:
        public = {}
        for name, short in short_names(models).items():
            public[name] = name
            if is_local(name):
                public[name] = short
        return public
    if len(names) != len(models):
        raise UserError(
            f"Expected `names` to have one name for each of the {len(models)} models {', '.join(models)}, but got "
            f"{len(names)}: {', '.join(names)}."
        )
    return dict(zip(models, names, strict=True))


def last_parts(value: Any) -> dict[str, str]:
    """Return, for every file and folder of this machine in nested plain values, the last part of its path."""
    parts: dict[str, str] = {}
    if isinstance(value, str) and is_local(value):
        parts[value] = Path(value).name
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            parts |= last_parts(item)
    return parts


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Replace models and paths in nested plain values by the names that others know.

    Args:
        value: of anything that JSON can hold.
        names: name here -> name for others; of paths that it does not have, the last part stays.
    """
    if isinstance(value, str):
        return _name(value, names)
    if isinstance(value, list | tuple):
        return [renamed(item, names) for item in value]
    if not isinstance(value, Mapping):
        return value
    others = {}
    for key, item in value.items():
        if is_local(key):
            key = _name(key, names)
        others[key] = renamed(item, names)
    return others


def _name(text: str, names: Mapping[str, str]) -> str:
    if text in names:
        return names[text]
    # within a sentence; no path within a longer one
    for name in sorted(filter(is_local, names), key=len, reverse=True):
        text = text.replace(name, names[name])
    return Path(text).name if is_local(text) else text
