"""Which types and texts the maps of an evaluation were fitted on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aligners.fitting.storage.bank import StoredBank
from datamodules.rows.types import SeenTypes
from datamodules.text.loading import load_texts
from datamodules.text.sources import TextSource

if TYPE_CHECKING:
    from datamodules.module import TextModule
    from datamodules.text.fitted import FittedTexts

__all__ = ["fitted_texts", "seen_by_any"]

logger = logging.getLogger(__name__)


def seen_by_any(stored: Sequence[StoredBank], data: Any) -> SeenTypes:
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


def fitted_texts(stored: Sequence[StoredBank], data: TextModule) -> dict[str, FittedTexts]:
    """The texts that the maps of each checkpoint were fitted on, by the checkpoint's path.

    Args:
        stored: the checkpoints. The texts of one that does not hold them are read once more; where they cannot be, a
            warning says that nothing is known of them.
        data: the data module of the run.
    """
    found = {}
    for checkpoint in stored:
        if checkpoint.fitted is not None:
            found[str(checkpoint.path)] = checkpoint.fitted
            continue
        text = checkpoint.data_config["text"]
        try:
            texts = data.texts if text == data.config()["text"] else load_texts(TextSource(**text))
        except ValueError as error:
            logger.warning("Which held-out texts %s was fitted on is not known: %s", checkpoint.path, error)
            continue
        found[str(checkpoint.path)] = texts.fitted("fit", "validation")
    return found


def _seen(checkpoint: StoredBank, data: Any) -> SeenTypes:
    if checkpoint.seen is not None:
        return checkpoint.seen
    rows, present = checkpoint.data_config, data.config()
    same = all(rows[name] == present[name] for name in ("text", "rows", "special_tokens", "max_length"))
    return data.seen if same else SeenTypes(None, frozenset())
