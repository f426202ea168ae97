"""Maps the vectors of an index, a part at a time, into files that searches read."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aligners.errors import UserError, check_extra, check_known
from aligners.files.atomic import whole_file
from aligners.fitting.migration.search import Similarity
from aligners.fitting.migration.vector_files import (
    AT_ONCE,
    ID_COLUMNS,
    check_vectors,
    parquet_parts,
)
from aligners.fitting.migration.vector_maps import VectorMap
from aligners.progress import track

OUTPUTS = ("npy", "parquet", "faiss", "onnx")


def check_outputs(outputs: list[str]) -> None:
    """Raise unless these forms of output are known, and the packages that write them are installed."""
    check_known(OUTPUTS, outputs=outputs)
    if "faiss" in outputs:
        check_extra("index", "faiss", "`outputs` faiss")
    if "onnx" in outputs:
        for package in ("onnx", "onnxscript"):
            check_extra("onnx", package, "`outputs` onnx")


def map_index(
    fitted: VectorMap,
    index: Path,
    folder: Path,
    outputs: list[str],
    *,
    similarity: Similarity = "cosine",
) -> list[Path]:
    """Map the vectors of an index, a part at a time, and write each file whole or not at all.

    Vectors are float32; ids of a Parquet file are kept in Parquet.

    Args:
        fitted: the map from the old space to the new.
        index: a .npy or Parquet file of old vectors, which need not fit into memory.
        folder: where mapped.npy, mapped.parquet and mapped.faiss are written.
        outputs: which of them, out of `OUTPUTS`.
        similarity: what the FAISS index sorts by.

    Returns:
        The files.

    Raises:
        ValueError: the index cannot be read, has another width, or its vectors are not finite.
        OSError: a file cannot be written.
    """
    number = count(index)
    written = []
    writers: dict[str, Callable[..., None]] = {
        "npy": _write_npy,
        "parquet": _write_parquet,
        "faiss": partial(_write_faiss, similarity=similarity),
    }
    for name in dict.fromkeys(outputs):
        if name not in writers:
            continue
        path = folder / f"mapped.{name}"
        parts = mapped_parts(fitted, index, number)
        with whole_file(path) as unfinished:
            writers[name](unfinished, parts, (number, fitted.d_y))
        written.append(path)
    return written


def count(index: Path) -> int:
    """Return the number of vectors in a file, without reading them."""
    if index.suffix == ".npy":
        return len(_opened(index))
    import pyarrow.parquet as parquet

    return int(parquet.ParquetFile(index).metadata.num_rows)


def _opened(index: Path) -> np.ndarray:
    rows = np.load(index, mmap_mode="r", allow_pickle=False)
    if rows.ndim != 2:
        raise UserError(
            f"Expected {index} to be of shape (N, d), but got {rows.shape}."
        )
    return rows


def mapped_parts(
    fitted: VectorMap, index: Path, number: int
) -> Iterator[tuple[np.ndarray, list[str] | None]]:
    """Yield mapped vectors (n, d_y) with their ids, in the order of the file."""
    total = -(-number // AT_ONCE)
    for rows, ids in track(_parts(index), "Mapping the index", total):
        if rows.any():  # a part may be zero, and stays what the map makes of zeros
            check_vectors(rows, str(index))
        yield fitted.mapped(rows), ids


def _parts(index: Path) -> Iterator[tuple[np.ndarray, list[str] | None]]:
    if index.suffix != ".npy":
        yield from parquet_parts(index)
        return
    rows = _opened(index)
    for start in range(0, len(rows), AT_ONCE):
        yield np.asarray(rows[start : start + AT_ONCE]), None


def _write_npy(path: Path, parts: Iterator[Any], shape: tuple[int, int]) -> None:
    made = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    start = 0
    for rows, _ in parts:
        made[start : start + len(rows)] = rows
        start += len(rows)
    made.flush()


def _write_parquet(path: Path, parts: Iterator[Any], shape: tuple[int, int]) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    writer = None
    try:
        for rows, ids in parts:
            flat = arrow.array(rows.reshape(-1))
            columns = {"vector": arrow.FixedSizeListArray.from_arrays(flat, shape[1])}
            if ids is not None:
                columns = {ID_COLUMNS[0]: arrow.array(ids), **columns}
            table = arrow.table(columns)
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _write_faiss(
    path: Path, parts: Iterator[Any], shape: tuple[int, int], *, similarity: Similarity
) -> None:
    """Write a flat index of inner products; for the cosine, of vectors of length 1."""
    import faiss

    made = faiss.IndexFlatIP(shape[1])
    for rows, _ in parts:
        if similarity == "cosine":
            length = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = rows / np.maximum(length, 1e-12)
        made.add(rows)
    faiss.write_index(made, str(path))
