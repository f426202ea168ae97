"""The column of labels: classes or numbers to predict, and how missing ones are marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

MISSING = -1  # the class of a text that has none, as in GLUE's test splits; NaN where numbers are predicted


@dataclass(frozen=True)
class LabelColumn:
    """How the values of a column become labels.

    Attributes:
        column: its name.
        names: of the classes by number, where known.
        dtype: of the labels: int64 for classes, float64 for numbers to predict.
        written: the class of each name, where labels are written as names.
    """

    column: str
    names: list[str] | None
    dtype: str
    written: dict[str, int] | None = None

    def labels(self, values: Sequence[Any]) -> list[int] | list[float]:
        """Convert the values of a split to labels, `MISSING` or NaN where there is none.

        In a column of numbers -1 is a number like any other, unless the split has nothing else.
        """
        if self.written is not None:
            return [self.written.get(value or "", MISSING) for value in values]
        if self.dtype == "int64":
            return [MISSING if _absent(value) else int(float(value)) for value in values]
        found = [math.nan if _absent(value) else float(value) for value in values]
        return [math.nan] * len(found) if set(found) == {float(MISSING)} else found


def read_labels(tables: Sequence[Dataset], column: str | None, source: str) -> LabelColumn | None:
    """Find out what a column of labels holds; None if there is no column.

    Whole numbers and names are classes. Numbers with fractions are to be predicted. A column of whole numbers, some
    of them missing, may be stored as text or as floats; it holds classes all the same.

    Args:
        tables: of the source, which share the column.
        column: its name.
        source: where the tables come from, for the message.

    Raises:
        ValueError: it holds neither numbers nor names, or an infinite number.
    """
    from datasets import ClassLabel

    if column is None:
        return None
    for table in tables:
        kind = getattr(table.features[column], "dtype", "")
        if not kind.startswith(("bool", "string", "large_string", "int", "uint", "float", "double", "null")):
            raise UserError(
                f"Expected numbers or names of classes in column {column!r} (`label_column`) of {source!r}, but it "
                f"holds {table.features[column]}."
            )
    feature = tables[0].features[column]
    if isinstance(feature, ClassLabel):
        return LabelColumn(column, list(feature.names), "int64")
    values = [value for table in tables for value in table[column][:]]
    present = [value for value in values if not _absent(value)]
    incomplete = len(present) < len(values)
    if not any(isinstance(value, str | float) for value in present):
        return LabelColumn(column, None, "int64")
    numbers = _all(present, float)
    if _all(present, int) or (incomplete and numbers and all(float(value).is_integer() for value in present)):
        return LabelColumn(column, None, "int64")
    if numbers:
        if any(math.isinf(float(value)) for value in present):
            raise UserError(
                f"Expected numbers to predict in column {column!r} (`label_column`) of {source!r}, but some are "
                "infinite. Leave these texts out."
            )
        return LabelColumn(column, None, "float64")
    names = sorted({str(value) for value in present})
    return LabelColumn(column, names, "int64", {name: number for number, name in enumerate(names)})


def known_labels(labels: Tensor) -> Tensor:
    """Tell which texts have a label: (n,) bool."""
    return ~labels.isnan() if labels.is_floating_point() else labels != MISSING


def _absent(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _all(values: Sequence[Any], kind: Callable[[Any], Any]) -> bool:
    """Whether all values convert to this type; floats do not convert to whole numbers."""
    if kind is int and any(isinstance(value, float) for value in values):
        return False
    try:
        for value in values:
            kind(value)
    except ValueError:
        return False
    return True
