"""Which rows of several recordings belong together, and which rows are of one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aligners.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 3  # examples in a message
HOW_TO = "docs/howto/my_own_states.md shows how"


@dataclass
class Side:
    """What one source says of its rows.

    Attributes:
        name: as the user wrote it.
        rows: N.
        key: (N,) which row it is, the same in all sources; None: its number says so.
        group: (N,) which text, image or other whole it is of; None: each row is its own.
        mask: (N,) whether it counts; None: all do.
        tokens: (N,) the token that it is of; None: that is not known.
    """

    name: str
    rows: int
    key: np.ndarray | None = None
    group: np.ndarray | None = None
    mask: np.ndarray | None = None
    tokens: np.ndarray | None = None


@dataclass
class Joined:
    """P rows that all sources have, and their groups.

    Attributes:
        rows: for each source the number of each row in it, (P,) int64.
        group: (P,) number of each row's group.
        names: name of each group.
        cautions: what was left out, each a sentence.
    """

    rows: list[np.ndarray]
    group: np.ndarray
    names: list[str]
    cautions: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """Hash which rows belong together, and to which group."""
        digest = blake2b(digest_size=16)
        for part in (*self.rows, self.group):
            digest.update(part.tobytes())
        digest.update("\n".join(self.names).encode())
        return digest.hexdigest()


def join(sides: Sequence[Side]) -> Joined:
    """Pair the rows of some sources, by their keys or by their numbers; rows that do not count are left out everywhere.

    Args:
        sides: the sources.

    Raises:
        ValueError: only some have keys, rows without keys differ in number or in their groups, a key is missing or
            comes twice, no key is common to all, or no row is left.
    """
    for side in sides:
        if side.mask is not None:
            side.mask = _as_mask(side)
    with_keys = [side for side in sides if side.key is not None]
    if with_keys and len(with_keys) < len(sides):
        others = [side for side in sides if side.key is None]
        raise UserError(
            f"Expected `key` for all recorded states or for none, but {with_keys[0].name} has one and "
            f"{others[0].name} does not. Name the column with the same keys there, too."
        )
    joined = _by_key(sides) if with_keys else _by_number(sides)
    if not len(joined.group):
        raise UserError(
            f"Expected rows that count in all of {_listed(sides)}, but their masks leave none."
        )
    empty = [name for name in joined.names if not name.strip()]
    if empty:
        raise UserError(
            f"Expected a name for every group of {sides[0].name}, but got {empty[0]!r}."
        )
    return joined


def _as_mask(side: Side) -> np.ndarray:
    """Return a mask as booleans."""
    values = np.asarray(side.mask)
    if values.dtype.kind in "biuf":
        known = np.isin(values, (0, 1)).all()
        counts = values.astype(bool)
    else:
        written = np.char.lower(values.astype(str))
        counts = np.isin(written, ("true", "1"))
        known = (counts | np.isin(written, ("false", "0"))).all()
    if not known:
        raise UserError(
            f"Expected `mask` of {side.name} to be true or false, or 1 or 0, in every row, but it holds other values."
        )
    return counts


def _by_number(sides: Sequence[Side]) -> Joined:
    """Pair the rows of equal numbers."""
    first = sides[0]
    for side in sides[1:]:
        if side.rows != first.rows:
            raise UserError(
                f"Expected recorded states of the same rows, but {first.name} has {first.rows} and {side.name} "
                f"{side.rows}. Name a column that says which rows belong together, as `key`: {HOW_TO}."
            )
    names = _common_groups(sides)
    _check_tokens(sides)
    used = np.ones(first.rows, dtype=bool)
    for side in sides:
        if side.mask is not None:
            used &= side.mask
    rows = np.flatnonzero(used)
    group, of_groups = _numbered(names[rows])
    return Joined([rows] * len(sides), group, of_groups)


def _common_groups(sides: Sequence[Side]) -> np.ndarray:
    """Return the name of each row's group; raise if rows of equal numbers are of different groups."""
    grouped = [side for side in sides if side.group is not None]
    if not grouped:
        return np.arange(sides[0].rows)
    names = [_named(side) for side in grouped]
    found = _first_difference(names)
    if found is not None:
        other, row, _ = found
        raise UserError(
            f"Expected the rows of {grouped[0].name} and {grouped[other].name} in one order, but row {row} (counted "
            f"from 0) is of the group {names[0][row]!r} in the first and of {names[other][row]!r} in the second. Name "
            f"a column that says which rows belong together, as `key`: {HOW_TO}."
        )
    return names[0]


def _check_tokens(sides: Sequence[Side]) -> None:
    """Raise if rows of equal numbers are of different tokens."""
    known = []
    tokens = []
    for side in sides:
        if side.tokens is not None and len(side.tokens) == side.rows:
            known.append(side)
            tokens.append(side.tokens)
    found = _first_difference(tokens)
    if found is not None:
        other, row, number = found
        raise UserError(
            f"Expected the rows of {known[0].name} and {known[other].name} to be of the same tokens, but row {row} "
            f"(counted from 0) is the first of {number} that are of others. Record both on the same tokens in the same "
            f"order, or name a column that says which rows belong together, as `key`: {HOW_TO}."
        )


class _Difference(NamedTuple):
    """Where one of several lists of values differs from the first: its number, the first such row, and how many."""

    other: int
    row: int
    number: int


def _first_difference(values: Sequence[np.ndarray]) -> _Difference | None:
    """Compare values of the rows (N,) of some sources with those of the first; None: they are equal."""
    for place, others in enumerate(values):
        different = np.flatnonzero(others != values[0])
        if len(different):
            return _Difference(place, int(different[0]), len(different))
    return None


