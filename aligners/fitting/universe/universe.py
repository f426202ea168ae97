"""k models and the bijections that take their states into one space, in memory and in files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from aligners.errors import UserError, check_known
from aligners.fitting.bank import (
    BACKWARD,
    FORWARD,
    StoredBank,
    build_aligner,
    describe_aligner,
    kind_of,
    load_bank,
    records_at,
    restored,
    take_places,
)
from aligners.fitting.universe.joint import (
    SHRINKING,
    JointMoments,
    all_pairs,
    gcpa,
    generalised_procrustes,
    linear_universe,
    maxvar,
)
from aligners.fitting.universe.shared import SharedPart, cut
from aligners.maps.base import Aligner, deviation
from aligners.maps.inn import INN
from aligners.maps.linear import Affine, Procrustes, least_squares
from aligners.similarity.algebra.moments import Moments, squares


class ThroughSpace(Aligner):
    """g = v⁻¹ ∘ u: u takes X's states into a shared space, v takes Y's there.

    Through one space, maps compose: from X to Y and on to Z is the map from X to Z, where u and v are bijections.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        network: class and options of u, as `kind_of` gives them.
        network_y: of v. Default: the same.
        space: dimensions of the space. Default: `d_x`, which then has to be equal to `d_y`.

    Raises:
        ValueError: the widths differ and `space` is not given, or `network` is not an invertible aligner.
    """

    invertible = both_ways = True
    needs_equal_width = True
    variance_x: Tensor
    variance_y: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        network: Mapping[str, Any],
        network_y: Mapping[str, Any] | None = None,
        space: int | None = None,
    ) -> None:
        self.needs_equal_width = space is None
        super().__init__(sites, d_x, d_y)
        self.space, self.network, self.network_y = space, _plain(network), network_y and _plain(network_y)
        self.into, self.out_of = (
            build_aligner({**kind, "sites": sites, "d_x": width, "d_y": space or width})
            for kind, width in ((self.network, d_x), (self.network_y or self.network, d_y))
        )
        if not self.into.invertible:
            raise UserError(f"ThroughSpace expects an invertible `network`, but got {network['class']}.")
        self.bijective, self.closed_form = self.into.bijective and self.out_of.bijective, self.into.closed_form
        self.rows_needed = self.into.rows_needed
        self.register_buffer("variance_x", torch.ones(sites))
        self.register_buffer("variance_y", torch.ones(sites))

    @classmethod
    def of(cls, into: Aligner, out_of: Aligner) -> Self:
        """The map by two fitted maps into one space, which it takes over.

        Args:
            into: u.
            out_of: v.
        """
        kind, other = kind_of(into), kind_of(out_of)
        whole = into.d_x == into.d_y == out_of.d_x
        more: dict[str, Any] = {"network_y": None if kind == other else other, "space": None if whole else into.d_y}
        composed = cls(into.sites, into.d_x, out_of.d_x, network=kind, **more)
        composed.into.load_state_dict(into.state_dict())
        composed.out_of.load_state_dict(out_of.state_dict())
        return composed

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.out_of.inverse(self.into(x))

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d_y) -> (S, N, d_x)."""
        return self.into.inverse(self.out_of(y))

    def fit(self, moments: Moments) -> None:
        """Fit u as a map from X to Y, and v as one from Y to itself: the space begins as Y's own."""
        y_to_y = Moments(moments.n, *(moments.mean_y,) * 2, *(moments.yy,) * 3)
        self.into.fit(moments)
        self.out_of.fit(y_to_y)
        for buffer, scatter in ((self.variance_x, moments.xx), (self.variance_y, moments.yy)):
            buffer.copy_(scatter.diagonal(dim1=-2, dim2=-1).mean(-1) / moments.n)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of g on the batch plus that of g⁻¹, (S,)."""
        if self.closed_form:
            return super().loss(x, y)
        there = (self(x) - y).square().mean((1, 2)) / self.variance_y
        return there + (self.inverse(y) - x).square().mean((1, 2)) / self.variance_x

    def start_names(self) -> Sequence[str]:
        """The start of u at each site."""
        return self.into.start_names()

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """As u or v has it."""
        part, _, rest = name.partition(".")
        return getattr(self, part).fan_in(rest, parameter)

    def options(self) -> dict[str, Any]:
        """Class and options of u and v, and the dimensions of the space."""
        further = {"network_y": self.network_y, "space": self.space}
        return {"network": self.network, **{name: value for name, value in further.items() if value is not None}}


def _plain(kind: Mapping[str, Any]) -> dict[str, Any]:
    return {"class": kind["class"], "options": dict(kind["options"])}


class TwoLinear(Affine):
    """A linear map, and beside it one back: two regressions, at any widths.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states, or dimensions of a space.
    """

    invertible = True

    def fit(self, moments: Moments) -> None:
        """Solve both from moments, in float64."""
        self.set_map(moments, least_squares(moments, SHRINKING), least_squares(moments.swap(), SHRINKING))


CALM = 4  # how much slower matrices between couplings learn


BETWEEN = (".pairs.", ".matrices")  # in names of such matrices


NETWORK = "universe"  # name of the trained maps in reports and files, beside the closed forms


FitMaps = Callable[[Aligner, JointMoments], None]


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
        fit_maps: sets them from the moments of all models.
        widths: of the models, where some are below d. Their states end in zeros.

    Attributes:
        turns: (N,) a number for each row of the next batch, which says who predicts it: see `loss`. By default, its
            place. With a number that goes with the row's text, the same rows give the same loss on any number of ranks.
    """

    variance: Tensor
    turns: Tensor | None = None

    def __init__(self, maps: Aligner, models: int, fit_maps: FitMaps, widths: Sequence[int] | None = None) -> None:
        super().__init__(maps.sites, maps.d_x, maps.d_y)
        self.widths = list(widths or [maps.d_x] * models)
        self.maps, self.models, self.fit_maps = maps, models, fit_maps
        self.closed_form, self.rows_needed = maps.closed_form, maps.rows_needed
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
        return self.maps.inverse(self._other(embedded.unflatten(0, (self.models, -1)), shift))

    def forward(self, x: Tensor) -> Tensor:
        """Each model's states as the others say, each row from one of them: (k · S, N, d) -> (k · S, N, d)."""
        others, order = self._asked(self.embed(x), means=False)
        return self.maps.inverse(others)[:, order.argsort()]

    def fit(self, moments: Moments) -> None:
        """Set the maps from the moments of all pairs of models: see `JointMoments.of`."""
        joint = JointMoments.of(moments, self.models)
        self.variance.copy_(joint.variance.flatten())
        self.fit_maps(self.maps, joint)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of every model as the others say, averaged over the models: (k · S,).

        Half of the rows are predicted from one other model, each of these in its turn, and half from the mean of all
        others in the shared space. The mean has less noise, but alone would let single models stray. This takes one
        pass of the k maps and one of their inverses.
        """
        others, order = self._asked(self.embed(x), means=True)
        errors = (self.maps.inverse(others) - y[:, order]).square().mean(2).sum(1) / max(1, len(order))
        return self.over_models(errors / self.variance)

    def _asked(self, embedded: Tensor, means: bool) -> tuple[Tensor, Tensor]:
        """In the place of every model, row by row, another one in its turn; by turns the mean of the others, too.

        Returns:
            (k · S, N, d), its rows sorted by turn, and the places (N,) that they had.
        """
        by_model, shifts = embedded.unflatten(0, (self.models, -1)), self.models - 1
        turns = torch.arange(embedded.shape[1], device=embedded.device) if self.turns is None else self.turns
        rows = [(turns % ((1 + means) * shifts) == turn).nonzero().squeeze(1) for turn in range(shifts)]
        parts = [self._other(by_model[:, :, chosen], shift) for shift, chosen in enumerate(rows, start=1)]
        if means:
            rows.append((turns % (2 * shifts) >= shifts).nonzero().squeeze(1))
            last = by_model[:, :, rows[-1]]
            parts.append(((last.sum(0) - last) / shifts).flatten(0, 1))
        return torch.cat(parts, 1), torch.cat(rows)

    def _other(self, each: Tensor, shift: int) -> Tensor:
        """In the place of every model the one so many places on, (k, S, N, d) -> (k · S, N, d)."""
        return each.roll(-shift, 0).flatten(0, 1)

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
        return CALM * inputs if any(part in name for part in BETWEEN) else inputs

    def places(self, name: str) -> Sequence[int] | slice:
        """As the maps have it."""
        return self.maps.places(name.removeprefix("maps.")) if name.startswith("maps.") else slice(None)

    def options(self) -> dict[str, Any]:
        """The number of models, and what the maps are."""
        return {"models": self.models, "maps": kind_of(self.maps)}

    def map(self, i: int, j: int) -> ThroughSpace:
        """The map from model i into model j at all sites, on their own widths."""
        return ThroughSpace.of(self._of_model(i), self._of_model(j))

    def _of_model(self, i: int) -> Aligner:
        """The map of one model into the space."""
        if isinstance(self.maps, SharedPart):
            return self.maps.of_model(i)
        sites, width = self.maps.sites // self.models, self.widths[i]
        taken = take_places(self.maps, slice(i * sites, (i + 1) * sites))
        if width == taken.d_x:
            return taken
        state = taken.state_dict()
        state |= {name: state[name][..., :width] for name in ("mean_x", "weight_back")}
        state["weight"] = state["weight"][:, :width]
        return restored({**describe_aligner(taken), "d_x": width}, state).requires_grad_(False).eval()


def fit_network(maps: Aligner, joint: JointMoments) -> None:
    """Start every INN as its model's map in the best linear universe, other networks as near as they can to a rotation.

    The closest linear map to the models' mean would not do: it is steep where models vary little, and its inverse
    amplifies what another model says there. In the best linear universe the inverses count.
    """
    scale = joint.variance.sqrt()[..., None, None]
    if isinstance(maps, INN) and maps.mixing != "none":
        weights = linear_universe(joint)
        mapped = joint.mapped(weights / scale)
        maps.start_at(mapped, weights.flatten(0, 1) / deviation(mapped.yy, mapped.n))
        return
    rotations = generalised_procrustes(joint.scaled())
    rotations = maps.shared_first(rotations) if isinstance(maps, SharedPart) else rotations
    maps.fit(joint.mapped(rotations / scale))


def fit_procrustes(maps: Aligner, joint: JointMoments) -> None:
    """Set the maps to those of `generalised_procrustes` on scaled states."""
    scale = joint.variance.sqrt()[..., None, None]
    rotations = generalised_procrustes(joint.scaled())
    _set(maps, joint, rotations / scale, rotations.mT * scale)


def fit_gcca(maps: Aligner, joint: JointMoments) -> None:
    """Set the maps to those of `maxvar`, with its least-squares way back in place of the inverse."""
    _set(maps, joint, *maxvar(joint))


def fit_gcpa(maps: Aligner, joint: JointMoments) -> None:
    """Set the maps to those of `gcpa`."""
    _set(maps, joint, *gcpa(joint))


_Closed = tuple[Callable[[int, int, int], Aligner], FitMaps]  # the class that holds such maps, and what sets them
CLOSED_UNIVERSES: dict[str, _Closed] = {
    "procrustes": (Procrustes, fit_procrustes), "gcca": (TwoLinear, fit_gcca), "gcpa": (TwoLinear, fit_gcpa),
}  # fmt: skip


def _set(maps: Aligner, joint: JointMoments, into: Tensor, back: Tensor) -> None:
    moments = joint.own()
    centred, varies = moments._replace(mean_y=torch.zeros_like(moments.mean_y)), squares(moments.xx) > 0
    back = back.flatten(0, 1) * varies[:, None]  # what narrower models lack stays zero
    maps.set_map(centred, into.flatten(0, 1) * varies[..., None], back)  # type: ignore[operator]


def load_universe(path: Path | str) -> StoredBank:
    """Read a file universe.safetensors, whose banks hold k · S places, model after model.

    Raises:
        ValueError: the file is not there, cannot be read, or is of something else.
    """
    bank = load_bank(path)
    if bank.command != "universe":
        raise UserError(f"Expected a file of `train.py universe`, but {path} is of `train.py {bank.command}`.")
    return bank


def without_member(bank: StoredBank, model: str) -> StoredBank:
    """A universe that one of its models has left: the maps of all others are as they were.

    Args:
        bank: the universe.
        model: its name.

    Raises:
        ValueError: it is no member.
    """
    names, sites = [about["name"] for about in bank.data["models"]], len(bank.data["sites"])
    check_known(names, model=model)
    left = names.index(model)
    kept = [place for place in range(len(names) * sites) if place // sites != left]

    def others(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else [value for i, value in enumerate(values) if i != left]

    maps: dict[str, Aligner] = {}
    for name, universe in universes_of(bank).items():
        if isinstance(universe.maps, SharedPart):
            first, *more = (universe.maps.of_model(i) for i in range(len(names)) if i != left)
            for part in more:
                first = first.joined(part)
            maps[name] = first
        else:
            maps[name] = take_places(universe.maps, kept)
    data = bank.data | {name: others(bank.data.get(name)) for name in ("models", "widths")}
    config = bank.data_config | {name: others(bank.data_config.get(name)) for name in ("models", "revisions")}
    training = records_at(bank.training, kept)
    pairs = {FORWARD: [bank.pairs[FORWARD][place] for place in kept]}
    return replace(
        bank, maps={FORWARD: maps}, pairs=pairs, data=data, data_config=config, moments=None, training=training
    )


def universes_of(bank: StoredBank) -> dict[str, Universe]:
    """The trained universe of a file and its closed forms, by name, frozen."""
    models = len(bank.data["models"])
    universes = {}
    for name, maps in bank.maps[FORWARD].items():
        _, fit_maps = CLOSED_UNIVERSES.get(name, (None, fit_network))
        universe = Universe(maps, models, fit_maps, bank.data.get("widths"))
        universes[name] = universe.requires_grad_(False).eval()
    return universes


def pair_banks(bank: StoredBank) -> Iterator[tuple[int, int, StoredBank]]:
    """For each pair of models its numbers, and its maps as `train.py fit` keeps them, with the universe's data.

    The map from the first model into the second is u_j⁻¹ ∘ u_i; one that is bijective is its own way back.
    """
    universes, count = universes_of(bank), len(bank.data["sites"])
    sites = bank.pairs[FORWARD][:count]
    for p, (i, j) in enumerate(all_pairs(len(bank.data["models"]))):
        there: dict[str, Aligner] = {name: universe.map(i, j) for name, universe in universes.items()}
        widths = [universes[NETWORK].widths[m] for m in (i, j)]
        one_way = [name for name, aligner in there.items() if not aligner.bijective]
        pair = replace(
            bank,
            command="fit",
            maps={FORWARD: there, BACKWARD: {name: universes[name].map(j, i) for name in one_way}},
            pairs={FORWARD: sites, BACKWARD: sites},
            moments=bank.moments and cut(bank.moments, slice(p * count, (p + 1) * count), *widths),
            training=records_at(bank.training, list(range(i * count, (i + 1) * count))),  # a site's, for all models
        )
        yield i, j, pair
