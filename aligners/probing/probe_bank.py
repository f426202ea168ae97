"""Banks of probes that are trained and applied together, and the words that they read, with the states in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.errors import UserError

Source = Literal["model", "untrained"]
Numbers = Sequence[int]
MIX_SPEED = (
    10  # the weights of a mix must change a lot in few steps, so they learn faster
)
AT_ONCE = 128  # sentences that are read together
BY_PLACE = ("readings.mean", "readings.scale")  # tensors with an entry for each place
MIX = "readings.mix"  # the tensor with an entry for each variant and place


class ModelLayer(NamedTuple):
    """A place where states were read.

    Attributes:
        source: the model, or its untrained twin.
        layer: number of the layer.
    """

    source: Source
    layer: int


class Variant(NamedTuple):
    """One probe of a bank: the states that it reads, and what it is trained on.

    Attributes:
        source: the model, or its untrained twin.
        layer: the layer that it reads; None: a learned mix of all layers.
        control: whether it is trained on the control task.
        rank: rank of a structural probe; None: the bank's usual one.
    """

    source: Source
    layer: int | None
    control: bool = False
    rank: int | None = None

    def reads(self, place: ModelLayer) -> bool:
        """Tell whether it reads the states of a place."""
        if place.source != self.source:
            return False
        return self.layer in (None, place.layer)


Places = Sequence[ModelLayer]
Variants = Sequence[Variant]


@dataclass(frozen=True)
class Words:
    """B sentences with a row of states for each of their N words.

    Attributes:
        states: (L, N, d) float32.
        places: place at which each of the L was read.
        sentences: sentences in the order of their rows.
        first: (B + 1,) on the CPU: the first row of each sentence; the last entry is N.
        cut: number of sentences that were left out, because the model does not read all of their words.
    """

    states: Tensor
    places: Places
    sentences: Sequence[Sentence]
    first: Tensor
    cut: int = 0

    def rows(self, sentences: Numbers) -> Tensor:
        """Return the rows of some sentences, one after the other, on the CPU."""
        return numbers_within(self.first, sentences)

    def starts(self, sentences: Numbers) -> Tensor:
        """Return the start of each sentence among the `rows` of these sentences, (b,)."""
        every = self.first.diff()
        lengths = every[list(sentences)]
        return lengths.cumsum(0) - lengths

    def numbers(self, layers: Numbers) -> list[int]:
        """Return the numbers, among the places, of some of the model's layers."""
        return [self.places.index(ModelLayer("model", layer)) for layer in layers]

    def read(self, places: Places, sentences: Numbers) -> Tensor:
        """Return the states of some sentences at some places: (L', n, d).

        Raises:
            ValueError: nothing was read at one of the places.
        """
        numbers = []
        for place in places:
            if place not in self.places:
                raise UserError(
                    f"Expected states of layer {place.layer} of the {place.source}, but only {len(self.places)} "
                    "other places were read."
                )
            numbers.append(self.places.index(place))

        device = self.states.device
        layers = torch.tensor(numbers, device=device)
        rows = self.rows(sentences).to(device)
        return self.states[layers[:, None], rows]


def numbers_within(first: Tensor, chosen: Numbers) -> Tensor:
    """Return the numbers first[c], ..., first[c + 1] - 1 of each chosen c, one after the other."""
    wanted = torch.as_tensor(chosen, dtype=torch.int64)
    begins = first[wanted]
    lengths = first[wanted + 1] - begins
    ends = lengths.cumsum(0)
    total = int(ends[-1])

    shifts = begins - (ends - lengths)
    shift_of_each = shifts.repeat_interleave(lengths)
    return torch.arange(total) + shift_of_each


