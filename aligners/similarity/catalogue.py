"""The table of measures by name: what each is computed from, and how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from aligners.similarity.functional.attention import AttentionSums, attnsim_from_sums
from aligners.similarity.functional.cca import cca_from_moments, cca_held_out, r2_cca_from_moments
from aligners.similarity.functional.chance import canonical_chance, regression_chance
from aligners.similarity.functional.cka import linear_cka_from_moments, unbiased_cka_from_moments
from aligners.similarity.functional.hsic import cka_from_hsic
from aligners.similarity.functional.kernels import rbf_cka, rsa
from aligners.similarity.functional.neurons import neuronsim_from_moments
from aligners.similarity.functional.regression import (
    mixedsim_from_moments,
    mixedsim_held_out,
    r2_from_moments,
    r2_held_out,
)
from aligners.similarity.sample import Sample
from aligners.similarity.shared import SharedMoments

__all__ = ["ATTENTION", "DEFAULT", "Family", "Measure", "catalogue", "register"]

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
            (L_x, L_y); see `aligners.similarity.functional.chance`.
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
    svcca, pwcca = partial(_svcca, share), partial(_pwcca, share)
    cka = partial(_on, linear_cka_from_moments)
    cca, cca_out = partial(_on, cca_from_moments), partial(_on, cca_held_out)
    r2, r2_out = partial(_on, r2_from_moments), partial(_on, r2_held_out)
    regressed = partial(_on, regression_chance)
    whole, canonical = partial(_canonical_chance, 1.0), partial(_canonical_chance, share)
    mixedsim, mixedsim_out = partial(_on, mixedsim_from_moments), partial(_on, mixedsim_held_out)
    measures = (
        Measure("cka", "moments", cka),
        Measure("unbiased_cka", "moments", partial(_on, unbiased_cka_from_moments)),
        Measure("minibatch_cka", "batches", cka_from_hsic),
        Measure("rbf_cka", "rows", _rbf_cka, budget=2000),
        Measure("cca", "moments", cca, held_out=cca_out, chance=whole),
        Measure("svcca", "moments", svcca, held_out=svcca, chance=canonical),
        Measure("r2_cca", "moments", partial(_on, r2_cca_from_moments), chance=whole),
        Measure("r2_svcca", "moments", partial(_r2_svcca, share), chance=canonical),
        Measure("pwcca", "moments", pwcca, symmetric=False, held_out=pwcca, chance=canonical),
        Measure("r2", "moments", r2, symmetric=False, held_out=r2_out, chance=regressed),
        Measure("neuronsim", "moments", partial(_on, neuronsim_from_moments), symmetric=False),
        Measure("mixedsim", "moments", mixedsim, symmetric=False, held_out=mixedsim_out, chance=regressed),
        Measure("rsa", "rows", _rsa, budget=5000),
        *(
            Measure(name, "heads", partial(_attnsim, name=name), symmetric=False)
            for name in ("attnsim_norm", "attnsim_pearson", "attnsim_js")
        ),
        Measure("attention_cka", "head_moments", cka),
        Measure("attention_svcca", "head_moments", svcca, held_out=svcca, chance=canonical),
        Measure("attention_pwcca", "head_moments", pwcca, symmetric=False, held_out=pwcca, chance=canonical),
    )
    return {measure.name: measure for measure in measures} | _FURTHER


def _on(function: Callable[..., Tensor], *contents: SharedMoments) -> Tensor:
    """A measure that shares nothing with others: a function of the moments, or of fitted and held-out ones."""
    return function(*(content.moments for content in contents))


def _svcca(share: float, moments: SharedMoments, held_out: SharedMoments | None = None) -> Tensor:
    return moments.correlations("SVCCA", share, held_out).mean()


def _r2_svcca(share: float, moments: SharedMoments) -> Tensor:
    return moments.correlations("R² of SVCCA", share).mean_square()


def _pwcca(share: float, moments: SharedMoments, held_out: SharedMoments | None = None) -> Tensor:
    return moments.correlations("PWCCA", share, held_out).weighted()


def _canonical_chance(share: float, moments: SharedMoments) -> Tensor:
    return canonical_chance(moments.moments, share)


def _rsa(sample: Sample) -> Tensor:
    return rsa(sample.x, sample.y)


def _rbf_cka(sample: Sample) -> Tensor:
    return rbf_cka(sample.x, sample.y)


def _attnsim(sums: AttentionSums, name: str) -> Tensor:
    return attnsim_from_sums(sums)[name]


ON_REQUEST = ("r2_cca", "r2_svcca")  # say what `cca` and `svcca` say, as Ren et al. define them
DEFAULT = tuple(
    name
    for name, measure in catalogue().items()
    if name == "rsa" or (measure.family == "moments" and name not in ON_REQUEST)
)
