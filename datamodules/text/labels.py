"""Labels: classes or numbers to predict, how missing ones are marked, and which classes of a head answer each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Say = Callable[[str], None]  # takes a sentence that begins with "Caution: "
MISSING = -1  # the class of a text that has none, as in GLUE's test splits; NaN where numbers are predicted
NO_NUMBER = {
    "na",
    "n/a",
    "nan",
    "null",
    "none",
}  # as R and Python write a number that is missing
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
FEW = 20  # different numbers that may be classes


@dataclass(frozen=True)
class LabelColumn:
    """How the values of a column become labels.

    Attributes:
        column: its name.
        names: of the classes by number, where known.
        dtype: of the labels: int64 for classes, float64 for numbers to predict.
        written: the class of each name, where labels are written as names.
        missing: words that mean no label, such as NA in a column of numbers.
    """

    column: str
    names: list[str] | None
    dtype: str
    written: dict[str, int] | None = None
    missing: frozenset[str] = frozenset()

    def labels(self, values: Sequence[Any]) -> list[int] | list[float]:
        """Convert the values of a split to labels, `MISSING` or NaN where there is none.

        In a column of numbers -1 is a number like any other, unless the split has nothing else.
        """
        if self.written is not None:
            return [self.written.get(value or "", MISSING) for value in values]
        if self.dtype == "int64":
            return [
                MISSING if self.lacks(value) else int(float(value)) for value in values
            ]
        numbers = [math.nan if self.lacks(value) else float(value) for value in values]
        return (
            [math.nan] * len(numbers) if set(numbers) == {float(MISSING)} else numbers
        )

    def lacks(self, value: Any) -> bool:
        """Whether a value of the column is no label."""
        return _absent(value) or value in self.missing


def is_mixed(feature: Any) -> bool:
    """Whether a column of a table has values of several kinds: `Json`, which old versions of `datasets` lack."""
    return type(feature).__name__ == "Json"


def read_labels(
    tables: Sequence[Dataset], column: str | None, source: str, say: Say
) -> LabelColumn | None:
    """Find out what a column of labels holds; None if there is no column.

    Whole numbers and names are classes. Numbers with fractions are to be predicted. A column of whole numbers, some
    of them missing, may be stored as text or as floats; it holds classes all the same.

    Args:
        tables: of the source, which share the column.
        column: its name.
        source: where the tables come from, for the message.
        say: takes cautions: on labels that may be meant otherwise than they are read.

    Raises:
        ValueError: it holds neither numbers nor names, or an infinite number, or one with a decimal comma.
    """
    from datasets import ClassLabel

    if column is None:
        return None
    for table in tables:
        _check_kind(table.features[column], column, source)
    feature = tables[0].features[column]
    if isinstance(feature, ClassLabel):
        return LabelColumn(column, list(feature.names), "int64")
    split_values = [table[column][:] for table in tables]
    values = list(chain(*split_values))
    labels = _label_column(column, values, source, say)
    if labels.dtype == "int64" and labels.written is None:
        for of_split in split_values:
            _say_minus_one(labels, of_split, source, say)
    return labels


def _check_kind(feature: Any, column: str, source: str) -> None:
    """Raise unless a column holds numbers or texts."""
    known = ("bool", "string", "large_string", "int", "uint", "float", "double", "null")
    if getattr(feature, "dtype", "").startswith(known) and not is_mixed(feature):
        return
    held = (
        "values of several kinds: write all of them alike"
        if is_mixed(feature)
        else feature
    )
    expected = f"Expected numbers or names of classes in column {column!r} (`label_column`) of {source!r}"
    raise UserError(f"{expected}, but it holds {held}.")


def _label_column(
    column: str, values: Sequence[Any], source: str, say: Say
) -> LabelColumn:
    """How the values of a column, not all of the same kind, become labels."""
    missing = _words_for_none(values)
    if missing:
        say(
            f"Caution: {' and '.join(map(repr, sorted(missing)))} in column {column!r} of {source!r}, beside numbers, "
            "count as no label."
        )
    present = [value for value in values if not _absent(value) and value not in missing]
    if not any(isinstance(value, str | float) for value in present):
        return LabelColumn(column, None, "int64")
    numbers, incomplete = _converted(present, float), len(present) < len(values)
    whole = numbers is not None and all(number.is_integer() for number in numbers)
    if _converted(present, int) is not None or (incomplete and whole):
        return LabelColumn(column, None, "int64", missing=missing)
    if numbers is None:
        return _named_classes(column, present, source)
    if any(map(math.isinf, numbers)):
        raise UserError(
            f"Expected numbers to predict in column {column!r} (`label_column`) of {source!r}, but some are infinite. "
            "Leave these texts out."
        )
    if whole and 1 < len(set(numbers)) <= FEW:
        say(
            f"Caution: the labels of {source!r}, such as {numbers[0]} in column {column!r}, are taken for numbers to "
            "predict, as they are written with fractions. Write classes as whole numbers."
        )
    return LabelColumn(column, None, "float64", missing=missing)


def _words_for_none(values: Sequence[Any]) -> frozenset[str]:
    """Words such as NA that mean a missing number: of a column where everything else is a number, or nothing."""
    texts = {value for value in values if isinstance(value, str) and value}
    words = {text for text in texts if text.strip().casefold() in NO_NUMBER}
    return (
        frozenset(words)
        if words < texts and _converted(sorted(texts - words), float) is not None
        else frozenset()
    )


def _named_classes(column: str, present: Sequence[Any], source: str) -> LabelColumn:
    names = sorted({str(value) for value in present})
    if all(DECIMAL_COMMA.fullmatch(name.strip()) for name in names):
        raise UserError(
            f"Expected numbers with decimal points in column {column!r} (`label_column`) of {source!r}, but got "
            f"{names[0]!r}. Write {names[0].replace(',', '.')!r}."
        )
    return LabelColumn(
        column, names, "int64", {name: number for number, name in enumerate(names)}
    )


def _say_minus_one(
    labels: LabelColumn, values: Sequence[Any], source: str, say: Say
) -> None:
    """Say that -1 counts as no label where other labels stand beside it: it could be a class."""
    classes = labels.labels(values)
    rows = [
        row
        for row, value in enumerate(values)
        if classes[row] == MISSING and not labels.lacks(value)
    ]
    if rows and set(classes) != {MISSING}:
        say(
            f"Caution: {len(rows):,} of {len(values):,} rows of {source!r} have the label -1 in column "
            f"{labels.column!r}, which counts as no label; the first is row {rows[0]} (counting from 0). If -1 is a "
            "class, number the classes 0, 1, ..., or write names."
        )


def known_labels(labels: Tensor) -> Tensor:
    """Tell which texts have a label: (n,) bool."""
    return ~labels.isnan() if labels.is_floating_point() else labels != MISSING


def check_labelled(
    labels: Tensor | None,
    who: str,
    source: str,
    instead: str = "choose another split with `held_out`",
    columns: str = "",
) -> Tensor:
    """Return labels of which none is missing.

    Args:
        labels: of texts, (n,); None: they have none.
        who: needs them, for the message: "The task".
        source: where the texts come from, likewise.
        instead: what else a user may do, likewise.
        columns: `Texts.columns_without_labels`, likewise.

    Raises:
        ValueError: some texts have none.
    """
    if labels is None:
        raise UserError(
            f"{who} needs labels, but the texts of {source!r} have none. Name a `label_column`{columns} or another "
            f"source, or {instead}."
        )
    missing = int((~known_labels(labels)).sum())
    if missing:
        raise UserError(
            f"{who} needs a label for every text, but {missing} of {len(labels)} texts of {source!r} have none (-1, or "
            f"nothing). Leave these texts out, or {instead}. If -1 is a class, number them all from 0 on."
        )
    return labels


def _absent(value: Any) -> bool:
    return (
        value is None or value == "" or (isinstance(value, float) and math.isnan(value))
    )


def _converted(values: Sequence[Any], kind: Callable[[str], Any]) -> list[Any] | None:
    """The values as numbers of a kind; None if one is none, as a float is no whole number."""
    try:
        return [kind(str(value)) for value in values]
    except ValueError:
        return None


ClassMap = tuple[
    tuple[int, ...], ...
]  # for each class of the texts the head's classes that answer it


class Largest(tuple[int, ...]):
    """Classes of a head of which the most probable one answers, where otherwise their probabilities are added."""


Answers = int | str | list[int | str]
GivenMap = dict[
    str, Answers | dict[str, list[int | str]]
]  # class of the texts -> classes of the head, as written


LabelsOption = GivenMap | list[GivenMap | None] | None  # of all models, or of each


_NUMBER = re.compile(r"(?:label[ _-]?)?(\d+)", re.IGNORECASE)


def numbered(names: Sequence[str] | None, classes: int) -> list[int] | None:
    """Read names such as LABEL_0, or bare numbers, as numbers; None if any name has a meaning of its own.

    Args:
        names: of the classes; None: they have none, and class k is k.
        classes: how many there are.
    """
    if names is None:
        return list(range(classes))
    matches = [_NUMBER.fullmatch(name.strip()) for name in names]
    numbers = [int(match[1]) for match in matches if match is not None]
    return numbers if sorted(numbers) == list(range(classes)) else None


def class_map(
    head: Sequence[str],
    names: Sequence[str] | None,
    classes: int,
    *,
    given: GivenMap | None = None,
    model: str,
    source: str,
) -> ClassMap | None:
    """Find which classes of a head answer each class of the texts; None if the numbers agree.

    Equal names, whatever their case and whether words are joined by spaces, hyphens or underscores, are the same class.
    Names that are mere numbers (LABEL_0, 1) stand for the class of that number. A map that is given goes before both.

    Args:
        head: names of the head's classes, by number.
        names: of the texts' classes, by number; None: they have none.
        classes: how many classes the texts have.
        given: a map instead. Each class of the texts, by its name or number, is answered by the classes of the head on
            the right, by numbers or names: their probabilities are added or, of {largest: [...]}, the largest counts.
            A class of the head that stands nowhere is no answer at all.
        model: whose head it is, for messages.
        source: where the texts come from, for messages.

    Raises:
        ValueError: the names differ and no map is given, or one that does not name every class of the texts once, or a
            class of the head that there is not, or twice.

    Examples:
        >>> class_map(["POSITIVE", "NEGATIVE"], ["negative", "positive"], 2, model="m", source="s")
        ((1,), (0,))
    """
    if given is not None:
        groups = _given(given, head, names, classes, model)
    else:
        order = _order(head, names, classes)
        if order is None:
            raise UserError(
                f"Expected the head of {model} to have the classes of the texts of {source!r}, "
                f"{_listed(names, classes)}, but it has {_listed(head, len(head))}. Name a model of this task, "
                "or say which of the head's classes stand for each class of the texts, such as --data.labels "
                f"'{json.dumps(_example(head, names, classes))}' (lists add)."
            )
        groups = tuple((place,) for place in order)
    return None if groups == tuple((k,) for k in range(len(head))) else groups


def places_of(head: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """The place in a head of each class of the texts, by their names; None where only one side names its classes.

    Args:
        head: names of the head's classes, by number; or mere numbers.
        names: of the texts' classes, likewise.
    """
    by_name = numbered(head, len(head)) is None
    if by_name != (numbered(names, len(names)) is None):
        return None
    return _order(head, names, len(names))


def in_words(
    groups: ClassMap | None, head: Sequence[str], names: Sequence[str] | None
) -> dict[str, list[str]]:
    """A map for a report: name of each class of the texts -> names of the head's classes that answer it."""
    groups = groups or tuple((k,) for k in range(len(head)))
    return {
        names[k] if names else str(k): [head[place] for place in group]
        for k, group in enumerate(groups)
    }


