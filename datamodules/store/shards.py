"""A shard: the rows of whole texts at one site, a safetensors file of lengths, checksums and rows.

Its tensors are `lengths` (n,) int32, rows of each text; `crc32` (n,) uint32, of the bytes of each text's rows; and
`rows` (N, d), text by text, at the end. The manifest keeps each shard's checksum, taken over everything in the file
before the rows. It vouches for the lengths and CRCs, and these vouch for the rows of every text.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# The names that safetensors gives them.
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ALIGNED = 64


class ShardWriter:
    """A shard that is being written, its texts in any order.

    Args:
        file: open for writing; the disk reserves the space at once, except on macOS.
        lengths: rows of each text, (n,).
        width: d.
        stored_as: data type of the rows.
        about: which shard of which store this is.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """

    def __init__(
        self,
        file: BinaryIO,
        lengths: np.ndarray,
        width: int,
        stored_as: str,
        about: dict[str, str],
    ) -> None:
        self.lengths = lengths.astype("<i4")
        self._crc = np.zeros(len(lengths), dtype="<u4")
        rows = int(lengths.sum())
        self._header = _header(len(lengths), rows, width, stored_as, about)
        first = len(self._header) + 8 * len(lengths)
        row = width * DTYPES[stored_as].itemsize
        self._starts = first + (np.cumsum(lengths, dtype=np.int64) - lengths) * row
        self._file = file
        size = first + rows * row
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS has no such call: a full disk is noticed there only as rows are written
            file.truncate(size)

    def write_texts(self, texts: np.ndarray, rows: Sequence[Tensor]) -> None:
        """Write the rows of some texts, given as bytes."""
        for text, of_text in zip(texts.tolist(), rows, strict=True):
            self.write(text, of_text.numpy())

    def write(self, text: int, rows: np.ndarray) -> None:
        """Write the rows of a text, given as bytes.

        Args:
            text: its number in the shard.
            rows: (rows of the text, bytes of a row) uint8.
        """
        content = np.ascontiguousarray(rows).data.cast("B")
        self._crc[text] = zlib.crc32(content)
        self._file.seek(int(self._starts[text]))
        self._file.write(content)

    def finish(self) -> str:
        """Complete the file and return its checksum."""
        prefix = self._header + self.lengths.tobytes() + self._crc.tobytes()
        self._file.seek(0)
        self._file.write(prefix)
        return _checksum(prefix)


@dataclass
class Shard:
    """A complete shard.

    Attributes:
        path: path of the file.
        first: place of the first row in the file, in bytes.
        lengths: rows of each text, (n,).
        crc32: checksum of each text's rows, (n,).
        starts: number of each text's first row in the shard, (n,).
    """

    path: Path
    first: int
    lengths: np.ndarray
    crc32: np.ndarray

    def __post_init__(self) -> None:
        self.starts = self.lengths.cumsum() - self.lengths

    @classmethod
    def open(cls, path: Path, checksum: str, texts: int, row_bytes: int) -> Self:
        """Read everything but the rows.

        Args:
            path: path of the file.
            checksum: the shard's checksum in the manifest.
            texts: n, the number of texts.
            row_bytes: bytes of a row.

        Raises:
            ValueError: the file is missing, cut short, or not the one that was written.
        """
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(8)
                rest = int.from_bytes(head, "little") + 8 * texts
                prefix = head + file.read(min(rest, size))
        except OSError as error:
            what = f"cannot be read ({error.strerror})"
            raise UserError(damaged(path, what)) from error
        if _checksum(prefix) != checksum:
            raise UserError(damaged(path, "does not begin as it was written"))
        about_texts = np.frombuffer(prefix[-8 * texts :], dtype="<u4")
        lengths, crc32 = about_texts.reshape(2, texts)
        expected = len(prefix) + int(lengths.sum()) * row_bytes
        if size != expected:
            raise UserError(damaged(path, f"has {size} bytes instead of {expected}"))
        return cls(path, len(prefix), lengths.astype(np.int64), crc32)

    def check(self, text: int, rows: Any) -> None:
        """Check the rows of a text, given as bytes.

        Raises:
            ValueError: they differ from what was written.
        """
        if zlib.crc32(rows) != self.crc32[text]:
            what = f"holds other rows of its text number {text} than were written"
            raise UserError(damaged(self.path, what))


def damaged(path: Path, what: str) -> str:
    """Return the error for a damaged shard."""
    return (
        f"Expected a shard of stored states, but {path} {what}: it is damaged. Remove the file, and it will be "
        "written again."
    )


def _header(
    texts: int, rows: int, width: int, stored_as: str, about: dict[str, str]
) -> bytes:
    """Read the header of a safetensors file: its length, and the tensors that follow, in JSON."""
    end = 8 * texts + rows * width * DTYPES[stored_as].itemsize
    tensors = {
        "__metadata__": about,
        "lengths": {"dtype": "I32", "shape": [texts], "data_offsets": [0, 4 * texts]},
        "crc32": {
            "dtype": "U32",
            "shape": [texts],
            "data_offsets": [4 * texts, 8 * texts],
        },
        "rows": {
            "dtype": TYPES[stored_as],
            "shape": [rows, width],
            "data_offsets": [8 * texts, end],
        },
    }
    content = json.dumps(tensors).encode()
    content += b" " * (-(8 + len(content)) % ALIGNED)
    return len(content).to_bytes(8, "little") + content


def _checksum(prefix: bytes) -> str:
    return blake2b(prefix, digest_size=16).hexdigest()
