"""The table of measures by name: what each is computed from, and how."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from aligners.similarity.algebra.permuted_pairs import OfPairs
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
from aligners.similarity.functional.kernels import (
    rbf_cka_pairs,
    rsa_pairs,
    rsa_spearman_pairs,
)
from aligners.similarity.functional.matching import hard_matching, soft_matching
from aligners.similarity.functional.neighbours import (
    Formula,
    jaccard,
    local_cka,
    mutual,
    of_pairs,
)
from aligners.similarity.functional.predictivity import linear_predictivity
from aligners.similarity.functional.regression import (
    mixedsim,
    mixedsim_held_out,
    neuronsim,
    r2,
    r2_held_out,
)
from aligners.similarity.functional.shape import nbs, shape_of

Family = Literal["moments", "batches", "rows", "heads", "head_moments"]
ATTENTION = ("heads", "head_moments")  # the families that need attention weights


class Measure(NamedTuple):
    """How a measure is computed from what a comparison has summed up.

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
        whitened: of what is fitted, the whitening of each layer that it takes, which measures share: share of the
            variance, and whether features are standardised; see `whitening`.
    """

    name: str
    family: Family
    compute: Callable[[Any], Tensor]
    symmetric: bool = True
    held_out: Callable[[Any, Any], Tensor] | None = None
    budget: int = 0
    chance: Callable[[Any], Tensor] | None = None
    whitened: tuple[float, bool] | None = None


_FURTHER: dict[str, Measure] = {}


def register(measure: Measure) -> None:
    """Add a measure to those below, in place of any of the same name."""
    _FURTHER[measure.name] = measure


def catalogue(share: float = 0.99) -> dict[str, Measure]:
    """Return all measures.

    Args:
        share: share of the variance that SVCCA and PWCCA keep.
    """
    measures = [*_of_states(share), *_of_attention(share)]
    return {measure.name: measure for measure in measures} | _FURTHER


def _of_states(share: float) -> list[Measure]:
    """Return the measures of states, in the order of reports."""
    mean = Correlations.mean
    square = Correlations.mean_square
    weighted = Correlations.weighted
    return [
        Measure("cka", "moments", _on(linear_cka)),
        Measure("unbiased_cka", "moments", _on(unbiased_cka)),
        Measure("minibatch_cka", "batches", cka_from_hsic),
        Measure("mean_minibatch_cka", "batches", mean_cka),
        Measure("rbf_cka", "rows", _on_pairs(rbf_cka_pairs), budget=2000),
        _correlated("cca", "CCA", mean),
        _correlated("svcca", "SVCCA", mean, share),
        _correlated("r2_cca", "R² of CCA", square),
        _correlated("r2_svcca", "R² of SVCCA", square, share),
        _correlated("pwcca", "PWCCA", weighted, share),
        _correlated("svcca_standardised", "SVCCA", mean, share, True),
        _correlated("pwcca_standardised", "PWCCA", weighted, share, True),
        _regression("r2", r2, r2_held_out),
        Measure("neuronsim", "moments", _on(neuronsim), symmetric=False),
        _regression("mixedsim", mixedsim, mixedsim_held_out),
        Measure("nbs", "moments", lambda shared: shared.value(nbs)),
        Measure("angular_shape", "moments", _angular_shape),
        Measure("hard_matching", "moments", _on(hard_matching)),
        Measure("soft_matching", "moments", _on(soft_matching)),
        Measure(
            "linear_predictivity", "rows", _predicted, symmetric=False, budget=5000
        ),
        Measure("rsa", "rows", _on_pairs(rsa_pairs), budget=5000),
        Measure(
            "rsa_centred",
            "rows",
            _on_pairs(partial(rsa_pairs, kernel="centred_cosine")),
            budget=5000,
        ),
        Measure("rsa_spearman", "rows", _on_pairs(rsa_spearman_pairs), budget=2000),
        Measure("mutual_knn", "rows", _near(mutual), budget=5000),
        Measure("jaccard_knn", "rows", _near(jaccard), budget=5000),
        Measure("cknna", "rows", _near(local_cka), symmetric=False, budget=5000),
    ]


def _of_attention(share: float) -> list[Measure]:
    """Return the measures of attention weights, in the order of reports."""
    mean = Correlations.mean
    weighted = Correlations.weighted
    measures = []
    for kind in get_args(Kinds):
        compute = partial(attnsim, kind=kind)
        name = f"attnsim_{kind}"
        measures.append(Measure(name, "heads", compute, symmetric=False))
    for measure in (
        Measure("attention_cka", "moments", _on(linear_cka)),
        _correlated("attention_svcca", "SVCCA", mean, share),
        _correlated("attention_pwcca", "PWCCA", weighted, share),
        _correlated("attention_svcca_standardised", "SVCCA", mean, share, True),
        _correlated("attention_pwcca_standardised", "PWCCA", weighted, share, True),
    ):
        measures.append(measure._replace(family="head_moments"))
    return measures


def _on(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a measure that shares nothing with others: a formula of the moments."""
    return lambda shared: formula(shared.moments)