def by_number(
    head: Sequence[str],
    names: Sequence[str] | None,
    classes: int,
    *,
    model: str,
    source: str,
) -> str | None:
    """A caution where only one side names its classes, so that mere numbers match them; None where there is no doubt.

    Args:
        head: as for `class_map`, as are the others; no map is given.
        names: of the texts' classes.
        classes: how many the texts have.
        model: whose head it is.
        source: where the texts come from.
    """
    sides = {
        "the head names": numbered(head, classes),
        "the texts name": numbered(names, classes),
    }
    named = [side for side, numbers in sides.items() if numbers is None]
    if len(named) != 1:
        return None
    order = _order(head, names, classes) or range(classes)
    taken = {
        names[k] if names else str(k): head[place] for k, place in enumerate(order)
    }
    return (
        f"Caution: the classes of the texts of {source!r} and of the head of {model} were matched by number, as only "
        f"{named[0]} them: {', '.join(f'{key} is {value}' for key, value in taken.items())}. If that is wrong, "
        f"so is every score of this model; if it is right, confirm it: --data.labels '{json.dumps(taken)}'."
    )


def _order(
    head: Sequence[str], names: Sequence[str] | None, classes: int
) -> list[int] | None:
    """Find the place in the head of each class of the texts; None if the names do not tell."""
    if len(head) != classes:
        return None
    numbers, text_numbers = numbered(head, classes), numbered(names, classes)
    if numbers is not None:
        return [numbers.index(k) for k in text_numbers or range(classes)]
    if text_numbers is not None:
        return text_numbers  # the texts' numbers are the head's
    plain, wanted = (
        [_plain(name) for name in head],
        [_plain(name) for name in names or ()],
    )
    return (
        [plain.index(name) for name in wanted]
        if sorted(plain) == sorted(set(wanted))
        else None
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def _given(
    given: GivenMap,
    head: Sequence[str],
    names: Sequence[str] | None,
    classes: int,
    model: str,
) -> ClassMap:
    groups: dict[int | None, tuple[Any, ...]] = {}
    for key, value in given.items():
        kind: Any = Largest if isinstance(value, dict) else tuple
        named = value.get("largest", []) if isinstance(value, dict) else value
        answers = named if isinstance(named, list) else [named]
        groups[_number(key, names, classes)] = kind(
            _number(answer, head, len(head)) for answer in answers
        )
    if len(groups) < len(given) or set(groups) != set(range(classes)):
        raise UserError(
            f"Expected `data.labels` to name every class of the texts once, {_listed(names, classes)}, but got "
            f"{dict(given)}."
        )
    places = list(chain(*groups.values()))
    if None in places or len(set(places)) < len(places) or not all(groups.values()):
        raise UserError(
            f"Expected `data.labels` to give for every class one or more classes of the head of {model}, "
            f"{_listed(head, len(head))}, none of them twice, but got {dict(given)}."
        )
    return tuple(groups[k] for k in range(classes))


def _number(
    written: int | str, names: Sequence[str] | None, classes: int
) -> int | None:
    """Find the class that a user means by a name or number; None if there is none."""
    plain = [_plain(name) for name in names or ()]
    if isinstance(written, str):
        if _plain(written) in plain:
            return plain.index(_plain(written))
        match = _NUMBER.fullmatch(written.strip())
        if match is None:
            return None
        written = int(match[1])
    return written if 0 <= written < classes else None


def _listed(names: Sequence[str] | None, classes: int) -> str:
    return ", ".join(f"{k}: {names[k]}" if names else str(k) for k in range(classes))


def _example(
    head: Sequence[str], names: Sequence[str] | None, classes: int
) -> dict[str, int | list[int]]:
    """Suggest a map: equal names first, then in order, the last class with all that is left."""
    keys = [names[k] if names else str(k) for k in range(classes)]
    plain = [_plain(name) for name in head]
    guess: dict[str, int | list[int]] = {
        key: plain.index(_plain(key)) for key in keys if _plain(key) in plain
    }
    free, unknown = (
        [k for k in range(len(head)) if k not in guess.values()],
        [key for key in keys if key not in guess],
    )
    for key in unknown:
        guess[key] = free.pop(0) if free else 0
    if free and unknown:
        guess[unknown[-1]] = [guess[unknown[-1]], *free]  # type: ignore[list-item]
    return {key: guess[key] for key in keys}
