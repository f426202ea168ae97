"""Which latents are measured: those that carry most of a change to first order, in all or by row, and random ones."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.injection.latents.read_models import ModelPair, ReadBatch
from aligners.similarity.latents.dictionary import Firing
from aligners.similarity.latents.ratios import LEAST_UNITS
from aligners.similarity.passes.ranks import summed

ALIKE = 10  # latents of about one frequency, out of which one is drawn
NARROW = 5  # most latents that are measured for what they carry where they fire


class FirstOrder(NamedTuple):
    """Sums over texts of all ranks, from one forward and one backward pass of X at each site.

    Attributes:
        carried: (S, m) KL(Y ‖ X) in nats that each latent takes away to first order; NaN where not measured.
        fired: (S, m) rows on which each latent fires.
        texts: (S, m) texts in which it does.
        squares: (S, m) Σ f_j² over the rows.
        divergence: KL(Y ‖ X) in nats, summed.
        units: number of units.
    """

    carried: Tensor
    fired: Tensor
    texts: Tensor
    squares: Tensor
    divergence: float
    units: int

    def attributed(self) -> Tensor:
        """Return each latent's share of the divergence to first order, (S, m); NaN where nothing is attributed."""
        total = self.divergence if self.divergence else float("nan")
        return self.carried / total

    def by_row(self) -> Tensor:
        """Return the nats that each latent takes away for each row on which it fires, to first order, (S, m).

        NaN where nothing is attributed, or the latent fires in fewer than five texts: as for verdicts, that is too few
        to say anything.
        """
        enough = self.texts >= LEAST_UNITS
        return (self.carried / self.fired).where(enough, torch.nan)


def first_order(
    pair: ModelPair, batches: Iterable[ReadBatch], *, slopes: bool
) -> FirstOrder:
    """Attribute the change of answers between two models to the latents of their dictionary, all at once.

    Latent j moves X's state by f_j (d_y,j − d_x,j). Its product with the gradient of the divergence says by how much
    that falls, to first order, as in attribution patching (Syed, Rager and Conmy 2023, arXiv 2310.10348). The gradient
    is taken half-way to where all latents have moved X: at X itself a small change counts twice, as a divergence is
    quadratic there. Half-way is the midpoint rule of integrated gradients (Sundararajan, Taly and Yan 2017, arXiv
    1703.01365), by which the shares of all latents add up to what they recover together.

    Args:
        pair: the models.
        batches: what they computed on this rank's texts.
        slopes: whether gradients are taken; without, nothing is attributed.
    """
    sums = torch.zeros(4, *pair.sizes, dtype=torch.float64, device=pair.device)
    carried = sums[0]
    totals = sums.new_zeros(2)
    for read in batches:
        kl = read.divergences()
        totals[0] += kl.sum()
        totals[1] += len(kl)
        for place, entries in enumerate(read.entries):
            _count(sums[1:, place], read, entries)
            if slopes:
                taken = _taken_away(pair, read, place)
                carried[place].index_add_(0, entries.latent, taken)
    if not slopes:
        carried.fill_(torch.nan)
    divergence, units = summed(totals).tolist()
    carried, fired, texts, squares = summed(sums)
    return FirstOrder(carried, fired, texts, squares, divergence, int(units))


def _count(sums: Tensor, read: ReadBatch, entries: Firing) -> None:
    """Add the rows and the texts in which latents fire, and their squared codes, to (3, m)."""
    rows, texts, squares = sums
    ones = torch.ones_like(entries.value)
    rows.index_add_(0, entries.latent, ones)
    once = _once_a_text(read, entries)
    texts.index_add_(0, once, ones[: len(once)])
    squares.index_add_(0, entries.latent, entries.value**2)


def _once_a_text(read: ReadBatch, entries: Firing) -> Tensor:
    """Return the latents of entries, each as often as there are texts in which it fires."""
    texts = read.rows.owner[entries.row]
    pairs = torch.stack([texts, entries.latent])
    return pairs.unique(dim=1)[1]


def _taken_away(pair: ModelPair, read: ReadBatch, place: int) -> Tensor:
    """Return what each entry takes away from the divergence at a site, to first order: (E,) nats."""
    entries = read.entries[place]
    apart = pair.apart(place)
    added = entries.rebuilt(apart, len(read.rows))
    gradient = pair.slopes(read, place, added / 2)
    along = entries.along(apart, gradient.double())
    return -entries.value * along


