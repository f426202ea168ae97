"""What several tests of probes read."""

from __future__ import annotations

import pytest

from datamodules.text.sources import TextSource
from tests.probing.made import sentences_of_words, write_treebank


@pytest.fixture(scope="session")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    folder = tmp_path_factory.mktemp("treebank")
    fit = write_treebank(folder / "fit.conllu", sentences_of_words(120, 0))
    return TextSource(fit, held_out=write_treebank(folder / "test.conllu", sentences_of_words(40, 1)))
