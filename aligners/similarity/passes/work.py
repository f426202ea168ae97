"""How much a comparison computes, for the plan of a study: operations of its products and of its decompositions."""

from collections.abc import Collection
from itertools import combinations_with_replacement

from aligners.similarity.catalogue import Measure
from aligners.similarity.passes.sums import Shape

DOUBLE = 2  # products in float64 take twice as long
# × d³: eigenvectors, eigenvalues, singular vectors, singular values: what LAPACK takes for them, as their times compare
EIGEN, EIGENVALUES, SINGULAR, VALUES = 9.0, 4.6, 20.0, 9.0
KEPT = 0.5  # share of d that SVCCA keeps, on average


def comparison_work(
    measures: Collection[Measure],
    shapes: list[Shape],
    rows: int,
    batch: int,
    controls: bool = False,
    groups: int = 10,
    permutations: int = 1,
) -> tuple[float, float]:
    """Operations of matrix products, as many as take the time in float32, and of decompositions, in float64.

    Args:
        measures: that are computed.
        shapes: of the models.
        rows: held-out rows of each.
        batch: rows of a batch.
        controls: whether there are controls.
        groups: of texts that a jackknife leaves out.
        permutations: of the null.
    """
    kinds = {(measure.family, measure.budget) for measure in measures}
    fitted = [one.decomposed for one in measures if one.family == "moments" and one.decomposed]
    whitened = EIGEN * len({one.whitening for one in fitted})  # × d³, of a layer
    pairs = {
        one.whitening: SINGULAR if one.directions else VALUES for one in sorted(fitted) if one.pairs
    }
    sizes = {kind: 1.0 if kind[0] == 1 else KEPT**3 for kind in pairs}  # × d³, of a pair of layers
    correlated = sum(pairs[kind] * size for kind, size in sizes.items())
    held_out = SINGULAR * sum(sizes.values())
    products = solved = 0.0
    streams = 1 + controls * (
        3 + 2 * permutations
    )  # fit, untrained, standardised, both sides of a null
    for layers, d, *_ in shapes * (("moments", 0) in kinds):
        products += 2.0 * rows * layers * d**2 * (streams + controls)
        solved += layers * d**3 * (whitened * streams + EIGENVALUES)
    for i, j in combinations_with_replacement(range(len(shapes)), 2):
        if i == j and len(shapes) == 2 and not controls:
            continue
        (layers_x, d_x, *_), (layers_y, d_y, *_), beside = shapes[i], shapes[j], controls and i != j
        grid, matching, cube = (
            layers_x * layers_y,
            max(layers_x, layers_y),
            max(d_x, d_y) * min(d_x, d_y) ** 2,
        )
        streams = 1 + beside * (2 + permutations)
        for family, budget in kinds:
            if family == "moments":
                products += 2.0 * rows * (grid * (streams + beside) + beside * matching) * d_x * d_y
            elif family in ("rows", "batches"):
                n = min(budget or batch, rows)
                gram = n * (layers_x * d_x + layers_y * d_y + grid)
                features = 2.0 * (grid * d_x * d_y + layers_x * d_x**2 + layers_y * d_y**2)
                products += streams * (n if family == "rows" else rows) * min(gram, features)
        products += len(fitted) * streams * grid * 4.0 * cube
        left_out = beside * matching * (1 + groups)
        solved += cube * (
            grid * (streams * correlated + beside * held_out)
            + left_out * (correlated + 2 * whitened)
        )
    return DOUBLE * products, solved
