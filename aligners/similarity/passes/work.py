"""How much a comparison computes, for the plan of a study: operations of its products and of its decompositions."""

from collections.abc import Collection, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

from aligners.similarity.catalogue import Measure
from aligners.similarity.passes.sums import Shape

DOUBLE = 2  # products in float64 take twice as long
# × d³: eigenvectors, eigenvalues, singular vectors, singular values: what LAPACK takes for them, as their times compare
EIGEN, EIGENVALUES, SINGULAR, VALUES = 9.0, 4.6, 20.0, 9.0
KEPT = 0.5  # share of d that SVCCA keeps, on average
WHOLE, PARTS = {"cca", "r2_cca"}, {"svcca", "r2_svcca", "pwcca"}  # what is correlated: all features, or components
REGRESSIONS = {"r2", "mixedsim"}  # on a whitening of all features


class Work(NamedTuple):
    """Operations.

    Attributes:
        products: of matrix products, as many as take the time in float32.
        solved: of decompositions, in float64.
    """

    products: float
    solved: float


class Comparison(NamedTuple):
    """What is compared.

    Attributes:
        measures: which.
        shapes: of the models.
        rows: held-out rows of each.
        batch: rows of a batch.
        controls: whether there are controls.
        groups: of texts that a jackknife leaves out; permutations: of the null.
    """

    measures: Collection[Measure]
    shapes: Sequence[Shape]
    rows: int
    batch: int
    controls: bool = False
    groups: int = 10
    permutations: int = 1

    def work(self) -> Work:
        """All operations: of each layer, of each pair of models, and of the layers that match."""
        pairs = combinations_with_replacement(range(len(self.shapes)), 2)
        wanted = [(i, j) for i, j in pairs if i != j or len(self.shapes) != 2 or self.controls]
        own = [self._layer(shape) for shape in self.shapes]
        both = [self._pair(self.shapes[i], self.shapes[j], self.controls and i != j) for i, j in wanted]
        products, solved = (sum(parts) for parts in zip(*own, *both, strict=True))
        return Work(products, solved)

    @property
    def _names(self) -> set[str]:
        return {measure.name for measure in self.measures}

    @property
    def _whitenings(self) -> int:
        """Kinds of whitenings of a layer."""
        return bool(self._names & (WHOLE | REGRESSIONS)) + bool(self._names & PARTS)

    def _correlated(self, held_out: bool = False) -> float:
        """× d³: decompositions of a pair of layers."""
        whole, parts = bool(self._names & WHOLE), bool(self._names & PARTS)
        vectors = held_out or "pwcca" in self._names
        return whole * (SINGULAR if held_out else VALUES) + parts * KEPT**3 * (SINGULAR if vectors else VALUES)

    def _layer(self, shape: Shape) -> Work:
        """Sums, whitenings and nuclear norms of a model's layers."""
        if not any(measure.family == "moments" for measure in self.measures):
            return Work(0.0, 0.0)
        layers, d = shape.layers, shape.width
        streams = 1 + self.controls * (3 + 2 * self.permutations)  # fit, untrained, standardised, both sides of a null
        solved = layers * d**3 * (EIGEN * self._whitenings * streams + EIGENVALUES)
        return Work(DOUBLE * 2.0 * self.rows * layers * d**2 * (streams + self.controls), solved)

    def _pair(self, x: Shape, y: Shape, controls: bool) -> Work:
        """What is computed of a pair of models."""
        grid, matching = x.layers * y.layers, max(x.layers, y.layers)
        width, cube = x.width * y.width, max(x.width, y.width) * min(x.width, y.width) ** 2
        streams = 1 + controls * (2 + self.permutations)
        products = 0.0
        for measure in {(each.family, each.budget): each for each in self.measures}.values():
            if measure.family == "moments":
                products += 2.0 * self.rows * (grid * (streams + controls) + controls * matching) * width
            elif measure.family in ("rows", "batches"):
                n = min(measure.budget or self.batch, self.rows)
                gram = n * (x.layers * x.width + y.layers * y.width + grid)
                features = 2.0 * (grid * width + x.layers * x.width**2 + y.layers * y.width**2)
                times = n if measure.family == "rows" else self.rows
                products += streams * times * min(gram, features)
        fitted = sum(measure.chance is not None for measure in self.measures)
        products += fitted * streams * grid * 4.0 * cube
        solved = streams * self._correlated() * grid
        if controls:
            left_out = matching * (1 + self.groups)
            solved += self._correlated(held_out=True) * grid
            solved += left_out * (self._correlated() + 2 * EIGEN * self._whitenings)
        return Work(DOUBLE * products, solved * cube)
