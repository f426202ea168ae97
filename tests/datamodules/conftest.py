import pytest
from tests.datamodules.tokens.splitters import byte_level, splitter_folder, word_piece
from tests.tiny import tiny_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Models of other widths, depths, tokenizers and sides of padding."""
    folder = tmp_path_factory.mktemp("models")
    return [
        splitter_folder(folder / "pieces", word_piece(), seed=0, layers=2),
        splitter_folder(folder / "bytes", byte_level("left"), seed=1, layers=3, width=24),
        str(tiny_folder(folder / "whole", seed=2, layers=1)),
    ]
