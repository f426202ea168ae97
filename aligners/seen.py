"""Which types the maps of an evaluation have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aligners.storage import StoredAlignment
from datamodules.row_types import SeenTypes

__all__ = ["seen_by_any"]


def seen_by_any(stored: Sequence[StoredAlignment], data: Any) -> SeenTypes:
    """The types that were among the fitting rows of at least one checkpoint.

    Args:
        stored: the checkpoints. One that was made before types were kept held none out; its types are those of its
            fitting texts, and known where these are the run's.
        data: the data module of the run.

    Returns:
        The types, of no kind where they are not known of every checkpoint, or are not of one kind.
    """
    each = [_seen(checkpoint, data) for checkpoint in stored]
    kinds = {seen.kind for seen in each}
    if len(kinds) > 1:
        return SeenTypes(None, frozenset())
    return SeenTypes(kinds.pop(), frozenset().union(*(seen.names for seen in each)))


def _seen(checkpoint: StoredAlignment, data: Any) -> SeenTypes:
    if checkpoint.seen is not None:
        return checkpoint.seen
    rows, present = checkpoint.data_config, data.config()
    same = all(rows[name] == present[name] for name in ("text", "rows", "special_tokens", "max_length"))
    return data.seen if same else SeenTypes(None, frozenset())
