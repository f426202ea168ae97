"""Two tiny models with one tokenizer, and labelled texts: the world that most tests live in."""

import csv
import random
from pathlib import Path
from typing import NamedTuple

from tests.tiny import WORDS, tiny_folder

from aligners.datamodules.text.sources import TextSource

GOOD = {"good", "great", "fine", "funny", "warm"}
TEST_TEXTS = 25  # odd, so that no even number of ranks divides it


class World(NamedTuple):
    """Folders of the two models, and CSV files to fit and to test on."""

    model_x: str
    model_y: str
    fit: str
    test: str

    @property
    def text(self) -> TextSource:
        """What there is to fit and to test on."""
        return TextSource(self.fit, held_out=self.test)


def make_world(folder: Path) -> World:
    """Write the world under `folder`."""
    texts = sentences(200)
    return World(
        str(tiny_folder(folder / "x", seed=0)),
        str(tiny_folder(folder / "y", seed=1)),
        write_texts(folder / "fit.csv", texts[TEST_TEXTS:]),
        write_texts(folder / "test.csv", texts[:TEST_TEXTS]),
    )


def sentences(n: int) -> list[str]:
    """Different texts of 2 to 14 known words."""
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < n:
        found[" ".join(draw.choices(WORDS, k=draw.randint(2, 14)))] = None
    return list(found)


def write_texts(path: Path, texts: list[str], labels: list[int] | None = None) -> str:
    """A CSV with the columns text and label; by default, label 1 is a text with a good word."""
    labels = [int(bool(GOOD & set(text.split()))) for text in texts] if labels is None else labels
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(zip(texts, labels, strict=True))
    return str(path)


def read_texts(path: str) -> tuple[list[str], list[str]]:
    """The texts and labels of such a file."""
    with Path(path).open(newline="") as file:
        texts, labels = zip(*list(csv.reader(file))[1:], strict=True)
    return list(texts), list(labels)