def _by_key(sides: Sequence[Side]) -> Joined:
    """Pair the rows of equal keys, or of equal groups and keys where a key comes in several groups."""
    tables = [_table(side) for side in sides]
    on = _columns_to_join(tables)
    for side, table in zip(sides, tables, strict=True):
        _check_keys(side, table, on)
    _check_kinds(sides, tables)
    merged = _merged(sides, tables, on)
    cautions = []
    for side, table in zip(sides, tables, strict=True):
        lost = len(table) - len(merged)
        if lost:
            cautions.append(
                f"Caution: {lost:,} of the {len(table):,} rows of {side.name} have keys that other recorded states "
                "lack, and are left out."
            )
    rows = []
    for number in range(len(sides)):
        rows.append(merged[f"row_{number}"].to_numpy(dtype=np.int64))
    group, names = _numbered(_groups_of(sides, merged))
    return Joined(rows, group, names, cautions)


def _columns_to_join(tables: Sequence[DataFrame]) -> list[str]:
    """Return the columns by which rows are paired: keys, and groups where all have them and a key comes in several."""
    grouped = all("group" in table for table in tables)
    if grouped and any(table["key"].duplicated().any() for table in tables):
        return ["group", "key"]
    return ["key"]


def _merged(
    sides: Sequence[Side], tables: Sequence[DataFrame], on: list[str]
) -> DataFrame:
    """Return the rows that all tables have, in the order of their keys, with the columns row_0, group_0, row_1, ..."""
    merged: DataFrame | None = None
    for number, table in enumerate(tables):
        names = {"row": f"row_{number}"}
        if "group" not in on:
            names["group"] = f"group_{number}"
        own = table.rename(columns=names)
        merged = own if merged is None else merged.merge(own, on=on)
    if merged is None or not len(merged):
        examples = " and ".join(_examples(table) for table in tables[:2])
        raise UserError(
            f"Expected keys that all of {_listed(sides)} have, but there are none: they begin with {examples}."
        )
    return merged.sort_values(on, kind="stable")


def _groups_of(sides: Sequence[Side], merged: DataFrame) -> np.ndarray:
    """Return the name of each row's group, (P,): of the sources that name groups, which must agree, or else the key."""
    if "group" in merged:
        return merged["group"].to_numpy()
    keys = merged["key"].to_numpy()
    known = []
    for number in range(len(sides)):
        if f"group_{number}" in merged:
            known.append(merged[f"group_{number}"].to_numpy())
    for other in known[1:]:
        _check_groups(sides, keys, known[0], other)
    return known[0] if known else keys


def _table(side: Side) -> DataFrame:
    """Return the rows of a source that count, with their keys and groups."""
    from pandas import DataFrame

    table = DataFrame({"key": side.key, "row": np.arange(side.rows)})
    if side.group is not None:
        table["group"] = _named(side)
    if side.mask is not None:
        table = table[side.mask]
    return table


def _check_keys(side: Side, table: DataFrame, on: list[str]) -> None:
    """Raise if a key is missing or comes twice."""
    missing = table["key"].isna()
    if missing.any():
        row = int(table["row"][missing].iloc[0])
        raise UserError(
            f"Expected a key in every row of {side.name}, but {int(missing.sum())} have none, first row {row} "
            "(counted from 0). Leave them out with a `mask` column."
        )
    twice = table.duplicated(on)
    if twice.any():
        key = table["key"][twice].tolist()[0]
        within = " within a group" if "group" in on else ""
        instead = ""
        if "group" not in on:
            instead = " If keys are places in a text, name the texts of all sources as `group`."
        raise UserError(
            f"Expected every key of {side.name} once{within}, but {int(twice.sum())} rows repeat one, such as "
            f"{key!r}.{instead}"
        )


def _check_kinds(sides: Sequence[Side], tables: Sequence[DataFrame]) -> None:
    """Raise if the keys of some are numbers and those of others are not: none would match."""
    numbers = [table["key"].dtype.kind in "iuf" for table in tables]
    if any(numbers) and not all(numbers):
        one = numbers.index(True)
        other = numbers.index(False)
        raise UserError(
            f"Expected keys of one kind, but those of {sides[one].name} are numbers and those of {sides[other].name} "
            f"are not: they begin with {_examples(tables[one])} and {_examples(tables[other])}. Write both alike."
        )


def _check_groups(
    sides: Sequence[Side], keys: np.ndarray, one: np.ndarray, other: np.ndarray
) -> None:
    """Raise if a row is of different groups in two sources."""
    different = np.flatnonzero(one != other)
    if len(different):
        row = int(different[0])
        raise UserError(
            f"Expected the rows of a key in one group, but in {_listed(sides)} the row of key "
            f"{keys[row : row + 1].tolist()[0]!r} is of the groups {one[row]!r} and {other[row]!r}."
        )


def _named(side: Side) -> np.ndarray:
    """Return the groups of a source's rows as text, (N,) object."""
    values = np.asarray(side.group)
    names = np.array([str(value) for value in values.tolist()], dtype=object)
    return names


def _numbered(names: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Number groups by their first appearance: the number of each row's, (P,), and their names."""
    from pandas import factorize

    numbers, different = factorize(names)
    return numbers.astype(np.int64), [str(name) for name in different]


def _examples(table: DataFrame) -> str:
    """Return the first keys, for a message."""
    keys = table["key"].head(SHOWN).tolist()
    return ", ".join(map(repr, keys))


def _listed(sides: Sequence[Side]) -> str:
    """Return the names of the sources, for a message."""
    return ", ".join(side.name for side in sides)
