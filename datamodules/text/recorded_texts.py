"""Groups of recorded rows in place of texts: divided as texts are, by a keyed hash of their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import blake2b

from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.splitting import RawTexts, divide
from aligners.datamodules.text.texts import Texts
from aligners.errors import UserError

DIVIDING = ("validation_share", "test_share", "max_texts", "max_held_out", "seed")


def recorded_texts(
    source: TextSource, names: Sequence[str], said: str, digest: str
) -> Texts:
    """Divide groups of recorded rows into splits.

    Args:
        source: the user's options, of which only those that divide texts may be given.
        names: names of the groups, all different.
        said: where the rows are recorded.
        digest: hash of which rows belong to which group.

    Raises:
        ValueError: an option of texts was given, or a split would be empty.
    """
    from datasets import Dataset

    default = TextSource()
    for field in fields(TextSource):
        given = getattr(source, field.name)
        if field.name not in DIVIDING and given != getattr(default, field.name):
            raise UserError(
                f"Recorded states bring their own texts, so `text.{field.name}` {given!r} has no meaning for {said}. "
                f"Leave it out; {', '.join(DIVIDING)} divide the groups of rows."
            )
    table = Dataset.from_dict({"text": list(names)})
    origin = {
        "source": said,
        "subset": None,
        "revision": None,
        "text_columns": ["text"],
        "label_column": None,
        "split": "by a keyed hash of the group's name",
        "seed": source.seed,
        "validation_share": source.validation_share,
        "test_share": source.test_share,
    }
    # Groups of names that differ in case or white space alone share a split, and both stay.
    kept = replace(source, source=said, deduplicate=False)
    texts = divide(kept, RawTexts([table], ["text"], None, origin, []))
    hashes = {}
    for name, of_split in texts.origin["hashes"].items():
        both = f"{of_split} {digest}".encode()
        hashes[name] = blake2b(both, digest_size=8).hexdigest()
    return replace(texts, origin={**texts.origin, "hashes": hashes})
