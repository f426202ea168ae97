import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from aligners.callbacks.signals import Interruption

ALONE: Any = SimpleNamespace(world_size=1)


class Term(Exception):
    """Raised by the handler of before."""


@pytest.fixture
def holding() -> Iterator[Interruption]:
    """It holds signals back, while SIGTERM has a handler of its own."""

    def handle(*_: object) -> None:
        raise Term

    before = signal.signal(signal.SIGTERM, handle)
    interruption = Interruption()
    interruption.hold()
    yield interruption
    signal.signal(signal.SIGTERM, before)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "error", "before"),
    [(signal.SIGINT, KeyboardInterrupt, KeyboardInterrupt), (signal.SIGTERM, SIGTERMException, Term)],
)
def test_a_signal_is_held_back_until_it_is_asked_for(
    holding: Interruption, number: signal.Signals, error: type[BaseException], before: type[BaseException]
) -> None:
    holding.check(ALONE)
    send(number)
    with pytest.raises(error):
        holding.check(ALONE)
    holding.end()
    with pytest.raises(before):
        send(number)


def test_a_run_that_failed_holds_nothing_back(holding: Interruption) -> None:
    """Although the Trainer sets the handlers again that it found as it began."""
    for _ in range(2):
        holding.hold()
        found = signal.getsignal(signal.SIGTERM)
        holding.end()
        signal.signal(signal.SIGTERM, found)
    with pytest.raises(Term):
        send(signal.SIGTERM)


def test_a_second_signal_ends_the_process_even_while_the_first_is_obeyed(
    holding: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, sent = os.kill, list[Any]()
    send(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        holding.check(ALONE)
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((number, signal.getsignal(number))))
    kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert sent == [(signal.SIGTERM, signal.SIG_DFL)]


def test_what_another_handler_would_do_with_a_signal_is_left_out(holding: Interruption) -> None:
    """As Lightning's, which is set while signals are held back, and calls the handler that it found."""
    send(signal.SIGTERM)
    found = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("called"))
    holding.hold()
    with pytest.raises(SIGTERMException):
        holding.check(ALONE)
    assert signal.getsignal(signal.SIGTERM) == found
    with pytest.raises(SIGTERMException):
        holding.release()
    with pytest.raises(Term):
        send(signal.SIGTERM)
