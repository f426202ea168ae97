"""How far something is: a bar in a terminal, and a line now and then where the output goes to a file."""

import time
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import TypeVar

import rich
import rich.progress

EVERY = 30.0  # seconds between two lines
T = TypeVar("T")


def in_terminal() -> bool:
    """Whether a bar can move where the output goes: in a terminal, or a notebook."""
    console = rich.get_console()
    return console.is_terminal or console.is_jupyter


class Lines:
    """Says at the beginning what is done, and at most every 30 seconds how far it is.

    Args:
        what: is done: `Training`.
        total: steps.
        begin: steps that were done before.
    """

    def __init__(self, what: str, total: float, begin: int = 0) -> None:
        self.what, self.total, self.done, self._begin = what, total, begin, begin
        self._began = self._said = time.monotonic()
        print(f"{what}: {total:,.0f} steps.", flush=True)

    def step(self, words: Callable[[], str] = str) -> None:
        """Count a step, and say how far it is if the last line is old enough.

        Args:
            words: returns what is said besides; called only if something is said.
        """
        self.done, now = self.done + 1, time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            left = (now - self._began) / (self.done - self._begin) * (self.total - self.done) / 60
            text = f"{self.what}: step {self.done:,} of {self.total:,.0f}{words()}"
            print(f"{text}, about {left:.1f} min left", flush=True)


def track(
    each: Iterable[T], what: str, total: float | None = None, *, transient: bool = False, disable: bool = False
) -> Iterator[T]:
    """Yield each, and show how far it is, as Rich's `track`; in a file by lines."""
    lines = None if disable or in_terminal() else Lines(what, length_hint(each) if total is None else total)
    hidden = disable or lines is not None
    for one in rich.progress.track(each, what, total, transient=transient, disable=hidden):
        yield one
        if lines is not None:
            lines.step()
