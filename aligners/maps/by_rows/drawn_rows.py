"""Rows that are drawn from a pass: a bounded sample, the same for any batches and any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from aligners.datamodules.rows.read_rows import PairedBatch
from aligners.datamodules.rows.token_pairs import FREE
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError
from aligners.files.resources import free_memory, in_words
from aligners.maps.base import Aligner
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.progress import tell
from aligners.similarity.controls import Draw

# Of a number: in float32 while rows are drawn, and in float64 while maps are fitted to them.
BYTES = 4 + 8


class DrawnRows:
    """A random sample of the rows that were added, (S, n, d).

    Args:
        sites: S.
        budget: largest number of rows.
        width: d.
        seed: seed of the draw.
        device: where the rows are.
    """

    def __init__(
        self, sites: int, budget: int, width: int, seed: int, device: torch.device
    ) -> None:
        self.draw = Draw(budget, seed, device)
        self.rows = torch.empty(sites, budget, width, device=device)

    def add(self, rows: Tensor, text: Tensor, place: Tensor) -> None:
        """Draw from the rows (S, N, d) of a batch."""
        places, chosen = self.draw.admit(text, place)
        drawn = rows[:, chosen]
        self.rows[:, places] = drawn.to(self.rows.dtype)

    def end(self) -> Tensor:
        """Return the rows of all ranks, in the order of their keys."""
        self.draw.end(groups=1)
        return self.draw.collect(self.rows)

    def state(self) -> dict[str, Tensor]:
        """Return the sample so far, for a checkpoint."""
        there = self.draw.key < FREE
        return {
            "key": self.draw.key[there],
            "text": self.draw.text[there],
            "rows": self.rows[:, there],
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        count = len(state["key"])
        self.draw.key[:count] = state["key"]
        self.draw.text[:count] = state["text"]
        self.rows[:, :count] = state["rows"]


@dataclass
class KeptRows:
    """What maps that keep rows are fitted to, beside the moments.

    Attributes:
        fitting: draws of the fitting rows; None: no map needs any.
        validation: draws of the validation rows, for those that choose a strength; None likewise.
    """

    fitting: KeptPairs | None = None
    validation: KeptPairs | None = None

    @classmethod
    def of(
        cls,
        maps: Sequence[Aligner],
        sites: int,
        widths: tuple[int, int],
        device: torch.device,
    ) -> Self:
        """Prepare the draws that some maps need; `widths` are d_x and d_y, whatever the direction of each map."""
        draws = []
        for needed in (rows_needed(maps), rows_needed(maps, to_choose=True)):
            drawn = None
            if needed:
                drawn = KeptPairs(needed, sites, *widths, device)
            draws.append(drawn)
        return cls(*draws)

    def adding(self, split: Split) -> Callable[[PairedBatch], None] | None:
        """Return what draws from a batch of a split; None: no row is needed."""
        drawn = self.validation
        if split == "fit":
            drawn = self.fitting
        if drawn is None:
            return None
        return drawn.add

    def end(self) -> None:
        """Take the rows of all ranks, each of which has to call it."""
        for drawn in (self.fitting, self.validation):
            if drawn is not None:
                drawn.end()

    def arguments(self, aligner: Aligner, *, backward: bool = False) -> dict[str, Any]:
        """Return the arguments of `fit_map` for a map, from Y to X if `backward`."""
        found = {}
        named = {"kept": self.fitting, "kept_validation": self.validation}
        for name, drawn in named.items():
            rows = None
            if drawn is not None:
                rows = drawn.of(aligner)
            if rows is not None and backward:
                rows = rows.swap()
            found[name] = rows
        return found


class KeptPairs:
    """The paired rows that maps keep of a pass: for each seed among their options, the most that any of them asks for.

    Args:
        needed: seed -> largest number of rows.
        sites: S.
        d_x: width of X's rows.
        d_y: width of Y's rows.
        device: where the rows are.

    Raises:
        ValueError: there is no memory for them.
    """

    def __init__(
        self,
        needed: Mapping[int, int],
        sites: int,
        d_x: int,
        d_y: int,
        device: torch.device,
    ) -> None:
        self.needed = dict(needed)
        self.d_x = d_x
        most = max(needed.values())
        size = bytes_of_rows(self.needed, sites, d_x + d_y)
        free = free_memory(device)
        if size > free:
            raise UserError(
                f"Expected memory for the rows that maps keep, {most:,} at each of {sites} sites, but these take "
                f"{in_words(size)} and {in_words(free)} are free. Name fewer sites, give the maps fewer `rows`, or "
                "leave them out."
            )
        rank_zero_only(tell)(
            f"Up to {most:,} rows at each of {sites} sites are kept while maps are fitted to them, which takes "
            f"{in_words(size)}."
        )
        self._drawn = {}
        for seed, rows in self.needed.items():
            self._drawn[seed] = DrawnRows(sites, rows, d_x + d_y, seed, device)
        self._kept: dict[int, PairedRows] = {}

    def add(self, batch: PairedBatch) -> None:
        """Draw from a batch."""
        for drawn in self._drawn.values():
            both = torch.cat([batch.x, batch.y], -1)
            drawn.add(both, batch.text, batch.rows.place)

    def end(self) -> None:
        """Take the rows of all ranks, each of which has to call it."""
        for seed, drawn in self._drawn.items():
            both = drawn.end()
            x, y = both[..., : self.d_x], both[..., self.d_x :]
            self._kept[seed] = PairedRows(x, y)

    def of(self, aligner: Aligner) -> PairedRows | None:
        """Return the rows from X to Y that a map keeps; None: it keeps none."""
        if not isinstance(aligner, ByRows) or aligner.seed not in self._kept:
            return None
        return self._kept[aligner.seed].first(aligner.rows)

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Return the draws so far, for a checkpoint."""
        return {seed: drawn.state() for seed, drawn in self._drawn.items()}

    def restore(self, state: Mapping[int, Any]) -> None:
        """Take back what `state` returned."""
        for seed, of_draw in state.items():
            self._drawn[seed].restore(of_draw)


def rows_needed(maps: Iterable[Aligner], *, to_choose: bool = False) -> dict[int, int]:
    """Return the draws that some maps need of the fitting rows, seed -> number of rows.

    Args:
        maps: of any kind.
        to_choose: return those of the validation rows instead, for maps that choose a strength.
    """
    needed: dict[int, int] = {}
    for aligner in maps:
        if not isinstance(aligner, ByRows) or (to_choose and not aligner.chooses):
            continue
        rows = aligner.rows
        needed[aligner.seed] = max(rows, needed.get(aligner.seed, 0))
    return needed


def bytes_of_rows(needed: Mapping[int, int], sites: int, widths: int) -> int:
    """Return the bytes that draws take while maps are fitted to them, `widths` being d_x + d_y."""
    return sum(needed.values()) * sites * widths * BYTES
