"""The formats in which states are recorded, each opened without reading the states.

Nothing is unpickled: NumPy's files are read without pickles, and those of `torch.save` with `weights_only`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.models.recorded.row_arrays import RowArray, as_tensor, numpy_type
from aligners.models.recorded.source_names import StatesSource

TABLES = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
SAVED = (".pt", ".pth")
SAFE_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
KINDS = (".npy", ".safetensors", *SAVED, *TABLES)


@dataclass
class Opened:
    """Recorded states, not yet read.

    Attributes:
        sites: names of the sites, in order.
        arrays: the rows at each.
        columns: further values of the rows, by name: keys, groups, masks.
        sequence: (N,) which sequence of the file each row is of, where its rows come in sequences.
        of_tokens: whether the rows are of tokens whose texts the file does not know.
        tokens: (N,) the token of each row, where the file has it in a place that its format gives.
    """

    sites: list[str]
    arrays: list[RowArray]
    columns: Mapping[str, Any] = field(default_factory=dict)
    sequence: np.ndarray | None = None
    of_tokens: bool = False
    tokens: np.ndarray | None = None


def open_states(source: StatesSource) -> Opened:
    """Open a file or folder of recorded states.

    Args:
        source: what the user named.

    Raises:
        ValueError: the format is unknown, holds no states or none of that name, or the sites differ in rows or width.
    """
    try:
        opened = _open(source)
    except UserError:
        raise
    except Exception as error:  # whatever a reader raises for a damaged file
        raise UserError(
            f"{source.path} cannot be read as recorded states: {error}"
        ) from error
    first = opened.arrays[0]
    for name, array in zip(opened.sites, opened.arrays, strict=True):
        if (array.rows, array.width) != (first.rows, first.width):
            raise UserError(
                f"Expected all sites of {source.path} to have the {first.rows} rows of width {first.width} of "
                f"{opened.sites[0]!r}, but {name!r} has {array.rows} of {array.width}. Name those to read, for example "
                f"`{source.name.partition(':column=')[0]}:column={opened.sites[0]}`."
            )
    if not first.rows:
        raise UserError(f"Expected states in {source.path}, but it has no rows.")
    return opened


def _open(source: StatesSource) -> Opened:
    path = source.path
    if path.is_dir():
        return _open_folder(source)
    if path.suffix == ".npy":
        return _unnamed(source, _mapped(path))
    if path.suffix == ".safetensors":
        return _named(source, _safe_tensors(path))
    if path.suffix in SAVED:
        return _open_saved(source)
    if path.suffix in TABLES:
        from aligners.models.recorded.tables import open_table

        return open_table(source, TABLES[path.suffix])
    raise UserError(
        f"Expected recorded states in a file that ends in {', '.join(KINDS)}, or in a folder, but got {path}."
    )


def _open_folder(source: StatesSource) -> Opened:
    """Open a folder: of `save_to_disk`, of dictionary_learning's shards, or of .npy or Parquet files."""
    folder = source.path
    if (folder / "state.json").is_file():
        from aligners.models.recorded.tables import open_table

        return open_table(source, None)
    names = [folder, *sorted(part for part in folder.iterdir() if part.is_dir())]
    shards = [part for part in names if (part / "shard_0.meta").is_file()]
    if shards:
        from aligners.models.recorded.activation_shards import open_shards

        return open_shards(source, shards)
    if any(folder.glob("*.parquet")):
        from aligners.models.recorded.tables import open_table

        return open_table(source, "parquet")
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise UserError(
            f"Expected the folder {folder} to hold .npy or Parquet files, what `save_to_disk` of `datasets` writes, or "
            "shards of dictionary_learning, but found none of these."
        )
    return _named(source, {file.stem: _mapped(file) for file in files})


