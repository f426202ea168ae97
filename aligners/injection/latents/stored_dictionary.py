"""The dictionary of two models in a checkpoint, and what it may be used on."""

from collections.abc import Mapping
from typing import Any

from aligners.errors import UserError, check_known
from aligners.fitting.saved_bank import FORWARD, StoredBank
from aligners.maps.sparse.sparse_aligner import SparseAligner


def dictionary_of(
    bank: StoredBank, name: str | None = None
) -> tuple[str, SparseAligner]:
    """Return the dictionary of both models in a checkpoint, and its name.

    Args:
        bank: of `train.py fit`.
        name: which of several; None if there is one.

    Raises:
        ValueError: there is none of that name, or none or several without one.
    """
    found = {}
    for key, aligner in bank.maps.get(FORWARD, {}).items():
        if isinstance(aligner, SparseAligner) and aligner.of == "both":
            found[key] = aligner
    if not found:
        raise UserError(
            f"Expected {bank.path} to hold a sparse dictionary of both models (`SparseAligner` with `of: both`), but "
            f"it holds {', '.join(bank.maps.get(FORWARD, {})) or 'no maps'}. Train one: `train.py fit --config sparse`."
        )
    if name is not None:
        check_known(found, dictionary=name)
        return name, found[name]
    if len(found) > 1:
        raise UserError(
            f"Expected one dictionary, but {bank.path} holds {', '.join(found)}. Choose one with `dictionary`."
        )
    return next(iter(found.items()))


def check_same_rows(bank: StoredBank, present: Mapping[str, Any]) -> None:
    """Raise unless the rows are of the kind that the dictionary was trained on.

    Raises:
        ValueError: they are not.
    """
    for name in ("rows", "special_tokens"):
        if bank.data.get(name) != present[name]:
            raise UserError(
                f"{bank.path} was trained with `data.{name}` {bank.data.get(name)!r}, but got {present[name]!r}. Leave "
                "it out."
            )
