"""Vectors in files: `.npy`, which is memory-mapped, and Parquet with a column of vectors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aligners.errors import UserError
from aligners.files.user_files import refusing

ENDINGS = (".npy", ".parquet")
ID_COLUMNS = ("id", "_id")
AT_ONCE = 2**16  # rows that are read at a time
UNIT = 1e-3  # how far the length of a vector may be from 1
AGAIN = "Write the file again."


class Vectors(NamedTuple):
    """Rows (N, d) of floating-point numbers, and their ids where the file has any."""

    rows: np.ndarray
    ids: list[str] | None = None


def is_vector_file(place: Path | str) -> bool:
    """Tell whether a name is that of a file of vectors."""
    return str(place).endswith(ENDINGS)


def vector_file(folder: Path, part: str) -> Path | None:
    """Return the file of a part, such as `texts`, in a folder of vectors; None if there is none."""
    for ending in ENDINGS:
        path = folder / f"{part}{ending}"
        if path.is_file():
            return path
    return None


def read_vectors(path: Path) -> Vectors:
    """Read a file of vectors; `.npy` stays on the disk.

    Args:
        path: `.npy` of shape (N, d), or Parquet with one column of lists of numbers, and ids in `id` or `_id`.

    Raises:
        ValueError: there is no such file; it holds something else, no rows, or numbers that are not finite; all rows
            are zero; or ids are given twice.
    """
    if not path.is_file():
        raise UserError(
            f"Expected a file of vectors at {path}, but there is no such file."
        )
    with refusing(f"The vectors in {path} cannot be read", AGAIN):
        found = _read_npy(path) if path.suffix == ".npy" else _read_parquet(path)
    check_vectors(found.rows, str(path))
    if found.ids is not None:
        check_unique(found.ids, str(path))
    return found


def _read_npy(path: Path) -> Vectors:
    return Vectors(np.load(path, mmap_mode="r", allow_pickle=False))


def _read_parquet(path: Path) -> Vectors:
    parts = []
    ids: list[str] = []
    for rows, of_rows in parquet_parts(path):
        parts.append(rows)
        ids += of_rows or []
    if not parts:
        raise UserError(f"Expected rows in {path}, but got none.")
    return Vectors(np.concatenate(parts), ids or None)


def parquet_parts(path: Path) -> Iterator[tuple[np.ndarray, list[str] | None]]:
    """Yield rows (n, d) of a Parquet file with their ids, a part at a time."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    widths: set[int] = set()
    file = parquet.ParquetFile(path)
    vectors, ids = _columns(file.schema_arrow, path)
    wanted = [vectors, *([ids] if ids else [])]
    for batch in file.iter_batches(AT_ONCE, columns=wanted):
        column = batch.column(vectors)
        if not len(column):
            continue
        if column.null_count:
            raise UserError(
                f"Expected a vector in every row of {path}, but {column.null_count} have none."
            )
        ends = compute.min_max(compute.list_value_length(column)).as_py()
        widths |= set(ends.values())
        if len(widths) > 1:
            raise UserError(
                f"Expected vectors of one width in {path}, but they have {min(widths)} to {max(widths)} numbers."
            )
        flat = column.flatten().to_numpy(zero_copy_only=False)
        rows = flat.reshape(len(column), -1)
        of_rows = None
        if ids:
            of_rows = [str(value) for value in batch.column(ids).to_pylist()]
        yield rows, of_rows


def _columns(schema: Any, path: Path) -> tuple[str, str | None]:
    """Return the names of the columns of vectors and of ids."""
    lists = [field.name for field in schema if hasattr(field.type, "value_type")]
    if len(lists) != 1:
        raise UserError(
            f"Expected one column of lists of numbers in {path}, but got {', '.join(lists) or 'none'}."
        )
    ids = next((name for name in ID_COLUMNS if name in schema.names), None)
    return lists[0], ids


def check_vectors(rows: np.ndarray, what: str) -> None:
    """Raise unless rows are (N, d) of finite floating-point numbers, of which some are not zero."""
    if rows.ndim != 2 or 0 in rows.shape:
        raise UserError(
            f"Expected {what} to be of shape (N, d), a row for each text, but got {rows.shape}."
        )
    if rows.dtype.kind != "f":
        raise UserError(
            f"Expected floating-point numbers in {what}, but got {rows.dtype}. Quantised vectors have to be turned "
            "back first."
        )
    bad: list[int] = []
    largest = 0.0
    for start in range(0, len(rows), AT_ONCE):
        part = np.abs(rows[start : start + AT_ONCE]).max(1)
        wrong = np.flatnonzero(~np.isfinite(part))
        bad += (start + wrong).tolist()
        if not bad:
            largest = max(largest, float(part.max()))
    if bad:
        told = ", ".join(map(str, bad[:4]))
        why = ""
        if rows.dtype == np.float16:
            why = f" float16 ends at {np.finfo(np.float16).max:,.0f}: they may have been too large for it."
        raise UserError(
            f"Expected {what} to be finite, but {len(bad)} of its {len(rows)} rows are not: rows {told}.{why} Leave "
            "them out on both sides."
        )
    if largest == 0:
        raise UserError(
            f"Expected vectors in {what}, but all of its {len(rows)} rows are zero."
        )


def check_unique(ids: Sequence[str], what: str) -> None:
    """Raise if an id is given twice."""
    seen: set[str] = set()
    again = []
    for name in ids:
        if name in seen:
            again.append(name)
        seen.add(name)
    if again:
        told = ", ".join(again[:4])
        raise UserError(
            f"Expected each id once in {what}, but {len(again)} come again: {told}."
        )


def in_order(
    vectors: Vectors, ids: Sequence[str] | None, number: int, what: str
) -> np.ndarray:
    """Return the vectors of texts, in their order: joined by id where both have ids, or row by row.

    Args:
        vectors: of a file.
        ids: of the texts.
        number: of texts.
        what: the vectors are, for error messages.

    Raises:
        ValueError: a text has no vector; or, without ids, there are not as many vectors as texts.
    """
    if vectors.ids is None or ids is None:
        if len(vectors.rows) != number:
            raise UserError(
                f"Expected as many vectors in {what} as there are texts, {number}, but got {len(vectors.rows)}. Give "
                "both with ids, in a Parquet file and in JSON lines, or rows in the order of the texts."
            )
        return vectors.rows
    places = {name: place for place, name in enumerate(vectors.ids)}
    missing = [name for name in ids if name not in places]
    if missing:
        told = ", ".join(missing[:4])
        raise UserError(
            f"Expected a vector of every text in {what}, but {len(missing)} of {len(ids)} have none: {told}."
        )
    return vectors.rows[[places[name] for name in ids]]


def lengths(rows: np.ndarray) -> np.ndarray:
    """Return the length of each row, (N,) float64."""
    found = np.empty(len(rows))
    for start in range(0, len(rows), AT_ONCE):
        part = np.asarray(rows[start : start + AT_ONCE], np.float64)
        found[start : start + AT_ONCE] = np.linalg.norm(part, axis=1)
    return found


def are_unit(rows: np.ndarray) -> bool:
    """Tell whether all vectors but zeros have length 1."""
    found = lengths(rows)
    found = found[found > 0]
    return bool((np.abs(found - 1) < UNIT).all())
