"""k models and the bijections that take their states into one space."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from aligners.fitting.saved_bank import describe_aligner, kind_of, restored, take_places
from aligners.fitting.universe.joint import (
    JointMoments,
    linear_universe,
    maxvar,
    shared_rotations,
)
from aligners.fitting.universe.shared_part import SharedPart
from aligners.fitting.universe.through import ThroughSpace
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Affine
from aligners.similarity.algebra.moments import Moments, squares

NETWORK = "universe"  # name of the trained maps in reports and files
LINEAR = "gcca"  # that of the linear universe beside them
CLOSED_UNIVERSES = (
    LINEAR,
    "procrustes",
    "gcpa",
)  # the last two are in earlier files alone

RIVALS = 64  # rows that a mapped state is told apart from
TEMPERATURE = 0.05  # divides the cosines
CONTRASTIVE = 0.02  # weight of telling rows apart
CALM = 4  # how much slower matrices between couplings learn
BETWEEN = (".pairs.", ".matrices")  # in names of such matrices


class Universe(Aligner, registered=False):
    """k · S maps u_i into one shared space at each of S sites, fitted together; model after model, then site by site.

    A state of model i becomes one of model j by u_j⁻¹(u_i(x)), so that k maps make all k (k − 1) directions, and going
    from i to j to l is going from i to l. As an aligner it maps each model's states to what the others say of them. In
    that the models of a site are not independent; sites are.

    Nothing but agreement in every model's own space is asked for: from a space that shrinks or loses a direction there
    would be no way back. What leaves all maps as they are, h ∘ u_i for any bijection h of the space, is not settled by
    training: the space starts with unit scale, and may drift from it.

    Args:
        maps: u, a bank of k · S invertible maps from d to d, or to m shared coordinates: `SharedPart`.
        models: k.
        widths: of the models, where some are below d. Their states end in zeros.

    Attributes:
        contrastive: weight of telling a mapped state's partner apart from other rows: see `loss`.
        turns: (N,) a number for each row of the next batch, which says who predicts it: see `loss`. By default, its
            place. With a number that goes with the row's text, the same rows give the same loss on any number of ranks.
        rivals: turns (C,) and states (k · S, C, d) of the rows, of all ranks, that it is to be told apart from. By
            default, the batch's own.
    """

    variance: Tensor
    turns: Tensor | None = None
    rivals: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, maps: Aligner, models: int, widths: Sequence[int] | None = None
    ) -> None:
        super().__init__(maps.sites, maps.d_x, maps.d_y)
        self.maps = maps
        self.models = models
        self.widths = list(widths or [maps.d_x] * models)
        self.closed_form = maps.closed_form
        self.rows_needed = maps.rows_needed
        self.contrastive = CONTRASTIVE
        self.register_buffer("variance", torch.ones(maps.sites))

    def embed(self, x: Tensor) -> Tensor:
        """States of all models in the shared space, (k · S, N, d) -> (k · S, N, m)."""
        return self.maps(x)

    def predicted(self, embedded: Tensor, shift: int) -> Tensor:
        """The states of every model m as model (m + shift) mod k says.

        Args:
            embedded: (k · S, N, m), in the shared space.
            shift: 1 to k − 1; 0: from itself.
        """
        by_model = embedded.unflatten(0, (self.models, -1))
        return self.maps.inverse(by_model.roll(-shift, 0).flatten(0, 1))

    def from_mean(self, embedded: Tensor) -> Tensor:
        """The states of every model as the mean of all others says: (k · S, N, m) -> (k · S, N, d)."""
        return self.maps.inverse(
            _means_of_others(embedded.unflatten(0, (self.models, -1)))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Each model's states as the others say, each row from one of them: (k · S, N, d) -> (k · S, N, d)."""
        others, order, _ = self._asked(self.embed(x), means=False)
        return self.maps.inverse(others)[:, order.argsort()]

    def fit(self, moments: Moments) -> None:
        """Set the maps from the moments of all pairs of models: see `JointMoments.of`."""
        joint = JointMoments.of(moments, self.models)
        self.variance.copy_(joint.variance.flatten())
        if self.closed_form:
            _fit_gcca(cast(Affine, self.maps), joint)
        else:
            _start_network(self.maps, joint)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of every model as the others say, averaged over the models: (k · S,).

        Half of the rows are predicted from one other model, each of these in its turn, and half from the mean of all
        others in the shared space. The mean has less noise, but alone would let single models stray. This takes one
        pass of the k maps and one of their inverses. What has the least error may still be nearer to another row than
        to its own, so InfoNCE over cosines is added (van den Oord et al. 2018, arXiv 1807.03748, eq. 4), `contrastive`
        times.
        """
        others, order, turns = self._asked(self.embed(x), means=True)
        said = self.maps.inverse(others)
        y = y[:, order]
        losses = (said - y).square().mean(2) / self.variance[:, None]
        if self.contrastive:
            losses = losses + self.contrastive * self._info_nce(said, y, turns)
        return self.over_models(losses.sum(1) / max(1, len(order)))

    def _info_nce(self, said: Tensor, y: Tensor, turns: Tensor) -> Tensor:
        """How badly each mapped row is told apart from others than its own, (k · S, N)."""
        their_turns, rivals = self.rivals or (turns[:RIVALS], y[:, :RIVALS])
        cosines = normalize(said, dim=2) @ normalize(rivals, dim=2).mT / TEMPERATURE
        itself = turns[:, None] == their_turns
        cosines = cosines.masked_fill(itself, torch.finfo(cosines.dtype).min)
        own = torch.cosine_similarity(said, y, dim=2) / TEMPERATURE
        return softplus(cosines.logsumexp(2) - own)

    def _asked(self, embedded: Tensor, means: bool) -> tuple[Tensor, Tensor, Tensor]:
        """In the place of every model, row by row, another one in its turn; by turns the mean of the others, too.

        Returns:
            (k · S, N, d), its rows sorted by turn, the places (N,) that they had, and their turns (N,).
        """
        by_model = embedded.unflatten(0, (self.models, -1))
        turns = self.turns
        if turns is None:
            turns = torch.arange(embedded.shape[1], device=embedded.device)
        shifts = self.models - 1
        turn = turns % (2 * shifts if means else shifts)
        rows = []
        parts = []
        for shift in range(1, self.models):
            chosen = (turn == shift - 1).nonzero().squeeze(1)
            rows.append(chosen)
            parts.append(by_model[:, :, chosen].roll(-shift, 0).flatten(0, 1))
        if means:
            rest = (turn >= shifts).nonzero().squeeze(1)
            rows.append(rest)
            parts.append(_means_of_others(by_model[:, :, rest]))
        order = torch.cat(rows)
        return torch.cat(parts, 1), order, turns[order]

    def over_models(self, values: Tensor) -> Tensor:
        """The mean over the models at each place of a site, (k · S,): what belongs together stops and goes together."""
        return values.unflatten(0, (self.models, -1)).mean(0).repeat(self.models)

    def start_names(self) -> Sequence[str]:
        """The start of every map."""
        return self.maps.start_names()

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """As the maps have it; of matrices between couplings, `CALM` times as many.

        A state passes one network and the inverse of another one, which was made for other states: at the rate of a
        lone network such matrices diverge.
        """
        inputs = self.maps.fan_in(name.removeprefix("maps."), parameter)
        if any(part in name for part in BETWEEN):
            return CALM * inputs
        return inputs

    def places(self, name: str) -> Sequence[int] | slice:
        """As the maps have it."""
        if not name.startswith("maps."):
            return slice(None)
        return self.maps.places(name.removeprefix("maps."))

    def options(self) -> dict[str, Any]:
        """The number of models, what the maps are, and the weight in the loss."""
        return {
            "models": self.models,
            "maps": kind_of(self.maps),
            "contrastive": self.contrastive,
        }

    def map(self, i: int, j: int) -> ThroughSpace:
        """The map from model i into model j at all sites, on their own widths."""
        return ThroughSpace.of(self._of_model(i), self._of_model(j))

    def _of_model(self, i: int) -> Aligner:
        """The map of one model into the space."""
        if isinstance(self.maps, SharedPart):
            return self.maps.of_model(i)
        sites = self.maps.sites // self.models
        width = self.widths[i]
        taken = take_places(self.maps, slice(i * sites, (i + 1) * sites))
        if width == taken.d_x:
            return taken
        state = taken.state_dict()
        for name in ("mean_x", "weight_back"):
            state[name] = state[name][..., :width]
        state["weight"] = state["weight"][:, :width]
        cut = restored({**describe_aligner(taken), "d_x": width}, state)
        return cut.requires_grad_(False).eval()


def _means_of_others(by_model: Tensor) -> Tensor:
    """(k, S, N, d) -> (k · S, N, d)."""
    return ((by_model.sum(0) - by_model) / (len(by_model) - 1)).flatten(0, 1)


def _start_network(maps: Aligner, joint: JointMoments) -> None:
    """Start every INN as its model's map in the best linear universe, other networks as near as they can to a rotation.

    The closest linear map to the models' mean would not do: it is steep where models vary little, and its inverse
    amplifies what another model says there. In the best linear universe the inverses count.
    """
    banks: list[Any] = [maps]
    widths = [maps.d_x] * len(joint.mean)
    if isinstance(maps, SharedPart):
        banks = list(maps.banks.values())
        widths = maps.widths
    scale = joint.variance.sqrt()[..., None, None]
    if all(isinstance(bank, INN) and bank.mixing != "none" for bank in banks):
        weights = linear_universe(joint, widths, maps.d_y) / scale
        cast(INN, maps).start_at(joint.mapped(weights), weights.flatten(0, 1))
    else:
        maps.fit(
            joint.mapped(shared_rotations(joint.scaled(), widths, maps.d_y) / scale)
        )


def _fit_gcca(maps: Affine, joint: JointMoments) -> None:
    """Set the maps to those of `maxvar`, with its least-squares way back in place of the inverse."""
    into, back = maxvar(joint)
    moments = joint.own()
    varies = squares(moments.xx) > 0  # what narrower models lack stays zero
    into = into.flatten(0, 1) * varies[..., None]
    maps.set_map(moments, into, back.flatten(0, 1) * varies[:, None])
