"""A signal that arrives in the middle of a method."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

__all__ = ["strike"]


@contextmanager
def strike(owner: type, method: str, call: int, number: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Within it, this process gets a signal as a method of a class is called for the `call`-th time."""
    real, calls = getattr(owner, method), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return real(*args, **options)

    with patch.object(owner, method, counted):
        yield