def _mapped(path: Path) -> Tensor:
    """Map a file of NumPy into memory."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise UserError(
            f"Expected numbers in {path}, which NumPy can map into memory, but got: {error}"
        ) from error
    if array.dtype.kind not in "fiub":
        raise UserError(f"Expected numbers in {path}, but got {array.dtype}.")
    if not array.dtype.isnative:
        raise UserError(
            f"Expected numbers in this machine's byte order in {path}, but got {array.dtype}. Convert them with "
            "`array.astype(array.dtype.newbyteorder('='))`."
        )
    return as_tensor(array)


def _safe_tensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file into memory, to be read only.

    safetensors' own reader maps them to be written, for which memory as large as the file must be free.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        written = file.read(min(length, path.stat().st_size))
    if len(written) < length:
        raise ValueError("its header is cut off")
    header = json.loads(written)
    header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        dtype = SAFE_TYPES.get(about["dtype"])
        begin, end = about["data_offsets"]
        if dtype is None or begin == end:
            continue
        stored = np.dtype(np.int16) if dtype == torch.bfloat16 else numpy_type(dtype)
        place = 8 + length + begin
        shape = tuple(about["shape"])
        mapped = np.memmap(path, dtype=stored, mode="r", offset=place, shape=shape)
        tensors[name] = as_tensor(mapped).view(dtype)
    return tensors


def _open_saved(source: StatesSource) -> Opened:
    """Open what `torch.save` wrote of a tensor, or of tensors by name or in a list, as nnsight's saves are."""
    content = torch.load(source.path, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(content, Tensor):
        return _unnamed(source, content)
    if isinstance(content, (list, tuple)):
        content = {str(number): part for number, part in enumerate(content)}
    if not isinstance(content, Mapping):
        raise UserError(
            f"Expected a tensor, or tensors by name or in a list, in {source.path}, but got a {type(content).__name__}."
        )
    tensors = {}
    for name, part in content.items():
        if isinstance(part, Tensor):
            tensors[str(name)] = part.detach()
    return _named(source, tensors)


def _unnamed(source: StatesSource, tensor: Tensor) -> Opened:
    """Take an array (N, d) as one site, and (L, N, d) as L sites."""
    if tensor.dim() not in (2, 3) or not _can_be_states(tensor):
        raise UserError(
            f"Expected states of shape (N, d), or (L, N, d) of L sites, in {source.path}, but got "
            f"{tuple(tensor.shape)} of {tensor.dtype}."
        )
    if tensor.dim() == 2:
        tensor = tensor[None]
    sites = [str(number) for number in range(len(tensor))]
    arrays = [RowArray([of_site]) for of_site in tensor]
    return choose_sites(source, Opened(sites, arrays))


def _named(source: StatesSource, tensors: Mapping[str, Tensor]) -> Opened:
    """Take tensors (N, d), or (B, T, d) of B sequences, as sites, and (N,) as columns."""
    columns = {}
    sites = []
    arrays = []
    sequences: dict[tuple[int, ...], None] = {}
    for name in sorted(tensors, key=natural):
        tensor = tensors[name]
        if tensor.dim() in (2, 3) and tensor.is_floating_point():
            sites.append(name)
            arrays.append(RowArray([tensor.flatten(0, -2)]))
            sequences[tuple(tensor.shape[:-1])] = None
        else:
            columns[name] = tensor.flatten()
    opened = Opened(sites, arrays, columns)
    shapes = list(sequences)
    if len(shapes) == 1 and len(shapes[0]) == 2:
        count, length = shapes[0]
        opened.sequence = np.arange(count).repeat(length)
    return choose_sites(source, opened)


def _can_be_states(tensor: Tensor) -> bool:
    """Tell whether the numbers of a tensor can be states."""
    return not (tensor.is_complex() or tensor.dtype == torch.bool)


def choose_sites(source: StatesSource, opened: Opened) -> Opened:
    """Keep the sites that the user names, in that order; by default all.

    Raises:
        ValueError: there is none of that name, or none at all.
    """
    known = dict(zip(opened.sites, opened.arrays, strict=True))
    wanted = source.columns
    if wanted is None:
        wanted = opened.sites
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        what = "none"
        if missing:
            what = f"no {missing[0]!r}"
        there = ", ".join(known) or "nothing of the kind"
        raise UserError(
            f"Expected states in {source.path}, rows of floating-point numbers, but found {what}: it has {there}."
        )
    arrays = [known[name] for name in wanted]
    return replace(opened, sites=list(wanted), arrays=arrays)


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts `layer_10` after `layer_9`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def column_of(source: StatesSource, opened: Opened, name: str) -> np.ndarray:
    """Return a column of the rows (N,): of the file, or a file of its own, .npy or .txt with one value a line.

    Raises:
        ValueError: there is none of that name, or it has another number of values.
    """
    rows = opened.arrays[0].rows
    if name in opened.columns:
        values = np.asarray(opened.columns[name])
    else:
        values = _beside(source, name, opened.columns)
    if opened.sequence is not None and len(values) == opened.sequence[-1] + 1:
        values = values[opened.sequence]  # a value for each sequence
    if len(values) != rows:
        raise UserError(
            f"Expected one value of {name!r} for each of the {rows} rows of {source.path}, but got {len(values)}."
        )
    return values


def _beside(source: StatesSource, name: str, columns: Mapping[str, Any]) -> np.ndarray:
    """Read a column from a file of its own, beside the states or at its own path."""
    folder = source.path if source.path.is_dir() else source.path.parent
    for path in (folder / name, Path(name).expanduser()):
        if not path.is_file():
            continue
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        return np.array(path.read_text(encoding="utf-8").splitlines())
    there = ", ".join(columns) or "none"
    raise UserError(
        f"Expected {name!r} to be a column of {source.path}, or a file (.npy, or .txt with one value a line) beside it,"
        f" but it is neither. Columns without states: {there}."
    )
