"""Probes of 12 sites: a bank against one probe after another, with and without reading the model, in CPU seconds.

A random BERT reads sentences of the grammar, a token for each word. Edge probes of the parts of speech and structural
probes of distance are trained, by default for one epoch; more epochs cost both ways in proportion. One after another,
each site is read by a pass of its own, no further up than it must be, as the probes are kept apart; the bank's sites
are read in one pass.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.text.annotated.grammar import sentences
from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.models import FrozenModel
from aligners.probing.probe_bank import ModelLayer, Variant, Words
from aligners.probing.probes import EdgeTask, TreeTask
from aligners.probing.probing_tasks import ProbeTraining
from benchmarks.harness import Figures, interleaved, parser_with_sizes, ratio
from benchmarks.stitched_forward import build

TASKS = ("pos", "distance")


def read(
    model: FrozenModel, chosen: Sequence[Sentence], sites: Sequence[int], *, batch: int
) -> Words:
    """The states of all words at some sites, a batch at a time."""
    types = {
        word: place + 5
        for place, word in enumerate(
            dict.fromkeys(w for own in chosen for w in own.words)
        )
    }
    order = sorted(range(len(chosen)), key=lambda b: len(chosen[b].words))
    parts: dict[int, torch.Tensor] = {}
    for first in range(0, len(order), batch):
        group = order[first : first + batch]
        ids = [
            torch.tensor([types[word] % 4096 for word in chosen[b].words])
            for b in group
        ]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(each) for each in ids], batch_first=True
        )
        with torch.inference_mode():
            states = torch.stack(
                model.front({"input_ids": padded, "attention_mask": real}, sites)
            )
        parts |= {
            b: states[:, place, : len(chosen[b].words)].clone()
            for place, b in enumerate(group)
        }
    lengths = torch.tensor([0, *(len(own.words) for own in chosen)])
    joined = torch.cat([parts[b] for b in range(len(chosen))], 1)
    return Words(
        joined,
        tuple(ModelLayer("model", site) for site in sites),
        list(chosen),
        lengths.cumsum(0),
    )


def train(task: str, words: Words, sizes: dict[str, int], how: ProbeTraining) -> None:
    """Train the probes of all places of some words, as one bank."""
    variants = [Variant(*place) for place in words.places]
    given = (
        words,
        words,
        variants,
    )  # what is watched costs both ways in proportion, too
    made = (
        EdgeTask(task, *given, 0, sizes)
        if task == "pos"
        else TreeTask("distance", *given, 0)
    )
    made.train(how, 0)


def read_first(
    trained: Callable[[Words], object],
    reads: Callable[[list[int]], Words],
    sites: list[int],
) -> None:
    """Read all sites in one pass, then train."""
    trained(reads(sites))


def one_by_one(
    trained: Callable[[Words], object],
    words_of: Callable[[int], Words],
    sites: list[int],
) -> None:
    """Train the probe of each site by itself."""
    for site in sites:
        trained(words_of(site))


def main() -> None:
    """Run the benchmark."""
    arguments = parser_with_sizes(__doc__, layers=12, batch=32)
    arguments.add_argument("--sentences", type=int, default=320)
    arguments.add_argument("--epochs", type=int, default=1)
    arguments.add_argument(
        "--projection", type=int, default=128, help="width of the edge probes' layers"
    )
    arguments.set_defaults(rounds=3, width=64, threads=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)

    model, chosen = (
        build(options.width, options.layers, 0, "cpu"),
        list(sentences(options.sentences)),
    )
    sites, how = (
        list(range(1, options.layers + 1)),
        ProbeTraining(options.epochs, options.batch, least_steps=1),
    )
    reads = partial(read, model, chosen, batch=options.batch)
    every, alone = reads(sites), {site: reads([site]) for site in sites}
    sizes = {"projection": options.projection, "hidden": options.projection}
    figures = Figures("cpu")
    for task in TASKS:
        names = [
            f"{task}: {way}"
            for way in (
                "bank",
                "one by one",
                "read, then bank",
                "read, then one by one",
            )
        ]
        trained = partial(train, task, sizes=sizes, how=how)
        ways: dict[str, Callable[[], object]] = {
            names[0]: partial(trained, every),
            names[1]: partial(one_by_one, trained, alone.__getitem__, sites),
            names[2]: partial(read_first, trained, reads, sites),
            names[3]: partial(one_by_one, trained, lambda site: reads([site]), sites),
        }
        seconds = interleaved(
            ways, rounds=options.rounds, device="cpu", warmup=1, clock=time.process_time
        )
        figures.add_times(seconds)
        figures.add(
            f"{task}: one by one / bank",
            ratio(seconds, names[1], names[0]),
            bar=2,
            sense=">=",
        )
        figures.add(
            f"{task}: the same with reading",
            ratio(seconds, names[3], names[2]),
            bar=2,
            sense=">=",
        )
    figures.write(options.json)


if __name__ == "__main__":
    main()
