"""The contract of all aligners, and two building blocks of trained ones."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aligners.errors import UserError
from aligners.similarity.algebra.moments import Moments, squares

MORE_ROWS = (  # advice where there are too few
    "Give more texts, or more rows of each: `rows` 'words', or 'tokens' where both models read the same tokens."
)


class Aligner(nn.Module, ABC):
    """A bank of S independent maps g from X's space to Y's, one per site pair.

    Every parameter, buffer and input carries the sites on its leading axis, and nothing is shared between
    sites: fitting a bank gives each site what fitting it alone would give.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.

    Attributes:
        bijective: `inverse` is the exact inverse of `forward`.
        invertible: `inverse` exists, exactly or as a pseudo-inverse.
        closed_form: `fit` is the whole fit; nothing is left to train.
        needs_equal_width: the map exists only for d_x = d_y.
        both_ways: trained as a map from X to Y and, through its inverse, from Y to X.
        reconstructs: trained to give back the states that it is given, of which `reconstruction_errors` says how well.
        rows_needed: the fewest fitting rows that determine `fit`.
        registry: every aligner class by its `kind`. Classes defined with `registered=False` are left out: they are not
            banks of independent maps.
        kind: the name by which a checkpoint refers to the class: the class's own name, or its full path if another
            class already has that name.
    """

    registry: ClassVar[dict[str, type["Aligner"]]] = {}
    bijective: bool = False
    invertible: bool = False
    closed_form: bool = False
    needs_equal_width: bool = False
    both_ways: bool = False
    reconstructs: bool = False
    rows_needed: int = 2
    kind: ClassVar[str]

    def __init_subclass__(cls, registered: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = cls.__name__
        if not registered:
            return
        if _is_taken(cls):
            cls.kind = f"{cls.__module__}.{cls.__qualname__}"
        Aligner.registry[cls.kind] = cls

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        super().__init__()
        if self.needs_equal_width and d_x != d_y:
            raise UserError(
                f"{type(self).__name__} expects equal widths, but `d_x` is {d_x} and `d_y` is {d_y}. "
                "A map between spaces of different dimension cannot be a bijection: use Linear or MLP."
            )
        self.sites = sites
        self.d_x = d_x
        self.d_y = d_y

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Map states of X: (S, N, d_x) -> (S, N, d_y)."""

    def inverse(self, y: Tensor) -> Tensor:
        """Map states of Y back: (S, N, d_y) -> (S, N, d_x). Only where `invertible`."""
        raise NotImplementedError(f"{type(self).__name__} has no inverse.")

    @abstractmethod
    def fit(self, moments: Moments) -> None:
        """Set the parameters from the moments of the fitting rows.

        This solves a closed-form aligner, and sets the scaling and the starting point of a trained one.
        """

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Training loss of each site, (S,), in units of FVU. Only for aligners that are not closed-form.

        A loss may take a third argument, `real`: (N,) of ones and zeros; rows with 0 then count for nothing. Only with
        it can the steps of an aligner be recorded on a GPU (`aligners.fitting.recorded_steps`). Such a loss takes the
        same operations whatever the values of its arguments.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is fitted in closed form and has no loss."
        )

    def settle(self, x: Tensor, y: Tensor) -> None:
        """Set what depends on the weights but has no gradient, after a step on these rows.

        The weights are then those that are kept: averages over steps, if these are averaged.
        """

    def reconstruction_errors(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what is left of each row of X and Y, (S, N), in units of FVU. Only where `reconstructs`."""
        raise NotImplementedError(f"{type(self).__name__} reconstructs nothing.")

    def start_names(self) -> Sequence[str]:
        """Return the starting map of a trained aligner at each site: the name of a closed form, or "random"."""
        return ["random"] * self.sites

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """Return the number of inputs that a parameter sums over, which divides its rate; see `make_optimizer`.

        Args:
            name: the parameter's name in this module.
            parameter: (S, ..., fan-in, fan-out); one with fewer than three axes counts as having one input.
        """
        if parameter.ndim < 3:
            return 1
        return parameter.shape[-2]

    def rate_share(self, name: str) -> Tensor | None:
        """Return the factor on each site's learning rate of a parameter, (S,); None: the full rate.

        Args:
            name: the parameter's name in this module.
        """
        return None

    def places(self, name: str) -> Sequence[int] | slice:
        """Return the places of the bank along the leading axis of a parameter or buffer, by its name."""
        return slice(None)

    def kept_floats(self) -> int:
        """Numbers that a step keeps of each row and site for the gradient, about."""
        floats = 0
        for part in self.modules():
            if isinstance(part, BankLinear):
                d_in, d_out = part.weight.shape[-2:]
                floats += d_in + 3 * d_out
        if self.both_ways:
            floats *= 2
        return floats

    def findings(self) -> dict[str, Any]:
        """Return what a report should say about this fit besides its errors, as plain values."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments after (sites, d_x, d_y), as plain values, to build an equal aligner.

        Those by keyword that the aligner keeps as attributes of the same names.
        """
        options = {}
        parameters = signature(type(self)).parameters
        for name, parameter in parameters.items():
            by_keyword = parameter.kind is parameter.KEYWORD_ONLY
            if by_keyword and hasattr(self, name):
                options[name] = getattr(self, name)
        return options


def _is_taken(cls: type[Aligner]) -> bool:
    """Tell whether a class has the name of one of ours, or of somebody else's."""
    if cls.__module__.startswith("aligners."):
        return False
    import aligners.maps  # which imports this module

    if cls.__name__ in aligners.maps.__all__:
        return True
    known = Aligner.registry.get(cls.__name__)
    return known is not None and known.__module__ != cls.__module__


class BankLinear(nn.Module):
    """S affine layers at once: (S, N, d_in) -> (S, N, d_out).

    Every site starts from the same draw, so a site's result does not depend on the others in its bank. The
    draw is that of `torch.nn.Linear`, uniform within ±1/√d_in.
    """

    def __init__(self, sites: int, d_in: int, d_out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(d_in)
        weight = torch.empty(d_in, d_out)
        bias = torch.empty(1, d_out)
        weight.uniform_(-bound, bound)
        bias.uniform_(-bound, bound)
        self.weight = _of_sites(weight, sites)
        self.bias = _of_sites(bias, sites)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_in) -> (S, N, d_out)."""
        return torch.baddbmm(self.bias, x, self.weight)


def _of_sites(value: Tensor, sites: int) -> nn.Parameter:
    """Make a parameter that starts at the same value at every site."""
    values = value.expand(sites, -1, -1).clone()
    return nn.Parameter(values)


class Scaling(nn.Module):
    """Centres states and divides them by one number per site and model, their root mean variance.

    One number, not one per dimension: an L2 fit on the scaled states is then the same fit as on the raw ones,
    and the mean square of a scaled residual of Y is the FVU. The inverse is exact.
    """

    mean_x: Tensor
    mean_y: Tensor
    scale_x: Tensor
    scale_y: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        super().__init__()
        zeros_x = torch.zeros(sites, 1, d_x)
        zeros_y = torch.zeros(sites, 1, d_y)
        ones = torch.ones(sites, 1, 1)
        self.register_buffer("mean_x", zeros_x)
        self.register_buffer("mean_y", zeros_y)
        self.register_buffer("scale_x", ones)
        self.register_buffer("scale_y", ones.clone())

    def fit(self, moments: Moments) -> None:
        """Take means and scales from the fitting rows."""
        mean_x = moments.mean_x[:, None]
        mean_y = moments.mean_y[:, None]
        scale_x = deviation(moments.xx, moments.n)
        scale_y = deviation(moments.yy, moments.n)
        self.mean_x.copy_(mean_x)
        self.mean_y.copy_(mean_y)
        self.scale_x.copy_(scale_x)
        self.scale_y.copy_(scale_y)

    def scale(self, x: Tensor) -> Tensor:
        """Centre and scale states of X."""
        return (x - self.mean_x) / self.scale_x

    def scale_target(self, y: Tensor) -> Tensor:
        """Centre and scale states of Y."""
        return (y - self.mean_y) / self.scale_y

    def unscale(self, x: Tensor) -> Tensor:
        """The inverse of `scale`."""
        return x * self.scale_x + self.mean_x

    def unscale_target(self, y: Tensor) -> Tensor:
        """The inverse of `scale_target`."""
        return y * self.scale_y + self.mean_y


def deviation(scatter: Tensor, n: Tensor) -> Tensor:
    """Return the root mean variance over the features of n centred rows with this scatter, (S, d, d) -> (S, 1, 1)."""
    variance = squares(scatter).mean(-1) / n
    root = variance.sqrt()
    return root[:, None, None]


class Scaled(Aligner, registered=False):
    """An aligner that is trained on centred and scaled states, from X to Y alone."""

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        super().__init__(sites, d_x, d_y)
        self.scaling = Scaling(sites, d_x, d_y)

    @abstractmethod
    def _mapped(self, x: Tensor) -> Tensor:
        """Map up to Y's centre and scale: (S, N, d_x) -> (S, N, d_y)."""

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.scaling.unscale_target(self._mapped(x))

    def loss(self, x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the FVU of the batch, or of its rows where `real` (N,) is 1, at each site, (S,)."""
        residual = self._mapped(x) - self.scaling.scale_target(y)
        return mean_square(residual, real)


def mean_square(residual: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean square over the dimensions and rows of each site, (S, N, d) -> (S,).

    Args:
        residual: finite in every row, those left out as well: their gradient is zero times what they are.
        real: 1 for the rows that count and 0 for the others, (N,); None: all count.
    """
    squared = residual.square()
    if real is None:
        return squared.mean((1, 2))
    of_rows = squared.mean(2) * real
    return of_rows.sum(1) / real.sum()
