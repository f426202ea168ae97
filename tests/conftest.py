"""What every test gets: no network, and nothing of the user's home touched."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

if TYPE_CHECKING:
    from tests.world import World

    from aligners.datamodules.text.sources import TextSource

_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of a process that has set the environment of all
_HOME = None if _WORKER else tempfile.TemporaryDirectory(prefix="aligners-tests-")
if _HOME is not None:
    # Before any library reads its environment, and inherited by the command lines that tests start.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": f"{_HOME.name}/datasets",
        "ALIGNERS_CACHE": f"{_HOME.name}/aligners",
        "MPLCONFIGDIR": f"{_HOME.name}/matplotlib",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        **{f"WANDB_{kind}_DIR": f"{_HOME.name}/wandb" for kind in ("CACHE", "CONFIG", "DATA")},
        # W&B need not look at the machine and at everything that is installed.
        **{f"WANDB_X_DISABLE_{what}": "true" for what in ("META", "STATS", "MACHINE_INFO", "VIEWER")},
        "WANDB_X_SAVE_REQUIREMENTS": "false",
    }
if len(tempfile.gettempdir()) > 60:
    # Processes meet at sockets in the temporary folder, and the path of a socket has at most some 100 letters.
    _SOCKETS = tempfile.TemporaryDirectory(prefix="aligners-", dir="/tmp")
    multiprocessing.process.current_process()._config["tempdir"] = _SOCKETS.name  # type: ignore[attr-defined]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background; the processes that tests start heed it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads cost more than they give
patch.object(os, "fsync", lambda file: None).start()  # nobody pulls the plug, and the wait for disks adds up


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests, and not the one that only waits for those that do."""
    if _WORKER:
        import wandb.sdk.launch.inputs.internal  # noqa: F401  (it inspects all that has been imported before)
    if _WORKER or not config.getoption("numprocesses", None):
        from hypothesis import settings

        settings.register_profile("fixed", derandomize=True)  # the same examples every time, as all other seeds
        settings.load_profile("fixed")


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    if _HOME is not None:
        _HOME.cleanup()


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: Python need not look through it for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the files that start processes, run studies or tutorials: nobody should wait for the longest at the end."""
    long = {"command", "printed", "Started", "Torture", "two_ranks", "PROCESSES", "study", "subprocess", "runpy"}
    items.sort(key=lambda item: not long & set(vars(getattr(item, "module", item))))


@pytest.fixture(autouse=True)
def _nothing_registered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and measures that a test adds are gone after it."""
    from aligners.maps.base import Aligner
    from aligners.similarity import catalogue

    monkeypatch.setattr(Aligner, "registry", dict(Aligner.registry))
    monkeypatch.setattr(catalogue, "_FURTHER", dict(catalogue._FURTHER))


@pytest.fixture(autouse=True)
def _bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns when arguments are given beside those of the process."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Lightning switches Ctrl-C off when it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not drawn."""
    from PIL import Image

    from aligners.reports import publishing

    monkeypatch.setattr(publishing, "save_figure", lambda _, path: Image.new("L", (1, 1)).save(path, "png"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from tests.world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two causal language models, of 2 and of 3 blocks."""
    from tests.tiny import tiny_folder

    folder = tmp_path_factory.mktemp("causal")
    return [str(tiny_folder(folder / str(s), "gpt2", task="causal", seed=s, layers=2 + s)) for s in range(2)]


@pytest.fixture(scope="session")
def masked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two masked language models."""
    from tests.stitches import masking_folder

    folder = tmp_path_factory.mktemp("masked")
    return [masking_folder(folder / str(s), seed=s) for s in range(2)]


@pytest.fixture(scope="session")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    """Annotated sentences of known words, to fit and to test on."""
    from tests.aligners.probing.made import sentences_of_words, write_treebank

    from aligners.datamodules.text.sources import TextSource

    folder = tmp_path_factory.mktemp("treebank")
    fit = write_treebank(folder / "fit.conllu", sentences_of_words(120, 0))
    return TextSource(fit, held_out=write_treebank(folder / "test.conllu", sentences_of_words(40, 1)))
