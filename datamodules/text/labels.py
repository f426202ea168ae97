"""Labels: classes or numbers to predict, how missing ones are marked, and which classes of a head answer each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Say = Callable[[str], None]  # takes a sentence that begins with "Caution: "
MISSING = -1  # the class of a text that has none, as in GLUE's test splits; NaN where numbers are predicted
NO_NUMBER = {"na", "n/a", "nan", "null", "none"}  # as R and Python write missing ones
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")
KINDS = ("bool", "string", "large_string", "int", "uint", "float", "double", "null")
FEW = 20  # most different numbers that may be classes


@dataclass(frozen=True)
class LabelColumn:
    """How the values of a column become labels.

    Attributes:
        column: name of the column.
        names: names of the classes by number, where known.
        dtype: data type of the labels: int64 for classes, float64 for numbers to predict.
        written: number of the class for each name, where labels are written as names.
        missing: words that mean there is no label, such as NA in a column of numbers.
    """

    column: str
    names: list[str] | None
    dtype: str
    written: dict[str, int] | None = None
    missing: frozenset[str] = frozenset()

    def labels(self, values: Sequence[Any]) -> list[int | float]:
        """Convert the values of a split to labels, with `MISSING` or NaN where there is none.

        In a column of numbers -1 counts as a number, unless the split has no other value.
        """
        none = math.nan
        if self.dtype == "int64":
            none = MISSING
        labels: list[int | float] = []
        for value in values:
            if self.lacks(value):
                labels.append(none)
            elif self.written is not None:
                labels.append(self.written[value])
            elif self.dtype == "int64":
                labels.append(int(float(value)))
            else:
                labels.append(float(value))
        if self.dtype == "float64" and set(labels) == {MISSING}:
            return [none] * len(labels)
        return labels

    def lacks(self, value: Any) -> bool:
        """Tell whether a value of the column means that there is no label."""
        return _absent(value) or value in self.missing


def is_mixed(feature: Any) -> bool:
    """Tell whether a column has values of several kinds (the type `Json`, which old versions of `datasets` lack)."""
    return type(feature).__name__ == "Json"


def read_labels(
    tables: Sequence[Dataset], column: str | None, source: str, say: Say
) -> LabelColumn | None:
    """Find out what a column of labels holds; None if there is no column.

    Whole numbers and names are classes. Numbers with fractions are to be predicted. A column of whole numbers, some
    of them missing, may be stored as text or as floats; it holds classes all the same.

    Args:
        tables: tables of the source, which share the column.
        column: name of the column.
        source: where the tables come from, for the message.
        say: receives cautions about labels that may have been meant differently.

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
    held = str(feature)
    if is_mixed(feature):
        held = "values of several kinds: write all of them alike"
    elif getattr(feature, "dtype", "").startswith(KINDS):
        return
    raise UserError(
        f"Expected numbers or names of classes in column {column!r} (`label_column`) of {source!r}, but it holds "
        f"{held}."
    )


def _label_column(
    column: str, values: Sequence[Any], source: str, say: Say
) -> LabelColumn:
    """Decide how the values of a column become labels."""
    missing = _words_for_none(values)
    if missing:
        say(
            f"Caution: {' and '.join(map(repr, sorted(missing)))} in column {column!r} of {source!r}, beside numbers, "
            "count as no label."
        )
    classes = LabelColumn(column, None, "int64", missing=missing)
    present = [value for value in values if not classes.lacks(value)]
    if set(map(type, present)) <= {int, bool} or _converted(present, int) is not None:
        return classes
    numbers = _converted(present, float)
    if numbers is None:
        return _named_classes(column, present, source)

    whole = all(map(float.is_integer, numbers))
    if whole and len(present) < len(values):
        return classes
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
    """Return words such as NA that mean a missing number, in a column where every other value is a number or empty."""
    texts, words = set(), set()
    for value in values:
        if not isinstance(value, str) or not value:
            continue
        texts.add(value)
        if value.strip().casefold() in NO_NUMBER:
            words.add(value)
    if words == texts or _converted(sorted(texts - words), float) is None:
        return frozenset()
    return frozenset(words)


def _named_classes(column: str, present: Sequence[Any], source: str) -> LabelColumn:
    names = sorted(set(map(str, present)))
    if all(map(DECIMAL_COMMA.fullmatch, names)):
        raise UserError(
            f"Expected numbers with decimal points in column {column!r} (`label_column`) of {source!r}, but got "
            f"{names[0]!r}. Write {names[0].replace(',', '.')!r}."
        )
    written = {name: number for number, name in enumerate(names)}
    return LabelColumn(column, names, "int64", written)


