"""A bank of probes: what they read, and the probes themselves, all trained and asked at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from probing.arms import Arm, Readings, needed
from probing.words import Place, Words

__all__ = ["Asked", "Bank", "Probes", "answers", "fresh_bank"]

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


class Probes(nn.Module, ABC):
    """The networks of a bank, one for each arm. Every parameter has the arms on its first axis.

    Args:
        arms: A of them.
        width: d, of the states.

    Attributes:
        kinds: every class of probes by its name, which is how a file refers to it.
    """

    kinds: ClassVar[dict[str, type[Probes]]] = {}

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
    def loss(self, read: Tensor, part: Any) -> Tensor:
        """Training loss of each arm, (A,)."""

    def options(self) -> dict[str, Any]:
        """The constructor's arguments after arms and width, as plain values."""
        return {}


class Bank(nn.Module):
    """Probes with what they read.

    Attributes:
        arms: A of them.
        places: L, where the states are read that it takes, in this order.

    Args:
        probes: the networks.
        places: of which those are kept that an arm reads.
    """

    def __init__(self, probes: Probes, places: Sequence[Place]) -> None:
        super().__init__()
        self.arms, self.places = probes.arms, needed(probes.arms, places)
        self.readings = Readings(self.arms, self.places, probes.width)
        self.probes = probes

    def forward(self, states: Tensor, part: Any) -> Tensor:
        """Answer: states (L, n, d) and a part of what is asked -> (A, ...)."""
        return self.probes(self.readings(states), part)

    def loss(self, states: Tensor, part: Any) -> Tensor:
        """Training loss of each arm, (A,)."""
        return self.probes.loss(self.readings(states), part)

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Number of inputs that a parameter sums over: see `make_optimizer`."""
        return parameter.shape[-2] if parameter.ndim > 2 else 1

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
    bank.readings.fit(words, bank.places)
    return bank.to(words.states.device)


@torch.no_grad()
def answers(bank: Bank, words: Words, asked: Asked) -> Iterator[tuple[Any, Tensor]]:
    """Ask a bank, some sentences at a time.

    Yields:
        A part of what is asked, and the answers (A, ...) to it.
    """
    every = asked.sentences
    for first in range(0, len(every), AT_ONCE):
        chosen = every[first : first + AT_ONCE]
        part = asked.part(words, chosen)
        yield part, bank(words.read(bank.places, chosen), part)
