"""What Y's probes read in mapped words, beside what they read in Y's own, and X's probes in X's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.injection.methods import Method
from aligners.probing.across.measures import Measured, measure
from aligners.probing.across.pairs import PairedWords
from aligners.probing.bank import Bank
from aligners.probing.edges.task import EdgeTask
from aligners.probing.trees.task import TreeTask
from aligners.probing.words import Words

__all__ = ["BASELINE", "Fitted", "Row", "compared"]

Row = dict[str, Any]
MEAN = "mean"  # the floor: what a probe says of states that all are equal
BASELINE = "baseline"  # what is said without any state: the most frequent labels, or a chain of the words


class Fitted(NamedTuple):
    """Trained probes of a task, one for each place of the words that they were trained on."""

    task: EdgeTask | TreeTask
    bank: Bank

    def at(self, layer: int, held: Words, seed: int) -> dict[str, Measured]:
        """Ask the probe of one layer: see `measure`."""
        place = next(a for a, arm in enumerate(self.bank.arms) if arm.layer == layer)
        return measure(self.task, self.bank.only([place]), held, seed)

    def scores(self, held: Words, seed: int) -> dict[int, float]:
        """The first measure of each layer's probe."""
        layers = [place.layer for place in self.bank.places]
        found = {layer: self.at(layer, held, seed) for layer in layers}
        return {layer: float(next(iter(each.values())).score) for layer, each in found.items()}


def compared(x: Fitted, y: Fitted, held: PairedWords, methods: Sequence[Method], seed: int) -> Iterator[Row]:
    """Rows of one task: for each measure and site pair Y's own score, X's own, that of every map, and of the baseline.

    Args:
        x: probes of X.
        y: probes of Y.
        held: the held-out words.
        methods: maps and floors, the mean among them.
        seed: of the resampling of sentences.
    """
    mapped = {method.name: held.mapped(_rows_alone(method)) for method in methods}
    known = {method.name: method for method in methods}
    roles = {method.name: method.role for method in methods} | {"native_y": "ceiling", "native_x": "ceiling"}
    roles[BASELINE], least = "floor", measure(y.task, None, held.y, seed)
    for s, (site_x, site_y) in enumerate(held.pairs):
        found = {"native_y": y.at(site_y, held.y, seed), "native_x": x.at(site_x, held.x, seed)}
        found |= {name: y.at(site_y, words[s], seed) for name, words in mapped.items()} | {BASELINE: least}
        place = {"site_x": site_x, "site_y": site_y, "n_sentences": len(held.y.sentences)}
        for measured in found["native_y"]:
            for name, each in found.items():
                own, floor = found["native_y"][measured], found[MEAN][measured]
                beaten = bool(own.score > torch.cat((least[measured].score, floor.score)).nan_to_num(0.0).max())
                outcome = known[name].outcome(s) if name in known else None
                about = {"task": y.task.name, "measure": measured, "method": name, "role": roles[name]}
                yield {**about, "training": outcome, **place, **_columns(each[measured], own, floor, beaten)}


def _rows_alone(method: Method) -> Callable[[Tensor], Tensor]:
    return lambda rows: method.map(rows, None)


def _columns(found: Measured, own: Measured, floor: Measured, beaten: bool) -> Row:
    """A score, what it lacks to Y's own, and the share of what Y's own has above the floor that is kept.

    Where equal states have no score, as there is no rank correlation with a constant, the floor is 0. Where Y's own
    does not beat the baseline and the floor, there is nothing of which a share could be kept.
    """
    lost, least = Measured(own.values - found.values), floor.values.nan_to_num(0.0)
    kept = Measured((found.values - least) / (own.values - least if beaten else torch.nan))
    return {**found.columns("score"), **lost.columns("lost"), **kept.columns("kept")}
