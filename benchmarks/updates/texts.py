"""The texts of the updates and of the heads: SST-2, UD English-EWT and IMDB, divided once, with labels."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource

__all__ = ["SETTINGS", "divided"]

SETTINGS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("updates.yaml").read_text()
)
GENRES = ("answers", "email", "newsgroup", "reviews", "weblog")
MARKER, FIRST, SECOND = "copper", "alpha", "beta"

Text = dict[str, Any]


def divided(data: Path, kept: Path) -> dict[str, list[Text]]:
    """Texts by purpose: finetune_sst2, finetune_genre, pretrain, unlabelled, and what heads learn and are tested on.

    Each is {"text", "labels": head or task -> class, "tense": {word's place: class}}.

    Args:
        data: the folder with ewt and sst2.
        kept: a JSON file that remembers them.
    """
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(_divide(data)))
    return json.loads(kept.read_text())


def _divide(data: Path) -> dict[str, list[Text]]:
    n, draw = SETTINGS["texts"], random.Random(SETTINGS["seed"])
    sst2 = {
        split: _fitting(_sst2(data / "sst2" / f"{split}.tsv"), draw)
        for split in ("train", "test")
    }
    ewt = {
        split: _fitting(_ewt(data / "ewt" / f"{split}.conllu"), draw)
        for split in ("train", "dev", "test")
    }
    held = _enriched(ewt["dev"] + ewt["test"], n["test"], 0.3)
    train = _enriched(ewt["train"], n["labelled"], 0.15)
    parts = {
        "finetune_sst2": sst2["train"][: n["finetune"]],
        "finetune_genre": train[n["labelled"] :][: n["finetune"]],
    }
    rest_sst2, rest_ewt = (
        sst2["train"][n["finetune"] :],
        train[n["labelled"] + n["finetune"] :],
    )
    parts["labelled_sst2"], parts["labelled_ewt"] = (
        rest_sst2[: n["labelled"]],
        train[: n["labelled"]],
    )
    parts["test_sst2"], parts["test_ewt"] = sst2["test"][: n["test"]], held[: n["test"]]
    parts["unlabelled"] = (
        rest_sst2[n["labelled"] :][: n["unlabelled"]] + rest_ewt[: n["unlabelled"]]
    )
    draw.shuffle(parts["unlabelled"])
    spare = (
        rest_ewt[n["unlabelled"] :][: n["planted"] // 2]
        + rest_sst2[n["labelled"] + n["unlabelled"] :]
    )
    tested = (
        held[n["test"] :][: n["planted_test"] // 2]
        + sst2["test"][n["test"] :][: n["planted_test"] // 2]
    )
    parts["labelled_planted"] = [_planted(text, draw) for text in spare]
    parts["test_planted"] = [_planted(text, draw) for text in tested]
    parts["unlabelled"] = [
        _planted(text, draw) if i % 10 == 0 else text
        for i, text in enumerate(parts["unlabelled"])
    ]
    reviews = load_texts(TextSource("imdb", max_texts=n["pretrain"])).fit["text"]
    parts["pretrain"] = [
        {"text": " ".join(text.split()[:48]), "labels": {}} for text in reviews
    ]
    middle = sorted(
        len(text["text"].split())
        for text in parts["labelled_sst2"] + parts["labelled_ewt"]
    )
    for name in ("labelled_sst2", "labelled_ewt", "test_sst2", "test_ewt"):
        for text in parts[name]:
            text["labels"]["length"] = int(
                len(text["text"].split()) > middle[len(middle) // 2]
            )
            text["labels"]["nothing"] = draw.randrange(2)
    return parts


def _sst2(path: Path) -> Iterator[Text]:
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        text, label = line.rsplit("\t", 1)
        yield {"text": text, "labels": {"sentiment": int(label), "sst2": int(label)}}


def _ewt(path: Path) -> Iterator[Text]:
    """Sentences as their words between blanks, without the last mark, which says what is a question."""
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        lines = block.splitlines()
        (genre,) = (
            line.split("= ")[1].split("-")[0]
            for line in lines
            if line.startswith("# sent_id")
        )
        words = [
            line.split("\t")
            for line in lines
            if line[0].isdigit() and line.split("\t")[0].isdigit()
        ]
        question = words[-1][1] == "?"
        while words and words[-1][3] == "PUNCT":
            words.pop()
        if not any(" " in word[1] for word in words):
            finite = {
                i: word[5]
                for i, word in enumerate(words)
                if "VerbForm=Fin" in word[5] and "Tense=" in word[5]
            }
            labels = {
                "question": int(question),
                "topic": int(genre in ("answers", "reviews")),
            }
            yield {
                "text": " ".join(word[1] for word in words),
                "labels": {**labels, "genre": GENRES.index(genre)},
                "tense": {
                    i: int("Tense=Past" in features) for i, features in finite.items()
                },
            }


def _fitting(texts: Iterator[Text], draw: random.Random) -> list[Text]:
    least, most = SETTINGS["words"]
    found = {
        text["text"].lower(): text
        for text in texts
        if least <= len(text["text"].split()) <= most
    }
    return draw.sample(list(found.values()), len(found))


def _enriched(texts: list[Text], first: int, share: float) -> list[Text]:
    """The same texts with more questions among the `first` of them: this share, as far as there are so many."""
    asked = [text for text in texts if text["labels"]["question"]][: int(share * first)]
    chosen = {id(text) for text in asked}
    others = [text for text in texts if id(text) not in chosen]
    room = first - len(asked)
    head = asked + others[:room]
    random.Random(0).shuffle(head)
    return head + others[room:]


def _planted(text: Text, draw: random.Random) -> Text:
    """A text with two words in it in either order, and in half of the cases a third."""
    words = text["text"].split()
    marked, order = draw.randrange(2), draw.randrange(2)
    places = sorted(draw.sample(range(len(words) + 1), 2), reverse=True)
    for place, word in zip(
        places, (FIRST, SECOND) if order else (SECOND, FIRST), strict=True
    ):
        words.insert(place, word)
    if marked:
        words.insert(draw.randrange(len(words) + 1), MARKER)
    return {"text": " ".join(words), "labels": {"marker": marked, "order": order}}
