"""A bank of probes: what they read, and the probes themselves, all trained and asked at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from aligners.probing.arms import Arm, Readings, needed
from aligners.probing.words import Place, Words

__all__ = ["Asked", "Bank", "Examples", "Probes", "answers", "fresh_bank", "losses"]

AT_ONCE = 128  # sentences that are asked together


class Asked(Protocol):
    """What is asked of the words of some sentences."""

    @property
    def sentences(self) -> list[int]:
        """Numbers of the sentences of which something is asked, ascending."""
        ...

    def part(self, words: Words, sentences: Sequence[int]) -> Any:
        """What is asked of some sentences, whose rows are counted from 0, one sentence after the other."""
        ...


class Examples(NamedTuple):
    """Words, and what is asked of them."""

    words: Words
    asked: Asked


class Probes(nn.Module, ABC):
    """The networks of a bank, one for each arm. Every parameter has the arms on its first axis.

    Args:
        arms: A of them.
        width: d, of the states.

    Attributes:
        kinds: every class of probes by its name, which is how a file refers to it.
        centred: whether the states that they read have a mean of zero.
    """

    kinds: ClassVar[dict[str, type[Probes]]] = {}
    centred: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Probes.kinds[cls.__name__] = cls

    def __init__(self, arms: Sequence[Arm], width: int) -> None:
        super().__init__()
        self.arms, self.width = tuple(arms), width

    @abstractmethod
    def forward(self, read: Tensor, part: Any) -> Tensor:
        """Answer what is asked: (A, n, d) and a part of `Asked` -> (A, ...)."""

    @abstractmethod
    def losses(self, read: Tensor, part: Any) -> Tensor:
        """Loss of each arm on each of the n targets or sentences that are asked, (A, n)."""

    def options(self) -> dict[str, Any]:
        """The constructor's arguments after arms and width, as plain values."""
        return {}


class Bank(nn.Module):
    """Probes with what they read.

    Attributes:
        arms: A of them.
        places: L, where the states are read that it takes, in this order.
        unfinished: those of its arms that were still learning when their training reached its limit.

    Args:
        probes: the networks.
        places: of which those are kept that an arm reads.
    """

    def __init__(self, probes: Probes, places: Sequence[Place]) -> None:
        super().__init__()
        self.arms, self.places = probes.arms, needed(probes.arms, places)
        self.readings = Readings(self.arms, self.places, probes.width)
        self.probes = probes
        self.unfinished: list[Arm] = []

    def forward(self, states: Tensor, part: Any) -> Tensor:
        """Answer: states (L, n, d) and a part of what is asked -> (A, ...)."""
        return self.probes(self.readings(states), part)

    def losses(self, states: Tensor, part: Any) -> Tensor:
        """Loss of each arm on each of the n targets or sentences that are asked, (A, n)."""
        return self.probes.losses(self.readings(states), part)

    def only(self, chosen: Sequence[int]) -> Bank:
        """Some of the arms, as a bank of their own."""
        probes = type(self.probes)([self.arms[a] for a in chosen], self.probes.width, **self.probes.options())
        bank = Bank(probes, self.places)
        kept = [self.places.index(place) for place in bank.places]
        state = {}
        for name, value in self.state_dict().items():
            per_place = name in ("readings.mean", "readings.scale")
            state[name] = value[kept] if per_place else value[list(chosen)]
        state["readings.mix"] = state["readings.mix"][:, kept]
        bank.load_state_dict(state)
        return bank.to(self.readings.mean.device).eval().requires_grad_(False)


def fresh_bank(kind: type[Probes], arms: Sequence[Arm], words: Words, seed: int, **options: Any) -> Bank:
    """Make an untrained bank.

    Args:
        kind: of probes.
        arms: what they read.
        words: whose states they are to be trained on; centre and scale are theirs.
        seed: of the weights. No other random number is affected.
        options: of the probes.

    Raises:
        ValueError: an arm has nothing to read among the words' places; or as the probes do.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        bank = Bank(kind(arms, words.states.shape[-1], **options), words.places)
    bank.readings.fit(words, bank.places, centred=kind.centred)
    return bank.to(words.states.device)


@torch.no_grad()
def answers(bank: Bank, words: Words, asked: Asked) -> Iterator[tuple[Any, Tensor]]:
    """Ask a bank, some sentences at a time.

    Yields:
        A part of what is asked, and the answers (A, ...) to it.
    """
    for states, part in _parts(bank, words, asked):
        yield part, bank(states, part)


@torch.no_grad()
def losses(bank: Bank, examples: Examples) -> Tensor:
    """Mean loss of each arm over all that is asked, (A,)."""
    return torch.cat([bank.losses(states, part) for states, part in _parts(bank, *examples)], 1).mean(1)


def _parts(bank: Bank, words: Words, asked: Asked) -> Iterator[tuple[Tensor, Any]]:
    every = asked.sentences
    for first in range(0, len(every), AT_ONCE):
        chosen = every[first : first + AT_ONCE]
        yield words.read(bank.places, chosen), asked.part(words, chosen)