def carried_by_text(
    pair: ModelPair, read: ReadBatch, place: int, latents: Tensor
) -> Tensor:
    """Return what latents take away from the divergence of each text of a batch, to first order: (T, B) nats."""
    entries = read.entries[place]
    taken = _taken_away(pair, read, place)
    texts = read.rows.owner[entries.row]
    carried = taken.new_zeros(len(latents), read.rows.texts)
    for number, latent in enumerate(latents):
        own = entries.latent == latent
        carried[number].index_add_(0, texts[own], taken[own])
    return carried


class Chosen(NamedTuple):
    """Latents of one site that are measured.

    Attributes:
        first: (T,) those that carry most, in order.
        random: (R,) as many others that fire, R ≤ T.
        narrow: (C,) those that carry most for each row on which they fire, C ≤ 5, in order, but those of both others.
        partners: (T + R + C,) for each of all three another latent, of about the same frequency, that Y has.
    """

    first: Tensor
    random: Tensor
    narrow: Tensor
    partners: Tensor

    @property
    def every(self) -> Tensor:
        """All three kinds, (T + R + C,)."""
        return torch.cat([self.first, self.random, self.narrow])

    def to(self, device: torch.device) -> Self:
        """Return the numbers on a device."""
        return type(self)(*(part.to(device) for part in self))

    def kinds(self) -> list[str]:
        """Say for each why it was chosen: "first", "random" or "narrow"."""
        kinds = []
        for kind in ("first", "random", "narrow"):
            kinds += [kind] * len(getattr(self, kind))
        return kinds


def choose(pair: ModelPair, found: FirstOrder, count: int, seed: int) -> list[Chosen]:
    """Choose at each site the latents that carry most and as many others, of those that fire.

    Where nothing is attributed, those that add most to the states of both, by Σ f_j² (‖d_x,j‖² + ‖d_y,j‖²), come first,
    and none is chosen for what it carries where it fires.

    Args:
        pair: the models.
        found: sums over all texts.
        count: T.
        seed: seed of what is random.
    """
    worth, norms_y = _worth(pair, found)
    fired = found.fired.cpu()
    by_row = found.by_row().cpu()
    chosen = []
    for place in range(len(worth)):
        draw = torch.Generator().manual_seed(seed + place)
        live = fired[place].nonzero()[:, 0]
        first, random = _first_and_random(worth[place], live, count, draw)
        others = torch.cat([first, random])
        narrow = _narrow(by_row[place], min(count, NARROW), others)

        candidates = live[norms_y[place, live] > 0]
        partners = []
        for latent in torch.cat([others, narrow]):
            partner = _partner(latent, candidates, fired[place], draw)
            partners.append(partner)
        of_site = Chosen(first, random, narrow, torch.tensor(partners).long())
        chosen.append(of_site.to(pair.device))
    return chosen


def _first_and_random(
    worth: Tensor, live: Tensor, count: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the live latents that are worth most, and as many others, drawn at random."""
    ranked = _ordered(worth, live)
    rest = ranked[count:].sort().values
    drawn = torch.randperm(len(rest), generator=draw)[:count]
    return ranked[:count], rest[drawn]


def _narrow(by_row: Tensor, count: int, others: Tensor) -> Tensor:
    """Return the latents that carry most where they fire, in order, but those that are chosen already."""
    known = by_row.isfinite().nonzero()[:, 0]
    first = _ordered(by_row, known)[:count]
    return first[~torch.isin(first, others)]


def _ordered(worth: Tensor, latents: Tensor) -> Tensor:
    """Return latents by what they are worth, the most first."""
    order = worth[latents].argsort(descending=True, stable=True)
    return latents[order]


def _worth(pair: ModelPair, found: FirstOrder) -> tuple[Tensor, Tensor]:
    """Return by what latents are ranked, and ‖d_y,j‖², each (S, m) on the CPU."""
    norms_x = pair.dictionary.decoder_x.square().sum(2)
    norms_y = pair.dictionary.decoder_y.square().sum(2)
    worth = found.carried
    if not worth.isfinite().all():
        worth = found.squares * (norms_x + norms_y)
    return worth.cpu(), norms_y.cpu()


def _partner(
    latent: Tensor, candidates: Tensor, fired: Tensor, draw: torch.Generator
) -> int:
    """Draw another latent among those that fire about as often; the latent itself where there is none."""
    others = candidates[candidates != latent]
    if not len(others):
        return int(latent)
    apart = (fired[others].log() - fired[latent].log()).abs()
    near = others[apart.argsort(stable=True)[:ALIKE]]
    place = torch.randint(len(near), (), generator=draw)
    return int(near[place])