def _angular_shape(shared: SharedMoments) -> Tensor:
    """`angular_shape`, from what `nbs` has decomposed."""
    return shape_of(shared.value(nbs))


def _on_pairs(made_of: Callable[..., OfPairs]) -> Callable[..., Tensor]:
    """Make a measure of a sample of rows from what it is made of, which other orders of Y's rows share."""
    return lambda sample: sample.of_pairs(made_of)


def _predicted(sample: Any) -> Tensor:
    """Cross-validated R² of a sample of rows, whose folds are whole texts."""
    return linear_predictivity(sample.x, sample.y, groups=sample.text)


def _near(formula: Formula) -> Callable[..., Tensor]:
    """Make a measure from a formula of the neighbours of a sample of rows."""

    def compute(sample: Any) -> Tensor:
        of_x, of_y = sample.near()
        return of_pairs(of_x, of_y, formula)

    return compute


def _correlated(
    name: str,
    label: str,
    average: Callable[[Correlations], Tensor],
    share: float = 1.0,
    standardised: bool = False,
) -> Measure:
    """Make an average of canonical correlations, which measures share."""
    weighted = average == Correlations.weighted

    def compute(shared: SharedMoments, held_out: SharedMoments | None = None) -> Tensor:
        correlations = shared.correlations(
            label, share, held_out, standardised=standardised, weighted=weighted
        )
        return average(correlations)

    def chance(shared: SharedMoments) -> Tensor:
        white = shared.white_x, shared.white_y
        return canonical_chance(shared.moments, share, standardised, *white)

    measure = Measure(
        name,
        family="moments",
        compute=compute,
        symmetric=not weighted,
        chance=chance,
        whitened=(share, standardised),
    )
    if average == Correlations.mean_square:
        return measure  # these have no held-out value
    return measure._replace(held_out=compute)


def _regression(
    name: str, formula: Callable[..., Tensor], held_out: Callable[..., Tensor]
) -> Measure:
    """Make a regression on all of Y, whose whitening measures share."""

    def compute(shared: SharedMoments) -> Tensor:
        return formula(shared.moments, white_y=shared.white_y)

    def compute_held_out(fitted: SharedMoments, others: SharedMoments) -> Tensor:
        return held_out(fitted.moments, others.moments, white_y=fitted.white_y)

    return Measure(
        name,
        family="moments",
        compute=compute,
        symmetric=False,
        held_out=compute_held_out,
        chance=_on(regression_chance),
        whitened=(1.0, False),
    )


ON_REQUEST = (
    # say what `cca`, `svcca` and `pwcca` say, as Ren et al. and the code released with Wu et al. define them
    "r2_cca",
    "r2_svcca",
    "svcca_standardised",
    "pwcca_standardised",
    # a decomposition or a matching for each pair of layers
    "nbs",
    "angular_shape",
    "hard_matching",
    "soft_matching",
)


def _default() -> tuple[str, ...]:
    """Return the measures of moments, and RSA, except those on request."""
    names = []
    for name, measure in catalogue().items():
        usual = measure.family == "moments" or name == "rsa"
        if usual and name not in ON_REQUEST:
            names.append(name)
    return tuple(names)


DEFAULT = _default()
