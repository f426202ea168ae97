"""A bank of probes, all trained and asked at once, and the words that they read, with their states in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.errors import UserError

Source = Literal["model", "untrained"]


class ModelLayer(NamedTuple):
    """Where states were read.

    Attributes:
        source: the model, or its untrained twin.
        layer: its number.
    """

    source: Source
    layer: int


class Arm(NamedTuple):
    """One probe of a bank.

    Attributes:
        source: the model, or its untrained twin.
        layer: that it reads; None: a learned mix of all.
        control: whether it is asked the control task.
        rank: of a structural probe; None: the usual one of the bank.
    """

    source: Source
    layer: int | None
    control: bool = False
    rank: int | None = None

    def reads(self, place: ModelLayer) -> bool:
        """Whether it reads what was read at a place."""
        return place.source == self.source and self.layer in (None, place.layer)


@dataclass(frozen=True)
class Words:
    """B sentences with a row of states for each of their N words.

    Attributes:
        states: (L, N, d) float32.
        places: where each of the L was read.
        sentences: in the order of their rows.
        first: (B + 1,) on the CPU: the row of each sentence's first word; the last entry is N.
        cut: sentences that were left out, because the model does not read all of their words.
    """

    states: Tensor
    places: tuple[ModelLayer, ...]
    sentences: Sequence[Sentence]
    first: Tensor
    cut: int = 0

    def rows(self, sentences: Sequence[int]) -> Tensor:
        """The rows of some sentences, one after the other, on the CPU."""
        return numbers_within(self.first, sentences)

    def starts(self, sentences: Sequence[int]) -> Tensor:
        """The place of the first word of each of some sentences among the `rows` of these, (b,)."""
        lengths = self.first.diff()[list(sentences)]
        return lengths.cumsum(0) - lengths

    def read(self, places: Sequence[ModelLayer], sentences: Sequence[int]) -> Tensor:
        """The states of some sentences at some places: (L', n, d).

        Raises:
            ValueError: nothing was read at a place.
        """
        missing = [place for place in places if place not in self.places]
        if missing:
            raise UserError(
                f"Expected states that were read at layer {missing[0].layer} of the {missing[0].source}, but got "
                f"{len(self.places)} other places."
            )
        where = torch.tensor([self.places.index(place) for place in places])
        rows, device = self.rows(sentences), self.states.device
        return self.states[where[:, None].to(device), rows.to(device)]


def numbers_within(first: Tensor, chosen: Sequence[int]) -> Tensor:
    """The numbers first[c], ..., first[c + 1] - 1 of each c that is chosen, one after the other."""
    wanted = torch.as_tensor(chosen, dtype=torch.int64)
    lengths = first[wanted + 1] - first[wanted]
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + (first[wanted] - ends + lengths).repeat_interleave(lengths)


@dataclass
class WordsBeingRead:
    """Collects batches.

    Attributes:
        sentences: of the split, by the numbers of its texts.
        places: where states are read.
    """

    sentences: Sequence[Sentence]
    places: tuple[ModelLayer, ...]
    _parts: list[tuple[int, Tensor]] = field(default_factory=list)
    _cut: list[int] = field(default_factory=list)

    def add(self, numbers: Sequence[int], counts: Sequence[int], states: Tensor) -> None:
        """Add the sentences of a batch that were read whole.

        Args:
            numbers: of its texts.
            counts: rows of each, which are words.
            states: (L, n, d) of its rows.
        """
        for number, part in zip(numbers, states.split(counts, 1), strict=True):
            if part.shape[1] == len(self.sentences[number].words):
                self._parts.append((number, part.float()))
            else:
                self._cut.append(number)

    def whole(self, *, drop: bool = True) -> Words:
        """All of them, in the order of the texts, however they were batched.

        Args:
            drop: whether sentences that the model does not read whole may be left out.

        Raises:
            ValueError: no sentence was read whole, or one was not that must be.
        """
        if self._cut and not drop:
            begins = " ".join(self.sentences[self._cut[0]].words[:5])
            raise UserError(
                f"Expected sentences that every model reads whole, but {len(self._cut)} are not, such as {begins!r}. "
                "Raise `data.max_length`, or leave them out with `long_sentences` drop."
            )
        if not self._parts:
            raise UserError(
                f"Expected sentences that every model reads whole, but none of {len(self._cut)} is. Raise "
                "`data.max_length`, or give shorter sentences."
            )
        parts = sorted(self._parts, key=lambda part: part[0])
        lengths = torch.tensor([0, *(part.shape[1] for _, part in parts)])
        states = torch.cat([part for _, part in parts], 1)
        self._parts = []
        sentences = [self.sentences[number] for number, _ in parts]
        return Words(states, self.places, sentences, lengths.cumsum(0), len(self._cut))


AT_ONCE = 128  # sentences that are read together


class Examples:
    """Words with their annotations.

    Args:
        words: with their states.
        annotations: labels or trees. They have `sentences`, the numbers of those that have any, ascending; and
            `part`: those of some sentences, whose rows are counted from 0, one sentence after the other.
        sentences: numbers of those that are taken; default: all that are annotated.
    """

    def __init__(self, words: Words, annotations: Any, sentences: list[int] | None = None) -> None:
        self.words, self.annotations = words, annotations
        self.sentences = annotations.sentences if sentences is None else sentences

    def batch(self, places: Sequence[ModelLayer], sentences: Sequence[int]) -> tuple[Tensor, Any]:
        """States (L, n, d) and annotations of some sentences."""
        return self.words.read(places, sentences), self.annotations.part(self.words, sentences)

    def batches(self, places: Sequence[ModelLayer]) -> Iterator[tuple[Tensor, Any]]:
        """All of them, in order, `AT_ONCE` sentences at a time."""
        for first in range(0, len(self.sentences), AT_ONCE):
            yield self.batch(places, self.sentences[first : first + AT_ONCE])


class Probes(nn.Module):
    """The networks of a bank, one for each arm. Every parameter has the arms on its first axis.

    A subclass has `forward`, from what is read, (A, n, d), and the annotations of some sentences to answers, (A, ...);
    and `losses`, likewise to the loss of each arm on each of the n targets or sentences, (A, n).

    Args:
        arms: A of them.
        width: d, of the states.

    Attributes:
        centred: whether the states that they read have a mean of zero.
    """

    centred: ClassVar[bool] = True
    losses: Callable[[Tensor, Any], Tensor]

    def __init__(self, arms: Sequence[Arm], width: int) -> None:
        super().__init__()
        self.arms, self.width = tuple(arms), width

    def options(self) -> dict[str, Any]:
        """The constructor's arguments after arms and width, as plain values; attributes have their names."""
        return {name: getattr(self, name) for name in list(signature(type(self)).parameters)[2:]}


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

    def __init__(self, probes: Probes, places: Sequence[ModelLayer]) -> None:
        super().__init__()
        self.arms, self.places = probes.arms, needed(probes.arms, places)
        self.readings = ArmInputs(self.arms, self.places, probes.width)
        self.probes = probes
        self.unfinished: list[Arm] = []

    def forward(self, states: Tensor, part: Any) -> Tensor:
        """Answers: states (L, n, d) and the annotations of some sentences -> (A, ...)."""
        return self.probes(self.readings(states), part)

    def losses(self, states: Tensor, part: Any) -> Tensor:
        """Loss of each arm on each of the n targets or sentences, (A, n)."""
        return self.probes.losses(self.readings(states), part)

    def only(self, chosen: Sequence[int]) -> Self:
        """Some of the arms, as a bank of their own."""
        probes = type(self.probes)(
            [self.arms[a] for a in chosen], self.probes.width, **self.probes.options()
        )
        bank = type(self)(probes, self.places)
        indices = [self.places.index(place) for place in bank.places]
        state = {}
        for name, value in self.state_dict().items():
            per_place = name in ("readings.mean", "readings.scale")
            state[name] = value[indices] if per_place else value[list(chosen)]
        state["readings.mix"] = state["readings.mix"][:, indices]
        bank.load_state_dict(state)
        return bank.to(self.readings.mean.device).eval().requires_grad_(False)


def fresh_bank(
    kind: type[Probes], arms: Sequence[Arm], words: Words, seed: int, **options: Any
) -> Bank:
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
def answers(bank: Bank, examples: Examples) -> Iterator[tuple[Any, Tensor]]:
    """Yield the annotations of some sentences at a time, and what a bank answers, (A, ...)."""
    for states, part in examples.batches(bank.places):
        yield part, bank(states, part)


@torch.no_grad()
def losses(bank: Bank, examples: Examples) -> Tensor:
    """Mean loss of each arm over all targets or sentences, (A,)."""
    return torch.cat(
        [bank.losses(states, part) for states, part in examples.batches(bank.places)], 1
    ).mean(1)


QUICKER = 10  # how much faster than other parameters the weights of a mix learn: they have far to go in few steps


def needed(arms: Sequence[Arm], places: Sequence[ModelLayer]) -> tuple[ModelLayer, ...]:
    """The places that any arm reads.

    Raises:
        ValueError: an arm has nothing to read.
    """
    for arm in arms:
        if not any(map(arm.reads, places)):
            raise UserError(
                f"Expected a place that {arm} reads, but got {', '.join(map(str, places)) or 'none'}."
            )
    return tuple(place for place in places if any(arm.reads(place) for arm in arms))


class ArmInputs(nn.Module):
    """What the arms of a bank read: each a layer at unit scale, mostly centred, or a learned mix of such layers.

    The mix is γ Σ_l softmax(a)_l h_l. One number scales a layer, so that one learning rate suits all layers and
    widths.

    Args:
        arms: A, of the bank.
        places: L, of what is read.
        width: d.

    References:
        Peters et al. 2018, "Deep contextualized word representations", eq. 1; Tenney et al. 2019, "What do you learn
        from context?", §3.2.
    """

    mean: Tensor
    scale: Tensor
    read: Tensor
    mixed: Tensor

    def __init__(self, arms: Sequence[Arm], places: Sequence[ModelLayer], width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(places), 1, width))
        self.register_buffer("scale", torch.ones(len(places), 1, 1))
        read = torch.tensor([[arm.reads(place) for place in places] for arm in arms])
        self.register_buffer("read", read, persistent=False)
        self.register_buffer(
            "mixed", torch.tensor([[arm.layer is None] for arm in arms]), persistent=False
        )
        self.mix = nn.Parameter(torch.zeros(len(arms), len(places)))
        self.gamma = nn.Parameter(torch.ones(len(arms), 1))

    def fit(self, words: Words, places: Sequence[ModelLayer], *, centred: bool) -> None:
        """Take scales, and centres if they are wanted, from words, in double precision."""
        for number, place in enumerate(places):
            states = words.states[words.places.index(place)].double()
            mean = states.mean(0, keepdim=True)
            self.mean[number] = mean if centred else 0
            self.scale[number] = (states - mean).square().mean().sqrt().clamp(min=1e-12)

    def weights(self) -> Tensor:
        """How much of each place each arm reads, (A, L), adding up to 1."""
        return (QUICKER * self.mix).masked_fill(~self.read, -torch.inf).softmax(-1)

    def forward(self, states: Tensor) -> Tensor:
        """(L, n, d) -> (A, n, d)."""
        gamma = self.gamma.where(self.mixed, 1)
        return torch.einsum(
            "al,lnd->and", self.weights() * gamma, (states - self.mean) / self.scale
        )