class WordsBeingRead:
    """Collects the words of a split, batch by batch.

    Args:
        sentences: all sentences of the split, by the numbers of its texts.
        places: places where states are read.
    """

    def __init__(self, sentences: Sequence[Sentence], places: Places) -> None:
        self.sentences = sentences
        self.places = places
        self._parts = dict[int, Tensor]()
        self._cut = list[int]()

    def add(self, numbers: Numbers, counts: Numbers, states: Tensor) -> None:
        """Add those sentences of a batch that were read whole.

        Args:
            numbers: numbers of the batch's texts.
            counts: number of rows, that is, of words, of each text.
            states: (L, n, d) of all rows.
        """
        parts = states.split(counts, 1)
        for number, part in zip(numbers, parts, strict=True):
            words = self.sentences[number].words
            read = part.shape[1]
            if read == len(words):
                self._parts[number] = part.float()
            else:
                self._cut.append(number)

    def whole(self, *, drop: bool = True) -> Words:
        """Return all words that were read, in the order of the texts, however they were batched.

        Args:
            drop: whether to leave out sentences that the model does not read whole.

        Raises:
            ValueError: no sentence was read whole, or one was not and `drop` is false.
        """
        self._check(drop)
        sentences = []
        states = []
        first = [0]
        for number in sorted(self._parts):
            sentence = self.sentences[number]
            sentences.append(sentence)
            states.append(self._parts[number])
            first.append(first[-1] + len(sentence.words))
        self._parts.clear()
        return Words(
            states=torch.cat(states, 1),
            places=self.places,
            sentences=sentences,
            first=torch.tensor(first),
            cut=len(self._cut),
        )

    def _check(self, drop: bool) -> None:
        """Raise if no sentence was read whole, or one was not and must not be dropped."""
        expected = "Expected sentences that every model reads whole"
        if self._cut and not drop:
            cut = self.sentences[self._cut[0]]
            begins = " ".join(cut.words[:5])
            raise UserError(
                f"{expected}, but {len(self._cut)} are not, such as {begins!r}. "
                "Raise `data.max_length`, or leave them out with `long_sentences` drop."
            )
        if not self._parts:
            raise UserError(
                f"{expected}, but none of {len(self._cut)} is. "
                "Raise `data.max_length`, or give shorter sentences."
            )


class Examples:
    """Words with their annotations.

    Args:
        words: words with their states.
        annotations: labels or trees. `sentences` are the numbers of the annotated sentences, in ascending order; `part`
            returns the annotations of some of them, with rows counted from 0, one sentence after the other.
        sentences: numbers of the sentences to use; default: all annotated ones.
    """

    def __init__(
        self, words: Words, annotations: Any, sentences: list[int] | None = None
    ) -> None:
        self.words = words
        self.annotations = annotations
        if sentences is None:
            sentences = annotations.sentences
        self.sentences = sentences

    def batch(self, places: Places, sentences: Numbers) -> tuple[Tensor, Any]:
        """Return states (L, n, d) and annotations of some sentences."""
        states = self.words.read(places, sentences)
        part = self.annotations.part(self.words, sentences)
        return states, part

    def batches(self, places: Places) -> Iterator[tuple[Tensor, Any]]:
        """Yield all sentences in order, `AT_ONCE` at a time."""
        count = len(self.sentences)
        for first in range(0, count, AT_ONCE):
            chosen = self.sentences[first : first + AT_ONCE]
            yield self.batch(places, chosen)


class Probes(nn.Module):
    """The networks of a bank, one for each variant. The first axis of every parameter is that of the variants.

    A subclass has `forward`, which takes states, (A, n, d), and annotations of some sentences, and returns answers, (A,
    ...). It also has `losses`, which takes the same and returns the loss of each variant on each of the n targets or
    sentences, (A, n).

    Args:
        variants: the A variants.
        width: d, the width of the states.

    Attributes:
        centred: whether the states are centred.
    """

    centred: ClassVar[bool] = True
    losses: Callable[[Tensor, Any], Tensor]

    def __init__(self, variants: Variants, width: int) -> None:
        super().__init__()
        self.variants = tuple(variants)
        self.width = width

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments after variants and width, as plain values; each is also an attribute."""
        parameters = list(signature(type(self)).parameters)
        names = parameters[2:]
        return {name: getattr(self, name) for name in names}


class Bank(nn.Module):
    """Probes, with the states that they read.

    Args:
        probes: the networks.
        places: the L places of the states that it takes, in this order.

    Attributes:
        variants: the A variants.
        places: the L places of the states that it takes, in this order.
        unfinished: variants that were still learning when training reached its limit.
    """

    def __init__(self, probes: Probes, places: Places) -> None:
        super().__init__()
        self.variants = probes.variants
        self.places = needed(probes.variants, places)
        self.readings = Readings(self.variants, self.places, probes.width)
        self.probes = probes
        self.unfinished: list[Variant] = []

    def forward(self, states: Tensor, part: Any) -> Tensor:
        """Return the answers: states (L, n, d) and the annotations of some sentences -> (A, ...)."""
        read = self.readings(states)
        return self.probes(read, part)

    def losses(self, states: Tensor, part: Any) -> Tensor:
        """Return the loss of each variant on each of the n targets or sentences, (A, n)."""
        read = self.readings(states)
        return self.probes.losses(read, part)

    def only(self, chosen: Numbers) -> Self:
        """Return some of the variants, as a separate bank."""
        variants = [self.variants[a] for a in chosen]
        kind = type(self.probes)
        options = self.probes.options()
        probes = kind(variants, self.probes.width, **options)
        bank = type(self)(probes, self.places)

        places = [self.places.index(place) for place in bank.places]
        state = {}
        for name, value in self.state_dict().items():
            if name in BY_PLACE:
                state[name] = value[places]
            else:
                state[name] = value[list(chosen)]

        mix = state[MIX]
        state[MIX] = mix[:, places]
        bank.load_state_dict(state)
        bank.to(self.readings.mean.device)
        return bank.eval().requires_grad_(False)


def fresh_bank(
    kind: type[Probes], variants: Variants, words: Words, seed: int, **options: Any
) -> Bank:
    """Make an untrained bank.

    Args:
        kind: class of the probes.
        variants: what they read.
        words: the words that they will be trained on, which determine centre and scale.
        seed: seed of the weights. No other random number is affected.
        options: options of the probes.

    Raises:
        ValueError: a variant has nothing to read among the words' places; or the probes refuse their options.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        width = words.states.shape[-1]
        probes = kind(variants, width, **options)
        bank = Bank(probes, words.places)
    bank.readings.fit(words, bank.places, centred=kind.centred)
    return bank.to(words.states.device)


