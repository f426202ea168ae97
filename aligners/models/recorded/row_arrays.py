"""Rows of numbers that lie on disk: only those that are asked for are read."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 24  # numbers that are looked at together
UNIT = 2e-3  # how far from 1 the norm of a normalised row may be, in float16


class RowArray:
    """N rows of d numbers, in parts that may be memory-mapped.

    Args:
        parts: (n, d) each, of one data type.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = [part for part in parts if len(part)] or list(parts[:1])
        sizes = [len(part) for part in self.parts]
        ends = np.cumsum(sizes)
        self.starts = ends - sizes
        self.rows = int(ends[-1])
        self.width = int(self.parts[0].shape[1])
        self.dtype = self.parts[0].dtype

    def take(self, rows: Tensor) -> Tensor:
        """Return some rows, given their numbers (P,) on the CPU: (P, d) float32."""
        if len(self.parts) == 1:
            return self.parts[0].index_select(0, rows).float()
        taken = torch.empty(len(rows), self.width)
        part_of = np.searchsorted(self.starts, rows.numpy(), side="right") - 1
        for number in np.unique(part_of):
            places = torch.from_numpy(np.flatnonzero(part_of == number))
            inside = rows[places] - int(self.starts[number])
            taken[places] = self.parts[number].index_select(0, inside).float()
        return taken

    def blocks(self) -> Iterator[Tensor]:
        """Return all rows, as they are stored, a few at a time."""
        size = max(BLOCK // max(self.width, 1), 1)
        for part in self.parts:
            yield from part.split(size)


@dataclass
class Seen:
    """What one look at all rows of a source finds.

    Attributes:
        fingerprint: hash of shapes, data types and bytes at all sites.
        bad: site -> numbers of its rows that hold NaN or infinity as float32.
        unit: whether all other rows have norm 1.
    """

    fingerprint: str = ""
    bad: dict[int, np.ndarray] = field(default_factory=dict)
    unit: bool = True

    @classmethod
    def of(cls, arrays: Sequence[RowArray]) -> "Seen":
        """Read all rows of all sites once, block by block."""
        seen = cls()
        digest = blake2b(digest_size=16)
        for site, array in enumerate(arrays):
            digest.update(f"{array.rows} {array.width} {array.dtype}\n".encode())
            first = 0
            bad = []
            for block in array.blocks():
                content = block.contiguous()
                digest.update(content.view(torch.uint8).numpy().data)
                bad.append(first + seen._look_at(content))
                first += len(block)
            numbers = np.concatenate(bad)
            if len(numbers):
                seen.bad[site] = numbers
        seen.fingerprint = digest.hexdigest()
        return seen

    def _look_at(self, block: Tensor) -> np.ndarray:
        """Return which rows of a block are not finite, and note whether the others have norm 1."""
        values = block.float()
        finite = values.isfinite().all(1)
        if self.unit:
            norms = values.norm(dim=1)[finite]
            self.unit = bool(((norms - 1).abs() < UNIT).all())
        return (~finite).nonzero()[:, 0].numpy()


def numpy_type(dtype: torch.dtype) -> np.dtype:
    """Return the data type by which NumPy knows one of torch."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor of the same memory, also of a file that is mapped to be read only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(array)
