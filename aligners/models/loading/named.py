"""What a model's name means: a folder or a repository, or a folder or a GGUF file in one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligners.errors import check_extra

GGUF = ".gguf"


def located(name: str, source: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The folder or repository that a name begins with, and where in it the model is.

    Args:
        name: a folder; `owner/name` on the Hub; `owner/name/folder` for a folder in that; or a GGUF file in these. On
            the Hub, `@` and a branch, tag or commit may follow.
        source: how it is read, such as `revision`, which holds where the name has none.

    Returns:
        The folder, or the id on the Hub; and `source` with `subfolder` or `gguf_file`, as `from_pretrained` takes them.

    Raises:
        ValueError: it is a GGUF file, and a package that reads those is not installed.
    """
    source = dict(source)
    here = Path(name).exists() or name.startswith((".", "/", "~"))
    if "@" in name and not here:
        name, _, source["revision"] = name.rpartition("@")

    parts, gguf = Path(name).parts, name.endswith(GGUF)
    for package in ("gguf", "accelerate") if gguf else ():
        check_extra("formats", package, f"The GGUF file {name!r}")
    whole = min(len(parts) if here else 2, len(parts) - gguf)
    inside = "/".join(parts[whole:])
    if not inside:
        return name, source
    source["gguf_file" if gguf else "subfolder"] = inside
    return str(Path(*parts[:whole])), source
