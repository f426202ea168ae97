"""Estimates the memory of a comparison before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torchmetrics import Metric

from similarity.algebra.pairs import BLOCK
from similarity.algebra.tiles import TILE
from similarity.arms import Arm, Shape
from similarity.sample import RowSample

__all__ = ["memory_of"]

DOUBLE, SINGLE = 8, 4  # bytes
# Copies that are there at once, as measured by benchmarks/similarity_memory.py:
BATCH = 6  # of a batch's rows of one model, in double precision
WHITENING = 6  # of the moments within one model
PAIR = 12  # of a tile of the moments between two
BLOCKS, LAYER = 4, 6  # of a block of all layers' Gram matrices, and of a layer of a sample of rows


def memory_of(arms: Iterable[Arm], shapes: Sequence[Shape], rows: int, twins: Sequence[nn.Module]) -> int:
    """Return the bytes that a comparison takes on each device besides its models: accumulators, a batch, computation.

    Args:
        arms: the accumulators, still empty.
        shapes: the models' shapes.
        rows: the number of rows of the largest batch.
        twins: models whose untrained twins are read as well.
    """
    arms = list(arms)
    kept = sum(_bytes(metric) for arm in arms for metric in arm.modules() if isinstance(metric, Metric))
    samples = [metric for arm in arms for metric in arm.modules() if isinstance(metric, RowSample)]
    wide, deep = max(shape.width for shape in shapes), 2 * max(shape.layers for shape in shapes)
    states = [shape.layers * shape.width for shape in shapes]
    copied = len(twins) > 0  # of the twins, and standardised
    batch = rows * (BATCH * DOUBLE * max(states) + sum(states) * (SINGLE + copied * (SINGLE + DOUBLE)))
    moments = WHITENING * DOUBLE * max(shape.layers * shape.width**2 for shape in shapes)
    tile = PAIR * max(TILE, DOUBLE * wide**2)
    blocks = BLOCKS * DOUBLE * BLOCK**2 * deep
    drawn = (_bytes(sample) // 2 + blocks + LAYER * DOUBLE * sample.budget * wide for sample in samples)
    copies = sum(weight.nbytes for model in twins for weight in model.parameters())
    return kept + copies + batch + max(moments + tile, *drawn, 0)


def _bytes(metric: Metric) -> int:
    return sum(getattr(metric, name).nbytes for name in metric._defaults)
