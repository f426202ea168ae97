"""Universes: k models with bijections that map their states into one space, and their files."""

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
LINEAR = "gcca"  # name of the linear universe in reports and files
# The last two are only in files of earlier versions.
CLOSED_UNIVERSES = (LINEAR, "procrustes", "gcpa")

RIVALS = 64  # other rows that a mapped state must be distinguished from
TEMPERATURE = 0.05  # temperature that divides the cosines
CONTRASTIVE = 0.02  # weight of the contrastive loss
CALM = 4  # factor on the learning rate of matrices between couplings
BETWEEN = (".pairs.", ".matrices")  # part of these matrices' names


class Universe(Aligner, registered=False):
    """k · S maps u_i into one shared space at each of S sites, fitted together; model after model, then site by site.

    A state of model i becomes one of model j by u_j⁻¹(u_i(x)): k maps make all k (k − 1) directions, and going from i
    over j to l is the same as going from i to l. As an aligner, a universe maps each model's states to the other
    models' predictions of them. So the models of a site depend on each other; sites are independent.

    The loss only requires agreement in every model's own space: a space that shrank or lost a direction could not be
    mapped back. The space is determined up to a bijection h, as h ∘ u_i gives the same maps between models: it starts
    at unit scale, and may drift from it.

    Args:
        maps: u, a bank of k · S invertible maps from d to d, or to m shared coordinates: `SharedPart`.
        models: k.
        widths: widths of the models, if some are below d. Their states are padded with zeros.

    Attributes:
        contrastive: weight of the contrastive loss; see `loss`.
        turns: (N,) a number for each row of the next batch, which decides which model predicts it; see `loss`. Default:
            its place. If the number depends only on the row's text, equal rows give equal losses on any number of
            ranks.
        rivals: turns (C,) and states (k · S, C, d) of the rows of all ranks that a mapped state must be distinguished
            from. Default: the batch's own.
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
        """Map states of all models into the shared space, (k · S, N, d) -> (k · S, N, m)."""
        return self.maps(x)

    def predicted(self, embedded: Tensor, shift: int) -> Tensor:
        """Predict the states of every model m from model (m + shift) mod k.

        Args:
            embedded: (k · S, N, m) states in the shared space.
            shift: 1 to k − 1; 0: each model predicts itself.
        """
        by_model = self._by_model(embedded)
        shifted = by_model.roll(-shift, 0)
        return self.maps.inverse(shifted.flatten(0, 1))

    def from_mean(self, embedded: Tensor) -> Tensor:
        """Predict the states of every model from the mean of all others: (k · S, N, m) -> (k · S, N, d)."""
        means = _means_of_others(self._by_model(embedded))
        return self.maps.inverse(means)

    def _by_model(self, values: Tensor) -> Tensor:
        """Split the first axis by model: (k · S, ...) -> (k, S, ...)."""
        return values.unflatten(0, (self.models, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Predict each model's states from the others, each row from one of them: (k · S, N, d) -> (k · S, N, d)."""
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
        """Return the FVU of every model as predicted by the others, averaged over the models: (k · S,).

        Half of the rows are predicted from one other model, each in its turn, and half from the mean of all others in
        the shared space. The mean has less noise, but alone it would let single models drift. One loss takes one pass
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
        """Return the InfoNCE loss of each mapped row against rows that are not its own, (k · S, N)."""
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
        """Predict every model's rows from other models in turn; with `means`, also from the mean of the others.

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
        """Return the mean over a site's models at each of its places, (k · S,): the maps of a site train together."""
        means = self._by_model(values).mean(0)
        return means.repeat(self.models)

    def start_names(self) -> Sequence[str]:
        """Return the start of every map."""
        return self.maps.start_names()

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Return the maps' `fan_in`; for matrices between couplings, `CALM` times as much.

        A state passes through one network and the inverse of another, which was trained on other states: at the rate
        for a single network such matrices diverge.
        """
        own_name = name.removeprefix("maps.")
        inputs = self.maps.fan_in(own_name, parameter)
        for part in BETWEEN:
            if part in name:
                return CALM * inputs
        return inputs

    def places(self, name: str) -> Sequence[int] | slice:
        """Return the maps' `places`."""
        if not name.startswith("maps."):
            return slice(None)
        return self.maps.places(name.removeprefix("maps."))

    def options(self) -> dict[str, Any]:
        """Return the number of models, the kind of the maps, and the weight of the contrastive loss."""
        return {
            "models": self.models,
            "maps": kind_of(self.maps),
            "contrastive": self.contrastive,
        }

    def map(self, i: int, j: int) -> ThroughSpace:
        """Return the map from model i into model j at all sites, on their own widths."""
        source = self._of_model(i)
        target = self._of_model(j)
        return ThroughSpace.of(source, target)

    def _of_model(self, i: int) -> Aligner:
        """Return the map of one model into the space."""
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
    """Return the places (n,) of the rows that are marked, (N,)."""
    return rows.nonzero().squeeze(1)


def _means_of_others(by_model: Tensor) -> Tensor:
    """Return the mean of the other models, for each model: (k, S, N, d) -> (k · S, N, d)."""
    others = by_model.sum(0) - by_model
    means = others / (len(by_model) - 1)
    return means.flatten(0, 1)


def _start_network(maps: Aligner, joint: JointMoments) -> None:
    """Start INNs at the best linear universe, and other networks as close to rotations as possible.

    The closest linear map to the models' mean would not do: it is steep where models vary little, and its inverse
    amplifies other models' predictions there. The best linear universe takes the inverses into account.
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
    """Set the maps to those of `maxvar`, with its least-squares way back as the inverse."""
    into, back = maxvar(joint)
    moments = joint.own()
    varies = (
        squares(moments.xx) > 0
    )  # the missing dimensions of narrower models stay zero
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
    """Return, for each place of a universe's space, the site of every model."""
    own = [site for site, _ in bank.pairs[FORWARD]]
    count = len(bank.data["sites"])
    return [tuple(own[place::count]) for place in range(count)]


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """Return the trained universe of a file and its closed forms, by name, frozen."""
    models = len(bank.data["models"])
    widths = bank.data.get("widths")
    banks = bank.maps[FORWARD]
    universes = {}
    for name, maps in banks.items():
        universe = Universe(maps, models, widths)
        universes[name] = universe.requires_grad_(False).eval()
    return universes


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """Yield for each pair of models its numbers, and its maps as `train.py fit` saves them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; a bijective map brings its own inverse.
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
    """Return the maps from model i into j, and back where a map is no bijection: route -> name -> map."""
    forward: dict[str, Aligner] = {}
    backward: dict[str, Aligner] = {}
    for name, universe in universes.items():
        forward[name] = universe.map(i, j)
        if not forward[name].bijective:
            backward[name] = universe.map(j, i)
    return {FORWARD: forward, BACKWARD: backward}
