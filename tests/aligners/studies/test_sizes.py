"""How many texts a task has, before any cell reads them."""

from pathlib import Path
from typing import Any

import pytest

from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.studies.spec import Assumed
from aligners.studies.study_plan import TextSizes, _splits, text_sizes

ASSUMED = Assumed(texts=700, held_out=300)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"source": "sst2"}, (63982, 3367, 872)),
        ({"source": "mnli", "max_texts": 1600, "max_held_out": 100}, (1600, 100, 100)),
        ({"source": "rte", "max_texts": 1600, "max_held_out": 1600}, (1600, 124, 277)),
        ({"source": "rte", "max_held_out": 1600, "fill_from": "test"}, (2366, 124, 1600)),
        (
            {"source": "mnli", "max_held_out": 1600, "fill_from": "test"},
            (373067, 1600, 1600),
        ),  # which has no such split
        ({"source": "mnli", "held_out": "validation_mismatched"}, (373067, 19635, 9832)),
    ],
)
def test_splits_of_glue_are_known(options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert text_sizes(TextSource(**options), ASSUMED) == (*expected, True)


def test_texts_at_hand_are_counted_and_others_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in {"train.txt": 1000, "held.txt": 30}.items():
        (tmp_path / name).write_text("\n".join(f"text {place}" for place in range(count)))
    path = str(tmp_path / "train.txt")
    assert text_sizes(TextSource(path), ASSUMED) == (750, 50, 200, True)
    assert text_sizes(TextSource(path, held_out=str(tmp_path / "held.txt")), ASSUMED) == (950, 50, 30, True)
    stream = TextSource(path, streaming=True, max_texts=100)
    assert text_sizes(stream, ASSUMED) == (100, 47, 100, False)
    missing = TextSource(str(tmp_path / "nothing.txt"), max_held_out=40)
    assert text_sizes(missing, ASSUMED) == TextSizes(700, 40, 40, known=False)


@pytest.mark.parametrize("name", ["rotten_tomatoes", "imdb", "grammar"])
def test_known_sizes_of_texts_in_packages_are_those(name: str) -> None:
    assert sum(_splits(name, None, None).values()) == load_texts(TextSource(name)).describe()["rows_read"][0]
