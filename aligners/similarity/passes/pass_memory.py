"""The memory that one pass over the texts takes."""

from collections.abc import Sequence

from aligners.similarity.algebra.moments import tile_of
from aligners.similarity.algebra.pairs import block_of, by_gram
from aligners.similarity.passes.pass_plan import Settings, Span, Tile, spans_of
from aligners.similarity.passes.streams import Shape, Stream

DOUBLE, SINGLE = 8, 4  # bytes
# Copies that are there at once, as measured by benchmarks/similarity_memory.py:
BATCH = 6  # of a batch's rows of one model, in double precision
WORDS = 5  # of a batch's attention weights of one model, in double precision
PAIR = 12  # of a few layer pairs of the moments between two
BLOCKS = 4  # of a block of all layers' rows and Gram matrices
LAYER = 4  # of a layer of a sample of rows
FEATURES = 3  # of a sample of rows, where its sums are taken on the feature side
# of all pairs of rows, for samples of at most so many: those of RBF CKA
DISTANCES, FEW = 1.5, 2000


class PassMemory:
    """Bytes that a pass takes on each device.

    Args:
        settings: settings of the comparison.
        rows: rows of the largest batch, at most.
        entries: of its attention matrices, for one head, at most.
        weights: bytes of each model's weights where they count: of the models themselves on a GPU, where only those are
            that a pass reads, and of untrained twins.
    """

    def __init__(
        self, settings: Settings, rows: int, entries: int, weights: Sequence[int]
    ) -> None:
        self._settings = settings
        self._rows = rows
        self._entries = entries
        self._weights = weights

    def of(self, tiles: Sequence[Tile]) -> int:
        """Bytes of a pass with these tiles: models, what is kept of layers and of pairs, and the largest measure."""
        features = max(shape.layers * shape.width for shape in self._settings.shapes)
        taken = DOUBLE * BATCH * self._rows * features
        for model in {span.model for span in spans_of(tiles)}:
            taken += self._of_model(model)
        for stream in self._settings.streams:
            taken += self._of_stream(stream, tiles)
        return taken + max(map(self._of_measuring, tiles))

    def _of_model(self, model: int) -> int:
        """Its batch, also as an untrained twin reads it and as a control has it, and its weights."""
        shape = self._settings.shapes[model]
        names = {stream.name for stream in self._settings.streams}
        readers = 1 + ("untrained" in names)
        taken = readers * SINGLE
        if names - {"value", "fit"}:
            taken += DOUBLE
        rows = self._rows * shape.layers * shape.width
        heads = self._entries * shape.blocks * shape.heads
        attention = heads * readers * WORDS * DOUBLE
        return rows * taken + attention + self._weights[model]

    def _of_stream(self, stream: Stream, tiles: Sequence[Tile]) -> int:
        """What is kept of the layers and of the pairs of layers."""
        taken = 0
        sides: set[tuple[str, Span]] = set()
        for tile in tiles:
            if stream.covers(tile.pair):
                name_x, name_y = stream.sides
                sides |= {(name_x, tile.x), (name_y, tile.y)}
                taken += self._of_tile(stream, tile)
        for _, span in sides:
            taken += _of_span(stream, self._settings.shape_of(span))
        return taken

    def _of_tile(self, stream: Stream, tile: Tile) -> int:
        """The products of X with Y, and sums over pairs of heads."""
        x = self._settings.shape_of(tile.x)
        y = self._settings.shape_of(tile.y)
        groups = stream.groups_of(tile.pair)
        entries = 0
        if "moments" in stream.families:
            grids = x.layers * y.layers
            if groups > 1:
                grids += groups * len(self._settings.matching(tile))
            entries += grids * x.width * y.width
        if tile.leads:
            grids = 0
            if "heads" in stream.families:
                grids += 4
            if "head_moments" in stream.families:
                grids += 1
            pairs = x.blocks * x.heads * y.blocks * y.heads
            entries += groups * grids * pairs
        return DOUBLE * entries

    def _of_measuring(self, tile: Tile) -> int:
        """What it takes for a while to compute the measures of a tile."""
        x = self._settings.shape_of(tile.x)
        y = self._settings.shape_of(tile.y)
        widest = max(x.width, y.width)
        at_once = tile_of(self._settings.device)
        most = PAIR * max(at_once, DOUBLE * widest**2)
        for stream in self._settings.streams:
            for budget in stream.budgets:
                block = block_of(self._settings.device)
                most = max(most, _of_sample(budget, block, x, y))
        return most


def _of_span(stream: Stream, shape: Shape) -> int:
    """The moments, their whitenings and samples of some layers in one stream."""
    taken = SINGLE * shape.width * sum(stream.budgets)
    if "moments" in stream.families:
        matrices = 1
        if stream.groups > 1:
            matrices += stream.groups
        shared = set()  # whitenings, of features that are standardised or not
        for measure in stream.measures:
            if measure.family == "moments" and measure.whitened:
                share, standardised = measure.whitened
                shared.add(standardised or share == 1)
        matrices += len(shared)
        taken += DOUBLE * matrices * shape.width**2
    return shape.layers * taken


def _of_sample(n: int, block: int, x: Shape, y: Shape) -> int:
    """A layer of n rows, their distances, and blocks of Gram matrices of so many rows, or all rows, as float64."""
    features = x.layers * x.width + y.layers * y.width
    if by_gram(n, x.layers, x.width, y.layers, y.width, double=True):
        grams = block * (x.layers + y.layers)
        entries = BLOCKS * block * (grams + features)
    else:
        entries = FEATURES * n * features
    entries += LAYER * n * max(x.width, y.width)
    if n <= FEW:
        entries += int(DISTANCES * n**2)
    return DOUBLE * entries
