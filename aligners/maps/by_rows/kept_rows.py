"""What maps that keep rows have in common: how these are drawn, and how many rows are mapped at a time."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.rows.token_pairs import row_keys
from aligners.errors import UserError, check_range
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments

AT_ONCE = 2**24  # numbers that a map may hold at a time, over all of its sites
FITTED_BY = "`train.py fit`, `evaluate.py inject` and `aligners.api` fit such maps."
SHARE_OF_VALIDATION = 10  # of rows without a split, every tenth chooses a strength


class PairedRows(NamedTuple):
    """Paired rows of S sites, in the order of a draw, so that the first of them are a draw of fewer.

    Attributes:
        x: (S, K, d_x).
        y: (S, K, d_y).
    """

    x: Tensor
    y: Tensor

    @classmethod
    def drawn(cls, x: Tensor, y: Tensor, budget: int, seed: int) -> Self:
        """Draw up to `budget` rows of (S, N, d_x) and (S, N, d_y), by a hash of the seed and their numbers."""
        numbers = torch.arange(x.shape[1])
        texts = torch.zeros_like(numbers)
        keys = row_keys(seed, numbers, texts)
        order = keys.argsort()
        chosen = order[:budget].to(x.device)
        return cls(x, y).at(chosen)

    def at(self, rows: Tensor) -> Self:
        """Some of the rows."""
        x = self.x[:, rows]
        y = self.y[:, rows]
        return type(self)(x, y)

    def double(self) -> Self:
        """The rows in float64."""
        return type(self)(self.x.double(), self.y.double())

    def swap(self) -> Self:
        """Swap X and Y."""
        return type(self)(self.y, self.x)

    def first(self, count: int) -> Self:
        """The first rows, which are a draw of fewer."""
        return type(self)(self.x[:, :count], self.y[:, :count])


class ByRows(Aligner, registered=False):
    """A closed form that needs rows of the fit: `fit` takes them beside the moments.

    The rows are a draw by a hash of the seed and of where each is from: its number among arrays, and in the commands
    its text and its place there. It is the same draw for all sites.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        rows: the most rows that are drawn.
        seed: seed of the draw.

    Attributes:
        chooses: a strength is chosen on other rows, which `fit` takes as well.
        of_rows: names of the buffers (S, rows, d) that are shorter than the options say where there are fewer rows.
    """

    closed_form = True
    chooses: bool = False
    of_rows: ClassVar[tuple[str, ...]]

    def __init__(self, sites: int, d_x: int, d_y: int, rows: int, seed: int) -> None:
        super().__init__(sites, d_x, d_y)
        check_range(least=2, rows=rows)
        self.rows = rows
        self.seed = seed

    def fit(
        self,
        moments: Moments,
        kept: PairedRows | None = None,
        validation: PairedRows | None = None,
    ) -> None:
        """Fit in float64.

        Args:
            moments: of all fitting rows.
            kept: a draw of them.
            validation: a draw of other rows, where the map `chooses`. Default: every tenth of the draw.

        Raises:
            ValueError: there are no rows, too few, or they do not determine the map.
        """
        if kept is None:
            raise UserError(
                f"{type(self).__name__} needs rows of the fit, and not only their moments, but got none. {FITTED_BY}"
            )
        kept = kept.double()
        if self.chooses and validation is None:
            kept, validation = _split(kept)
        count = kept.x.shape[1]
        if count < self.rows_needed:
            raise UserError(
                f"{type(self).__name__} expects at least {self.rows_needed} rows to keep, but got {count}."
            )
        self._fit(moments, kept, validation)

    @abstractmethod
    def _fit(
        self, moments: Moments, kept: PairedRows, validation: PairedRows | None
    ) -> None:
        """Set the buffers from moments and rows in float64."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any
    ) -> None:
        """Make the buffers of rows as long as those that are loaded."""
        for name in self.of_rows:
            stored = state_dict.get(prefix + name)
            if stored is not None and stored.ndim == 3:
                own = self.get_buffer(name)
                sites, _, width = own.shape
                again = own.new_zeros(sites, stored.shape[1], width)
                self.register_buffer(name, again)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _keep(self, name: str, value: Tensor) -> None:
        """Set a buffer whose number of rows the fit decides."""
        like = self.get_buffer(name)
        self.register_buffer(name, value.to(like))

    def _in_parts(
        self, function: Callable[[Tensor], Tensor], x: Tensor, numbers: int
    ) -> Tensor:
        """Apply a function of rows to (S, N, d) a few rows at a time, as each takes so many numbers at each site."""
        of_a_row = len(x) * numbers
        fitting = AT_ONCE // of_a_row
        at_once = max(1, fitting)
        rows = x.shape[1]
        if rows <= at_once:
            return function(x)
        parts = [function(part) for part in x.split(at_once, 1)]
        return torch.cat(parts, 1)


def _split(rows: PairedRows) -> tuple[PairedRows, PairedRows]:
    """Take every tenth row out of a draw, to choose a strength on."""
    count = rows.x.shape[1]
    chosen = torch.zeros(count, dtype=torch.bool, device=rows.x.device)
    chosen[::SHARE_OF_VALIDATION] = True
    fitted = rows.at(~chosen)
    validation = rows.at(chosen)
    return fitted, validation
