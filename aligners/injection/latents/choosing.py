"""Which latents are measured: those that carry most of a change to first order, and as many others at random."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.injection.comparing.read_answers import divergences
from aligners.injection.latents.read_models import ModelPair, ReadBatch, X, Y
from aligners.similarity.passes.ranks import summed

ALIKE = 10  # latents of about one frequency, out of which one is drawn


class FirstOrder(NamedTuple):
    """Sums over texts of all ranks, from one forward and one backward pass of X at each site.

    Attributes:
        carried: (S, m) KL(Y ‖ X) in nats that each latent takes away to first order; NaN where not measured.
        fired: (S, m) rows on which each latent fires.
        squares: (S, m) Σ f_j² over them.
        divergence: KL(Y ‖ X) in nats, summed.
        units: number of units.
    """

    carried: Tensor
    fired: Tensor
    squares: Tensor
    divergence: float
    units: int

    def attributed(self) -> Tensor:
        """Return each latent's share of the divergence to first order, (S, m); NaN where nothing is attributed."""
        total = self.divergence if self.divergence else float("nan")
        return self.carried / total


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
    zeros = torch.zeros(pair.sizes, dtype=torch.float64, device=pair.device)
    carried = zeros
    fired = zeros.clone()
    squares = zeros.clone()
    totals = zeros.new_zeros(2)
    for read in batches:
        kl = divergences(read.answers[Y], read.answers[X])
        totals[0] += kl.sum()
        totals[1] += len(kl)
        for place, entries in enumerate(read.entries):
            latent = entries.latent
            value = entries.value
            fired[place].index_add_(0, latent, torch.ones_like(value))
            squares[place].index_add_(0, latent, value**2)
            if slopes:
                taken = _taken_away(pair, read, place)
                carried[place].index_add_(0, latent, taken)
    if not slopes:
        carried = carried + torch.nan
    divergence, units = summed(totals).tolist()
    return FirstOrder(
        summed(carried), summed(fired), summed(squares), divergence, int(units)
    )


def _taken_away(pair: ModelPair, read: ReadBatch, place: int) -> Tensor:
    """Return what each entry takes away from the divergence at a site, to first order: (E,) nats."""
    entries = read.entries[place]
    dictionary = pair.dictionary
    difference = dictionary.decoder_y[place] - dictionary.decoder_x[place]
    added = entries.rebuilt(difference, len(read.rows))
    gradient = pair.slopes(read, place, added / 2)
    along = entries.along(difference, gradient.double())
    return -entries.value * along


class Chosen(NamedTuple):
    """Latents of one site that are measured.

    Attributes:
        first: (T,) those that carry most, in order.
        random: (R,) as many others that fire, R ≤ T.
        partners: (T + R,) for each of both another latent, of about the same frequency, that Y has.
    """

    first: Tensor
    random: Tensor
    partners: Tensor

    @property
    def every(self) -> Tensor:
        """Both kinds, (T + R,)."""
        return torch.cat([self.first, self.random])


def choose(pair: ModelPair, found: FirstOrder, count: int, seed: int) -> list[Chosen]:
    """Choose at each site the latents that carry most and as many others, of those that fire.

    Where nothing is attributed, those that add most to the states of both, by Σ f_j² (‖d_x,j‖² + ‖d_y,j‖²), come first.

    Args:
        pair: the models.
        found: sums over all texts.
        count: T.
        seed: seed of what is random.
    """
    worth, norms_y = _worth(pair, found)
    fired = found.fired.cpu()
    chosen = []
    for place in range(len(worth)):
        draw = torch.Generator().manual_seed(seed + place)
        live = fired[place].nonzero()[:, 0]
        order = worth[place, live].argsort(descending=True, stable=True)
        ranked = live[order]
        first = ranked[:count]
        rest = ranked[count:].sort().values
        drawn = torch.randperm(len(rest), generator=draw)[:count]
        random = rest[drawn]
        candidates = live[norms_y[place, live] > 0]
        partners = []
        for latent in torch.cat([first, random]):
            partner = _partner(latent, candidates, fired[place], draw)
            partners.append(partner)
        numbers = first, random, torch.tensor(partners, dtype=torch.long)
        of_site = Chosen(*(part.to(pair.device) for part in numbers))
        chosen.append(of_site)
    return chosen


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