def _say_minus_one(
    labels: LabelColumn, values: Sequence[Any], source: str, say: Say
) -> None:
    """Report that -1 counts as no label where there are other labels: it could have been meant as a class."""
    classes = labels.labels(values)
    rows = []
    for row, value in enumerate(values):
        if classes[row] == MISSING and not labels.lacks(value):
            rows.append(row)
    if rows and set(classes) != {MISSING}:
        say(
            f"Caution: {len(rows):,} of {len(values):,} rows of {source!r} have the label -1 in column "
            f"{labels.column!r}, which counts as no label; the first is row {rows[0]} (counting from 0). If -1 is a "
            "class, number the classes 0, 1, ..., or write names."
        )


def known_labels(labels: Tensor) -> Tensor:
    """Tell which texts have a label: (n,) bool."""
    if labels.is_floating_point():
        return ~labels.isnan()
    return labels != MISSING


def check_labelled(
    labels: Tensor | None,
    who: str,
    source: str,
    instead: str = "choose another split with `held_out`",
    columns: str = "",
) -> Tensor:
    """Return labels, after checking that none is missing.

    Args:
        labels: labels of texts, (n,); None: they have none.
        who: who needs them, for the message, such as "The task".
        source: where the texts come from, for the message.
        instead: what else a user may do, for the message.
        columns: `Texts.columns_without_labels`, for the message.

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
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == ""


def _converted(values: Sequence[Any], kind: Callable[[str], Any]) -> list[Any] | None:
    """Convert the values to numbers of a kind; None if one does not convert, such as a fraction to a whole number."""
    try:
        return [kind(str(value)) for value in values]
    except ValueError:
        return None


# For each class of the texts the head's classes that answer it.
ClassMap = tuple[tuple[int, ...], ...]


class Largest(tuple[int, ...]):
    """Classes of a head whose most probable one answers; otherwise their probabilities would be added."""


Answers = int | str | list[int | str]
# A class of the texts -> classes of the head, as they are written.
GivenMap = dict[str, Answers | dict[str, list[int | str]]]
LabelsOption = (
    GivenMap | list[GivenMap | None] | None
)  # one for all models, or one for each
Names = Sequence[str] | None

_NUMBER = re.compile(r"(?:label[ _-]?)?(\d+)", re.IGNORECASE)


def numbered(names: Names, classes: int) -> list[int] | None:
    """Read names such as LABEL_0, or bare numbers, as numbers; None if any name has a meaning of its own.

    Args:
        names: names of the classes; None: they have none, and class k is k.
        classes: number of classes.
    """
    every = list(range(classes))
    if names is None:
        return every
    numbers = []
    for name in names:
        match = _NUMBER.fullmatch(name.strip())
        if match is not None:
            numbers.append(int(match[1]))
    if sorted(numbers) != every:
        return None
    return numbers


def class_map(
    head: Sequence[str],
    names: Names,
    classes: int,
    *,
    given: GivenMap | None = None,
    model: str,
    source: str,
) -> ClassMap | None:
    """Find which classes of a head answer each class of the texts; None if the numbers agree.

    Equal names, whatever their case and whether words are joined by spaces, hyphens or underscores, are the same class.
    Names that are mere numbers (LABEL_0, 1) stand for the class of that number. A given map overrides both rules.

    Args:
        head: names of the head's classes, by number.
        names: names of the texts' classes, by number; None: they have none.
        classes: how many classes the texts have.
        given: a map to use instead. It gives, for each class of the texts, by name or number, the classes of the head
            that answer it, by numbers or names. Their probabilities are added; of {largest: [...]}, the largest counts.
            Classes of the head that are not listed answer nothing.
        model: name of the head's model, for messages.
        source: where the texts come from, for messages.

    Raises:
        ValueError: the names differ and no map is given; or the given map does not name every class of the texts once,
            or it names a class of the head twice, or one that does not exist.

    Examples:
        >>> class_map(["POSITIVE", "NEGATIVE"], ["negative", "positive"], 2, model="m", source="s")
        ((1,), (0,))
    """
    if given is not None:
        groups = _given(given, head, names, classes, model)
    else:
        order = _order(head, names, classes)
        if order is None:
            example = json.dumps(_example(head, names, classes))
            raise UserError(
                f"Expected the head of {model} to have the classes of the texts of {source!r}, "
                f"{_listed(names, classes)}, but it has {_listed(head, len(head))}. Name a model of this task, "
                "or say which of the head's classes stand for each class of the texts, such as --data.labels "
                f"'{example}' (lists add)."
            )
        groups = _one_each(order)
    if groups == _one_each(range(len(head))):
        return None
    return groups


def _one_each(places: Iterable[int]) -> ClassMap:
    """Build a class map in which the class at the k-th of these places answers class k of the texts."""
    return tuple(zip(places))


def places_of(head: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Return the place in a head of each class of the texts, by name; None where only one side names its classes.

    Args:
        head: names of the head's classes, by number; they may be mere numbers.
        names: names of the texts' classes, likewise.
    """
    by_name = numbered(head, len(head)) is None
    if by_name != (numbered(names, len(names)) is None):
        return None
    return _order(head, names, len(names))


