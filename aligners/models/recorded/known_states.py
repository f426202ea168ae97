"""What a look at all rows of recorded states has found, so that unchanged files need not be read through again."""

import json
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from filelock import FileLock

from aligners.files.atomic import let_write, write_text
from aligners.files.sealed import read_sealed_json, sealed_json
from aligners.models.recorded.row_arrays import RowArray, Seen
from aligners.models.recorded.source_names import StatesSource

VERSION = 1  # of what is written down, and of how it is found


class KnownStates:
    """Remembers recorded states by their files: one that was written again has another date, and is read again.

    Args:
        folder: where it is written down; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def seen(self, source: StatesSource, arrays: Sequence[RowArray]) -> Seen:
        """Look at all rows of a source, unless it is known what there is to see."""
        if self._folder is None:
            return Seen.of(arrays)
        place = self._folder / f"{_digest(source)}.json"
        known = _read(place)
        if known is not None:
            return known
        seen = Seen.of(arrays)
        parent = self._folder.parent  # a store that others wrote may be read only
        while not parent.exists():
            parent = parent.parent
        if os.access(parent, os.W_OK):
            _write(place, seen)
        return seen


def _digest(source: StatesSource) -> str:
    """Hash which sites of a source are read, and each file's place, size, number and dates."""
    files = []
    for path in _files(source.path):
        status = path.stat()
        dates = [status.st_mtime_ns, status.st_ctime_ns]
        files.append([str(path), status.st_size, status.st_ino, *dates])
    about = [VERSION, source.column, files]
    return blake2b(json.dumps(about).encode(), digest_size=12).hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """Yield the file, or all files of the folder, in order."""
    place = path.resolve()
    if place.is_file():
        yield place
        return
    for part in sorted(place.rglob("*")):
        if part.is_file():
            yield part.resolve()


def _read(place: Path) -> Seen | None:
    """Read what was seen; None: nothing is written there that can be read."""
    try:
        known = read_sealed_json(place.read_text(encoding="utf-8"))
        bad = {}
        for site, rows in known["bad"].items():
            bad[int(site)] = np.array(rows, dtype=np.int64)
        return Seen(known["fingerprint"], bad, known["unit"])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # they are read again


def _write(place: Path, seen: Seen) -> None:
    """Write down what was seen."""
    place.parent.mkdir(parents=True, exist_ok=True)
    let_write(place.parent)
    bad = {str(site): rows.tolist() for site, rows in seen.bad.items()}
    about = {"fingerprint": seen.fingerprint, "bad": bad, "unit": seen.unit}
    with FileLock(place.parent / ".lock"):
        write_text(place, sealed_json(about))
