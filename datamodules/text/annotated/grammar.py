"""Sentences of a small grammar with known trees, parts of speech, agreement and roles.

The words that carry meaning are invented, so that a probe cannot know their parts of speech from elsewhere; those that
carry structure are English: "the blenty dwags that stove a plim grunked". There are many rare words, as in any
language, and some are a noun in one sentence and a verb in another.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from aligners.datamodules.text.annotated.sentence import Sentence, Target

ONSETS = (
    "b",
    "bl",
    "br",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gl",
    "gr",
    "k",
    "kl",
    "m",
    "n",
    "p",
    "pl",
    "s",
    "sk",
    "st",
    "t",
)
VOWELS = ("a", "e", "i", "o", "u", "ee", "oa")
CODAS = (
    "b",
    "ck",
    "d",
    "ff",
    "g",
    "lt",
    "m",
    "mp",
    "n",
    "nd",
    "p",
    "rk",
    "sk",
    "t",
    "x",
)
SHARED = 0.2  # of the noun stems are verb stems, too
MOST_NESTED = 3
SINGULAR, PLURAL = "Number=Sing", "Number=Plur"
PAST, PRESENT = "Tense=Past", "Tense=Pres"


class Lexicon:
    """The invented stems of each part of speech, a few of them frequent and most of them rare.

    Args:
        seed: seed of the draw.
        size: number of noun stems; there are as many verb stems, and half as many stems of adjectives and of adverbs.
    """

    def __init__(self, seed: int = 0, size: int = 1200) -> None:
        draw = random.Random(f"lexicon {seed}")
        stems = list(dict.fromkeys(_stem(draw) for _ in range(8 * size)))
        nouns, verbs, rest = (
            stems[:size],
            stems[size : 2 * size],
            stems[2 * size : 3 * size],
        )
        for place in draw.sample(range(size), int(SHARED * size)):
            verbs[place] = nouns[place]
        third = size // 3
        self._stems = {
            "noun": nouns,
            "intransitive": verbs[:third],
            "transitive": verbs[third : 2 * third],
            "ditransitive": verbs[2 * third :],
            "adjective": [f"{stem}y" for stem in rest[: size // 2]],
            "adverb": [f"{stem}ly" for stem in rest[size // 2 :]],
        }
        weights = list(accumulate(1 / (n + 3) for n in range(size)))
        self._weights = {
            kind: weights[: len(stems)] for kind, stems in self._stems.items()
        }

    def draw(self, kind: str, draw: random.Random) -> str:
        """Draw a stem; the chance of the n-th most frequent one is proportional to 1 / (n + 2)."""
        return draw.choices(self._stems[kind], cum_weights=self._weights[kind])[0]


@dataclass
class Node:
    """A word of a tree, with its dependents.

    Attributes:
        word: the word as it is written.
        pos: universal part of speech.
        relation: to its head.
        features: such as Number=Sing.
        role: role as an argument of its head; empty: it is no argument.
        before: dependents to the left, in order.
        after: dependents to the right.
    """

    word: str
    pos: str
    relation: str
    features: tuple[str, ...] = ()
    role: str = ""
    before: list["Node"] = field(default_factory=list)
    after: list["Node"] = field(default_factory=list)


def sentences(
    count: int, seed: int = 0, lexicon: Lexicon | None = None
) -> Iterator[Sentence]:
    """Draw sentences, with the tasks `pos`, `morphology`, `dependencies` and `roles`.

    The label of a sentence is the tense of its main verb, past or present, which is not always its first verb: "the
    dwags that stove grunk" is in the present.

    Args:
        count: number of sentences. Some may be drawn twice.
        seed: seed of the draw.
        lexicon: lexicon of the words; default: one drawn with this seed.
    """
    draw, lexicon = random.Random(f"sentences {seed}"), lexicon or Lexicon(seed)
    writer = _Writer(lexicon, draw)
    for _ in range(count):
        yield _flat(writer.clause("root", 0))


class _Writer:
    """Draws trees."""

    def __init__(self, lexicon: Lexicon, draw: random.Random) -> None:
        self.lexicon, self.draw = lexicon, draw

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def clause(self, relation: str, nested: int) -> Node:
        """Draw a clause with its subject: active, passive, or with a clause as its object."""
        number = self.number()
        if self.chance(0.2) and nested < MOST_NESTED:
            verb = self.verb("transitive", number, relation)
            inner = self.clause("ccomp", nested + 2)
            inner.before.insert(0, Node("that", "SCONJ", "mark"))
            verb.after.append(inner)
            subject = self.noun(number, "nsubj", "agent", nested + 1)
        elif self.chance(0.2):
            return self.passive(number, relation, nested)
        else:
            kind = self.draw.choice(("intransitive", "transitive", "ditransitive"))
            verb = self.verb(kind, number, relation)
            subject = self.noun(
                number,
                "nsubj",
                "theme" if kind == "intransitive" else "agent",
                nested + 1,
            )
            verb.after += self.objects(kind, nested + 1)
        verb.before.insert(0, subject)
        self.adjuncts(verb, nested)
        return verb

    def objects(self, kind: str, nested: int) -> list[Node]:
        """Draw what a verb of this kind has to its right."""
        nodes = (
            []
            if kind == "intransitive"
            else [self.noun(self.number(), "obj", "patient", nested)]
        )
        return nodes + (
            [self.phrase("to", "obl", "recipient", nested)]
            if kind == "ditransitive"
            else []
        )

    def passive(self, number: str, relation: str, nested: int) -> Node:
        """Draw a clause whose subject undergoes the action."""
        verb = Node(
            f"{self.lexicon.draw('transitive', self.draw)}ed",
            "VERB",
            relation,
            ("VerbForm=Part",),
        )
        past = self.chance(0.5)
        form = (
            ("was" if number == SINGULAR else "were")
            if past
            else ("is" if number == SINGULAR else "are")
        )
        verb.before = [
            self.noun(number, "nsubj:pass", "patient", nested + 1),
            Node(form, "AUX", "aux:pass", (number, PAST if past else PRESENT)),
        ]
        if self.chance(0.6):
            verb.after.append(self.phrase("by", "obl:agent", "agent", nested + 1))
        self.adjuncts(verb, nested)
        return verb

    def adjuncts(self, verb: Node, nested: int) -> None:
        """Draw an adverb and a place, or one of them, or neither."""
        if self.chance(0.25):
            adverb = Node(self.lexicon.draw("adverb", self.draw), "ADV", "advmod")
            verb.before.append(adverb) if self.chance(0.5) else verb.after.insert(
                0, adverb
            )
        if self.chance(0.25) and nested < MOST_NESTED:
            verb.after.append(
                self.phrase(
                    self.draw.choice(("in", "near", "under", "on")),
                    "obl",
                    "place",
                    nested + 1,
                )
            )

    def verb(self, kind: str, number: str, relation: str) -> Node:
        """Draw a finite verb that agrees with its subject."""
        stem = self.lexicon.draw(kind, self.draw)
        if self.chance(0.5):
            return Node(f"{stem}ed", "VERB", relation, (PAST,))
        return Node(
            f"{stem}s" if number == SINGULAR else stem,
            "VERB",
            relation,
            (number, PRESENT),
        )

    def noun(self, number: str, relation: str, role: str, nested: int) -> Node:
        """Draw a noun with its determiner and adjectives, and perhaps a phrase or a relative clause."""
        stem = self.lexicon.draw("noun", self.draw)
        noun = Node(
            stem if number == SINGULAR else f"{stem}s",
            "NOUN",
            relation,
            (number,),
            role,
        )
        determiners = (
            ("the", "a", "this", "every")
            if number == SINGULAR
            else ("the", "some", "these", "many")
        )
        noun.before.append(Node(self.draw.choice(determiners), "DET", "det"))
        while self.chance(0.3):
            noun.before.append(
                Node(self.lexicon.draw("adjective", self.draw), "ADJ", "amod")
            )
        if nested < MOST_NESTED and self.chance(0.15):
            noun.after.append(self.phrase("of", "nmod", "", nested + 1))
        elif nested < MOST_NESTED and self.chance(0.2):
            noun.after.append(self.relative(number, nested + 1))
        return noun

    def relative(self, number: str, nested: int) -> Node:
        """Draw a relative clause in which the noun is subject or object."""
        if self.chance(0.6):
            kind = self.draw.choice(("intransitive", "transitive"))
            verb = self.verb(kind, number, "acl:relcl")
            verb.before, verb.after = (
                [Node("that", "PRON", "nsubj")],
                self.objects(kind, nested),
            )
        else:
            subject_number = self.number()
            verb = self.verb("transitive", subject_number, "acl:relcl")
            verb.before = [
                Node("that", "PRON", "obj"),
                self.noun(subject_number, "nsubj", "agent", nested),
            ]
        return verb

    def phrase(self, word: str, relation: str, role: str, nested: int) -> Node:
        """Draw a noun with a preposition."""
        noun = self.noun(self.number(), relation, role, nested)
        noun.before.insert(0, Node(word, "ADP", "case"))
        return noun

    def number(self) -> str:
        return SINGULAR if self.chance(0.6) else PLURAL


def _relations(
    below: Node, span: tuple[int, int], place: dict[int, int]
) -> Iterator[Target]:
    """Return the relation of a node to the word at `span`, and its role if it has one; `place` numbers the nodes."""
    at = place[id(below)]
    yield Target("dependencies", (at, at + 1), span, (below.relation,))
    if below.role:
        places = [place[id(part)] for part in _in_order(below)]
        whole = (min(places), max(places) + 1)
        yield Target("roles", span, whole, (below.role,))


def _flat(root: Node) -> Sentence:
    """List the words of a tree from left to right."""
    nodes, heads = list(_in_order(root)), {id(root): 0}
    place = {id(node): number for number, node in enumerate(nodes)}
    targets: list[Target] = []
    for number, node in enumerate(nodes):
        span = (number, number + 1)
        targets.append(Target("pos", span, labels=(node.pos,)))
        targets.append(Target("morphology", span, labels=node.features))
        for below in (*node.before, *node.after):
            heads[id(below)] = number + 1
            targets += _relations(below, span, place)
    verb = {
        feature for node in (root, *root.before) for feature in node.features
    }  # an auxiliary comes before the verb
    words, ordered = (node.word for node in nodes), (heads[id(node)] for node in nodes)
    return Sentence(
        tuple(words),
        tuple(ordered),
        tuple(targets),
        "past" if PAST in verb else "present",
    )


def _in_order(node: Node) -> Iterator[Node]:
    for below in node.before:
        yield from _in_order(below)
    yield node
    for below in node.after:
        yield from _in_order(below)


def _stem(draw: random.Random) -> str:
    parts: Sequence[Sequence[str]] = (ONSETS, VOWELS, CODAS)
    stem = "".join(draw.choice(part) for part in parts)
    return (
        stem
        if draw.random() < 0.5
        else draw.choice(ONSETS) + draw.choice(VOWELS) + stem
    )
