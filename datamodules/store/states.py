"""The stored states of one model on one set of texts: a folder with a manifest, and shards of each site."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from datamodules.store.identity import DTYPES, StateIdentity
from datamodules.store.manifest import MANIFEST, Manifest, plan_shards, shard_path
from datamodules.store.shards import BYTES, Shard, layout_size
from datamodules.tokens.tokenised import TokenisedTexts

__all__ = ["USED", "StoredStates"]

SHARD = 250_000_000  # bytes of a shard, at most one text more
USED = "used"  # whose date says when the states were last read


class StoredStates:
    """Where the states of a model on some texts are kept, or will be.

    Args:
        root: folder of all stores.
        model: whose states they are.
        data: the texts.
        place: the model's number among those that the texts are tokenised for.
        component: what is read at a site.
        stored_as: data type of the stored values.

    Attributes:
        folder: of this store.
        lengths: rows of each text, (n,).
        row_bytes: bytes of a row.

    Raises:
        ValueError: the folder holds a manifest that does not belong there.
    """

    def __init__(
        self, root: Path, model: FrozenModel, data: TokenisedTexts, place: int, component: Component, stored_as: str
    ) -> None:
        self.model, self.data, self.place = model, data, place
        self.identity = StateIdentity.of(model, data, place, component, stored_as)
        self.folder = root / self.identity.name
        self.lengths = data.lengths_of(place).numpy()
        self.row_bytes = model.width * BYTES[stored_as]
        self.dtype = DTYPES[stored_as]
        self.manifest = Manifest.load(self.folder) if (self.folder / MANIFEST).exists() else self._planned()
        self._open: dict[tuple[int, int], Shard] = {}
        self._checked: dict[int, np.ndarray] = {}

    def _planned(self) -> Manifest:
        bounds = plan_shards(self.lengths, self.row_bytes, SHARD)
        about: dict[str, Any] = {
            "model": self.model.name,
            "revision": self.model.revision,
            "tokenizer": getattr(self.model.tokenizer, "name_or_path", None),
            "texts": len(self.lengths),
            "longest_text": int(self.lengths.max()),
        }
        rows = [int(self.lengths[a:b].sum()) for a, b in pairwise(bounds)]
        return Manifest(self.identity, about, self.model.width, bounds, rows)

    # ------------------------------------------------------------------ what is there

    def missing(self, sites: Sequence[int]) -> dict[int, list[int]]:
        """Number of each shard that is not there at all of the sites -> at which it is not."""
        lacking = {k: self.manifest.lacking(self.folder, sites, k) for k in range(len(self.manifest.rows))}
        return {k: each for k, each in lacking.items() if each}

    def size(self, shard: int) -> int:
        """Bytes of a shard at one site."""
        rows, texts = self.manifest.rows[shard], self.texts(shard)
        return layout_size(len(texts), rows, self.manifest.width, self.identity.stored_as)

    def texts(self, shard: int) -> range:
        """The row numbers of the texts in a shard."""
        return range(*self.manifest.bounds[shard : shard + 2])

    def shard(self, site: int, shard: int) -> Shard:
        """Open a shard, once.

        Raises:
            ValueError: it is damaged.
        """
        if (site, shard) not in self._open:
            checksum, texts = self.manifest.sites[site][shard], len(self.texts(shard))
            path = shard_path(self.folder, site, shard)
            self._open[site, shard] = Shard.open(path, checksum, texts, self.row_bytes)
        return self._open[site, shard]

    def checked(self, site: int) -> np.ndarray:
        """Which texts' rows at a site have been compared with their checksums, (n,)."""
        return self._checked.setdefault(site, np.zeros(len(self.lengths), dtype=bool))

    def note_use(self) -> None:
        """Note that the states are read now, if anything can be written there."""
        if os.access(self.folder, os.W_OK):
            (self.folder / USED).touch()

    # ------------------------------------------------------------------ what is written

    def lock(self, name: str) -> FileLock:
        """A lock between processes, of a shard or of the manifest."""
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{name}.lock")

    def reload(self) -> None:
        """See what other processes have written."""
        if (self.folder / MANIFEST).exists():
            self.manifest = Manifest.load(self.folder)

    def record(self, shard: int, checksums: Mapping[int, str]) -> None:
        """Enter a shard into the manifest.

        Args:
            shard: its number.
            checksums: site -> checksum.
        """
        with self.lock("manifest"):
            self.reload()
            for site, checksum in checksums.items():
                self.manifest.sites.setdefault(site, {})[shard] = checksum
                self._open.pop((site, shard), None)
            self.manifest.save(self.folder)
