import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.interruption import Interruption
from tests.runs import quiet_trainer


class Term(Exception):
    """Raised by the handler of before."""


@pytest.fixture
def trainer() -> Iterator[pl.Trainer]:
    """A Trainer, while SIGTERM has a handler of its own."""

    def handle(*_: object) -> None:
        raise Term

    before = signal.signal(signal.SIGTERM, handle)
    yield quiet_trainer()
    signal.signal(signal.SIGTERM, before)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "error", "before"),
    [(signal.SIGINT, KeyboardInterrupt, KeyboardInterrupt), (signal.SIGTERM, SIGTERMException, Term)],
)
def test_a_signal_is_held_back_until_it_is_asked_for(
    trainer: pl.Trainer, number: signal.Signals, error: type[BaseException], before: type[BaseException]
) -> None:
    interruption = Interruption()
    interruption.hold()
    interruption.check(trainer)
    send(number)
    with pytest.raises(error):
        interruption.check(trainer)
    interruption.end()
    with pytest.raises(before):
        send(number)


def test_a_run_that_failed_holds_nothing_back(trainer: pl.Trainer) -> None:
    """Although the Trainer sets the handlers again that it found as it began."""
    interruption = Interruption()
    for _ in range(2):
        interruption.hold()
        found = signal.getsignal(signal.SIGTERM)
        interruption.end()
        signal.signal(signal.SIGTERM, found)
    with pytest.raises(Term):
        send(signal.SIGTERM)


def test_a_second_signal_ends_the_process_even_while_the_first_is_obeyed(
    trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruption, kill = Interruption(), os.kill
    sent: list[Any] = []
    interruption.hold()
    send(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        interruption.check(trainer)
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((number, signal.getsignal(number))))
    kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert sent == [(signal.SIGTERM, signal.SIG_DFL)]


def test_what_another_handler_would_do_with_a_signal_is_left_out(trainer: pl.Trainer) -> None:
    """As Lightning's, which is set while signals are held back, and calls the handler that it found."""
    interruption = Interruption()
    interruption.hold()
    send(signal.SIGTERM)
    found = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("called"))
    interruption.hold()
    with pytest.raises(SIGTERMException):
        interruption.check(trainer)
    assert signal.getsignal(signal.SIGTERM) == found
    with pytest.raises(SIGTERMException):
        interruption.release()
    with pytest.raises(Term):
        send(signal.SIGTERM)
