"""How far something is: a bar in a terminal, and a line now and then where the output goes to a file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

import rich
import rich.progress

__all__ = ["Lines", "in_terminal", "track"]

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
        total: steps; infinite if they are not known.
        begin: steps that were done before.
    """

    def __init__(self, what: str, total: float, begin: int = 0) -> None:
        self.what, self.total, self._begin = what, total, begin
        self._began = self._said = time.monotonic()
        print(f"{what}: {total:,.0f} steps." if math.isfinite(total) else f"{what}.", flush=True)

    def at(self, done: int, words: Callable[[], str] = str) -> None:
        """Say how far it is, if the last line is old enough.

        Args:
            done: steps, with those before.
            words: returns what is said besides; called only if something is said.
        """
        now = time.monotonic()
        if now - self._said < EVERY:
            return
        self._said = now
        minutes = (now - self._began) / max(1, done - self._begin) * (self.total - done) / 60
        known = math.isfinite(self.total)
        of, left = (f" of {self.total:,.0f}", f", about {minutes:.1f} min left") if known else ("", "")
        print(f"{self.what}: step {done:,}{of}{words()}{left}", flush=True)


def track(
    each: Iterable[T], what: str, total: float | None = None, *, transient: bool = False, disable: bool = False
) -> Iterator[T]:
    """Yield each, and show how far it is, as Rich's `track`; in a file by lines."""
    if disable or in_terminal():
        yield from rich.progress.track(each, what, total, transient=transient, disable=disable)
        return
    lines = Lines(what, total or (len(each) if isinstance(each, Sized) else math.inf))
    for done, one in enumerate(each, start=1):
        yield one
        lines.at(done)
