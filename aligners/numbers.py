"""Numbers that any file can hold."""

from __future__ import annotations

import math
from typing import SupportsFloat


def finite(value: SupportsFloat | None) -> float | None:
    """A number as JSON can hold it; None if there is none, or it is not finite."""
    return None if value is None or not math.isfinite(float(value)) else float(value)
