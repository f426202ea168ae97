"""Moments that remember what closed forms decompose, so that maps of the same rows share it."""

from functools import cached_property
from typing import NamedTuple, Self

from aligners.errors import UserError
from aligners.maps.base import MORE_ROWS
from aligners.similarity.algebra.moments import Moments
from aligners.similarity.functional.canonical_correlations import (
    Canonical,
    Whitening,
    canonical,
    whitening,
)


class CanonicalSolution(NamedTuple):
    """Canonical directions of S site pairs, and the whitenings of X and of Y that they come from."""

    found: Canonical
    white_x: Whitening
    white_y: Whitening

    def swap(self) -> Self:
        """The same with X and Y in each other's place."""
        found = self.found._replace(a=self.found.b, b=self.found.a)
        return type(self)(found, self.white_y, self.white_x)


class SharedMoments(Moments):
    """Moments that remember canonical solutions, also for their swapped form.

    They are kept as long as this object is. Refusals are not remembered.
    """

    _origin: "SharedMoments | None" = None

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Moments that have nothing to remember yet."""
        return cls(*moments)

    @cached_property
    def _known(self) -> dict[tuple[float, float], CanonicalSolution]:
        """Solutions by share and tolerance."""
        return {}

    def swap(self) -> Self:
        """Return the moments of the pairs (y, x), which remember with these."""
        swapped = super().swap()
        swapped._origin = self
        return swapped

    def canonical(self, share: float, tolerance: float) -> CanonicalSolution:
        """As `canonical_solution`, found at the first call."""
        if self._origin is not None:
            return self._origin.canonical(share, tolerance).swap()
        key = share, tolerance
        if key not in self._known:
            plain = Moments(*self)
            self._known[key] = canonical_solution(plain, share, tolerance)
        return self._known[key]


def canonical_solution(
    moments: Moments, share: float, tolerance: float
) -> CanonicalSolution:
    """Find canonical directions from moments.

    Args:
        moments: moments of the fitting rows; `SharedMoments` remember the solution.
        share: as in `whitening`.
        tolerance: likewise.

    Raises:
        ValueError: there are too few rows for the directions to mean anything.
    """
    if isinstance(moments, SharedMoments):
        return moments.canonical(share, tolerance)
    white_x = whitening(moments.xx, share=share, tolerance=tolerance)
    white_y = whitening(moments.yy, share=share, tolerance=tolerance)
    together = white_x.rank + white_y.rank
    surplus = together - (moments.n - 1)
    if (surplus > 0).any():
        site = int(surplus.argmax())
        raise UserError(
            f"Expected at least {int(together[site]) + 1} fitting rows, one more than X and Y have directions at site "
            f"pair number {site}, but got {int(moments.n)}: {int(surplus[site])} canonical correlations would be 1 "
            f"whatever the states are. {MORE_ROWS} SVCCA with a smaller `share` needs fewer."
        )
    found = canonical(white_x, white_y, moments.xy)
    return CanonicalSolution(found, white_x, white_y)
