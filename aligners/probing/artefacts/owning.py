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
TWO = 2  # classes that a direction distinguishes


class Truth(NamedTuple):
    """The labels that an artefact is scored against, or why there are none.

    Attributes:
        labels: split -> (n,) the artefact's class of each text, -1 for none; None: it is only scored by agreement.
        doubt: why it has none, for readers; empty where there is nothing to say.
    """

    labels: dict[Split, Tensor] | None = None
    doubt: str = ""


def truth_of(artefact: Artefact, data: PairedActivations) -> Truth:
    """Find the labels of the texts that belong to an artefact.

    They do if its `classes` have the names of the texts' classes, in any order, or if its `label_column` names their
    column; class k is then its k-th class. Artefacts without classes, such as dictionaries, have no labels.

    Args:
        artefact: a head, or a direction that reads classes 0 and 1.
        data: a data module with the texts.
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
    """Return the artefact's class for each class of the texts.

    Args:
        artefact: an artefact, perhaps with `classes`.
        texts: texts with labels.
        named: whether the artefact names their column.

    Raises:
        ValueError: it is not known to distinguish these classes.
    """
    own: Sequence[str] | None = artefact.about.get("classes")
    if texts.regression:
        raise UserError(
            "it distinguishes classes, but the labels are numbers to predict"
        )
    if own is None and not named:
        raise UserError(
            "it has neither `classes` nor a `label_column`, so nothing says what it reads"
        )
    count = artefact.classes if isinstance(artefact, Head) else TWO
    if own is not None and len(own) != count:
        raise UserError(
            f"it distinguishes {count} classes, but its `classes` are {', '.join(map(str, own))}"
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
    """Return a caution where the texts' labels may not belong to some artefacts; empty where there is no doubt."""
    doubts = [truth.doubt for truth in truths if truth.doubt]
    if not doubts:
        return ""
    return (
        f"Caution: some artefacts are not known to read the labels of the texts of {source!r}, and are only scored "
        f"by agreement with their own old answers: {'; '.join(doubts)}. Labels belong to an artefact whose "
        "artefact.json has `classes` of their names, or their column as `label_column`."
    )
