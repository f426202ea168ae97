"""Moments of all layer pairs, shared by measures so that each decomposition is computed once."""

from __future__ import annotations

from aligners.similarity.algebra.moments import GridMoments
from aligners.similarity.functional.cca import Correlations, correlations_from_moments, correlations_held_out

__all__ = ["SharedMoments"]


class SharedMoments:
    """Moments that remember the canonical correlations that SVCCA and PWCCA found from them.

    What is remembered is small compared with the moments: no directions. Refusals are not remembered, so
    that each measure that asks is told so by its own name.

    Args:
        moments: moments of the rows.
        origin: whose swapped form this is; both have one memory.
    """

    def __init__(self, moments: GridMoments, origin: SharedMoments | None = None) -> None:
        self.moments = moments
        self._origin = origin
        self._found: dict[tuple[float, SharedMoments | None], Correlations] = {} if origin is None else origin._found

    def swap(self) -> SharedMoments:
        """Swap X and Y."""
        return SharedMoments(self.moments.swap(), self) if self._origin is None else self._origin

    def correlations(self, measure: str, share: float, held_out: SharedMoments | None = None) -> Correlations:
        """Canonical correlations of all layer pairs, computed at the first call.

        Args:
            measure: the measure's name, for error messages.
            share: share of the variance in (0, 1].
            held_out: rows to take the correlations on, with directions and weights of these rows; None: these rows.

        Raises:
            ValueError: as `svcca_from_moments` and `cca_held_out`.
        """
        turned = self._origin is not None
        key = share, held_out.swap() if turned and held_out is not None else held_out
        if key not in self._found:
            if held_out is None:
                found = correlations_from_moments(self.moments, share=share, measure=measure)
            else:
                found = correlations_held_out(self.moments, held_out.moments, share=share, measure=measure)
            self._found[key] = found.swap() if turned else found
        return self._found[key].swap() if turned else self._found[key]
