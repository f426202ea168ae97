"""How many texts a task has, without reading them where that can be."""

from functools import cache
from typing import Any, NamedTuple

from aligners.files.tables import table_beside
from aligners.studies.spec import Assumed
from datamodules.text.loading import split_shares
from datamodules.text.sources import TextSource, fitting_split, held_out_split, is_local, known_source


class TextSizes(NamedTuple):
    """Texts of a task, up to copies.

    Attributes:
        fit: to fit on; validation: on which training is watched; test: held out.
        known: whether they were known or counted, and not assumed.
    """

    fit: int
    validation: int
    test: int
    known: bool = True


def text_sizes(source: TextSource, assumed: Assumed) -> TextSizes:
    """The sizes of the splits of a source.

    Args:
        source: of the texts.
        assumed: sizes of one that is neither known nor at hand.
    """
    shares = split_shares(source, draw_test=source.official is None)
    try:
        rows = _counted(source)
    except (OSError, ValueError):  # it cannot be found, reached or read; a cell will say so
        rows = None
    if rows is None:
        sizes = {"fit": assumed.texts, "test": assumed.held_out}
        sizes["validation"] = round(assumed.texts * shares["validation"] / shares["fit"])
    else:
        train, *official = rows
        sizes = {name: round(train * share) for name, share in shares.items()}
        sizes |= {"test": sum(official)} if official else {}
    limited = {name: size if (most := source.most(name)) is None else min(size, most) for name, size in sizes.items()}
    return TextSizes(**limited, known=rows is not None)


def _counted(source: TextSource) -> list[int] | None:
    """Rows to fit on, then of the official held-out splits that are read; None where nobody says how many."""
    splits = None if source.streaming else _splits(source.source, source.subset, source.revision)
    if not splits:
        return None
    rows, most = [fitting_split(splits, source)], source.most("test")
    for name in (source.official, source.fill_from):
        if name is not None and source.official and (len(rows) == 1 or rows[1] < (most or 0)):
            further = held_out_split(splits, name, source)
            rows.append(further if isinstance(further, int) else len(further))
    return rows


@cache
def _splits(name: str, subset: str | None, revision: str | None) -> dict[str, Any]:
    """Rows of each split: as known, counted in files, or as the Hub says; nothing is downloaded."""
    known = table_beside(__file__, "sizes.yaml")
    if name in known:
        return known[name]
    if is_local(name):
        return {split: len(rows) for split, rows in known_source(TextSource(name)).open(TextSource(name)).items()}
    from datasets import load_dataset_builder

    about = load_dataset_builder(name, subset, revision=revision).info.splits or {}
    return {split: rows.num_examples for split, rows in about.items()}
