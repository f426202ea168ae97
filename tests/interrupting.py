"""A signal that arrives in the middle of a method, and Ctrl-C in a hook."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl

WENT_ON = 99


@contextmanager
def strike(
    owner: type, method: str, call: int, number: signal.Signals = signal.SIGINT, most: int | None = None
) -> Iterator[None]:
    """Within it, this process gets a signal as a method of a class is called for the `call`-th time.

    If it is called more often than `most`, the process ends at once, with the status `WENT_ON`.
    """
    real, calls = getattr(owner, method), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        if most is not None and calls > most:
            os._exit(WENT_ON)
        return real(*args, **options)

    with patch.object(owner, method, counted):
        yield


class Interrupt(pl.Callback):
    """Ctrl-C in a hook as it is called for the `after`-th time, sanity checks not counted."""

    def __init__(self, hook: str, after: int) -> None:
        self.left = after
        setattr(self, hook, self._count)

    def _count(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
