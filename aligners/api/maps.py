"""Maps on arrays: fit, transform, inverse and score, for one site. What they compute is in `aligners.maps`."""

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from aligners import maps as banks
from aligners.api.arrays import Array, as_given, rows, rows_of_both
from aligners.errors import UserError, check_range
from aligners.fitting.fits import fit_map, seeded
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments, moments_of

__all__ = [
    "CCA", "INN", "MLP", "PWCCA", "SVCCA", "ArrayMap", "Identity", "Linear", "Mean", "Permutation", "Procrustes",
    "Ridge", "TrainedMap",
]  # fmt: skip


class ArrayMap:
    """A map from rows of X (N, d_x) to rows of Y (N, d_y), of any aligner with a closed form.

    Rows are NumPy arrays or tensors; what comes out is of the kind, data type and device that went in. Closed forms are
    solved in float64.

    Args:
        aligner: the class, one of `aligners.maps` or one's own.
        options: of the class, besides the number of sites and the widths.

    Attributes:
        bank: the aligner, a bank of one site; there once the map is fitted.
    """

    bank: Aligner

    def __init__(self, aligner: type[Aligner], **options: Any) -> None:
        self.aligner, self.options = aligner, options

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        if type(self) in (ArrayMap, TrainedMap):
            options = [self.aligner.__name__, *options]
        return f"{type(self).__name__}({', '.join(options)})"

    def fit(self, x: Array, y: Array) -> Self:
        """Fit the map on paired rows.

        Args:
            x: (N, d_x).
            y: (N, d_y), row by row the partners of `x`.

        Raises:
            ValueError: the rows are not paired, not finite or too few, or the map cannot be fitted to them.
        """
        of_x, of_y = rows_of_both(x, y)
        bank = self._made(of_x.shape[1], of_y.shape[1]).to(of_x)
        moments = self._moments(of_x[None], of_y[None])
        fit_map(self.aligner.__name__, bank, *moments, advice="Give more rows.")
        self._train(bank, of_x[None], of_y[None])
        self.bank, self._mean_y = bank.requires_grad_(False).eval(), moments[0].mean_y
        return self

    def transform(self, x: Array) -> Array:
        """Map rows of X: (N, d_x) -> (N, d_y).

        Raises:
            ValueError: the map is not fitted, or the rows have another width or device, or are not finite.
        """
        bank = self._fitted()
        return as_given(bank(self._placed(rows(x, "x", bank.d_x), "x"))[0], x)

    def inverse(self, y: Array) -> Array:
        """Map rows of Y back: (N, d_y) -> (N, d_x).

        Raises:
            ValueError: as `transform`, or the map has no inverse.
        """
        bank = self._fitted()
        if not bank.invertible:
            raise UserError(
                f"Expected a map with an inverse, but {self!r} from width {bank.d_x} to {bank.d_y} has none. Fit a map "
                "from Y to X, or use Procrustes, Permutation or INN."
            )
        return as_given(bank.inverse(self._placed(rows(y, "y", bank.d_y), "y"))[0], y)

    def score(self, x: Array, y: Array) -> float:
        """1 − FVU of paired rows: 1 is perfect, 0 no better than the mean of Y's fitting rows, and it may be negative.

        All neurons count together, by their variance; scikit-learn's score of several outputs is a mean over them.

        Raises:
            ValueError: as `transform`, or the rows are not paired, or none of Y's differs from the mean.
        """
        bank = self._fitted()
        of_x, of_y = rows_of_both(x, y, bank.d_x, bank.d_y)
        of_x, of_y = self._placed(of_x, "x"), self._placed(of_y, "y")
        total = (of_y.double() - self._mean_y[:, None]).square().sum()
        if not total > 0:
            raise UserError("Expected rows in `y` that differ from the mean of the fitting rows, but got only that.")
        return float(1 - (bank(of_x) - of_y).double().square().sum() / total)

    def _made(self, d_x: int, d_y: int) -> Aligner:
        return self.aligner(1, d_x, d_y, **self.options)

    def _moments(self, x: Tensor, y: Tensor) -> list[Moments]:
        """Moments of the fitting rows and, for a map that chooses a strength on them, of others."""
        return [moments_of(x, y)]

    def _train(self, bank: Aligner, x: Tensor, y: Tensor) -> None:
        if not bank.closed_form:
            raise UserError(f"Expected an aligner with a closed form, but {type(bank).__name__} trains: TrainedMap.")

    def _fitted(self) -> Aligner:
        if not hasattr(self, "bank"):
            raise UserError(f"Expected a map that is fitted, but {self!r} is not. Call `fit(x, y)` first.")
        return self.bank

    def _placed(self, given: Tensor, name: str) -> Tensor:
        """Rows as a batch of one site, in the precision of the map."""
        held = self._mean_y.device
        if given.device != held:
            raise UserError(f"Expected `{name}` on {held}, where the map was fitted, but got {given.device}. Move it.")
        like = next((tensor for tensor in self.bank.state_dict().values() if tensor.is_floating_point()), given)
        return given.to(like.dtype)[None]


