"""States of two models that are made of known features, and dictionaries of them with known artefacts."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from aligners.errors import UserError, check_range
from aligners.similarity.latents.dictionary import PairedDictionary

KINDS = ("shared", "rotated", "scaled", "x", "y")


class Planted(NamedTuple):
    """Paired states of one site whose features are known.

    Attributes:
        codes: (1, N, m) strengths of the features, at least 0.
        x: (1, N, d_x); y: (1, N, d_y).
        dictionary: the true decoders.
        kind: (m,) numbers in `KINDS`; what is not "x" or "y" is in both models.
        text: (N,) numbers of the texts; rows of a text are neighbours.
    """

    codes: Tensor
    x: Tensor
    y: Tensor
    dictionary: PairedDictionary
    kind: Tensor
    text: Tensor

    @property
    def owner(self) -> Tensor:
        """The only model that has each feature, (m,): 0 X, 1 Y, −1 both."""
        owner = torch.full_like(self.kind, -1)
        owner[self.kind == KINDS.index("x")] = 0
        owner[self.kind == KINDS.index("y")] = 1
        return owner


class Plan(NamedTuple):
    """What to plant.

    Attributes:
        d_x, d_y: widths. At equal widths, what is not rotated has one direction in both models.
        shared, rotated, scaled, own_x, own_y: numbers of features. Scaled ones are 0.4 to 2.5 times as strong in Y.
        texts: number of texts; rows: rows of each.
        active: mean number of features of a row.
        power: of the rank, by which frequencies fall.
        noise: share of the variance of each model that is noise of its own.
        topics: number of topics, to which features belong; in texts of its topic a feature is several times as frequent
            as in others, so that features of a topic come together. 0: none.
    """

    d_x: int = 64
    d_y: int = 64
    shared: int = 100
    rotated: int = 0
    scaled: int = 20
    own_x: int = 20
    own_y: int = 20
    texts: int = 200
    rows: int = 20
    active: float = 6.0
    power: float = 0.7
    noise: float = 0.05
    topics: int = 0

    @property
    def counts(self) -> list[int]:
        """The numbers of features of each of `KINDS`."""
        return [self.shared, self.rotated, self.scaled, self.own_x, self.own_y]


def plant(plan: Plan, seed: int = 0) -> Planted:
    """Make paired states from known features: x = Σ_j f_j d_x,j + noise, y likewise.

    Which features a row has is drawn independently, with frequencies that fall as a power of a rank that is drawn
    without regard to the kind, times a factor for each text and feature, so that rows of a text are alike. Strengths
    are log-normal.

    Args:
        plan: what to plant.
        seed: equal seeds give equal states.

    Raises:
        ValueError: numbers that cannot be.
    """
    check_range(least=1, d_x=plan.d_x, d_y=plan.d_y)
    check_range(least=1, texts=plan.texts, rows=plan.rows)
    check_range(least=0, features=plan.counts)
    check_range(least=0, below=1, noise=plan.noise)
    kinds = torch.arange(len(KINDS))
    counts = torch.tensor(plan.counts)
    kind = kinds.repeat_interleave(counts)
    features = len(kind)
    if not 0 < plan.active < features:
        raise UserError(
            f"Expected `active` between 0 and the {features} features, but got {plan.active}."
        )
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.arange(plan.texts)
    text = numbers.repeat_interleave(plan.rows)
    codes = _codes(plan, features, text, draw)
    decoder_x, decoder_y = _decoders(plan, kind, draw)
    x = _noisy(codes @ decoder_x, plan.noise, draw)
    y = _noisy(codes @ decoder_y, plan.noise, draw)
    dictionary = PairedDictionary.of(decoder_x[None], decoder_y[None])
    return Planted(codes[None], x[None], y[None], dictionary, kind, text)


def _codes(plan: Plan, features: int, text: Tensor, draw: torch.Generator) -> Tensor:
    ranks = 1 + torch.randperm(features, generator=draw)
    frequency = ranks.double() ** -plan.power
    frequency *= plan.active / frequency.sum()
    # exponential, of mean 1: some texts are full of a feature
    uniform = torch.rand(plan.texts, features, generator=draw)
    uniform = uniform.double()
    of_text = -torch.log1p(-uniform)
    if plan.topics:
        topic_of = torch.randint(plan.topics, (features,), generator=draw)
        topic = torch.randint(plan.topics, (plan.texts, 1), generator=draw)
        of_its_topic = topic == topic_of
        of_text *= 0.5 + 0.5 * plan.topics * of_its_topic
    chance = frequency * of_text
    chance = chance.clamp(max=0.9)
    shape = len(text), features
    uniform = torch.rand(shape, generator=draw)
    fires = uniform < chance[text]
    normal = _normal(shape, draw)
    strengths = torch.exp(0.5 * normal)
    return strengths * fires


def _decoders(plan: Plan, kind: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    features = len(kind)
    decoder_x = _normal((features, plan.d_x), draw)
    decoder_y = _normal((features, plan.d_y), draw)
    decoder_x = functional.normalize(decoder_x)
    decoder_y = functional.normalize(decoder_y)
    of_kind = {}
    for number, name in enumerate(KINDS):
        of_kind[name] = kind == number
    if plan.d_x == plan.d_y:
        apart = of_kind["rotated"]
        decoder_y = torch.where(apart[:, None], decoder_y, decoder_x)
    uniform = torch.rand(features, generator=draw)
    exponents = uniform.double() * 2 - 1
    strength = torch.exp(exponents * math.log(2.5))
    scaled = of_kind["scaled"]
    decoder_y[scaled] *= strength[scaled, None]
    decoder_x[of_kind["y"]] = 0
    decoder_y[of_kind["x"]] = 0
    return decoder_x, decoder_y


def _noisy(states: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Add isotropic noise that is so large a share of the variance of the sum."""
    mean = states.var(0).mean()
    variance = mean * share / (1 - share)
    noise = _normal(states.shape, draw)
    deviation = variance.sqrt()
    return states + deviation * noise


