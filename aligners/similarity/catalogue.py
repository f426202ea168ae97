"""The table of measures by name: what each is computed from, and how."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from aligners.similarity.functional.attention import attnsim
from aligners.similarity.functional.canonical import canonical_chance, regression_chance
from aligners.similarity.functional.cca import Correlations, SharedMoments
from aligners.similarity.functional.cka import cka_from_hsic, linear_cka, mean_cka, unbiased_cka
from aligners.similarity.functional.kernels import rbf_cka, rsa
from aligners.similarity.functional.regression import mixedsim, mixedsim_held_out, neuronsim, r2, r2_held_out

Family = Literal["moments", "batches", "rows", "heads", "head_moments"]
ATTENTION = ("heads", "head_moments")  # the families that need attention weights


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
            (L_x, L_y); see `aligners.similarity.functional.canonical`.
    """

    name: str
    family: Family
    compute: Callable[[Any], Tensor]
    symmetric: bool = True
    held_out: Callable[[Any, Any], Tensor] | None = None
    budget: int = 0
    chance: Callable[[Any], Tensor] | None = None


_FURTHER: dict[str, Measure] = {}


def register(measure: Measure) -> None:
    """Add a measure to those below, in place of any of the same name."""
    _FURTHER[measure.name] = measure


def catalogue(share: float = 0.99) -> dict[str, Measure]:
    """All measures.

    Args:
        share: of the variance that SVCCA and PWCCA keep.
    """
    whole = _on(canonical_chance)

    def canonical(shared: SharedMoments, standardised: bool = False) -> Tensor:
        return canonical_chance(shared.moments, share, standardised, white_x=shared.white_x, white_y=shared.white_y)

    scaled = partial(canonical, standardised=True)
    cca, r2_cca = _shared("CCA", 1.0, Correlations.mean), _shared("R² of CCA", 1.0, Correlations.mean_square)
    svcca, pwcca = _shared("SVCCA", share, Correlations.mean), _shared("PWCCA", share, Correlations.weighted)
    svcca_of, pwcca_of = (
        _shared(name, share, average, standardised=True)
        for name, average in (("SVCCA", Correlations.mean), ("PWCCA", Correlations.weighted))
    )
    r2_svcca = _shared("R² of SVCCA", share, Correlations.mean_square)
    measures = (
        Measure("cka", "moments", _on(linear_cka)),
        Measure("unbiased_cka", "moments", _on(unbiased_cka)),
        Measure("minibatch_cka", "batches", cka_from_hsic),
        Measure("mean_minibatch_cka", "batches", mean_cka),
        Measure("rbf_cka", "rows", lambda sample: rbf_cka(sample.x, sample.y), budget=2000),
        Measure("cca", "moments", cca, held_out=cca, chance=whole),
        Measure("svcca", "moments", svcca, held_out=svcca, chance=canonical),
        Measure("r2_cca", "moments", r2_cca, chance=whole),
        Measure("r2_svcca", "moments", r2_svcca, chance=canonical),
        Measure("pwcca", "moments", pwcca, symmetric=False, held_out=pwcca, chance=canonical),
        Measure("svcca_standardised", "moments", svcca_of, held_out=svcca_of, chance=scaled),
        Measure("pwcca_standardised", "moments", pwcca_of, False, held_out=pwcca_of, chance=scaled),
        _regression("r2", r2, r2_held_out),
        Measure("neuronsim", "moments", _on(neuronsim), symmetric=False),
        _regression("mixedsim", mixedsim, mixedsim_held_out),
        Measure("rsa", "rows", lambda sample: rsa(sample.x, sample.y), budget=5000),
        *(
            Measure(f"attnsim_{kind}", "heads", partial(attnsim, kind=kind), symmetric=False)
            for kind in ("norm", "pearson", "js")
        ),
        Measure("attention_cka", "head_moments", _on(linear_cka)),
        Measure("attention_svcca", "head_moments", svcca, held_out=svcca, chance=canonical),
        Measure("attention_pwcca", "head_moments", pwcca, symmetric=False, held_out=pwcca, chance=canonical),
        Measure("attention_svcca_standardised", "head_moments", svcca_of, held_out=svcca_of, chance=scaled),
        Measure("attention_pwcca_standardised", "head_moments", pwcca_of, False, held_out=pwcca_of, chance=scaled),
    )
    return {measure.name: measure for measure in measures} | _FURTHER


def _on(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A measure that shares nothing with others: a formula of the moments."""
    return lambda shared: formula(shared.moments)


def _shared(
    name: str, share: float, average: Callable[[Correlations], Tensor], standardised: bool = False
) -> Callable[..., Tensor]:
    """An average of canonical correlations, which measures share."""
    options = {"standardised": standardised, "weighted": average == Correlations.weighted}

    def compute(shared: SharedMoments, held_out: SharedMoments | None = None) -> Tensor:
        return average(shared.correlations(name, share, held_out, **options))

    return compute


def _regression(name: str, formula: Callable[..., Tensor], held_out: Callable[..., Tensor]) -> Measure:
    """A regression on all of Y, whose whitening measures share."""

    def on(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *contents: formula(*(each.moments for each in contents), white_y=contents[0].white_y)

    return Measure(name, "moments", on(formula), symmetric=False, held_out=on(held_out), chance=_on(regression_chance))


# say what `cca`, `svcca` and `pwcca` say, as Ren et al. and the code released with Wu et al. define them
ON_REQUEST = ("r2_cca", "r2_svcca", "svcca_standardised", "pwcca_standardised")
DEFAULT = tuple(
    name
    for name, measure in catalogue().items()
    if name == "rsa" or (measure.family == "moments" and name not in ON_REQUEST)
)
