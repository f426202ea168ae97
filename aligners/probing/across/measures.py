"""What a task's probes score on words, with what they score in resamples of the sentences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.injection.scoring.scores import percentile_interval
from aligners.probing.bank import Bank
from aligners.probing.edges.scores import counts, f1, majority
from aligners.probing.edges.targets import targets_of
from aligners.probing.edges.task import EdgeTask
from aligners.probing.rows import draws
from aligners.probing.trees.asked import Trees
from aligners.probing.trees.scores import by_length, chain, predictions
from aligners.probing.trees.task import TreeTask
from aligners.probing.words import Words

__all__ = ["Measured", "measure"]


class Measured(NamedTuple):
    """A score, and the same in R resamples of the sentences, (A, 1 + R), equal resamples for all that is compared.

    What is computed of several such scores, entry by entry, has its interval over sentences, too.
    """

    values: Tensor

    @property
    def score(self) -> Tensor:
        """(A,) on the sentences as they are."""
        return self.values[:, 0]

    def columns(self, name: str, arm: int = 0) -> dict[str, float | None]:
        """`name`, with the ends of its 95 % interval; None for what is no number."""
        low, high = percentile_interval(self.values[arm, 1:])
        found = {name: self.values[arm, 0], f"{name}_low": low, f"{name}_high": high}
        return {key: float(value) if value.isfinite() else None for key, value in found.items()}


def measure(task: EdgeTask | TreeTask, bank: Bank | None, held: Words, seed: int) -> dict[str, Measured]:
    """Ask the probes of a task about held-out words.

    Args:
        task: as it was fitted.
        bank: A trained probes; None: the task's trivial baseline, the most frequent labels or a chain of the words.
        held: the words, with states at the bank's places.
        seed: of the resampling.

    Returns:
        F1 of labels; of trees Spearman's correlation, and UUAS of distances or the share of roots of depths.
    """
    return _labels(task, bank, held, seed) if isinstance(task, EdgeTask) else _trees(task, bank, held, seed)


def _labels(task: EdgeTask, bank: Bank | None, held: Words, seed: int) -> dict[str, Measured]:
    targets = targets_of(task.labels, held, task.seed)
    found = majority(task.labels, targets) if bank is None else counts(bank, held, targets)
    return {"F1": Measured(f1(_weights(targets.count, seed) @ found))}


def _trees(task: TreeTask, bank: Bank | None, held: Words, seed: int) -> dict[str, Measured]:
    trees = Trees.of(held)
    given = chain(trees, task.name == "depth") if bank is None else predictions(bank, held, trees)
    found = task.scores(given, held, trees)
    weights = _weights(len(trees.sentences), seed)
    edges = (found.hits @ weights.T) / (found.asked @ weights.T)
    spearman = by_length(found.spearman, found.lengths, weights)
    return {"Spearman": Measured(spearman), "UUAS" if task.name == "distance" else "root": Measured(edges)}


def _weights(sentences: int, seed: int) -> Tensor:
    """How often each sentence counts: once, and as often as it is drawn in each resample, (1 + R, B)."""
    drawn = draws(sentences, seed)
    return torch.cat((torch.ones(1, sentences, dtype=drawn.dtype), drawn))