def _normal(shape: Sequence[int], draw: torch.Generator) -> Tensor:
    """Draw from a standard normal distribution, in float32 so that a seed gives what it always gave."""
    return torch.randn(shape, generator=draw).double()


class Damaged(NamedTuple):
    """Codes and a dictionary as an L1 penalty leaves them, with what was done to each latent.

    Attributes:
        codes: (1, N, m').
        dictionary: of m' latents.
        feature: (m',) the feature that each latent stands for.
        shrunk: (m',) whether one of its decoders was shrunk to 0; split: whether it is one of a pair of halves.
    """

    codes: Tensor
    dictionary: PairedDictionary
    feature: Tensor
    shrunk: Tensor
    split: Tensor

    @classmethod
    def by_l1(
        cls,
        planted: Planted,
        shrunk: int,
        split: int,
        noise: float = 0.1,
        missed: float = 0.1,
        seed: int = 0,
    ) -> Self:
        """Plant the artefacts of an L1 penalty by hand (2504.02922, §2.2) into a dictionary of the true features.

        Complete shrinkage: a shared feature's decoder of X becomes 0, its code stays. Latent decoupling: a shared
        feature becomes two latents, one with a decoder of Y alone, one of X alone. All decoders get noise, and codes
        are inexact and miss rows, each half of a pair others.

        Args:
            planted: the states.
            shrunk: how many shared features lose X's decoder.
            split: how many others become two latents.
            noise: length of the decoders' noise and relative deviation of the codes.
            missed: share of the rows with a feature on which its latent does not fire.
            seed: of which, and of the noise.

        Raises:
            ValueError: fewer shared features than that.
        """
        draw = torch.Generator().manual_seed(seed)
        has_both = planted.owner == -1
        both = has_both.nonzero()[:, 0]
        if shrunk + split > len(both):
            raise UserError(
                f"Expected `shrunk` + `split` of at most the {len(both)} shared features, but got {shrunk + split}."
            )
        order = torch.randperm(len(both), generator=draw)
        chosen = both[order]
        to_shrink = chosen[:shrunk]
        to_split = chosen[shrunk : shrunk + split]
        features = len(planted.kind)
        every = torch.arange(features)
        feature = torch.cat([every, to_split])
        is_shrunk = torch.isin(feature, to_shrink)
        is_split = torch.isin(feature, to_split)
        number = torch.arange(len(feature))
        second = number >= features

        true_x, true_y = planted.dictionary.decoders
        decoder_x = _deviating(true_x[0, feature], noise, draw)
        decoder_y = _deviating(true_y[0, feature], noise, draw)
        first = is_split & ~second
        only_y = is_shrunk | first
        decoder_x[only_y] = 0
        decoder_y[second] = 0
        dictionary = PairedDictionary.of(decoder_x[None], decoder_y[None])

        codes = planted.codes[0, :, feature]
        factors = 1 + noise * _normal(codes.shape, draw)
        factors = factors.clamp(min=0)
        uniform = torch.rand(codes.shape, generator=draw)
        kept = uniform >= missed
        codes = codes * factors * kept
        return cls(codes[None], dictionary, feature, is_shrunk, is_split)


def _deviating(decoder: Tensor, noise: float, draw: torch.Generator) -> Tensor:
    """Add noise of this length to the decoders (m, d) that are not 0."""
    _, width = decoder.shape
    deviation = noise / math.sqrt(width)
    deviations = _normal(decoder.shape, draw)
    deviations *= deviation
    exists = decoder.any(1, keepdim=True)
    deviations = deviations * exists
    return decoder + deviations
