"""Memory for rows that are read ahead, used again once nobody holds the rows in it.

The system clears every page of fresh memory at its first use, which costs about as much as reading into it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["Ring", "Rings"]

ALIGNED = 64


class Ring:
    """Memory that is given out in turn, from its beginning again once nobody holds what was given out there.

    What does not fit meanwhile gets memory of its own.

    Args:
        size: bytes; they are taken from the system as they are used.

    Attributes:
        fresh: bytes that did not fit.
    """

    def __init__(self, size: int) -> None:
        self.size, self.fresh = size, 0
        self._memory = torch.empty(size, dtype=torch.uint8).numpy()
        self._given: deque[tuple[int, weakref.ref[np.ndarray]]] = deque()  # first byte and array, in their order
        self._next = 0

    def take(self, size: int) -> np.ndarray:
        """Bytes, (size,) uint8, that are used again when the array and all that share its memory are gone."""
        while self._given and self._given[0][1]() is None:
            self._given.popleft()
        start = self._place(size)
        if start is None:
            self.fresh += size
            return torch.empty(size, dtype=torch.uint8).numpy()
        array = self._memory[start : start + size]
        self._given.append((start, weakref.ref(array)))
        self._next = start + size + -size % ALIGNED
        return array

    def _place(self, size: int) -> int | None:
        """Where so many bytes are free, or None."""
        if not self._given:
            return 0 if size <= self.size else None
        oldest = self._given[0][0]
        if self._next > oldest and self._next + size <= self.size:
            return self._next
        start = 0 if self._next > oldest else self._next
        return start if start + size <= oldest else None


class Rings:
    """Rings that are kept from one epoch to the next, and lent to one reader at a time."""

    def __init__(self) -> None:
        self._free: list[Ring] = []

    @contextmanager
    def lent(self, size: int) -> Iterator[Ring]:
        """A ring of at least so many bytes, for the time of the context."""
        ring = self._free.pop() if self._free else None
        if ring is None or ring.size < size:
            ring = Ring(size)
        try:
            yield ring
        finally:
            self._free.append(ring)
