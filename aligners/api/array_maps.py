"""Maps on arrays, as scikit-learn's estimators: the options of each. What they compute is in `aligners.maps`."""

from collections.abc import Sequence

from torch import Tensor

from aligners import maps as banks
from aligners.api.estimators import ArrayMap, NotFittedError, TrainedMap
from aligners.maps.by_rows.relative import Decode
from aligners.maps.inn import Mixing
from aligners.maps.starting_maps import Start
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
