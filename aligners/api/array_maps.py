"""Maps on arrays, as scikit-learn's estimators: the options of each. What they compute is in `aligners.maps`."""

from collections.abc import Sequence
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor

from aligners import maps as banks
from aligners.api.arrays import Array, column_names, rows
from aligners.api.estimators import ArrayMap, NotFittedError, TrainedMap
from aligners.errors import UserError
from aligners.maps.by_rows.relative import Decode
from aligners.maps.inn import Mixing
from aligners.maps.starting_maps import Start
from aligners.maps.unpaired.rotation import Matching
from aligners.similarity.algebra.moments import Moments, moments_of

__all__ = [
    "CCA",
    "INN",
    "MLP",
    "PWCCA",
    "SVCCA",
    "ArrayMap",
    "Identity",
    "KernelRidge",
    "Linear",
    "Matching",
    "Mean",
    "NearestNeighbours",
    "NotFittedError",
    "Permutation",
    "Procrustes",
    "ReducedRank",
    "Relative",
    "Ridge",
    "SoftMatching",
    "TrainedMap",
]


class Linear(ArrayMap, aligner=banks.Linear):
    """Least squares with an intercept; ridge regression with a larger `ridge`. See `aligners.maps.Linear`."""

    ridge: float = 1e-6
    inverse_tolerance: float = 1e-6


class Ridge(ArrayMap, aligner=banks.Ridge):
    """Ridge regression, fitted on the first nine tenths of the rows, its strength chosen on the rest.

    Rows of one text are alike: keep them next to each other, so that the last tenth comes from other texts. See
    `aligners.maps.Ridge`.
    """

    def _moments(self, x: Tensor, y: Tensor) -> list[Moments]:
        first = x.shape[1] * 9 // 10
        return [
            moments_of(x[:, rows], y[:, rows])
            for rows in (slice(first), slice(first, None))
        ]


class Procrustes(ArrayMap, aligner=banks.Procrustes):
    """The best rotation or reflection, with one factor if asked for. See `aligners.maps.Procrustes`."""

    scale: bool = False

    def fit_unpaired(
        self,
        x: Array,
        y: Array,
        pairs: Array | None = None,
        how: Matching | None = None,
    ) -> Self:
        """Fit the map on rows that are not of the same texts, by the structure of each side (Dar 2025, mini-vec2vec).

        `aligners.maps.unpaired.rotation` says how, and when that works: measure the result on a few known pairs.
        Between real models it has needed some: from MiniLM to E5, on 2,520 vectors of texts a side, 20 pairs. With
        `scale`, the factor is that of least error on the known pairs, and without them the ratio of the two sides'
        deviations, which a few far rows decide.

        Args:
            x: (N, d_x).
            y: (M, d_y), other rows, such as the same model's states of other texts; thousands on each side.
            pairs: (P, 2) numbers of rows of `x` and of `y` that are known to be partners; default: none is.
            how: options of the matching.

        Raises:
            ValueError: the rows are of several sites, not finite or too few; or `pairs` is out of range.
        """
        from aligners.maps.unpaired.rotation import unpaired_rotation

        of_x, of_y = rows(x, "x"), rows(y, "y")
        if len(of_x) > 1 or len(of_y) > 1:
            raise UserError(
                "Expected rows of one site in `x` and `y`, but got several. Fit each site alone."
            )
        known = None
        if pairs is not None:
            known = torch.as_tensor(np.asarray(pairs))
        a, b = of_x[0].double(), of_y[0].to(of_x.device).double()
        found = unpaired_rotation(a, b, known, how)
        rotation = found.rotation[None]
        back = rotation.mT
        if self.scale:
            factor = _unpaired_scale(a, b, found.rotation, known)
            rotation, back = rotation * factor, back / factor
        made = self._made(1, a.shape[1], b.shape[1]).to(of_x)
        bank = cast(banks.Procrustes, made)
        bank.set_map(_means_only(a, b), rotation, back)
        means = a.mean(0, keepdim=True), b.mean(0, keepdim=True)
        self._keep(bank, means, None, x, column_names(x))
        self.nearest_cosine_ = float(found.nearest)
        return self


