"""How long the rest of a study takes: as planned, corrected by what its cells have taken so far."""

from collections.abc import Iterable, Mapping

from aligners.studies.cells import Cell


class Pace:
    """What cells take: their planned times, times what those of their kind have taken so far for each planned second.

    A kind of which none is done yet is corrected by all others.

    Args:
        planned: seconds of each cell, by its id.
    """

    def __init__(self, planned: Mapping[str, float]) -> None:
        self._planned = planned
        self._sums: dict[str, tuple[float, float]] = {}  # of a kind: seconds planned, and taken

    def add(self, cell: Cell, seconds: float | None) -> None:
        """Take into account what a cell has taken, where that is known."""
        planned = self._planned.get(cell.id)
        if planned and seconds is not None:
            before, taken = self._sums.get(cell.kind, (0.0, 0.0))
            self._sums[cell.kind] = before + planned, taken + seconds

    def expected(self, cell: Cell) -> float:
        """Seconds that a cell will take."""
        known = [self._sums[cell.kind]] if cell.kind in self._sums else self._sums.values()
        planned, taken = (sum(sums) for sums in zip(*known, strict=True)) if known else (1.0, 1.0)
        return self._planned.get(cell.id, 0.0) * taken / planned

    def left(self, cells: Iterable[Cell], workers: int, besides: float = 0.0) -> float:
        """Seconds that cells will take, so many at a time: at least those of the longest chain of them.

        Args:
            cells: each after those that it needs.
            workers: cells at a time.
            besides: seconds of other work, which can be shared out.
        """
        total, until = besides, {"": 0.0}
        for cell in cells:
            alone = self.expected(cell)
            until[cell.id] = alone + max((until.get(need, 0.0) for need in cell.needs), default=0.0)
            total += alone
        return max(total / max(1, workers), *until.values())
