"""The manifest of a store: whose states it holds, how they are divided, and which parts are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from aligners.files.whole import write_text
from datamodules.store.identity import FORMAT, StateIdentity

__all__ = ["MANIFEST", "Manifest", "plan_shards", "shard_path"]

MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """Everything about a store but the states themselves.

    Attributes:
        identity: what the states are states of.
        about: the same in words: names of the model and of the texts.
        width: d of the states.
        bounds: shard k holds the texts bounds[k] to bounds[k + 1] - 1, at every site.
        rows: rows of each shard.
        sites: site -> number of a shard that is there -> checksum of all in it but the rows.
    """

    identity: StateIdentity
    about: dict[str, Any]
    width: int
    bounds: list[int]
    rows: list[int]
    sites: dict[int, dict[int, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the manifest of a folder.

        Raises:
            ValueError: there is none, it is damaged, another version wrote it, or it belongs to another folder.
        """
        path = folder / MANIFEST
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            written = held["identity"]["format"]
            if written == FORMAT:
                held["identity"] = StateIdentity(**held["identity"])
                held["sites"] = {int(n): {int(k): v for k, v in each.items()} for n, each in held["sites"].items()}
                found = cls(**held)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Expected the manifest of a store of states, but {path} cannot be read: {error!r}. {_remove(folder)}"
            ) from error
        if written != FORMAT:
            raise ValueError(
                f"Expected a store of format {FORMAT}, but {path} says {written}: another version of aligners wrote "
                f"it. {_remove(folder)}"
            )
        if found.identity.name != folder.name:
            raise ValueError(
                f"Expected {path} to describe the states that its folder is named after, but it describes those of "
                f"{found.identity.name}. {_remove(folder)}"
            )
        return found

    def save(self, folder: Path) -> None:
        """Write the manifest, whole or not at all."""
        ordered = {
            str(site): {str(k): each[k] for k in sorted(each)} for site, each in sorted(self.sites.items())
        }  # the same file, whoever wrote which shard first
        write_text(folder / MANIFEST, json.dumps({**asdict(self), "sites": ordered}, indent=1) + "\n")

    def lacking(self, folder: Path, sites: Sequence[int], shard: int) -> list[int]:
        """Those of some sites whose shard of this number is not in the folder."""
        return [
            site
            for site in sites
            if shard not in self.sites.get(site, {}) or not shard_path(folder, site, shard).exists()
        ]


def plan_shards(lengths: np.ndarray, row_bytes: int, most: int) -> list[int]:
    """Divide texts into shards of whole texts: the number of each shard's first text, and the number of texts.

    Args:
        lengths: rows of each text, (n,).
        row_bytes: bytes of a row.
        most: bytes of a shard, which its last text may exceed.
    """
    before = (np.cumsum(lengths) - lengths) * row_bytes // most
    return [0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(lengths)]


def shard_path(folder: Path, site: int, shard: int) -> Path:
    """The file of a shard at a site."""
    return folder / "sites" / f"{site:02d}" / f"{shard:05d}.safetensors"


def _remove(folder: Path) -> str:
    return f"Remove the folder {folder}: what is needed of it is then computed again."
