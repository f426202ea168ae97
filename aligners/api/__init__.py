"""Maps and measures on plain arrays, and injection from names and texts: the library in a few lines of Python.

`docs/python.md` shows every name. The maps here take the widths from what they are fitted on; the banks in `aligners`,
which they are made of, hold one map for each of many site pairs.
"""

from aligners.api.maps import (
    CCA,
    INN,
    MLP,
    PWCCA,
    SVCCA,
    ArrayMap,
    Identity,
    Linear,
    Mean,
    Permutation,
    Procrustes,
    Ridge,
    TrainedMap,
)
from aligners.api.measures import (
    cca,
    cka,
    measure,
    minibatch_cka,
    mixedsim,
    neuronsim,
    pwcca,
    r2,
    r2_cca,
    r2_svcca,
    rbf_cka,
    rsa,
    svcca,
    unbiased_cka,
)
from aligners.api.models import Injected, inject, load, states

__all__ = [
    "CCA", "INN", "MLP", "PWCCA", "SVCCA", "ArrayMap", "Identity", "Injected", "Linear", "Mean", "Permutation",
    "Procrustes", "Ridge", "TrainedMap", "cca", "cka", "inject", "load", "measure", "minibatch_cka", "mixedsim",
    "neuronsim", "pwcca", "r2", "r2_cca", "r2_svcca", "rbf_cka", "rsa", "states", "svcca", "unbiased_cka",
]  # fmt: skip
