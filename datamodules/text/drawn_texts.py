"""Keeps texts as they were drawn: the cells of a study read the same ones, and draw them once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import Texts
from aligners.files.atomic import check_folder, whole_folder, write_text
from aligners.models.embedded import cache_folder

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS, ABOUT = ("fit", "validation", "test"), "about.json"


def drawn_once(
    source: TextSource, tables: Sequence[Dataset], draw: Callable[[], Texts]
) -> Texts:
    """The texts that are drawn from tables, of the folder `texts` of the cache if they were drawn before.

    Their folder is named by a hash of the source's options, of this code, and of the fingerprints by which `datasets`
    tells tables apart: another one once a file or a revision has changed. Tables in memory are drawn each time, and
    so is everything where the cache cannot be written to.

    Args:
        source: of the tables.
        tables: from which is drawn.
        draw: draws the texts.
    """
    from datasets import load_from_disk

    folder = cache_folder() / "texts"
    if not all(table.cache_files for table in tables):
        return draw()
    try:
        check_folder(folder, "ALIGNERS_CACHE")
    except ValueError:
        return draw()
    decides = [
        asdict(source),
        _code(),
        *([table._fingerprint, str(table.features)] for table in tables),
    ]
    place = (
        folder
        / blake2b(
            json.dumps(decides, sort_keys=True).encode(), digest_size=16
        ).hexdigest()
    )
    with FileLock(
        place.with_suffix(".lock")
    ):  # of several cells that begin together, one draws
        if not place.is_dir():
            texts = draw()
            with whole_folder(place) as unfinished:
                for name in SPLITS:
                    if len(
                        split := getattr(texts, name)
                    ):  # none is written without rows
                        split.save_to_disk(unfinished / name)
                write_text(
                    unfinished / ABOUT, json.dumps([texts.label_names, texts.origin])
                )
    names, origin = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    splits = {
        name: load_from_disk(str(place / name))
        for name in SPLITS
        if (place / name).is_dir()
    }
    none = splits["fit"].select([])  # there are always texts to fit on
    return Texts(
        **{name: splits.get(name, none) for name in SPLITS},
        label_names=names,
        origin=origin,
    )


@cache
def _code() -> str:
    """A hash of the code that draws, and of the version of `datasets`."""
    import datasets

    digest = blake2b(datasets.__version__.encode(), digest_size=16)
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.suffix in (".py", ".yaml"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
