"""A world of its own for the tests: no network, nothing of the user's home touched, two tiny models, a few texts."""

from __future__ import annotations

import csv
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_HOME = tempfile.TemporaryDirectory(prefix="aligners-tests-")  # before any library reads its environment
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_CACHE": f"{_HOME.name}/datasets",
    "ALIGNERS_CACHE": f"{_HOME.name}/aligners",
    "MPLCONFIGDIR": f"{_HOME.name}/matplotlib",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    **{f"WANDB_{kind}_DIR": f"{_HOME.name}/wandb" for kind in ("CACHE", "CONFIG", "DATA")},
}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads cost more than they give

from tests.tiny import WORDS, tiny_folder  # noqa: E402

GOOD = {"good", "great", "fine", "funny", "warm"}
TEST_TEXTS = 25  # odd, so that no number of ranks above one divides it evenly


class World(NamedTuple):
    """Two models with one tokenizer, and labelled texts to fit and to test on."""

    model_x: str
    model_y: str
    fit: str
    test: str


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    texts = _sentences(200)
    return World(
        str(tiny_folder(folder / "x", seed=0)),
        str(tiny_folder(folder / "y", seed=1)),
        _write(folder / "fit.csv", texts[TEST_TEXTS:]),
        _write(folder / "test.csv", texts[:TEST_TEXTS]),
    )


@pytest.fixture(scope="session", autouse=True)
def _clean() -> Iterator[None]:
    yield
    _HOME.cleanup()


def _sentences(n: int) -> list[str]:
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < n:
        found[" ".join(draw.choices(WORDS, k=draw.randint(2, 14)))] = None
    return list(found)


def _write(path: Path, texts: list[str]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([text, int(bool(GOOD & set(text.split())))] for text in texts)
    return str(path)