def _unpaired_scale(
    a: Tensor, b: Tensor, rotation: Tensor, pairs: Tensor | None
) -> Tensor:
    """The factor of least error on known pairs; without any that ask for one above 0, the ratio of the deviations."""
    ratio = (b.var(0).sum() / a.var(0).sum()).sqrt()
    if pairs is None or not len(pairs):
        return ratio
    turned = (a[pairs[:, 0]] - a.mean(0)) @ rotation
    wanted = b[pairs[:, 1]] - b.mean(0)
    factor = (turned * wanted).sum() / turned.square().sum()
    return torch.where(factor > 0, factor, ratio)


def _means_only(a: Tensor, b: Tensor) -> Moments:
    """Moments of rows without partners: their means."""
    zeros = Moments.zeros(1, a.shape[1], b.shape[1])
    return zeros._replace(
        mean_x=a.mean(0, keepdim=True), mean_y=b.mean(0, keepdim=True)
    )


class Permutation(ArrayMap, aligner=banks.Permutation):
    """The best one-to-one matching of neurons. See `aligners.maps.Permutation`."""

    signed: bool = False


class ReducedRank(ArrayMap, aligner=banks.ReducedRank):
    """Least squares of a rank, given or by the share of the fit that it keeps. See `aligners.maps.ReducedRank`."""

    rank: int | None = None
    share: float = 0.99
    ridge: float = 1e-6


class SoftMatching(ArrayMap, aligner=banks.SoftMatching):
    """Means of matched neurons, for widths that differ too. See `aligners.maps.SoftMatching`."""


class CCA(ArrayMap, aligner=banks.CCA):
    """Along canonical directions. See `aligners.maps.CCA`."""

    directions: int | None = None
    shrink: bool = False
    tolerance: float = 1e-10


class SVCCA(ArrayMap, aligner=banks.SVCCA):
    """CCA between principal components that hold a share of the variance. See `aligners.maps.SVCCA`."""

    share: float = 0.99
    directions: int | None = None
    shrink: bool = False
    tolerance: float = 1e-10


class PWCCA(ArrayMap, aligner=banks.PWCCA):
    """CCA along the directions that carry a share of the projection weight. See `aligners.maps.PWCCA`."""

    share: float = 0.99
    shrink: bool = False
    tolerance: float = 1e-10


class NearestNeighbours(ArrayMap, aligner=banks.NearestNeighbours):
    """The mean of Y over the fitting rows whose X is nearest. See `aligners.maps.NearestNeighbours`."""

    k: int = 10
    weighted: bool = False
    rows: int = 10_000
    seed: int = 0


class KernelRidge(ArrayMap, aligner=banks.KernelRidge):
    """Ridge regression in the space of an RBF kernel, on landmarks. See `aligners.maps.KernelRidge`.

    Fitted on the first nine tenths of the rows, its strength chosen on the rest, as `Ridge`.
    """

    landmarks: int = 512
    width: float = 1.0
    rows: int = 10_000
    seed: int = 0


class Relative(ArrayMap, aligner=banks.Relative):
    """Through cosines with anchors, which both models have. See `aligners.maps.Relative`.

    Fitted on the first nine tenths of the rows, its strength chosen on the rest, as `Ridge`; `decode="inverse"` on all.
    """

    anchors: int = 512
    decode: Decode = "least_squares"
    tolerance: float = 0.1
    rows: int = 10_000
    seed: int = 0


class Mean(ArrayMap, aligner=banks.Mean):
    """The mean of Y's fitting rows, whatever x is: the floor, with score 0 on them."""


class Identity(ArrayMap, aligner=banks.Identity):
    """Return x unchanged, as if there were no map."""


class INN(TrainedMap, aligner=banks.INN):
    """An invertible network, trained in both directions at once. Options: see `TrainedMap` and `aligners.maps.INN`."""

    couplings: int = 8
    hidden: int | None = None
    depth: int = 1
    mixing: Mixing = "rotation"
    start: Start | None = None
    both_ways: bool = True
    recompute: bool = False


class MLP(TrainedMap, aligner=banks.MLP):
    """A free network, without an inverse. Options: see `TrainedMap` and `aligners.maps.MLP`."""

    hidden: Sequence[int] | None = None
    parameters: int | None = None
    skip: bool = True
