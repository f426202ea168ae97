"""Universes: k models and the bijections that take their states into one space; their files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from aligners.errors import UserError
from aligners.fitting.saved_bank import (
    BACKWARD,
    FORWARD,
    StoredBank,
    describe_aligner,
    kind_of,
    load_bank,
    records_at,
    restored,
    take_places,
)
from aligners.fitting.universe.joint import (
    JointMoments,
    all_pairs,
    linear_universe,
    maxvar,
    shared_rotations,
)
from aligners.fitting.universe.shared_part import SharedPart, cut
from aligners.fitting.universe.through import ThroughSpace
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Affine
from aligners.similarity.algebra.moments import Moments, squares

NETWORK = "universe"  # name of the trained maps in reports and files
LINEAR = "gcca"  # that of the linear universe beside them
# The last two are only in files of earlier versions.
CLOSED_UNIVERSES = (LINEAR, "procrustes", "gcpa")

RIVALS = 64  # rows that a mapped state is told apart from
TEMPERATURE = 0.05  # divides the cosines
CONTRASTIVE = 0.02  # weight of telling rows apart
CALM = 4  # how much slower matrices between couplings learn
BETWEEN = (".pairs.", ".matrices")  # in names of such matrices


class Universe(Aligner, registered=False):
    """k · S maps u_i into one shared space at each of S sites, fitted together; model after model, then site by site.

    A state of model i becomes one of model j by u_j⁻¹(u_i(x)): k maps make all k (k − 1) directions, and going from i
    over j to l is the same as going from i to l. As an aligner, a universe maps each model's states to what the others
    say of them. So the models of a site are not independent of each other; sites are.

    The loss asks for nothing but agreement in every model's own space: from a space that shrinks or loses a direction
    there would be no way back. Training does not settle what leaves all maps between models as they are, h ∘ u_i for
    any bijection h of the space: the space starts at unit scale, and may drift from it.

    Args:
        maps: u, a bank of k · S invertible maps from d to d, or to m shared coordinates: `SharedPart`.
        models: k.
        widths: of the models, where some are below d. Their states end in zeros.

    Attributes:
        contrastive: weight of telling a mapped state's partner apart from other rows: see `loss`.
        turns: (N,) a number for each row of the next batch, which says who predicts it: see `loss`. Default: its place.
            If the number depends on the row's text alone, the same rows give the same loss on any number of ranks.
        rivals: turns (C,) and states (k · S, C, d) of the rows of all ranks that a mapped state is told apart from.
            Default: the batch's own.
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
        if not widths:
            widths = [maps.d_x] * models
        self.widths = list(widths)
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
        by_model = self._by_model(embedded)
        shifted = by_model.roll(-shift, 0)
        return self.maps.inverse(shifted.flatten(0, 1))

    def from_mean(self, embedded: Tensor) -> Tensor:
        """The states of every model as the mean of all others says: (k · S, N, m) -> (k · S, N, d)."""
        means = _means_of_others(self._by_model(embedded))
        return self.maps.inverse(means)

    def _by_model(self, values: Tensor) -> Tensor:
        """(k · S, ...) -> (k, S, ...)."""
        return values.unflatten(0, (self.models, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Each model's states as the others say, each row from one of them: (k · S, N, d) -> (k · S, N, d)."""
        embedded = self.embed(x)
        others, order, _ = self._asked(embedded, means=False)
        said = self.maps.inverse(others)
        return said[:, order.argsort()]

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

        Half of the rows are predicted from one other model, each in its turn, and half from the mean of all others in
        the shared space. The mean has less noise, but alone it would let single models stray. One loss takes one pass
        of the k maps and one of their inverses. The prediction with the least error may still be nearer to another row
        than to its own, so InfoNCE over cosines is added (van den Oord et al. 2018, arXiv 1807.03748, eq. 4), times
        `contrastive`.
        """
        embedded = self.embed(x)
        others, order, turns = self._asked(embedded, means=True)
        said = self.maps.inverse(others)
        y = y[:, order]
        errors = (said - y).square().mean(2)
        losses = errors / self.variance[:, None]
        if self.contrastive:
            nce = self._info_nce(said, y, turns)
            losses = losses + self.contrastive * nce
        rows = max(1, len(order))
        return self.over_models(losses.sum(1) / rows)

    def _info_nce(self, said: Tensor, y: Tensor, turns: Tensor) -> Tensor:
        """How badly each mapped row is told apart from rows that are not its own, (k · S, N)."""
        their_turns = turns[:RIVALS]
        rivals = y[:, :RIVALS]
        if self.rivals is not None:
            their_turns, rivals = self.rivals
        theirs = normalize(rivals, dim=2)
        directions = normalize(said, dim=2)
        cosines = directions @ theirs.mT / TEMPERATURE
        itself = turns[:, None] == their_turns
        least = torch.finfo(cosines.dtype).min
        cosines = cosines.masked_fill(itself, least)
        own = torch.cosine_similarity(said, y, dim=2) / TEMPERATURE
        others = cosines.logsumexp(2)
        return softplus(others - own)

    def _asked(self, embedded: Tensor, means: bool) -> tuple[Tensor, Tensor, Tensor]:
        """In the place of every model, row by row, another one in its turn; with `means` also the mean of the others.

        Returns:
            (k · S, N, d), its rows sorted by turn, the places (N,) that they had, and their turns (N,).
        """
        by_model = self._by_model(embedded)
        turns = self.turns
        if turns is None:
            rows = embedded.shape[1]
            turns = torch.arange(rows, device=embedded.device)
        shifts = self.models - 1
        answers = shifts
        if means:
            answers = 2 * shifts
        turn = turns % answers

        places = []
        parts = []
        for shift in range(1, self.models):
            chosen = _where(turn == shift - 1)
            places.append(chosen)
            shifted = by_model[:, :, chosen].roll(-shift, 0)
            parts.append(shifted.flatten(0, 1))
        if means:
            rest = _where(turn >= shifts)
            places.append(rest)
            parts.append(_means_of_others(by_model[:, :, rest]))
        order = torch.cat(places)
        others = torch.cat(parts, 1)
        return others, order, turns[order]

    def over_models(self, values: Tensor) -> Tensor:
        """The mean over the models of a site at each of its places, (k · S,): the maps of a site train together."""
        means = self._by_model(values).mean(0)
        return means.repeat(self.models)

    def start_names(self) -> Sequence[str]:
        """The start of every map."""
        return self.maps.start_names()

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """As the maps have it; of matrices between couplings, `CALM` times as many.

        A state passes through one network and the inverse of another, which was made for other states: at the rate of
        a lone network such matrices diverge.
        """
        own_name = name.removeprefix("maps.")
        inputs = self.maps.fan_in(own_name, parameter)
        for part in BETWEEN:
            if part in name:
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
        source = self._of_model(i)
        target = self._of_model(j)
        return ThroughSpace.of(source, target)

    def _of_model(self, i: int) -> Aligner:
        """The map of one model into the space."""
        if isinstance(self.maps, SharedPart):
            return self.maps.of_model(i)
        sites = self.maps.sites // self.models
        start = i * sites
        places = slice(start, start + sites)
        taken = take_places(self.maps, places)
        width = self.widths[i]
        if width == taken.d_x:
            return taken
        state = taken.state_dict()
        state["mean_x"] = state["mean_x"][..., :width]
        state["weight_back"] = state["weight_back"][..., :width]
        state["weight"] = state["weight"][:, :width]
        description = describe_aligner(taken)
        description["d_x"] = width
        narrow = restored(description, state)
        return narrow.requires_grad_(False).eval()


def _where(rows: Tensor) -> Tensor:
    """The places (n,) of the rows that are marked, (N,)."""
    return rows.nonzero().squeeze(1)


def _means_of_others(by_model: Tensor) -> Tensor:
    """(k, S, N, d) -> (k · S, N, d)."""
    others = by_model.sum(0) - by_model
    means = others / (len(by_model) - 1)
    return means.flatten(0, 1)


def _start_network(maps: Aligner, joint: JointMoments) -> None:
    """Start INNs as their models' maps in the best linear universe, and other networks as near to rotations as can be.

    The closest linear map to the models' mean would not do: it is steep where models vary little, and its inverse
    amplifies what another model says there. In the best linear universe the inverses count.
    """
    banks: list[Any] = [maps]
    widths = [maps.d_x] * len(joint.mean)
    if isinstance(maps, SharedPart):
        banks = list(maps.banks.values())
        widths = maps.widths
    scale = joint.variance.sqrt()[..., None, None]
    for bank in banks:
        if not isinstance(bank, INN) or bank.mixing == "none":
            scaled = joint.scaled()
            rotations = shared_rotations(scaled, widths, maps.d_y)
            moments = joint.mapped(rotations / scale)
            maps.fit(moments)
            return
    weights = linear_universe(joint, widths, maps.d_y) / scale
    moments = joint.mapped(weights)
    start = weights.flatten(0, 1)
    cast(INN, maps).start_at(moments, start)


def _fit_gcca(maps: Affine, joint: JointMoments) -> None:
    """Set the maps to those of `maxvar`, with its least-squares way back in place of the inverse."""
    into, back = maxvar(joint)
    moments = joint.own()
    varies = squares(moments.xx) > 0  # what narrower models lack stays zero
    rows = varies[..., None]
    columns = varies[:, None]
    into = into.flatten(0, 1) * rows
    back = back.flatten(0, 1) * columns
    maps.set_map(moments, into, back)


# ---------------------------------------------------------------------- files


def load_universe(path: Path | str) -> StoredBank:
    """Read a file universe.safetensors, whose banks hold k · S places, model after model.

    Raises:
        ValueError: the file is missing, cannot be read, or holds something else.
    """
    bank = load_bank(path)
    if bank.command != "universe":
        raise UserError(
            f"Expected a file of `train.py universe`, but {path} is of `train.py {bank.command}`."
        )
    return bank


def sites_of(bank: StoredBank) -> list[tuple[int, ...]]:
    """For each place of a universe's space the site of every model."""
    own = [site for site, _ in bank.pairs[FORWARD]]
    count = len(bank.data["sites"])
    return [tuple(own[place::count]) for place in range(count)]


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """The trained universe of a file and its closed forms, by name, frozen."""
    models = len(bank.data["models"])
    widths = bank.data.get("widths")
    banks = bank.maps[FORWARD]
    universes = {}
    for name, maps in banks.items():
        universe = Universe(maps, models, widths)
        universes[name] = universe.requires_grad_(False).eval()
    return universes


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """For each pair of models its numbers, and its maps as `train.py fit` keeps them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; a bijective one is its own way back.
    """
    universes = universes_of(bank)
    widths = universes[NETWORK].widths
    sites = sites_of(bank)
    count = len(sites)
    numbers = all_pairs(len(widths))
    for p, (i, j) in enumerate(numbers):
        moments = bank.moments
        if moments is not None:
            start = p * count
            places = slice(start, start + count)
            moments = cut(moments, places, widths[i], widths[j])
        start = i * count
        of_source = range(start, start + count)
        pairs = [(of[i], of[j]) for of in sites]
        pair = replace(
            bank,
            command="fit",
            maps=_maps_between(universes, i, j),
            pairs={FORWARD: pairs, BACKWARD: pairs},
            moments=moments,
            training=records_at(bank.training, list(of_source)),
        )
        yield i, j, pair


def _maps_between(
    universes: Mapping[str, Universe], i: int, j: int
) -> dict[str, dict[str, Aligner]]:
    """The maps from model i into j, and back where a map is no bijection: route -> name -> map."""
    forward: dict[str, Aligner] = {}
    backward: dict[str, Aligner] = {}
    for name, universe in universes.items():
        forward[name] = universe.map(i, j)
        if not forward[name].bijective:
            backward[name] = universe.map(j, i)
    return {FORWARD: forward, BACKWARD: backward}
