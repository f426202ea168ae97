"""Files of vectors: what is read, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from aligners.errors import UserError
from aligners.fitting.migration import vector_files
from aligners.fitting.migration.vector_files import Vectors, are_unit, in_order, lengths, read_vectors

ROWS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
NAMES = [f"d{place}" for place in range(7)]


def parquet(path: Path, rows: Any = ROWS, **columns: Any) -> Path:
    pd.DataFrame({"vector": [row.tolist() for row in rows], **columns}).to_parquet(path)
    return path


def npy(path: Path, rows: Any = ROWS) -> Path:
    np.save(path, rows)
    return path


def test_npy_stays_on_the_disk(tmp_path: Path) -> None:
    found = read_vectors(npy(tmp_path / "a.npy"))
    assert isinstance(found.rows, np.memmap)
    assert found.ids is None
    np.testing.assert_array_equal(found.rows, ROWS)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_parquet_has_vectors_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(vector_files, "AT_ONCE", at_once)
    found = read_vectors(parquet(tmp_path / "a.parquet", id=NAMES, more=range(7)))
    np.testing.assert_allclose(found.rows, ROWS)
    assert found.ids == NAMES


def test_vectors_are_joined_by_id_or_row_by_row() -> None:
    order = np.random.default_rng(1).permutation(7)
    shuffled = Vectors(ROWS[order], [NAMES[place] for place in order])
    np.testing.assert_array_equal(in_order(shuffled, NAMES, 7, "it"), ROWS)
    np.testing.assert_array_equal(in_order(shuffled, NAMES[2:4], 2, "it"), ROWS[2:4])
    np.testing.assert_array_equal(in_order(Vectors(ROWS), NAMES, 7, "it"), ROWS)
    with pytest.raises(UserError, match="as many vectors in it as there are texts, 6, but got 7"):
        in_order(Vectors(ROWS), None, 6, "it")
    with pytest.raises(UserError, match="but 1 of 2 have none: other"):
        in_order(shuffled, ["d1", "other"], 2, "it")


def with_row(value: float, dtype: type = np.float32) -> np.ndarray:
    rows = ROWS.astype(dtype)
    with np.errstate(over="ignore"):
        rows[2, 1] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (with_row(np.nan), "1 of its 7 rows are not: rows 2"),
        (with_row(1e6, np.float16), "float16 ends at 65,504"),
        (np.zeros((4, 3), np.float32), "all of its 4 rows are zero"),
        (ROWS[:, 0], r"of shape \(N, d\).*\(7,\)"),
        (ROWS[:0], r"of shape \(N, d\).*\(0, 3\)"),
        (ROWS.astype(np.int8), "Quantised vectors"),
        (np.array([{"a": 1}], dtype=object), "cannot be read"),
    ],
)
def test_what_is_no_vector_is_refused(tmp_path: Path, rows: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", rows, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        read_vectors(tmp_path / "a.npy")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("no")
    with pytest.raises(UserError, match="cannot be read"):
        read_vectors(tmp_path / "a.npy")
    with pytest.raises(UserError, match="no such file"):
        read_vectors(tmp_path / "b.npy")
    with pytest.raises(UserError, match=r"Expected each id once in .*, but 1 come again: d0"):
        read_vectors(parquet(tmp_path / "a.parquet", id=["d0", *NAMES[:6]]))
    with pytest.raises(UserError, match="of one width"):
        read_vectors(parquet(tmp_path / "b.parquet", [*ROWS, ROWS[0, :2]]))
    evened_out = [np.ones(3), np.ones(2), np.ones(4)]  # as many numbers as three rows of one width
    with pytest.raises(UserError, match=r"of one width in .*, but they have 2 to 4 numbers"):
        read_vectors(parquet(tmp_path / "e.parquet", evened_out))
    pd.DataFrame({"a": [1.0]}).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(UserError, match="one column of lists"):
        read_vectors(tmp_path / "c.parquet")


def test_widths_that_change_between_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_files, "AT_ONCE", 2)
    path = parquet(tmp_path / "a.parquet", [np.ones(3), np.ones(3), np.ones(2), np.ones(2)])
    with pytest.raises(UserError, match="they have 2 to 3 numbers"):
        read_vectors(path)


def test_lengths() -> None:
    unit = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    assert are_unit(unit)
    assert are_unit(np.concatenate([unit, np.zeros((1, 3))]))
    assert not are_unit(ROWS)
    np.testing.assert_allclose(lengths(ROWS), np.linalg.norm(ROWS, axis=1), rtol=1e-6)
