"""What works where the libraries for models, texts and logs are not installed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.processes import HANGS, ROOT

from aligners.fitting.saved_bank import StoredBank, save_bank
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.reports.sharing import SharedMaps

LOAD_FILE = """
from aligners import load_bank
maps = load_bank(place).maps["0_1"]
"""
LOAD_FOLDER = """
from aligners import SharedMaps
maps = SharedMaps.from_pretrained(place).bank.maps["0_1"]
"""
APPLY = """
import sys
import torch
mapped = {name: bank(torch.load(rows)) for name, bank in maps.items()}
torch.save(mapped, rows)
assert not {"transformers", "datasets", "wandb"} & set(sys.modules)
"""


def file_of(bank: StoredBank, folder: Path) -> Path:
    save_bank(bank, folder / "aligners.safetensors")
    return folder / "aligners.safetensors"


def folder_of(bank: StoredBank, folder: Path) -> Path:
    SharedMaps(bank).save_pretrained(folder / "shared")
    return folder / "shared"


def without(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has none of the three."""
    words = [sys.executable, "-m", "tests.without", "transformers,datasets,wandb", code]
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.parametrize(("write", "load"), [(file_of, LOAD_FILE), (folder_of, LOAD_FOLDER)])
def test_maps_are_loaded_and_applied(write: Callable[[StoredBank, Path], Path], load: str, tmp_path: Path) -> None:
    maps: dict[str, Aligner] = {"linear": Linear(2, 6, 6), "inn": INN(2, 6, 6, couplings=2, hidden=8)}
    for aligner in maps.values():
        for parameter in aligner.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model = {"name": "me/model", "revision": None, "fingerprint": "0" * 32}
    data = {"models": {"x": model, "y": model}}
    place = write(StoredBank("fit", {"0_1": maps}, {"0_1": [(1, 1), (2, 3)]}, data, {}), tmp_path)
    rows = torch.randn(2, 5, 6)
    torch.save(rows, tmp_path / "rows.pt")
    done = without(f"place, rows = {str(place)!r}, {str(tmp_path / 'rows.pt')!r}\n{load}{APPLY}")
    assert done.returncode == 0, done.stderr
    for name, mapped in torch.load(tmp_path / "rows.pt").items():
        assert torch.equal(mapped, maps[name](rows))


def test_a_model_is_not() -> None:
    done = without("from aligners.models import load_frozen")
    assert "ModuleNotFoundError: No module named 'transformers'" in done.stderr
