"""Words with states that are made up: drawn anew for each, or such that it is known what can be read off them."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.tiny import WORDS
from torch import Tensor

from aligners.datamodules.text.annotated.sentence import Sentence, Target
from aligners.probing.probe_bank import Bank, ModelLayer, Variant, Words, fresh_bank
from aligners.probing.probes import EdgeProbes
from aligners.probing.targets import Labels

PLACES = (ModelLayer("model", 0), ModelLayer("model", 1), ModelLayer("untrained", 0), ModelLayer("untrained", 1))
FORMS = ("ba", "do", "fe", "gu", "ka", "lo", "me")


def random_heads(n: int, draw: random.Random) -> tuple[int, ...]:
    """The heads of a random tree."""
    order, heads = draw.sample(range(n), n), [0] * n
    for place, word in enumerate(order[1:], start=1):
        heads[word] = order[draw.randrange(place)] + 1
    return tuple(heads)


def sentence(n: int, seed: int) -> Sentence:
    """A sentence with a random tree: `kind` goes by the word, `flags` are drawn, `arc` is of a word and its head."""
    draw = random.Random(seed)
    words, heads = tuple(draw.choice(FORMS) for _ in range(n)), random_heads(n, draw)
    targets = [Target("kind", (w, w + 1), labels=(words[w][0],)) for w in range(n)]
    flags = [tuple("xyz"[: draw.randrange(4)]) if w else () for w in range(n)]
    targets += [Target("flags", (w, min(n, w + 2)), labels=flags[w]) for w in range(n)]
    for w, h in enumerate(heads):
        if h:
            targets.append(Target("arc", (w, w + 1), (min(h - 1, w), max(h - 1, w) + 1), (side(w, h - 1),)))
    return Sentence(words, heads, tuple(targets))


def side(word: int, head: int) -> str:
    """Where the head of a word is."""
    return "left" if head < word else "right"


def drawn_words(lengths: tuple[int, ...] = (3, 1, 6, 5, 2, 7), width: int = 6, seed: int = 0) -> Words:
    """Words of such sentences, with states that are drawn anew for each."""
    sentences = [sentence(n, seed + b) for b, n in enumerate(lengths)]
    states = torch.randn(len(PLACES), sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    scales = torch.tensor([1.0, 5.0, 0.1, 1.0])[:, None, None]
    return Words(scales * states + 3, PLACES, sentences, torch.tensor([0, *lengths]).cumsum(0))


def made_words(sentences: Sequence[Sentence], *states: Tensor) -> Words:
    """Words of sentences; the model's layers 0, 1, ... have these states, each (N, d)."""
    first = torch.tensor([0, *(len(sentence.words) for sentence in sentences)]).cumsum(0)
    places = tuple(ModelLayer("model", layer) for layer in range(len(states)))
    return Words(torch.stack(states), places, sentences, first)


def edge_bank(variants: Sequence[Variant], words: Words, labels: Labels, seed: int, **sizes: int) -> Bank:
    """An untrained bank of edge probes."""
    return fresh_bank(EdgeProbes, variants, words, seed, **labels.shape, **sizes)


def sentences_of_words(count: int, seed: int) -> list[Sentence]:
    """Sentences of known words with random trees."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        heads = random_heads(draw.randint(5, 8), draw)
        found.append(Sentence(tuple(draw.choices(WORDS, k=len(heads))), heads))
    return found


def write_treebank(path: Path, sentences: Sequence[Sentence]) -> str:
    """A treebank in which a word's part of speech is one of three, by its number among the known words."""
    lines = []
    for sentence in sentences:
        for number, (word, head) in enumerate(zip(sentence.words, sentence.heads, strict=True), start=1):
            pos = ("NOUN", "VERB", "ADJ")[WORDS.index(word) % 3]
            relation = side(number, head) if head else "root"
            lines.append("\t".join([str(number), word, "_", pos, "_", "_", str(head), relation, "_", "_"]))
        lines.append("")
    path.write_text("\n".join([*lines, ""]))
    return str(path)
