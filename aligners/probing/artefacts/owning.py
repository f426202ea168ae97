"""Which labels of the texts belong to an artefact: by the names of its classes, or by a column that it names."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.text.labels import MISSING, places_of
from aligners.datamodules.text.texts import Texts
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError
from aligners.probing.artefacts.kinds import Artefact, Direction, Head

SPLITS: tuple[Split, ...] = ("fit", "test")
TWO = 2  # classes that a direction tells apart


class Truth(NamedTuple):
    """The labels that an artefact is scored against, or why there are none.

    Attributes:
        labels: split -> (n,) the artefact's class of each text, -1 for none; None: it is scored by agreement alone.
        doubt: why it has none, for readers; empty where there is nothing to say.
    """

    labels: dict[Split, Tensor] | None = None
    doubt: str = ""


def truth_of(artefact: Artefact, data: PairedActivations) -> Truth:
    """Find the labels of the texts that are an artefact's own.

    They are if its `classes` have the names of the texts' classes, in any order, or if its `label_column` names their
    column, whose class k is then its k-th. Artefacts without classes, such as dictionaries, have none.

    Args:
        artefact: a head, or a direction that reads classes 0 and 1.
        data: with the texts.
    """
    if not isinstance(artefact, (Head, Direction)):
        return Truth()
    column, usual = (
        artefact.about.get("label_column"),
        data.texts.origin.get("label_column"),
    )
    if column is None and usual is None:
        return Truth()
    try:
        texts = (
            data.texts
            if column in (None, usual)
            else data.texts_labelled_by(str(column))
        )
        places = _places(artefact, texts, named=column is not None)
    except UserError as error:
        return Truth(doubt=f"{artefact.name}: {str(error).rstrip('.')}")
    labels = {}
    own = torch.tensor(places)
    for split in SPLITS:
        given = torch.tensor(getattr(texts, split)["label"][:])
        labels[split] = torch.where(given < 0, MISSING, own[given.clamp(min=0)])
    return Truth(labels)


def _places(artefact: Head | Direction, texts: Texts, *, named: bool) -> list[int]:
    """The artefact's class of each class of the texts.

    Args:
        artefact: with `classes`, perhaps.
        texts: with the labels.
        named: whether it names their column.

    Raises:
        ValueError: it is not known to tell these classes apart.
    """
    own: Sequence[str] | None = artefact.about.get("classes")
    if texts.regression:
        raise UserError("it tells classes apart, and the labels are numbers to predict")
    if own is None and not named:
        raise UserError(
            "it has neither `classes` nor a `label_column`, so nothing says what it reads"
        )
    count = artefact.classes if isinstance(artefact, Head) else TWO
    if own is not None and len(own) != count:
        raise UserError(
            f"it tells {count} classes apart, but its `classes` are {', '.join(map(str, own))}"
        )
    theirs = texts.label_names or [str(number) for number in range(texts.classes)]
    places = None
    if own is not None and not (named and texts.label_names is None):
        places = places_of([str(name) for name in own], theirs)
    elif len(theirs) == count:
        places = list(range(count))
    if places is None:
        mine = f"{count} without names"
        if own:
            mine = ", ".join(map(str, own))
        raise UserError(
            f"its classes are {mine}, those of the texts {', '.join(theirs)}"
        )
    return places


def caution(truths: Sequence[Truth], source: str) -> str:
    """What is to be said where the labels of the texts are not some artefacts' own; empty where there is no doubt."""
    doubts = [truth.doubt for truth in truths if truth.doubt]
    if not doubts:
        return ""
    return (
        f"Caution: labels of the texts of {source!r} are not known to be what some artefacts read, which are scored by "
        f"agreement with their own old answers alone: {'; '.join(doubts)}. Labels belong to an artefact whose "
        "artefact.json has `classes` of their names, or their column as `label_column`."
    )
