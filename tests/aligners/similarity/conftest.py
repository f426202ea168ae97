import pytest
from tests.tiny import tiny_folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of three models: of 3 blocks of width 16, and two of 2 blocks of width 12."""
    folder = tmp_path_factory.mktemp("models")
    return [
        str(tiny_folder(folder / "x", layers=3, width=16)),
        str(tiny_folder(folder / "y", "roberta", seed=1, layers=2, width=12)),
        str(tiny_folder(folder / "z", seed=2, layers=2, width=12)),
    ]
