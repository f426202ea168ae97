"""Shared folders: weights as safetensors and what they are as JSON, on this machine or on the Hugging Face Hub."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from aligners.errors import UserError

MODEL, CONFIG = "model.safetensors", "config.json"
FORMAT = 1  # of shared folders; a later one is refused
LIBRARY = "aligners"
HUB_NAME = re.compile(
    r"[\w.-]+/[\w.-]+(@[\w./-]+)?"
)  # owner/name, or owner/name@revision
WANTED = [MODEL, CONFIG, "README.md", "report.json", "figures/*.png"]
FILE_ENDINGS = (".safetensors", ".ckpt")
# What runs keep; those of the version before end in .ckpt.
RUN_FILES = [
    f"{name}{end}"
    for end in FILE_ENDINGS
    for name in ("aligners", "universe", "stitching", "probes")
]


def shared_file(place: Path | str) -> Path:
    """Return the file of weights that a path or a name refers to: the file itself, or that of a shared folder.

    Args:
        place: a file, by its name now or in the version before; a shared folder; or the name of one on the Hub,
            `owner/name` or `owner/name@revision`.

    Raises:
        ValueError: a folder is no shared one or is damaged, or the Hub has no such name. A file need not be there.
    """
    path = Path(place)
    names = [
        path,
        *(path.with_suffix(end) for end in FILE_ENDINGS if path.name in RUN_FILES),
    ]
    file = next((name for name in names if name.is_file()), None)
    if file or not (path.is_dir() or is_hub_name(place)):
        return file or path
    folder = fetch(place)
    read_config(folder)
    return folder / MODEL


def is_shared(place: Path | str) -> bool:
    """Tell whether a place is a shared folder or the name of one, rather than a file."""
    return not Path(place).is_file() and (Path(place).is_dir() or is_hub_name(place))


def is_hub_name(place: Path | str) -> bool:
    """Tell whether a place has the form of a name on the Hub."""
    return HUB_NAME.fullmatch(str(place)) is not None and not str(place).endswith(
        FILE_ENDINGS
    )


def fetch(place: Path | str, revision: str | None = None, **options: Any) -> Path:
    """Return the folder of a place: itself on this machine, or its known files, downloaded from the Hub.

    Args:
        place: a folder, or a name on the Hub.
        revision: branch, tag or commit on the Hub, unless the name has one.
        options: options of `huggingface_hub.snapshot_download`, such as `token` and `cache_dir`.

    Raises:
        ValueError: there is neither a folder nor a name of that form, or the Hub does not give it.
    """
    if Path(place).is_dir():
        return Path(place)
    if not is_hub_name(place):
        raise UserError(
            f"Expected a shared folder, or its name on the Hub as `owner/name`, but got {place}."
        )
    from huggingface_hub import snapshot_download

    name, _, of_name = str(place).partition("@")
    try:
        options |= {
            "revision": of_name or revision,
            "allow_patterns": WANTED,
            "library_name": LIBRARY,
        }
        return Path(snapshot_download(name, **options))
    except (
        Exception
    ) as error:  # the Hub's own, those of the network, and those of its cache
        reason = (
            str(error).strip().splitlines()[0]
            if str(error).strip()
            else type(error).__name__
        )
        raise UserError(
            f"Expected {place} to be a file, a shared folder, or the name of one on the Hub, but there is no such file "
            f"here, and the Hub does not give it: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the description of a shared folder, after checking that its weights are unchanged.

    Raises:
        ValueError: it is no shared folder, is of a later version, its weights are damaged, or a file of it is a link
            that leads out of it.
    """
    wanted = f"Expected {folder} to be a folder that `evaluate.py share` wrote, but"
    for name in (CONFIG, MODEL):
        own_file(folder, name)
    runs = [name for name in RUN_FILES if (folder / name).is_file()]
    if runs:
        raise UserError(
            f"{wanted} it is that of a run. Name its file {folder / runs[0]}."
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{wanted} it has no {CONFIG}.") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(
            f"{wanted} its {CONFIG} cannot be read: {error}. Fetch or write it again."
        ) from error
    if not isinstance(config, dict) or config.get("library_name") != LIBRARY:
        raise UserError(f"{wanted} its {CONFIG} describes something else.")
    if not isinstance(config.get("format"), int) or config["format"] > FORMAT:
        raise UserError(
            f"{wanted} its format, {config.get('format')}, is later than {FORMAT}. Update aligners."
        )
    if not (folder / MODEL).is_file():
        raise UserError(f"{wanted} it has no {MODEL}. Fetch or write it again.")
    if sha256(folder / MODEL) != config.get("sha256"):
        raise UserError(
            f"{wanted} its {MODEL} is damaged: it is not the file that {CONFIG} describes. Fetch it again."
        )
    return config


def own_file(folder: Path, name: str) -> Path | None:
    """Return a file to read or publish from a folder that may be somebody else's; None if it is missing.

    Args:
        folder: on this machine; in the Hub's cache, files are links to others of the same repository.
        name: name of the file, which may stand in a folder below.

    Raises:
        ValueError: it is a link that leads out of the folder: what it leads to is not the folder's to publish.
    """
    path = folder / name
    if not path.is_file():
        return None
    whole = folder.resolve()
    places = (
        [whole, whole.parents[1] / "blobs"]
        if whole.parent.name == "snapshots"
        else [whole]
    )
    if not any(path.resolve().is_relative_to(place) for place in places):
        raise UserError(
            f"Expected the files of {folder} to be in it, but {path} leads to {path.resolve()}. Put the file itself "
            "there, or remove the link."
        )
    return path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as the Hub shows it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
