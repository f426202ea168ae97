"""Files that are read again: a byte that changed is noticed wherever it is, and files of earlier versions are read."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.aligners.fitting.storage.test_bank import FITTED, bank
from tests.damage import without_checksum
from tests.world import World

from aligners.api import Head, read_artefacts, write_artefact
from aligners.callbacks.checkpoint import WholeCheckpoints
from aligners.cli.options import check_goes_on
from aligners.datamodules.store.keeping import load_tensors, save_tensors
from aligners.datamodules.text.texts import FittedTexts
from aligners.errors import UserError
from aligners.files.sealed import NAME, SUMS, read_sealed_json, save_sealed, sealed_json
from aligners.fitting.saved_bank import ALIGNMENT, load_bank, save_bank
from aligners.models.loading.load_models import load_frozen
from aligners.models.loading.model_files import save_model
from aligners.probing.probe_bank import Bank, ModelLayer, Variant
from aligners.probing.probes import EdgeProbes
from aligners.probing.storing import load_banks, save_banks


def goes_on(path: Path) -> None:
    check_goes_on(str(path), "fit", ALIGNMENT)
    WholeCheckpoints().load_checkpoint(path, weights_only=True)


def kept_maps(folder: Path) -> Path:
    save_bank(bank(), folder / "aligners.safetensors")
    return folder / "aligners.safetensors"


def kept_run(folder: Path) -> Path:
    content = {ALIGNMENT: {"moments": torch.ones(3)}, "state_dict": {"weight": torch.randn(40)}, "global_step": 3}
    WholeCheckpoints().save_checkpoint(content, folder / "last.ckpt")
    return folder / "last.ckpt"


def kept_probes(folder: Path) -> Path:
    probes = EdgeProbes([Variant("model", 1)], 4, 2)
    save_banks(folder / "probes.safetensors", {"pos": (Bank(probes, [ModelLayer("model", 1)]), {"task": "pos"})})
    return folder / "probes.safetensors"


def kept_texts(folder: Path) -> Path:
    FITTED.save(folder)
    return folder / "fitted_on" / "texts.safetensors"


def kept_sums(folder: Path) -> Path:
    save_tensors(folder / "sums.safetensors", {"sum": torch.arange(30.0)})
    return folder / "sums.safetensors"


def kept_artefact(folder: Path) -> Path:
    head = Head.of(torch.randn(2, 3).numpy(), torch.randn(2).numpy(), model="m", site=1)
    write_artefact(head, folder / "head")
    return folder / "head" / "artefact.safetensors"


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "maps": (kept_maps, load_bank),
    "last.ckpt": (kept_run, goes_on),
    "probes": (kept_probes, load_banks),
    "texts": (kept_texts, lambda path: FittedTexts.load(path.parent.parent)),
    "sums of a store": (kept_sums, load_tensors),
    "artefact": (kept_artefact, lambda path: read_artefacts(path.parent)),
}


def places(size: int) -> Iterator[int]:
    """The first and last bytes of a file, where its lengths and checksums are, and some between them."""
    yield from range(min(size, 60))
    yield from range(max(0, size - 120), size)
    yield from random.Random(0).sample(range(size), min(size, 60))


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_that_changed_is_noticed_wherever_it_is(tmp_path: Path, kind: str) -> None:
    write, read = KINDS[kind]
    path = write(tmp_path)
    read(path)
    sound = path.read_bytes()
    at = sound.find(NAME.encode()) - 3
    for place in (*places(len(sound)), *range(at, min(at + 70, len(sound)))):
        changed = bytearray(sound)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(UserError, match=path.name):
            read(path)
    path.write_bytes(sound)
    read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_an_earlier_version_is_read(tmp_path: Path, kind: str) -> None:
    write, read = KINDS[kind]
    path = write(tmp_path)
    without_checksum(path)
    assert NAME.encode() not in path.read_bytes()
    read(path)


def test_equal_files_are_equal_however_much_they_say(tmp_path: Path) -> None:
    says = {str(number): f"tschüß {number}\n" for number in range(20)}
    for name in "ab":
        save_sealed(save_file, {"x": torch.ones(3)}, tmp_path / name, says)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(tmp_path / "a", "pt") as file:
        assert {**file.metadata(), NAME: ""} == {**says, NAME: ""}


def test_json_with_its_checksum() -> None:
    plain: dict[str, Any] = {"a": 1, "b": {"c": [0.5, None]}}
    text = sealed_json(plain)
    assert read_sealed_json(text) == read_sealed_json(json.dumps(plain)) == plain
    for place in range(len(text)):
        changed = text[:place] + chr(ord(text[place]) ^ 4) + text[place + 1 :]
        with pytest.raises(ValueError, match=r".*"):
            read_sealed_json(changed)


def test_damaged_weights_or_words_of_a_model_that_was_made_here(world: World, tmp_path: Path) -> None:
    frozen = load_frozen(world.model_x)
    assert frozen.tokenizer is not None
    save_model(tmp_path, frozen.model, frozen.tokenizer)
    load_frozen(tmp_path)
    for name in ("model.safetensors", "tokenizer.json", SUMS):
        sound = (tmp_path / name).read_bytes()
        changed = bytearray(sound)
        changed[len(sound) // 2] ^= 1
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(UserError, match=rf"{name} is damaged"):
            load_frozen(tmp_path)
        (tmp_path / name).write_bytes(sound)
    (tmp_path / SUMS).unlink()
    load_frozen(tmp_path)
