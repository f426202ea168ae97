"""Words with random states, of sentences with trees and labels that a rule gives."""

from __future__ import annotations

import random

import torch

from aligners.probing.words import Place, Words
from datamodules.text.annotated.sentence import Sentence, Target

PLACES = (Place("model", 0), Place("model", 1), Place("untrained", 0), Place("untrained", 1))
FORMS = ("ba", "do", "fe", "gu", "ka", "lo", "me")


def sentence(n: int, seed: int) -> Sentence:
    """A sentence with a random tree: `kind` goes by the word, `flags` are drawn, `arc` is of a word and its head."""
    draw = random.Random(seed)
    words = tuple(draw.choice(FORMS) for _ in range(n))
    order = draw.sample(range(n), n)
    heads = [0] * n
    for place, word in enumerate(order[1:], start=1):
        heads[word] = order[draw.randrange(place)] + 1
    targets = [Target("kind", (w, w + 1), labels=(words[w][0],)) for w in range(n)]
    targets += [
        Target("flags", (w, min(n, w + 2)), labels=tuple("xyz"[: draw.randrange(4)]) if w else ()) for w in range(n)
    ]
    targets += [
        Target("arc", (w, w + 1), (min(h - 1, w), max(h - 1, w) + 1), ("left" if h - 1 < w else "right",))
        for w, h in enumerate(heads)
        if h
    ]
    return Sentence(words, tuple(heads), tuple(targets))


def made_words(lengths: tuple[int, ...] = (3, 1, 6, 5, 2, 7), width: int = 6, seed: int = 0) -> Words:
    """Words with states that are drawn anew for each."""
    sentences = [sentence(n, seed + b) for b, n in enumerate(lengths)]
    states = torch.randn(len(PLACES), sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    scales = torch.tensor([1.0, 5.0, 0.1, 1.0])[:, None, None]
    return Words(scales * states + 3, PLACES, sentences, torch.tensor([0, *lengths]).cumsum(0))
