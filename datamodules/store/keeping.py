"""Looks after a folder of stores: what is there, whether it is whole, and what can go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from aligners.errors import UserError
from aligners.files.whole import remove_unfinished
from datamodules.store.results import load_tensors
from datamodules.store.shards import BYTES, Shard
from datamodules.store.states import MANIFEST, USED, Manifest, shard_path


@dataclass
class Kept:
    """A store in its folder, or the file of what was computed from stores.

    Attributes:
        folder: of the store; or the file.
        size: bytes that it takes on the disk.
        used: when its states were last read or written, in seconds since 1970.
    """

    folder: Path
    size: int
    used: float

    @property
    def manifest(self) -> Manifest:
        """What it holds.

        Raises:
            ValueError: see `Manifest.load`.
        """
        return Manifest.load(self.folder)


def kept_in(root: Path) -> list[Kept]:
    """The stores in a folder and the moments beside them, the least recently used first.

    Raises:
        ValueError: there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"Expected `folder` to be a folder of stores of states, but there is none at {root}.")
    found = []
    for folder in (path for path in root.iterdir() if (path / MANIFEST).is_file() or (path / "locks").is_dir()):
        files = [path for path in folder.rglob("*") if path.is_file()]
        dates = [path.stat().st_mtime for path in files if path.name in (MANIFEST, USED)]
        used = max(dates, default=folder.stat().st_mtime)
        found.append(Kept(folder, sum(path.stat().st_size for path in files), used))
    for path in (root / "moments").glob("*.safetensors"):
        found.append(Kept(path, path.stat().st_size, path.stat().st_mtime))
    return sorted(found, key=lambda kept: (kept.used, kept.folder))


def damages(kept: Kept) -> Iterator[str]:
    """Read all of a store, and say what is damaged."""
    try:
        if kept.folder.is_file():
            load_tensors(kept.folder)
            return
        manifest = kept.manifest
    except ValueError as error:
        yield str(error)
        return
    row_bytes = manifest.width * BYTES[manifest.identity.stored_as]
    for site, shards in manifest.sites.items():
        for number, checksum in shards.items():
            path = shard_path(kept.folder, site, number)
            texts = manifest.bounds[number + 1] - manifest.bounds[number]
            try:
                if path.exists():
                    _check_all(Shard.open(path, checksum, texts, row_bytes), row_bytes)
            except ValueError as error:
                yield str(error)


def _check_all(shard: Shard, row_bytes: int) -> None:
    with shard.path.open("rb") as file:
        file.seek(shard.first)
        for text, length in enumerate(shard.lengths.tolist()):
            shard.check(text, file.read(length * row_bytes))


def remove(kept: Kept) -> bool:
    """Remove a store, unless somebody is writing it; whether it was removed."""
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
        # Without its manifest nothing in it counts, however far the removal comes.
        (kept.folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(kept.folder)
    return True


def remove_down_to(root: Path, size: float) -> list[Kept]:
    """Remove the least recently used stores until at most so many bytes are left; what was removed.

    Raises:
        ValueError: there is no such folder.
    """
    stores = kept_in(root)
    total, removed = sum(kept.size for kept in stores), []
    for kept in stores:
        if total > size and remove(kept):
            total -= kept.size
            removed.append(kept)
    return removed