def in_words(
    groups: ClassMap | None, head: Sequence[str], names: Names
) -> dict[str, list[str]]:
    """Return a map for a report: name of each class of the texts -> names of the head's classes that answer it."""
    groups = groups or _one_each(range(len(head)))
    words = {}
    for name, group in zip(_shown(names, len(groups)), groups, strict=True):
        words[name] = [head[place] for place in group]
    return words


def by_number(
    head: Sequence[str], names: Names, classes: int, *, model: str, source: str
) -> str | None:
    """Return a caution where only one side names its classes, so that they are matched by number; None if in no doubt.

    Args:
        head: as for `class_map`, where no map is given.
        names: names of the texts' classes.
        classes: number of classes that the texts have.
        model: name of the head's model.
        source: where the texts come from.
    """
    named = []
    if numbered(head, classes) is None:
        named.append("the head names")
    if numbered(names, classes) is None:
        named.append("the texts name")
    if len(named) != 1:
        return None
    taken = {}
    order = _order(head, names, classes) or range(classes)
    for name, place in zip(_shown(names, classes), order, strict=True):
        taken[name] = head[place]
    pairs = map(" is ".join, taken.items())
    return (
        f"Caution: the classes of the texts of {source!r} and of the head of {model} were matched by number, as only "
        f"{named[0]} them: {', '.join(pairs)}. If that is wrong, "
        f"so is every score of this model; if it is right, confirm it: --data.labels '{json.dumps(taken)}'."
    )


def _order(head: Sequence[str], names: Names, classes: int) -> list[int] | None:
    """Find the place in the head of each class of the texts; None if the names do not determine it."""
    if len(head) != classes:
        return None
    numbers = numbered(head, classes)
    text_numbers = numbered(names, classes)
    if numbers is not None:
        return [numbers.index(k) for k in text_numbers or range(classes)]
    if text_numbers is not None:
        return text_numbers  # the texts' numbers are those of the head
    plain = list(map(_plain, head))
    wanted = list(map(_plain, names or ()))
    if sorted(plain) != sorted(set(wanted)):
        return None
    return list(map(plain.index, wanted))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def _groups(
    given: GivenMap, head: Sequence[str], names: Names, classes: int
) -> dict[int | None, tuple[Any, ...]]:
    """Return the numbers of the head's classes by that of the texts' class; None for a name that is not known."""
    groups: dict[int | None, tuple[Any, ...]] = {}
    for key, answers in given.items():
        kind: Any = tuple
        if isinstance(answers, dict):
            kind, answers = Largest, answers.get("largest", [])
        if not isinstance(answers, list):
            answers = [answers]
        numbers = [_number(answer, head, len(head)) for answer in answers]
        groups[_number(key, names, classes)] = kind(numbers)
    return groups


def _given(
    given: GivenMap, head: Sequence[str], names: Names, classes: int, model: str
) -> ClassMap:
    """Check a map that a user has written, and read its names as numbers."""
    groups = _groups(given, head, names, classes)
    if len(groups) < len(given) or set(groups) != set(range(classes)):
        raise UserError(
            f"Expected `data.labels` to name every class of the texts once, {_listed(names, classes)}, but got "
            f"{dict(given)}."
        )
    places = list(chain(*groups.values()))
    if None in places or len(set(places)) < len(places) or () in groups.values():
        raise UserError(
            f"Expected `data.labels` to give for every class one or more classes of the head of {model}, "
            f"{_listed(head, len(head))}, none of them twice, but got {dict(given)}."
        )
    return tuple(map(groups.__getitem__, range(classes)))


def _number(written: int | str, names: Names, classes: int) -> int | None:
    """Find the class that a user means by a name or number; None if there is none."""
    if isinstance(written, str):
        plain = list(map(_plain, names or ()))
        if _plain(written) in plain:
            return plain.index(_plain(written))
        match = _NUMBER.fullmatch(written.strip())
        if match is None:
            return None
        written = int(match[1])
    if not 0 <= written < classes:
        return None
    return written


def _shown(names: Names, classes: int) -> list[str]:
    """Return the names of the classes, or their numbers."""
    return list(names or map(str, range(classes)))


def _listed(names: Names, classes: int) -> str:
    if not names:
        return ", ".join(_shown(names, classes))
    return ", ".join(f"{number}: {name}" for number, name in enumerate(names))


def _example(
    head: Sequence[str], names: Names, classes: int
) -> dict[str, int | list[int]]:
    """Suggest a map: equal names first, then by order; the last class gets all that are left."""
    keys = _shown(names, classes)
    plain = list(map(_plain, head))
    example: dict[str, int | list[int]] = dict.fromkeys(keys, 0)
    free, unknown = list(range(len(head))), []
    for key in keys:
        if _plain(key) not in plain:
            unknown.append(key)
            continue
        place = plain.index(_plain(key))
        example[key] = place
        if place in free:
            free.remove(place)
    for key in unknown:
        if free:
            example[key] = free.pop(0)
    if free and unknown:
        example[unknown[-1]] = [example[unknown[-1]], *free]  # type: ignore[list-item]
    return example
