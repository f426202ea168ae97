"""The table of measures by name: what each is computed from, and how."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from aligners.similarity.functional.attention import Kinds, attnsim
from aligners.similarity.functional.canonical_correlations import (
    canonical_chance,
    regression_chance,
)
from aligners.similarity.functional.cca import Correlations, SharedMoments
from aligners.similarity.functional.cka import (
    cka_from_hsic,
    linear_cka,
    mean_cka,
    unbiased_cka,
)
from aligners.similarity.functional.kernels import rbf_cka, rsa
from aligners.similarity.functional.regression import (
    mixedsim,
    mixedsim_held_out,
    neuronsim,
    r2,
    r2_held_out,
)

Family = Literal["moments", "batches", "rows", "heads", "head_moments"]
ATTENTION = ("heads", "head_moments")  # the families that need attention weights


class Decomposed(NamedTuple):
    """What a fitted measure decomposes, and shares with all that decompose the same.

    Attributes:
        whitening: share of the variance of each layer, and whether features are standardised; see `whitening`.
        pairs: whether pairs of layers are decomposed, too; if not, it is a regression.
        directions: whether these give directions as well.
    """

    whitening: tuple[float, bool] = (1.0, False)
    pairs: bool = True
    directions: bool = False


class Measure(NamedTuple):
    """How a measure is computed from what an arm has kept.

    Attributes:
        name: in reports and on the command line.
        family: what it needs: moments of all rows, HSICs of batches, a sample of rows, sums over pairs of attention
            heads, or moments of attention weights.
        compute: from the family's content to (L_x, L_y), from X to Y.
        symmetric: whether the direction from Y to X is the same.
        held_out: from the contents of the fitting rows and of the held-out ones; None: nothing is fitted.
        budget: most rows of a sample.
        chance: of what is fitted, from the content to the share of variance that independent data would have in common
            (L_x, L_y); see `aligners.similarity.functional.canonical_correlations`.
        decomposed: what it decomposes, if anything.
    """

    name: str
    family: Family
    compute: Callable[[Any], Tensor]
    symmetric: bool = True
    held_out: Callable[[Any, Any], Tensor] | None = None
    budget: int = 0
    chance: Callable[[Any], Tensor] | None = None
    decomposed: Decomposed | None = None


_FURTHER: dict[str, Measure] = {}


def register(measure: Measure) -> None:
    """Add a measure to those below, in place of any of the same name."""
    _FURTHER[measure.name] = measure


def catalogue(share: float = 0.99) -> dict[str, Measure]:
    """All measures.

    Args:
        share: of the variance that SVCCA and PWCCA keep.
    """
    mean, square, weighted = (
        Correlations.mean,
        Correlations.mean_square,
        Correlations.weighted,
    )
    heads: Family = "head_moments"
    kinds: tuple[Kinds, ...] = get_args(Kinds)
    measures = (
        Measure("cka", "moments", _on(linear_cka)),
        Measure("unbiased_cka", "moments", _on(unbiased_cka)),
        Measure("minibatch_cka", "batches", cka_from_hsic),
        Measure("mean_minibatch_cka", "batches", mean_cka),
        Measure(
            "rbf_cka", "rows", lambda sample: rbf_cka(sample.x, sample.y), budget=2000
        ),
        _correlated("cca", "CCA", mean),
        _correlated("svcca", "SVCCA", mean, share),
        _correlated("r2_cca", "R² of CCA", square)._replace(held_out=None),
        _correlated("r2_svcca", "R² of SVCCA", square, share)._replace(held_out=None),
        _correlated("pwcca", "PWCCA", weighted, share),
        _correlated("svcca_standardised", "SVCCA", mean, share, True),
        _correlated("pwcca_standardised", "PWCCA", weighted, share, True),
        _regression("r2", r2, r2_held_out),
        Measure("neuronsim", "moments", _on(neuronsim), symmetric=False),
        _regression("mixedsim", mixedsim, mixedsim_held_out),
        Measure("rsa", "rows", lambda sample: rsa(sample.x, sample.y), budget=5000),
        *(
            Measure(
                f"attnsim_{kind}", "heads", partial(attnsim, kind=kind), symmetric=False
            )
            for kind in kinds
        ),
        Measure("attention_cka", heads, _on(linear_cka)),
        _correlated("attention_svcca", "SVCCA", mean, share)._replace(family=heads),
        _correlated("attention_pwcca", "PWCCA", weighted, share)._replace(family=heads),
        _correlated(
            "attention_svcca_standardised", "SVCCA", mean, share, True
        )._replace(family=heads),
        _correlated(
            "attention_pwcca_standardised", "PWCCA", weighted, share, True
        )._replace(family=heads),
    )
    return {measure.name: measure for measure in measures} | _FURTHER


def _on(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A measure that shares nothing with others: a formula of the moments."""
    return lambda shared: formula(shared.moments)


def _correlated(
    name: str,
    label: str,
    average: Callable[[Correlations], Tensor],
    share: float = 1.0,
    standardised: bool = False,
) -> Measure:
    """An average of canonical correlations, which measures share."""
    weighted = average == Correlations.weighted

    def compute(shared: SharedMoments, held_out: SharedMoments | None = None) -> Tensor:
        return average(
            shared.correlations(
                label, share, held_out, standardised=standardised, weighted=weighted
            )
        )

    def chance(shared: SharedMoments) -> Tensor:
        return canonical_chance(
            shared.moments, share, standardised, shared.white_x, shared.white_y
        )

    decomposed = Decomposed((share, standardised), directions=weighted)
    return Measure(
        name,
        "moments",
        compute,
        not weighted,
        compute,
        chance=chance,
        decomposed=decomposed,
    )


def _regression(
    name: str, formula: Callable[..., Tensor], held_out: Callable[..., Tensor]
) -> Measure:
    """A regression on all of Y, whose whitening measures share."""

    def on(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *contents: formula(
            *(each.moments for each in contents), white_y=contents[0].white_y
        )

    chance, decomposed = _on(regression_chance), Decomposed(pairs=False)
    return Measure(
        name,
        "moments",
        on(formula),
        False,
        on(held_out),
        chance=chance,
        decomposed=decomposed,
    )


# say what `cca`, `svcca` and `pwcca` say, as Ren et al. and the code released with Wu et al. define them
ON_REQUEST = ("r2_cca", "r2_svcca", "svcca_standardised", "pwcca_standardised")
_USUAL = (
    name
    for name, measure in catalogue().items()
    if measure.family == "moments" or name == "rsa"
)
DEFAULT = tuple(name for name in _USUAL if name not in ON_REQUEST)
