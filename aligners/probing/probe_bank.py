"""A bank of probes that are trained and applied at once, and the words that they read, with their states in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.errors import UserError

Source = Literal["model", "untrained"]
MIX_SPEED = (
    10  # the weights of a mix learn ten times faster: they have far to go in few steps
)
AT_ONCE = 128  # sentences that are read together


class ModelLayer(NamedTuple):
    """Where states were read.

    Attributes:
        source: the model, or its untrained twin.
        layer: its number.
    """

    source: Source
    layer: int


class Variant(NamedTuple):
    """One probe of a bank: which states it reads, and what it is trained on.

    Attributes:
        source: the model, or its untrained twin.
        layer: that it reads; None: a learned mix of all layers.
        control: whether it is trained on the control task.
        rank: of a structural probe; None: the usual one of the bank.
    """

    source: Source
    layer: int | None
    control: bool = False
    rank: int | None = None

    def reads(self, place: ModelLayer) -> bool:
        """Whether it reads the states of a place."""
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
        """Where each of some sentences starts among the `rows` of these, (b,)."""
        lengths = self.first.diff()[list(sentences)]
        return lengths.cumsum(0) - lengths

    def read(self, places: Sequence[ModelLayer], sentences: Sequence[int]) -> Tensor:
        """The states of some sentences at some places: (L', n, d).

        Raises:
            ValueError: nothing was read at a place.
        """
        for place in places:
            if place not in self.places:
                raise UserError(
                    f"Expected states of layer {place.layer} of the {place.source}, but got those "
                    f"of {len(self.places)} other places."
                )

        device = self.states.device
        numbers = torch.tensor(
            [self.places.index(place) for place in places], device=device
        )
        rows = self.rows(sentences).to(device)
        return self.states[numbers[:, None], rows]


def numbers_within(first: Tensor, chosen: Sequence[int]) -> Tensor:
    """The numbers first[c], ..., first[c + 1] - 1 of each chosen c, one after the other."""
    wanted = torch.as_tensor(chosen, dtype=torch.int64)
    begins = first[wanted]
    lengths = first[wanted + 1] - begins
    ends = lengths.cumsum(0)
    shifts = begins - (ends - lengths)
    return torch.arange(int(ends[-1])) + shifts.repeat_interleave(lengths)


@dataclass
class WordsBeingRead:
    """Collects the words of a split, batch by batch.

    Attributes:
        sentences: of the split, by the numbers of its texts.
        places: where states are read.
    """

    sentences: Sequence[Sentence]
    places: tuple[ModelLayer, ...]
    _parts: list[tuple[int, Tensor]] = field(default_factory=list)
    _cut: list[int] = field(default_factory=list)

    def add(
        self, numbers: Sequence[int], counts: Sequence[int], states: Tensor
    ) -> None:
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
            ValueError: no sentence was read whole, or one was not and `drop` is false.
        """
        expected = "Expected sentences that every model reads whole"
        if self._cut and not drop:
            begins = " ".join(self.sentences[self._cut[0]].words[:5])
            raise UserError(
                f"{expected}, but {len(self._cut)} are not, such as {begins!r}. "
                "Raise `data.max_length`, or leave them out with `long_sentences` drop."
            )
        if not self._parts:
            raise UserError(
                f"{expected}, but none of {len(self._cut)} is. "
                "Raise `data.max_length`, or give shorter sentences."
            )

        self._parts.sort(key=lambda part: part[0])
        sentences, states, first = [], [], [0]
        for number, part in self._parts:
            sentences.append(self.sentences[number])
            states.append(part)
            first.append(first[-1] + part.shape[1])
        self._parts = []
        joined = torch.cat(states, 1)
        return Words(
            joined, self.places, sentences, torch.tensor(first), len(self._cut)
        )


class Examples:
    """Words with their annotations.

    Args:
        words: with their states.
        annotations: labels or trees. They have `sentences`, the numbers of those that have any, ascending; and
            `part`: those of some sentences, whose rows are counted from 0, one sentence after the other.
        sentences: numbers of those that are taken; default: all that are annotated.
    """

    def __init__(
        self, words: Words, annotations: Any, sentences: list[int] | None = None
    ) -> None:
        self.words = words
        self.annotations = annotations
        self.sentences = annotations.sentences if sentences is None else sentences

    def batch(
        self, places: Sequence[ModelLayer], sentences: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """States (L, n, d) and annotations of some sentences."""
        return self.words.read(places, sentences), self.annotations.part(
            self.words, sentences
        )

    def batches(self, places: Sequence[ModelLayer]) -> Iterator[tuple[Tensor, Any]]:
        """All of them, in order, `AT_ONCE` sentences at a time."""
        for first in range(0, len(self.sentences), AT_ONCE):
            yield self.batch(places, self.sentences[first : first + AT_ONCE])


class Probes(nn.Module):
    """The networks of a bank, one for each variant. Every parameter has the variants on its first axis.

    A subclass has `forward`, from the states that are read, (A, n, d), and the annotations of some sentences to
    answers, (A, ...); and `losses`, likewise to the loss of each variant on each of the n targets or sentences, (A, n).

    Args:
        variants: A of them.
        width: d, of the states.

    Attributes:
        centred: whether the states that they read have a mean of zero.
    """

    centred: ClassVar[bool] = True
    losses: Callable[[Tensor, Any], Tensor]

    def __init__(self, variants: Sequence[Variant], width: int) -> None:
        super().__init__()
        self.variants = tuple(variants)
        self.width = width

    def options(self) -> dict[str, Any]:
        """The constructor's arguments after variants and width, as plain values; attributes have their names."""
        names = list(signature(type(self)).parameters)[2:]
        return {name: getattr(self, name) for name in names}


class Bank(nn.Module):
    """Probes with what they read.

    Attributes:
        variants: A of them.
        places: L, where the states that it takes are read, in this order.
        unfinished: the variants that were still learning when training reached its limit.

    Args:
        probes: the networks.
        places: of these, the ones that a variant reads are kept.
    """

    def __init__(self, probes: Probes, places: Sequence[ModelLayer]) -> None:
        super().__init__()
        self.variants = probes.variants
        self.places = needed(probes.variants, places)
        self.readings = Readings(self.variants, self.places, probes.width)
        self.probes = probes
        self.unfinished: list[Variant] = []

    def forward(self, states: Tensor, part: Any) -> Tensor:
        """Answers: states (L, n, d) and the annotations of some sentences -> (A, ...)."""
        return self.probes(self.readings(states), part)

    def losses(self, states: Tensor, part: Any) -> Tensor:
        """Loss of each variant on each of the n targets or sentences, (A, n)."""
        return self.probes.losses(self.readings(states), part)

    def only(self, chosen: Sequence[int]) -> Self:
        """Some of the variants, as a bank of their own."""
        variants = [self.variants[a] for a in chosen]
        probes = type(self.probes)(variants, self.probes.width, **self.probes.options())
        bank = type(self)(probes, self.places)

        places = [self.places.index(place) for place in bank.places]
        state = {}
        for name, value in self.state_dict().items():
            if name in ("readings.mean", "readings.scale"):
                state[name] = value[places]
            elif name == "readings.mix":
                state[name] = value[list(chosen)][:, places]
            else:
                state[name] = value[list(chosen)]
        bank.load_state_dict(state)
        return bank.to(self.readings.mean.device).eval().requires_grad_(False)


def fresh_bank(
    kind: type[Probes],
    variants: Sequence[Variant],
    words: Words,
    seed: int,
    **options: Any,
) -> Bank:
    """Make an untrained bank.

    Args:
        kind: of probes.
        variants: what they read.
        words: whose states they are to be trained on; centre and scale are theirs.
        seed: of the weights. No other random number is affected.
        options: of the probes.

    Raises:
        ValueError: a variant has nothing to read among the words' places; or as the probes do.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        probes = kind(variants, words.states.shape[-1], **options)
        bank = Bank(probes, words.places)
    bank.readings.fit(words, bank.places, centred=kind.centred)
    return bank.to(words.states.device)


@torch.no_grad()
def answers(bank: Bank, examples: Examples) -> Iterator[tuple[Any, Tensor]]:
    """Yield the annotations of some sentences at a time, and what a bank answers, (A, ...)."""
    for states, part in examples.batches(bank.places):
        yield part, bank(states, part)


@torch.no_grad()
def losses(bank: Bank, examples: Examples) -> Tensor:
    """Mean loss of each variant over all targets or sentences, (A,)."""
    parts = [
        bank.losses(states, part) for states, part in examples.batches(bank.places)
    ]
    return torch.cat(parts, 1).mean(1)


def needed(
    variants: Sequence[Variant], places: Sequence[ModelLayer]
) -> tuple[ModelLayer, ...]:
    """The places that any variant reads.

    Raises:
        ValueError: a variant has nothing to read.
    """
    read = set[ModelLayer]()
    for variant in variants:
        own = [place for place in places if variant.reads(place)]
        if not own:
            known = ", ".join(map(str, places)) or "none"
            raise UserError(f"Expected a place that {variant} reads, but got {known}.")
        read.update(own)
    return tuple(place for place in places if place in read)


class Readings(nn.Module):
    """What the variants of a bank read: each a layer at unit scale, mostly centred, or a learned mix of such layers.

    The mix is γ Σ_l softmax(a)_l h_l. One number scales a layer, so that one learning rate suits all layers and
    widths.

    Args:
        variants: A, of the bank.
        places: L, of the states.
        width: d.

    References:
        Peters et al. 2018, "Deep contextualized word representations", eq. 1; Tenney et al. 2019, "What do you learn
        from context?", §3.2.
    """

    mean: Tensor
    scale: Tensor
    read: Tensor
    mixed: Tensor

    def __init__(
        self, variants: Sequence[Variant], places: Sequence[ModelLayer], width: int
    ) -> None:
        super().__init__()
        read = torch.zeros(len(variants), len(places), dtype=torch.bool)
        mixed = torch.zeros(len(variants), 1, dtype=torch.bool)
        for a, variant in enumerate(variants):
            read[a] = torch.tensor([variant.reads(place) for place in places])
            mixed[a] = variant.layer is None
        self.register_buffer("mean", torch.zeros(len(places), 1, width))
        self.register_buffer("scale", torch.ones(len(places), 1, 1))
        self.register_buffer("read", read, persistent=False)
        self.register_buffer("mixed", mixed, persistent=False)
        self.mix = nn.Parameter(torch.zeros(len(variants), len(places)))
        self.gamma = nn.Parameter(torch.ones(len(variants), 1))

    def fit(self, words: Words, places: Sequence[ModelLayer], *, centred: bool) -> None:
        """Take scales, and centres if they are wanted, from words, in double precision."""
        for number, place in enumerate(places):
            states = words.states[words.places.index(place)].double()
            mean = states.mean(0, keepdim=True)
            if centred:
                self.mean[number] = mean
            else:
                self.mean[number] = 0
            variance = (states - mean).square().mean()
            self.scale[number] = variance.sqrt().clamp(min=1e-12)

    def weights(self) -> Tensor:
        """How much of each place each variant reads, (A, L), adding up to 1."""
        logits = (MIX_SPEED * self.mix).masked_fill(~self.read, -torch.inf)
        return logits.softmax(-1)

    def forward(self, states: Tensor) -> Tensor:
        """(L, n, d) -> (A, n, d)."""
        weights = self.weights() * self.gamma.where(self.mixed, 1)
        scaled = (states - self.mean) / self.scale
        return torch.einsum("al,lnd->and", weights, scaled)
