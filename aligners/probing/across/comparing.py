"""What Y's probes read in mapped words, beside what they read in Y's own, and X's probes in X's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.injection.methods import Method
from aligners.injection.scoring.scores import percentile_interval
from aligners.probing.tasks import Task
from aligners.probing.words import Place, Words, WordsBeingRead
from datamodules.rows.reading import PairedBatch
from datamodules.text.annotated.sentence import Sentence

Row = dict[str, Any]
MEAN = "mean"  # the floor: what a probe says of states that all are equal
BASELINE = "baseline"  # what is said without any state: the most frequent labels, or a chain of the words
AT_ONCE = 8192  # rows that are mapped together


class PairedWords(NamedTuple):
    """The same words as two models have them.

    Attributes:
        x: the words with X's states, at each of its sites once.
        y: with Y's.
        pairs: S site pairs (i, j).
    """

    x: Words
    y: Words
    pairs: Sequence[tuple[int, int]]

    def mapped(self, method: Method) -> list[Words]:
        """What a map makes of X's words, as words of Y: for each site pair words with states at Y's site."""
        x = self.x.states[[self.x.places.index(Place("model", i)) for i, _ in self.pairs]]
        with torch.no_grad():
            found = torch.cat([method.map(rows, None) for rows in x.split(AT_ONCE, 1)], 1)
        return [
            replace(self.y, states=found[s : s + 1], places=(Place("model", j),)) for s, (_, j) in enumerate(self.pairs)
        ]


class PairsBeingRead:
    """Collects batches of paired words.

    Args:
        sentences: of the split, by the numbers of its texts.
        pairs: the site pairs of the batches.
    """

    def __init__(self, sentences: Sequence[Sentence], pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs, sides = pairs, list(zip(*pairs, strict=True))
        self._chosen = [[side.index(layer) for layer in dict.fromkeys(side)] for side in sides]
        places = [tuple(Place("model", layer) for layer in dict.fromkeys(side)) for side in sides]
        self._reading = [WordsBeingRead(sentences, own) for own in places]

    def add(self, batch: PairedBatch) -> None:
        """Add the sentences of a batch that both models read whole."""
        for reading, states, chosen in zip(self._reading, (batch.x, batch.y), self._chosen, strict=True):
            reading.add(batch.texts.text_numbers, batch.rows.counts, states[chosen])

    def whole(self) -> PairedWords:
        """All of them, in the order of the texts.

        Raises:
            ValueError: no sentence is read whole.
        """
        x, y = (reading.whole() for reading in self._reading)
        return PairedWords(x, y, self.pairs)


def compared(x: Task, y: Task, held: PairedWords, methods: Sequence[Method], seed: int) -> Iterator[Row]:
    """Rows of one task: for each measure and site pair Y's own score, X's own, that of every map, and of the baseline.

    Args:
        x: with trained probes of X.
        y: with trained probes of Y.
        held: the held-out words.
        methods: maps and floors, the mean among them.
        seed: of the resampling of sentences.
    """
    mapped = {method.name: held.mapped(method) for method in methods}
    known = {method.name: method for method in methods}
    roles = {method.name: method.role for method in methods} | {"native_y": "ceiling", "native_x": "ceiling"}
    roles[BASELINE], least = "floor", y.measures(None, held.y, seed)
    for s, (site_x, site_y) in enumerate(held.pairs):
        found = {"native_y": y.at(site_y, held.y, seed), "native_x": x.at(site_x, held.x, seed)}
        found |= {name: y.at(site_y, words[s], seed) for name, words in mapped.items()} | {BASELINE: least}
        place = {"site_x": site_x, "site_y": site_y, "n_sentences": len(held.y.sentences)}
        for measured in found["native_y"]:
            for name, each in found.items():
                own, floor = found["native_y"][measured][0], found[MEAN][measured][0]
                beaten = bool(own[0] > torch.stack((least[measured][0, 0], floor[0])).nan_to_num(0.0).max())
                outcome = known[name].outcome(s) if name in known else None
                about = {"task": y.name, "measure": measured, "method": name, "role": roles[name]}
                yield {**about, "training": outcome, **place, **columns(each[measured][0], own, floor, beaten)}


def columns(score: Tensor, own: Tensor, floor: Tensor, beaten: bool) -> Row:
    """A score, what it lacks to Y's own, and the share of what Y's own has above the floor that is kept.

    Where equal states have no score, as there is no rank correlation with a constant, the floor is 0. Where Y's own
    does not beat the baseline and the floor, there is nothing of which a share could be kept.

    Args:
        score: (1 + R,) on the sentences as they are, and in each resample, as are the others.
        own: Y's own.
        floor: that of the mean.
        beaten: whether Y's own beats the baseline and the floor.
    """
    least, row = floor.nan_to_num(0.0), Row()
    kept = (score - least) / (own - least if beaten else torch.nan)
    for name, values in {"score": score, "lost": own - score, "kept": kept}.items():
        low, high = percentile_interval(values[1:])
        row |= {name: values[0], f"{name}_low": low, f"{name}_high": high}
    return {name: float(value) if value.isfinite() else None for name, value in row.items()}
