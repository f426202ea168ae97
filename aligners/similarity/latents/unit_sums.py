"""What two models have of each latent, summed over texts: the sums that ratios, intervals and tests are made of."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.similarity.double_metric import DoubleMetric
from aligners.similarity.latents.dictionary import (
    Firing,
    Pair,
    PairedDictionary,
    check_numbers,
    check_rows_of,
    firing,
    targets_of,
)
from aligners.similarity.latents.readings import Readings, check_fired


class Parts(NamedTuple):
    """What the owner of each latent has of it, and what the other model has, in each of G units of text.

    Attributes:
        own: (2, G, S, m) by kind of target: error, rebuilt. other: likewise.
        fired: (G, S, m) rows on which the latent fired.
        owner: (S, m) 0 where X owns it, 1 where Y does.
        squared: whether these are squared lengths, so that the ratio needs a root.
    """

    own: Tensor
    other: Tensor
    fired: Tensor
    owner: Tensor
    squared: bool


class LatentSums(DoubleMetric):
    """Sum the readings of both models for every latent, by unit of text, in one pass.

    A unit is a text, or one of a fixed number of groups of texts (its number modulo G), where texts are too many: the
    sums take 8 · G · S · m · (3 + 4 O) bytes, with O = 2 for decoders and 1 for fitted directions.

    Args:
        dictionary: of both models.
        readings: see `decoder_readings` and `FittedReadings`.
        units: G.
    """

    full_state_update = False
    fired: Tensor
    total: Tensor
    square: Tensor
    along: Tensor

    def __init__(
        self,
        dictionary: PairedDictionary,
        readings: Readings,
        units: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range(least=2, units=units)
        self.dictionary = dictionary
        self.readings = readings
        sites, latents, _ = dictionary.decoder_x.shape
        device = dictionary.decoder_x.device
        cells = (units, sites, latents)
        owners = len(readings.directions)
        shapes = {
            "fired": cells,
            "total": cells,
            "square": cells,
            "along": (owners, 2, 2, *cells),
        }
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=torch.float64, device=device)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(
        self,
        codes: Tensor,
        x: Tensor,
        y: Tensor,
        unit: Tensor,
        pairs: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Add rows.

        Args:
            codes: (S, N, m) at least 0.
            x: (S, N, d_x).
            y: (S, N, d_y).
            unit: (N,) numbers of the rows' units, below G.
            pairs: (M,) rows whose codes count, and (M,) rows whose targets they meet, as of
                `other_texts.other_rows`: the null. Default: each row meets itself.

        Raises:
            ValueError: see `check_rows_of`; units that do not exist.
        """
        check_rows_of(self.dictionary, codes, x, y)
        check_numbers("unit", unit, codes.shape[1], len(self.fired))
        rows = partners = None
        owners = unit
        if pairs is not None:
            rows, partners = pairs
            owners = unit[rows]
        for site in range(len(codes)):
            states = x[site], y[site]
            targets = self._targets(site, codes[site], states)
            entries = firing(_at(codes[site], rows))
            others = _at(codes[site], partners)
            met = others[entries.row, entries.latent].double()
            place = self._places(site, entries, owners)
            self._add_codes(entries, met, place)
            for kind, side, target in targets:
                products = self._products(
                    site, kind, side, entries, _at(target, partners)
                )
                for owner, of_owner in enumerate(products):
                    _add(self.along[owner, kind, side], place, of_owner)

    def _targets(
        self, site: int, codes: Tensor, states: Pair
    ) -> list[tuple[int, int, Tensor]]:
        """List kind, side and centred target, (N, d), of both kinds and sides."""
        pairs = targets_of(
            self.dictionary, site, firing(codes), states, self.readings.counting
        )
        found = []
        for kind, pair in enumerate(pairs):
            for side, target in enumerate(pair):
                centre = self.readings.centres[kind][side][site]
                found.append((kind, side, target - centre))
        return found

    def _places(self, site: int, entries: Firing, unit: Tensor) -> Tensor:
        """Where the entries, (E,), belong in sums (G, S, m) that are laid end to end, given the units of their rows."""
        _, sites, latents = self.fired.shape
        return (unit[entries.row] * sites + site) * latents + entries.latent

    def _add_codes(self, entries: Firing, met: Tensor, place: Tensor) -> None:
        """Add codes, and their products with the codes (E,) that they meet."""
        value = entries.value
        _add(self.fired, place, torch.ones_like(value))
        _add(self.total, place, value)
        _add(self.square, place, value * met)

    def _products(
        self, site: int, kind: int, side: int, entries: Firing, target: Tensor
    ) -> Iterator[Tensor]:
        """Yield f_j u_j·(t − t̄) of the entries, (E,), along the directions of each owner."""
        for directions in self.readings.directions:
            direction = directions[kind][side][site]
            yield entries.value * entries.along(direction, target)

    def compute(self) -> Tensor:
        """Return the readings (O, kind, side, G, S, m), each latent's own part put back into targets without it.

        Raises:
            ValueError: no row on which a latent fires.
        """
        check_fired(self.total.sum(0))
        readings = self.along.clone()
        put_back = self.square - self.readings.mean_code * self.total
        for owner, directions in enumerate(self.readings.directions):
            for side, decoder in enumerate(self.dictionary.decoders):
                missing = ~self.readings.counting[side]
                gain = torch.linalg.vecdot(directions[0][side], decoder)
                readings[owner, 0, side] += gain * put_back
                gain = torch.linalg.vecdot(directions[1][side], decoder)
                readings[owner, 1, side] += gain * missing * put_back
        for side, variance in enumerate(self.readings.variances):
            readings[:, :, side] /= variance[:, None]
        return readings

    def carried(self, variances: Pair, n: Tensor) -> Pair:
        """The share of each model's variance that latents alone add to what is rebuilt, Σ f_j²‖d_j‖² / N: (S, m) each.

        Args:
            variances: (S,) total variance of X's states and of Y's.
            n: () number of rows.
        """
        mean_square = self.square.sum(0) / n
        shares = []
        for decoder, variance in zip(self.dictionary.decoders, variances, strict=True):
            lengths = decoder.square().sum(2)
            shares.append(mean_square * lengths / variance[:, None])
        return shares[0], shares[1]

    def parts(
        self, owner: Tensor, null: Self | None = None, put_back: bool = True
    ) -> Parts:
        """Tell what the owner of each latent has of it from what the other model has.

        Args:
            owner: (S, m) 0 for X, 1 for Y: that with the larger decoder, see `relative_norms`.
            null: sums of the same rows with `pairs`, from which the other model's part is taken instead.
            put_back: whether the latent's own part is put back into the other's error, too. The paper does not, as it
                asks only about latents without one; then a latent that both decode well would be called the owner's.
        """
        readings = self.compute()
        of_other = readings if null is None else null.compute()
        if not put_back:
            variances = torch.stack(self.readings.variances)
            of_other = (null or self).along / variances[:, None, :, None]
        own = _chosen(readings, owner, owner)
        other = _chosen(of_other, owner, 1 - owner)
        return Parts(own, other, self.fired, owner, self.readings.squared)


def _at(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return some rows, or all."""
    return values if rows is None else values[rows]


def _add(sums: Tensor, place: Tensor, values: Tensor) -> None:
    """Add values (E,) to sums of any shape, at places in them laid end to end."""
    sums.view(-1).index_add_(0, place, values)


def _chosen(readings: Tensor, owner: Tensor, side: Tensor) -> Tensor:
    """Choose the readings of each latent's owner and of a side: (O, 2, 2, G, S, m) → (2, G, S, m)."""
    first, last = readings[0], readings[-1]
    of_owner = torch.where(owner == 1, last, first)
    return torch.where(side == 1, of_owner[:, 1], of_owner[:, 0])