class TrainedMap(ArrayMap):
    """As `ArrayMap`, of an aligner that takes gradient steps, with the optimiser, rates and clipping of `train.py fit`.

    The last step is kept, whatever other rows would say of it: score it on rows that it was not fitted on.

    Args:
        aligner: the class.
        steps: how many; the learning rate rises and falls over them.
        rows_a_step: drawn with replacement.
        learning_rate: for matrices of up to 64 inputs; wider ones get proportionally less.
        seed: of the initial weights and of the rows that are drawn.
        options: of the class.

    Raises:
        ValueError: there is no step, or it has no rows, or the learning rate is not positive.
    """

    def __init__(
        self,
        aligner: type[Aligner],
        *,
        steps: int = 1000,
        rows_a_step: int = 512,
        learning_rate: float = 1e-2,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(aligner, **options)
        check_range(least=1, steps=steps, rows_a_step=rows_a_step)
        check_range(above=0, learning_rate=learning_rate)
        self.steps, self.rows_a_step, self.learning_rate, self.seed = steps, rows_a_step, learning_rate, seed

    def _made(self, d_x: int, d_y: int) -> Aligner:
        return seeded(partial(self.aligner, **self.options), self.seed, 1, d_x, d_y)

    def _train(self, bank: Aligner, x: Tensor, y: Tensor) -> None:
        from aligners.fitting.alignment import Alignment

        optimizer = partial(torch.optim.AdamW, lr=self.learning_rate, weight_decay=0.0, fused=True)
        like = Alignment(optimizer=optimizer)
        diverged = like.train_on_rows(bank, x, y, self.steps, min(self.rows_a_step, x.shape[1]), self.seed)
        if bool(diverged.any()):
            raise UserError(
                f"Expected training to converge, but {type(bank).__name__} diverged at step {int(diverged)} of "
                f"{self.steps} with `learning_rate` {self.learning_rate:g}. Lower it."
            )


class Linear(ArrayMap):
    """Least squares with an intercept; ridge regression with a larger `ridge`. See `aligners.maps.Linear`."""

    def __init__(self, *, ridge: float = 1e-6) -> None:
        super().__init__(banks.Linear, ridge=ridge)


class Ridge(ArrayMap):
    """Ridge regression, fitted on the first nine tenths of the rows, its strength chosen on the rest.

    Rows of one text are alike: leave them next to each other, so that the rest is of other texts. See
    `aligners.maps.Ridge`.
    """

    def __init__(self) -> None:
        super().__init__(banks.Ridge)

    def _moments(self, x: Tensor, y: Tensor) -> list[Moments]:
        first = x.shape[1] * 9 // 10
        return [moments_of(x[:, rows], y[:, rows]) for rows in (slice(first), slice(first, None))]


class Procrustes(ArrayMap):
    """The best rotation or reflection, with one factor if asked for. See `aligners.maps.Procrustes`."""

    def __init__(self, *, scale: bool = False) -> None:
        super().__init__(banks.Procrustes, scale=scale)


class Permutation(ArrayMap):
    """The best one-to-one matching of neurons. See `aligners.maps.Permutation`."""

    def __init__(self, *, signed: bool = False) -> None:
        super().__init__(banks.Permutation, signed=signed)


class CCA(ArrayMap):
    """Along canonical directions. See `aligners.maps.CCA`."""

    def __init__(self, *, directions: int | None = None, shrink: bool = False) -> None:
        super().__init__(banks.CCA, directions=directions, shrink=shrink)


class SVCCA(ArrayMap):
    """CCA between principal components that hold a share of the variance. See `aligners.maps.SVCCA`."""

    def __init__(self, *, share: float = 0.99, directions: int | None = None, shrink: bool = False) -> None:
        super().__init__(banks.SVCCA, share=share, directions=directions, shrink=shrink)


class PWCCA(ArrayMap):
    """CCA along the directions that carry a share of the projection weight. See `aligners.maps.PWCCA`."""

    def __init__(self, *, share: float = 0.99, shrink: bool = False) -> None:
        super().__init__(banks.PWCCA, share=share, shrink=shrink)


class Mean(ArrayMap):
    """The mean of Y's fitting rows, whatever x is: the floor, with score 0 on them."""

    def __init__(self) -> None:
        super().__init__(banks.Mean)


class Identity(ArrayMap):
    """x as it is: what is there without any map."""

    def __init__(self) -> None:
        super().__init__(banks.Identity)


class INN(TrainedMap):
    """An invertible network, trained in both directions at once. Options: see `TrainedMap` and `aligners.maps.INN`."""

    def __init__(self, *, steps: int = 1000, seed: int = 0, **options: Any) -> None:
        super().__init__(banks.INN, steps=steps, seed=seed, **options)


class MLP(TrainedMap):
    """A free network, without an inverse. Options: see `TrainedMap` and `aligners.maps.MLP`."""

    def __init__(self, *, steps: int = 1000, seed: int = 0, **options: Any) -> None:
        super().__init__(banks.MLP, steps=steps, seed=seed, **options)
