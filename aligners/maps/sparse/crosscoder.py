"""Crosscoders: a sparse dictionary with one code for the states of several models, and a decoder for each."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, distributed, nn

from aligners.errors import UserError, check_known, check_range
from aligners.maps.base import mean_square
from aligners.maps.sparse.selection import (
    Selection,
    least_kept,
    least_kept_of_gaussians,
    products,
    sums_of_rows,
)

EXPANSION = 16  # latents by width
# Of a latent's decoder rows together, by the root of the number of models.
FIRST_NORM = 0.1
# A latent is dead after this many times the rows in which one fires on average.
ROWS_BY_CHANCE = 100
CALIBRATED_ON = 128  # rows of a step, about, on which the threshold is measured
REMEMBERED = 16  # steps of which the threshold is the average, about
PENALTY_RISE = 200  # steps over which the penalty of L1 rises
PENALTY = 0.03


class Crosscoder(nn.Module):
    """A bank of S sparse dictionaries of k models' states: m latents, one code f, and a decoder for each model.

    f = selection(relu(Σ_i x_i W_enc,i + b_enc)), x̂_i = f W_dec,i + b_dec,i. With one model it is a sparse autoencoder.
    States are centred and divided by their deviation, as by `aligners.maps.base.Scaling`: errors are then in units of
    FVU, and models of any widths and scales count alike. The size of latent j in a row is f_j Σ_i ‖W_dec,ij‖ / √d_i.

    Selections:

    - batch_topk: in training the N·k largest sizes of a batch of N rows; otherwise sizes above a threshold, so that no
      row's code depends on other rows. It is measured after every step with the weights that are kept, which may be
      averages over steps: as a running mean of the least size that would be selected from some of the step's rows.
    - l1: what is positive, under a penalty on the sum of sizes, which rises over the first steps.

    A dead latent has not fired for `dead_after` rows. An auxiliary loss fits those with the largest codes, d / 2 at
    most, to what the others leave (Gao et al. 2024).

    Nothing is shared between sites. On several ranks each selects from its own rows; threshold and dead latents are the
    same on all.

    References: Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing",
    https://transformer-circuits.pub/2024/crosscoders; batch top-k: Bussmann, Leask and Nanda 2024, arXiv 2412.06410; of
    crosscoders: Minder et al. 2025, arXiv 2504.02922, section 2.3; auxiliary loss: Gao et al. 2024, arXiv 2406.04093,
    appendix A.2; dedicated latents: Jiralerspong and Bricken 2026, arXiv 2602.11729.

    Args:
        sites: S.
        widths: d_i of each model.
        latents: m. Default: 16 times the largest width.
        active: k, the mean number of active latents of a row under batch_topk.
        selection: which latents a row keeps.
        penalty: coefficient of L1. Default: 0.03.
        own: share of the latents that each model has for itself: the others' weights of these are exactly zero.
        auxiliary: weight of the auxiliary loss.
        dead_after: rows. Default: 100 m / k.

    Raises:
        ValueError: an option is out of range, or of another selection.
    """

    threshold: Tensor
    measured: Tensor
    since: Tensor
    steps: Tensor
    partition: Tensor

    def __init__(
        self,
        sites: int,
        widths: Sequence[int],
        latents: int | None = None,
        *,
        active: int = 32,
        selection: Selection = "batch_topk",
        penalty: float | None = None,
        own: float = 0.0,
        auxiliary: float = 1 / 32,
        dead_after: int | None = None,
    ) -> None:
        super().__init__()
        if latents is None:
            latents = EXPANSION * max(widths)
        check_known(get_args(Selection), selection=selection)
        check_range(least=1, latents=latents, dead_after=dead_after)
        check_range(least=1, most=latents, active=active)
        check_range(least=0, penalty=penalty, auxiliary=auxiliary)
        if penalty is not None and selection != "l1":
            raise UserError(
                f"Expected `penalty` with the selection 'l1' alone, but got {penalty} with {selection!r}, which keeps "
                "as many latents as `active` says. Leave it out."
            )
        most = 0 if len(widths) == 1 else 1 / len(widths)
        check_range(least=0, most=most, own=own)
        if dead_after is None:
            dead_after = ROWS_BY_CHANCE * latents // active
        if penalty is None:
            penalty = PENALTY

        self.sites = sites
        self.widths = tuple(widths)
        self.latents = latents
        self.active = active
        self.selection = selection
        self.penalty = penalty
        self.auxiliary = auxiliary
        self.dead_after = dead_after
        self.own_latents = round(own * latents)
        self._add_weights(sites)
        self._add_state(sites)

    def _add_weights(self, sites: int) -> None:
        """Add decoders of random directions, their transposes as encoders, and biases of zero."""
        self.draw = int(torch.randint(2**31, ()))
        joint = sum(self.widths)
        directions = self._drawn()
        bias = torch.zeros(sites, 1, self.latents)
        self.bias = nn.Parameter(bias)
        self.encoders = nn.ParameterList()
        self.decoders = nn.ParameterList()
        self.shifts = nn.ParameterList()
        for width in self.widths:
            encoder = torch.zeros(sites, width, self.latents)
            decoder = torch.zeros(sites, self.latents, width)
            shift = torch.zeros(sites, 1, width)
            self.encoders.append(encoder)
            self.decoders.append(decoder)
            self.shifts.append(shift)
        self._set_directions(directions.expand(sites, self.latents, joint))

    def _add_state(self, sites: int) -> None:
        """Add what steps change besides weights, and which latents a model has."""
        self.register_buffer("threshold", torch.zeros(sites, 1, 1))
        self.register_buffer("measured", torch.zeros(sites, 1, 1))
        steps = torch.zeros(sites, dtype=torch.long)
        since = torch.zeros(sites, self.latents, dtype=torch.long)
        self.register_buffer("steps", steps)
        self.register_buffer("since", since)
        partition = torch.ones(len(self.widths), self.latents)
        for model in range(len(self.widths)):
            first = model * self.own_latents
            others = torch.arange(len(self.widths)) != model
            partition[others, first : first + self.own_latents] = 0
        self.register_buffer("partition", partition, persistent=False)

    def _drawn(self) -> Tensor:
        """Gaussian numbers of the seed, the same at every site: (m, Σ d_i)."""
        generator = torch.Generator().manual_seed(self.draw)
        return torch.randn(self.latents, sum(self.widths), generator=generator)

    @torch.no_grad()
    def _set_directions(self, directions: Tensor) -> None:
        """Set decoders to directions (S, m, Σ d_i) of one small norm, and encoders to their transposes."""
        norm = FIRST_NORM * len(self.widths) ** 0.5
        rows = norm * nn.functional.normalize(directions, dim=-1)
        parts = rows.split(self.widths, -1)
        for encoder, decoder, part in zip(
            self.encoders, self.decoders, parts, strict=True
        ):
            decoder.copy_(part)
            encoder.copy_(part.mT)

    @torch.no_grad()
    def start(self, covariance: Tensor) -> None:
        """Draw directions as states are distributed, and set the threshold for them, as if these were Gaussian.

        The directions of a latent in several models then belong together, and no latent lies where states never are.

        Args:
            covariance: of the states of all models side by side, (S, Σ d_i, Σ d_i), in float64.
        """
        values, vectors = torch.linalg.eigh(covariance)
        deviations = values.clamp(min=0).sqrt()
        root = vectors * deviations[:, None]
        drawn = self._drawn().to(covariance)
        self._set_directions(drawn @ root.mT)
        if self.selection == "batch_topk":
            self._start_threshold(covariance)

    def _start_threshold(self, covariance: Tensor) -> None:
        """Set the threshold for Gaussian states of all models side by side, of this covariance."""
        encoders = []
        for model in range(len(self.widths)):
            encoders.append(self.encoder(model))
        encoder = torch.cat(encoders, 1).to(covariance)
        images = covariance @ encoder
        variance = (images * encoder).sum(1, keepdim=True)
        norms = self.norms().to(covariance)
        mean = self.bias * norms
        deviation = variance.clamp(min=1e-30).sqrt() * norms
        threshold = least_kept_of_gaussians(mean, deviation, self.active)
        self.threshold.copy_(threshold)

    def encoder(self, model: int) -> Tensor:
        """W_enc of a model, zero for latents that are others' own: (S, d_i, m)."""
        weight = self.encoders[model]
        if not self.own_latents:
            return weight
        return weight * self.partition[model]

    def decoder(self, model: int) -> Tensor:
        """W_dec of a model, zero for latents that are others' own: (S, m, d_i)."""
        weight = self.decoders[model]
        if not self.own_latents:
            return weight
        return weight * self.partition[model][:, None]

    def norms(self) -> Tensor:
        """What a latent of code 1 adds to the states of all models, Σ_i ‖W_dec,ij‖ / √d_i: (S, 1, m)."""
        total = torch.zeros_like(self.bias)
        for model, width in enumerate(self.widths):
            norm = self.decoder(model).norm(dim=-1)
            norm = norm / width**0.5
            total = total + norm[:, None]
        return total

    def positive(self, states: Sequence[Tensor]) -> Tensor:
        """Codes before selection, from scaled states (S, N, d_i) of all models: (S, N, m)."""
        before: Tensor = self.bias
        for model, x in enumerate(states):
            before = torch.baddbmm(before, x, self.encoder(model))
        return before.relu()

    def codes(self, states: Sequence[Tensor]) -> Tensor:
        """Codes of scaled states (S, N, d_i) of all models, each row's for itself: (S, N, m)."""
        positive = self.positive(states)
        if self.selection == "l1":
            return positive
        sizes = positive * self.norms()
        kept = sizes > self.threshold
        return positive * kept

    def decode(self, codes: Tensor, most: int | None = None) -> list[Tensor]:
        """Scaled states of all models from codes (S, N, m), of which `most` are not zero: (S, N, d_i) each."""
        decoders = []
        for model in range(len(self.widths)):
            decoders.append(self.decoder(model))
        if self.selection == "l1":  # which keeps about half of all latents at first
            sums = [codes @ decoder for decoder in decoders]
        else:
            sums = products(codes, decoders, most)
        states = []
        for added, shift in zip(sums, self.shifts, strict=True):
            states.append(added + shift)
        return states

    def loss(self, states: Sequence[Tensor]) -> Tensor:
        """FVU of all models, added, with the penalty of L1 and the auxiliary loss, of scaled states: (S,).

        In train mode it also counts the rows since each latent has fired.
        """
        positive = self.positive(states)
        most = None
        if self.selection == "l1":
            codes = positive
            penalty = self._penalty(positive)
        else:
            codes = self._largest(positive)
            # equal rows have equal sizes, of which the last place may keep one each
            rows = positive.shape[1]
            most = self.sites * rows * (self.active + 1)
            penalty = positive.new_zeros(())
        if self.training:
            self._count(codes)

        loss = penalty
        residuals = []
        decoded = self.decode(codes, most)
        for x, again in zip(states, decoded, strict=True):
            residual = x - again
            loss = loss + mean_square(residual)
            residuals.append(residual)
        return loss + self._auxiliary_loss(positive, residuals)

    def _largest(self, positive: Tensor) -> Tensor:
        """Keep the codes (S, N, m) of the N·k largest sizes of each site."""
        sizes = positive * self.norms()
        sizes = sizes.detach()
        least = least_kept(sizes, self.active)
        nothing = positive.new_zeros(())
        # NaN is not kept: it would take the places of other sites' codes
        return torch.where(sizes >= least, positive, nothing)

    def _penalty(self, codes: Tensor) -> Tensor:
        """The mean sum of a row's sizes, times the coefficient of L1 as far as it has risen: (S,)."""
        risen = (self.steps + 1) / PENALTY_RISE
        sizes = codes * self.norms()
        sums = sizes.sum(2).mean(1)
        return self.penalty * risen.clamp(max=1).to(sums) * sums

    @torch.no_grad()
    def _count(self, codes: Tensor) -> None:
        """Count a step, and the rows of all ranks since each latent has fired."""
        fired = (codes > 0).any(1)
        rows = codes.shape[1] * ranks()
        self.since.add_(rows).masked_fill_(fired, 0)
        self.steps.add_(1)

    def dead(self) -> Tensor:
        """Which latents have not fired for `dead_after` rows of training: (S, m) bool."""
        return self.since >= self.dead_after

    def _auxiliary_loss(self, positive: Tensor, residuals: Sequence[Tensor]) -> Tensor:
        """Return the error of dead latents on what the others leave, over its variance, weighted: (S,), or a zero."""
        nothing = positive.new_zeros(())
        if not self.auxiliary:
            return nothing
        dead = self.dead()
        most = most_of(dead)
        if not most:
            return nothing
        numbers, codes = _of_dead(positive, dead, most)
        half = max(self.widths) // 2
        kept = min(most, max(1, half))
        values, places = codes.topk(kept, 2)
        chosen = self._decoder_rows(numbers, places)
        loss = nothing
        for model, residual in enumerate(residuals):
            left = residual.detach()
            again = self._added_up(model, chosen, values)
            total = mean_square(left).clamp(min=1e-30)
            loss = loss + mean_square(left - again) / total
        return self.auxiliary * loss * dead.any(1)

    def _decoder_rows(self, numbers: Tensor, places: Tensor) -> Tensor:
        """Which latents are at places (S, N, c) among those numbered (S, D), counted through all sites: (S, N, c)."""
        site = torch.arange(self.sites, device=numbers.device)
        before = self.latents * site
        through_all = numbers + before[:, None]
        return _in_each_row(through_all, places).gather(2, places)

    def _added_up(self, model: int, chosen: Tensor, values: Tensor) -> Tensor:
        """What c latents of each row add to a model's states, from their rows of decoders and codes: (S, N, d_i)."""
        sites, rows, kept = values.shape
        chosen = chosen.flatten()
        first = torch.arange(0, len(chosen), kept, device=chosen.device)
        weight = self.decoder(model)
        sums = sums_of_rows(weight, chosen, values.flatten(), first)
        return sums.view(sites, rows, -1)

    @torch.no_grad()
    def settle(self, states: Sequence[Tensor]) -> None:
        """Measure the threshold on some of these scaled states, with the weights as they are now.

        With it all ranks learn which latents fired on any of them.
        """
        if ranks() > 1:
            distributed.all_reduce(self.since, op=distributed.ReduceOp.MIN)
        if self.selection != "batch_topk":
            return
        rows = states[0].shape[1]
        every = max(1, rows // CALIBRATED_ON)
        some = [x[:, ::every] for x in states]
        sizes = self.positive(some) * self.norms()
        least = least_kept(sizes, self.active)
        if ranks() > 1:
            distributed.all_reduce(least)
            least = least / ranks()
        self.measured.add_(1)
        share = (1 / self.measured).clamp(min=1 / REMEMBERED)
        step = share * (least - self.threshold)
        self.threshold.add_(step)


def most_of(dead: Tensor) -> int:
    """At least the largest number of dead latents (S, m) of a site: it itself, where reading it waits for nothing."""
    if dead.device.type == "cpu":
        return int(dead.sum(1).max())
    return dead.shape[1]


def ranks() -> int:
    """The number of processes that train together."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def _of_dead(positive: Tensor, dead: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Gather the codes (S, N, m) of dead latents, D at most: their numbers (S, D) and codes (S, N, D)."""
    # the dead ones of each site first; those beyond a site's own number have the code 0
    numbers = dead.byte().topk(most, 1).indices
    among = dead.gather(1, numbers)
    places = _in_each_row(numbers, positive)
    codes = positive.gather(2, places)
    return numbers, codes * among[:, None]


def _in_each_row(numbers: Tensor, like: Tensor) -> Tensor:
    """Repeat the numbers of latents (S, D) for as many rows as a tensor (S, N, ...) has: (S, N, D)."""
    rows = like.shape[1]
    return numbers[:, None].expand(-1, rows, -1)
