"""Maintains a folder of stores: lists them, checks them, removes old ones, and keeps tensors computed from states."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligners.datamodules.store.shards import DTYPES, Shard
from aligners.datamodules.store.stored_states import (
    MANIFEST,
    USED,
    Manifest,
    shard_path,
)
from aligners.errors import UserError
from aligners.files.atomic import remove_unfinished, whole_file
from aligners.files.sealed import check_sealed, save_sealed


@dataclass
class StoreEntry:
    """A store in its folder, or a file of what was computed from stores.

    Attributes:
        folder: folder of the store, or the file.
        size: bytes on the disk.
        used: when its states were last read or written, in seconds since 1970.
    """

    folder: Path
    size: int
    used: float

    @property
    def manifest(self) -> Manifest:
        """Load the store's manifest.

        Raises:
            ValueError: see `Manifest.load`.
        """
        return Manifest.load(self.folder)


def kept_in(root: Path) -> list[StoreEntry]:
    """List the stores in a folder and the moments beside them, the least recently used first.

    Raises:
        ValueError: there is no such folder.
    """
    if not root.is_dir():
        raise UserError(
            f"Expected `folder` to be a folder of stores of states, but there is none at {root}."
        )
    entries = []
    for folder in root.iterdir():
        if (folder / MANIFEST).is_file() or (folder / "locks").is_dir():
            entries.append(_entry(folder))
    for path in (root / "moments").glob("*.safetensors"):
        about = path.stat()
        entries.append(StoreEntry(path, about.st_size, about.st_mtime))
    return sorted(entries, key=lambda kept: (kept.used, kept.folder))


def _entry(folder: Path) -> StoreEntry:
    """Return a store's size and last use; without a manifest, its last use is when its folder was last changed."""
    size = 0
    dates = []
    for path in folder.rglob("*"):
        if path.is_file():
            size += path.stat().st_size
        if path.name in (MANIFEST, USED):
            dates.append(path.stat().st_mtime)
    used = max(dates, default=folder.stat().st_mtime)
    return StoreEntry(folder, size, used)


def damages(kept: StoreEntry) -> Iterator[str]:
    """Read all of a store, and report what is damaged."""
    try:
        if kept.folder.is_file():
            load_tensors(kept.folder)
            return
        manifest = kept.manifest
    except ValueError as error:
        yield str(error)
        return
    row_bytes = manifest.width * DTYPES[manifest.identity.kept_as].itemsize
    for site, shards in manifest.sites.items():
        for number, checksum in shards.items():
            path = shard_path(kept.folder, site, number)
            texts = manifest.bounds[number + 1] - manifest.bounds[number]
            if not path.exists():
                continue
            try:
                _check_all(Shard.open(path, checksum, texts, row_bytes), row_bytes)
            except ValueError as error:
                yield str(error)


def _check_all(shard: Shard, row_bytes: int) -> None:
    """Raise unless the rows of all texts of a shard are as they were written."""
    with shard.path.open("rb") as file:
        file.seek(shard.first)
        for text, length in enumerate(shard.lengths.tolist()):
            shard.check(text, file.read(length * row_bytes))


def remove(kept: StoreEntry) -> bool:
    """Remove a store unless somebody is writing it; return whether it was removed."""
    if kept.folder.is_file():
        kept.folder.unlink()
        return True
    with ExitStack() as locks:
        try:
            for path in (kept.folder / "locks").glob("*.lock"):
                locks.enter_context(FileLock(path).acquire(timeout=0))
        except Timeout:
            return False
        remove_unfinished(kept.folder)
        # Without its manifest a store counts for nothing, even if the removal stops halfway.
        (kept.folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(kept.folder)
    return True


def remove_down_to(root: Path, size: float) -> list[StoreEntry]:
    """Remove the least recently used stores until at most so many bytes are left; return what was removed.

    Raises:
        ValueError: there is no such folder.
    """
    stores = kept_in(root)
    total = sum(entry.size for entry in stores)
    removed = []
    for entry in stores:
        if total > size and remove(entry):
            total -= entry.size
            removed.append(entry)
    return removed


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors on the CPU to a file, whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    with whole_file(path) as unfinished:
        save_sealed(save_file, contiguous, unfinished, {})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors, and record that they were used.

    Raises:
        ValueError: they differ from what was written.
    """
    try:
        check_sealed(path)
        tensors = load_file(path)
    except Exception as error:  # safetensors has errors of its own
        raise UserError(
            f"{path} is damaged: it differs from what was written. Remove the file, and its contents will be "
            "computed again."
        ) from error
    if os.access(path, os.W_OK):
        path.touch()
    return tensors