@torch.no_grad()
def answers(bank: Bank, examples: Examples) -> Iterator[tuple[Any, Tensor]]:
    """Yield annotations, some sentences at a time, with a bank's answers, (A, ...)."""
    for states, part in examples.batches(bank.places):
        yield part, bank(states, part)


@torch.no_grad()
def losses(bank: Bank, examples: Examples) -> Tensor:
    """Return the mean loss of each variant over all targets or sentences, (A,)."""
    parts = []
    for states, part in examples.batches(bank.places):
        parts.append(bank.losses(states, part))
    of_all = torch.cat(parts, 1)
    return of_all.mean(1)


def needed(variants: Variants, places: Places) -> Places:
    """Return the places that at least one variant reads.

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
    """The input of a bank's variants: one layer at unit scale, usually centred, or a learned mix of such layers.

    The mix is γ Σ_l softmax(a)_l h_l. Each layer is scaled by one number, so that one learning rate suits all layers
    and widths.

    Args:
        variants: the A variants of the bank.
        places: the L places of the states.
        width: d.

    References:
        Peters et al. 2018, "Deep contextualized word representations", eq. 1; Tenney et al. 2019, "What do you learn
        from context?", §3.2.
    """

    mean: Tensor
    scale: Tensor
    read: Tensor
    mixed: Tensor

    def __init__(self, variants: Variants, places: Places, width: int) -> None:
        super().__init__()
        count, sources = len(variants), len(places)
        read = torch.zeros(count, sources, dtype=torch.bool)
        mixed = torch.zeros(count, 1, dtype=torch.bool)

        for a, variant in enumerate(variants):
            mixed[a] = variant.layer is None
            for number, place in enumerate(places):
                read[a, number] = variant.reads(place)

        mean = torch.zeros(sources, 1, width)
        scale = torch.ones(sources, 1, 1)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.register_buffer("read", read, persistent=False)
        self.register_buffer("mixed", mixed, persistent=False)
        self.mix = nn.Parameter(torch.zeros(count, sources))
        self.gamma = nn.Parameter(torch.ones(count, 1))

    def fit(self, words: Words, places: Places, *, centred: bool) -> None:
        """Compute scales, and centres if `centred`, from words, in double precision."""
        for number, place in enumerate(places):
            layer = words.places.index(place)
            states = words.states[layer].double()
            mean = states.mean(0, keepdim=True)
            if centred:
                self.mean[number] = mean

            from_mean = states - mean
            variance = from_mean.square().mean()
            deviation = variance.sqrt()
            self.scale[number] = deviation.clamp(min=1e-12)

    def weights(self) -> Tensor:
        """Return the weight of each place for each variant, (A, L); they add up to 1."""
        logits = MIX_SPEED * self.mix
        logits = logits.masked_fill(~self.read, -torch.inf)
        return logits.softmax(-1)

    def forward(self, states: Tensor) -> Tensor:
        """(L, n, d) -> (A, n, d)."""
        factor = self.gamma.where(self.mixed, 1)
        weights = self.weights() * factor
        scaled = (states - self.mean) / self.scale
        return torch.einsum("al,lnd->and", weights, scaled)
