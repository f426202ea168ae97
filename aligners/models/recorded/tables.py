"""Tables with columns of vectors: Parquet, Arrow, and folders that `save_to_disk` of `datasets` wrote.

`CacheActivationsRunner` of SAELens writes such a folder: a column by the name of its hook, with (context_size, d_in)
numbers in each row, and the column `token_ids`, with (context_size,).
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aligners.errors import UserError
from aligners.models.recorded.files import Opened, choose_sites, natural
from aligners.models.recorded.row_arrays import RowArray, as_tensor
from aligners.models.recorded.source_names import StatesSource

TOKENS = "token_ids"  # the column of SAELens

if TYPE_CHECKING:
    from datasets import Dataset


def open_table(source: StatesSource, kind: str | None) -> Opened:
    """Open a table; `datasets` maps it into memory, after it has rewritten Parquet as Arrow in its cache.

    Args:
        source: what the user named.
        kind: `parquet` or `arrow`; None: a folder of `save_to_disk`.
    """
    table = _table(source, kind)
    blocks = _blocks(source, table)
    arrays = []
    for parts in blocks.values():
        flat = [as_tensor(part.reshape(-1, part.shape[-1])) for part in parts]
        arrays.append(RowArray(flat))
    sites = list(blocks)
    length = _length_of_sequences(blocks)
    opened = Opened(sites, arrays, _Columns(table, sites))
    if length is not None:
        opened.sequence = np.arange(len(table)).repeat(length)
        opened.tokens = _tokens(table)
    return choose_sites(source, opened)


def _blocks(source: StatesSource, table: Dataset) -> dict[str, list[np.ndarray]]:
    """Return the columns that hold states, each in parts (n, d), or (n, T, d) of sequences."""
    blocks = {}
    for name in sorted(table.column_names, key=natural):
        column = table.data.column(name)
        wanted = source.columns is None or name in source.columns
        if not wanted or not _holds_vectors(column.type):
            continue
        parts = [_vectors(chunk, source, name) for chunk in column.chunks]
        if parts:
            blocks[name] = parts
    return blocks


def _length_of_sequences(blocks: Mapping[str, list[np.ndarray]]) -> int | None:
    """Return how many rows each row of a table holds in all of its columns; None: one, or different numbers."""
    lengths = set()
    for parts in blocks.values():
        for part in parts:
            lengths.add(part.shape[1] if part.ndim == 3 else 1)
    if len(lengths) != 1 or 1 in lengths:
        return None
    return lengths.pop()


def _tokens(table: Dataset) -> np.ndarray | None:
    """Return the token of each row of all sequences; None: the table has none."""
    if TOKENS not in table.column_names:
        return None
    chunks = table.data.column(TOKENS).chunks
    return np.concatenate([chunk.flatten() for chunk in chunks])


def _table(source: StatesSource, kind: str | None) -> Dataset:
    from datasets import Dataset, load_dataset, load_from_disk

    path = source.path
    if kind is None:
        table = load_from_disk(str(path))
    else:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("*.parquet"))
        named = [glob.escape(str(file)) for file in files]
        table = load_dataset(kind, data_files=named, split="train")
    if not isinstance(table, Dataset):
        raise UserError(
            f"Expected one table in {path}, but it holds several: {', '.join(table)}. Name the folder of one."
        )
    if table._indices is not None:
        table = table.flatten_indices()
    return table


def _holds_vectors(kind: Any) -> bool:
    """Tell whether a column of this Arrow type holds vectors of floating-point numbers, or matrices."""
    import pyarrow as pa

    nested = 0
    while True:
        if isinstance(kind, pa.ExtensionType):
            kind = kind.storage_type
        elif (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            kind = kind.value_type
            nested += 1
        else:
            return nested in (1, 2) and pa.types.is_floating(kind)


def _vectors(chunk: Any, source: StatesSource, name: str) -> np.ndarray:
    """Return the numbers of a chunk, (n, d) or (n, T, d), in the chunk's own memory."""
    import pyarrow as pa

    shape = [len(chunk)]
    while True:
        if isinstance(chunk, pa.ExtensionArray):
            chunk = chunk.storage
        if chunk.null_count:
            raise UserError(
                f"Expected a vector in every row of column {name!r} of {source.path}, but {chunk.null_count} are "
                "missing. Remove these rows."
            )
        if pa.types.is_floating(chunk.type):
            break
        inside = chunk.flatten()
        shape.append(_length(chunk, inside, source, name))
        chunk = inside
    values = chunk.to_numpy(zero_copy_only=True)
    return values.reshape(shape)


def _length(chunk: Any, inside: Any, source: StatesSource, name: str) -> int:
    """Return the common length of the lists in a chunk."""
    import pyarrow.compute as pc

    if not len(chunk):
        return 1
    bounds = pc.min_max(pc.list_value_length(chunk)).as_py()
    if bounds["min"] != bounds["max"]:
        raise UserError(
            f"Expected vectors of one width in column {name!r} of {source.path}, but they have {bounds['min']} to "
            f"{bounds['max']} numbers."
        )
    return len(inside) // len(chunk)


class _Columns(Mapping[str, np.ndarray]):
    """The columns of a table without states, each read when it is asked for."""

    def __init__(self, table: Dataset, sites: list[str]) -> None:
        self.table = table
        self.names = [name for name in table.column_names if name not in sites]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(name)
        return self.table.data.column(name).to_pandas().to_numpy()

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
