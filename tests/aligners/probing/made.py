"""Words with states that are made up, so that it is known what can be read off them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from aligners.probing.bank import Arm, Bank, fresh_bank
from aligners.probing.edges import EdgeProbes, Labels
from aligners.probing.words import Place, Words
from datamodules.text.annotated.sentence import Sentence, Target
from tests.tiny import WORDS


def made_words(sentences: Sequence[Sentence], *states: Tensor) -> Words:
    """Words of sentences; the model's layers 0, 1, ... have these states, each (N, d)."""
    first = torch.tensor([0, *(len(sentence.words) for sentence in sentences)]).cumsum(0)
    places = tuple(Place("model", layer) for layer in range(len(states)))
    return Words(torch.stack(states), places, sentences, first)


def edge_bank(arms: Sequence[Arm], words: Words, labels: Labels, seed: int, **sizes: int) -> Bank:
    """An untrained bank of edge probes."""
    return fresh_bank(EdgeProbes, arms, words, seed, **labels.shape, **sizes)


def kinds_of_words(count: int, kinds: int, forms: int, *, seed: int = 0) -> tuple[list[Sentence], Tensor]:
    """Sentences of 6 words, each of a kind that is drawn anew, with the task `kind`; and the kinds, (N,).

    Args:
        count: of sentences.
        kinds: how many there are.
        forms: how many word types there are, which say nothing of the kinds.
        seed: of the draw.
    """
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(kinds, (count, 6), generator=draw)
    form = torch.randint(forms, (count, 6), generator=draw)
    sentences = [
        Sentence(
            tuple(f"w{n}" for n in words),
            targets=tuple(Target("kind", (n, n + 1), labels=(f"k{k}",)) for n, k in enumerate(own)),
        )
        for words, own in zip(form.tolist(), kind.tolist(), strict=True)
    ]
    return sentences, kind.flatten()


def sentences_of_words(count: int, seed: int) -> list[Sentence]:
    """Sentences of known words with random trees."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        n = draw.randint(5, 8)
        order = draw.sample(range(n), n)
        heads = [0] * n
        for place, word in enumerate(order[1:], start=1):
            heads[word] = order[draw.randrange(place)] + 1
        found.append(Sentence(tuple(draw.choices(WORDS, k=n)), tuple(heads)))
    return found


def write_treebank(path: Path, sentences: Sequence[Sentence]) -> str:
    """A treebank in which a word's part of speech is one of three, by its number among the known words."""
    lines = []
    for sentence in sentences:
        for number, (word, head) in enumerate(zip(sentence.words, sentence.heads, strict=True), start=1):
            pos = ("NOUN", "VERB", "ADJ")[WORDS.index(word) % 3]
            lines.append("\t".join([str(number), word, "_", pos, "_", "_", str(head), "dep", "_", "_"]))
        lines.append("")
    path.write_text("\n".join([*lines, ""]))
    return str(path)
