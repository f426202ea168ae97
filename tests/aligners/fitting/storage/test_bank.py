import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.damage import without_checksum
from tests.pickled import Code
from tests.runs import related_rows

from aligners.datamodules.rows.row_types import SeenTypes
from aligners.datamodules.text.texts import FittedTexts
from aligners.errors import UserError
from aligners.fitting.saved_bank import (
    ALIGNMENT,
    STITCHING,
    StoredBank,
    build_aligner,
    describe_aligner,
    load_bank,
    refuse_other_models,
    save_bank,
)
from aligners.maps.affine import LowRank
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes
from aligners.similarity.algebra.moments import Moments, moments_of

MODELS = {which: {"name": f"model-{which}", "revision": None, "fingerprint": which * 32} for which in "xy"}
FITTED = FittedTexts(np.array([-3, 5]), [{"source": "texts.csv", "n_texts": 2}])


def bank(path: Path = Path()) -> StoredBank:
    """With two names of which one begins like the other, and two routes."""
    torch.manual_seed(0)
    x, y = related_rows(2, 100, 5, 5)
    maps = {"linear": Linear(2, 5, 5), "linear_2": Procrustes(2, 5, 5), "inn": INN(2, 5, 5, couplings=2, hidden=4)}
    for aligner in maps.values():
        aligner.fit(moments_of(x, y))
    data = {"models": MODELS, "sites": [[1, 1], [2, 3]], "rows": "tokens", "special_tokens": True}
    pairs = {"0_1": [(1, 1), (2, 3)], "1_0": [(1, 1), (3, 2)]}
    record = {"best_step": [3, 0], "diverged_step": [0, 0], "start": ["linear", "linear"], "steps": 4}
    spread = {"1_0": {"mean": torch.ones(2, 5), "variance": torch.ones(2)}}
    return StoredBank(
        "fit", {"0_1": maps, "1_0": {"low": LowRank(2, 5, 5, rank=2)}}, pairs, data, {"rows": "tokens"},
        moments_of(x, y), SeenTypes("tokens", frozenset("abc")), FITTED, {"0_1.inn": record}, spread,
        [{"step": 0, "penalty": math.inf}], {"task": 1.0}, path,
    )  # fmt: skip


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "aligners.safetensors"
    expected = bank(path)
    save_bank(expected, path)
    found = load_bank(path)
    for name in ("command", "pairs", "data", "data_config", "seen", "training", "curves", "loss", "path"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.of_each(describe_aligner) == expected.of_each(describe_aligner)
    for route, name in (("0_1", "linear"), ("0_1", "linear_2"), ("0_1", "inn"), ("1_0", "low")):
        other = found.maps[route][name]
        assert not other.training
        assert not any(weight.requires_grad for weight in other.parameters())
        for key, value in expected.maps[route][name].state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key
    for a, b in zip(found.moments or (), expected.moments or (), strict=True):
        assert torch.equal(a, b)
    assert found.fitted is not None
    assert found.fitted.keys.tolist() == [-3, 5]
    assert found.fitted.origins == FITTED.origins
    assert torch.equal(found.spread["1_0"]["mean"], torch.ones(2, 5))


def test_a_file_is_found_by_its_name_now_and_in_the_version_before(tmp_path: Path) -> None:
    now, before = tmp_path / "aligners.safetensors", tmp_path / "aligners.ckpt"
    save_bank(bank(), now)
    assert load_bank(before).pairs == load_bank(now).pairs
    now.rename(before)
    assert load_bank(before).pairs == load_bank(now).pairs


def test_equal_banks_make_equal_files_without_anything_else_in_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_bank(bank(), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    large = replace(bank(), maps={"0_1": {"linear": Linear(2, 200, 200)}}, moments=Moments.zeros(2, 200, 200))
    save_bank(large, tmp_path / "large")
    kept = [*large.maps["0_1"]["linear"].state_dict().values(), *(large.moments or ())]
    content = sum(value.numel() * value.element_size() for value in kept)
    assert content < (tmp_path / "large").stat().st_size < 1.1 * content


def test_tensors_that_share_memory_are_written_too(tmp_path: Path) -> None:
    mean = torch.ones(2, 5)
    path = tmp_path / "aligners.safetensors"
    save_bank(replace(bank(), spread={route: {"mean": mean} for route in ("0_1", "1_0")}), path)
    assert torch.equal(load_bank(path).spread["1_0"]["mean"], mean)


@pytest.mark.parametrize(("key", "command"), [(ALIGNMENT, "fit"), (STITCHING, "stitch")])
def test_a_run_to_go_on_with_is_not_taken_for_a_finished_one(tmp_path: Path, key: str, command: str) -> None:
    torch.save({"state_dict": {}, key: {}}, tmp_path / "moved.ckpt")
    with pytest.raises(ValueError, match=rf"finished run, but .*moved\.ckpt is a checkpoint .*: `train\.py {command} "):
        load_bank(tmp_path / "moved.ckpt")


def test_a_model_is_another_when_its_weights_are() -> None:
    moved = {**MODELS, "x": {**MODELS["x"], "name": "a/folder/that/moved"}}
    refuse_other_models(MODELS, moved, "a.ckpt")
    changed = {**MODELS, "y": {"name": "other", "revision": None, "fingerprint": "z" * 32}}
    said = r"a\.ckpt was .*: Y was model-y \(fingerprint y{12}\) and is other \(fingerprint z{12}\)\. Name"
    with pytest.raises(ValueError, match=said):
        refuse_other_models(MODELS, changed, "a.ckpt")
    swapped = {"x": MODELS["y"], "y": MODELS["x"]}
    with pytest.raises(ValueError, match=r": X was .*; Y was "):
        refuse_other_models(MODELS, swapped, "a.ckpt")
    with pytest.raises(ValueError, match=r"model 1 was model-y .* and is nothing"):
        refuse_other_models(list(MODELS.values()), [MODELS["x"]], "a.ckpt")


def test_a_file_that_brings_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "evil.ckpt", tmp_path / "trace"
    torch.save({ALIGNMENT: {}, "more": Code(trace)}, path)
    with pytest.raises(ValueError, match=r"evil\.ckpt.*`train\.py fit`"):
        load_bank(path)
    path.write_bytes(pickle.dumps(Code(trace), protocol=2))
    with pytest.raises(ValueError, match=r"evil\.ckpt"):
        load_bank(path)
    assert not trace.exists()


def test_a_file_that_is_missing_damaged_something_else_or_of_unknown_maps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "aligners.safetensors"
    with pytest.raises(ValueError, match=r"Expected a checkpoint at .*, but there is no such file"):
        load_bank(path)
    said = r"written by `train\.py fit` or `train\.py stitch`, but it cannot be read"
    save_bank(bank(), path)
    whole = path.read_bytes()
    renamed = whole.replace(b"1/inn", b"1/onn")
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"text", renamed, whole + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=said):
            load_bank(path)
    for content in ({"state_dict": {}}, [1, 2]):
        torch.save(content, path)
        with pytest.raises(ValueError, match=said):
            load_bank(path)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(1)}, path, metadata)
        with pytest.raises(ValueError, match=f"{said} as one: it holds no maps"):
            load_bank(path)
    path.write_bytes(whole)
    without_checksum(path)
    path.write_bytes(path.read_bytes().replace(b"Procrustes", b"Teleporter"))
    with pytest.raises(ValueError, match=r"'Teleporter'.*Linear.*Import the module"):
        load_bank(path)


def test_building_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_aligner({"class": "MLP", "sites": 1, "d_x": 3, "d_y": 3, "options": {}})
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("route", "name", "said"), [("0_1", "linear", "linear"), ("0_1", "inn", "inn"), ("1_0", "low", "low")]
)
def test_a_map_with_nan_or_infinity_is_named_and_not_used(
    tmp_path: Path, value: float, route: str, name: str, said: str
) -> None:
    broken = bank()
    weight = max(broken.maps[route][name].state_dict().items(), key=lambda item: item[1].numel())[1]
    weight[1].view(-1)[3] = value
    save_bank(broken, tmp_path / "aligners.safetensors")
    site = {"0_1": "2-3", "1_0": "3-2"}[route]
    with pytest.raises(
        UserError, match=rf"finite numbers in every map of .*, but {said} \(\w+\) holds .* pair {site}\. "
    ):
        load_bank(tmp_path / "aligners.safetensors")


def with_header(path: Path, **changes: Any) -> Path:
    """A copy of a bank's file whose header says something else, as somebody could write it."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["bank"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    other = path.with_name("other.safetensors")
    save_file(tensors, other, {"bank": json.dumps(header | changes)})
    return other


@pytest.mark.parametrize(
    "changes",
    [
        {"maps": {"0_1": {"x/../../../pwned": {}}}},
        {"maps": {"0_1": {"a\x1b[2J": {}}}},
        {"maps": {"0_1": {"forward": {}}}},
        {"maps": {"../up": {"linear": {}}}},
        {"pairs": {"0_1": [["../a", "b"]]}},
        {"pairs": {"/etc": [[1, 1]]}},
        {"maps": {"0_1": {"linear": {"class": "os.system", "sites": 1, "d_x": 2, "d_y": 2, "options": {}}}}},
        {"maps": {"0_1": {"linear": {"class": "api", "sites": 1, "d_x": 2, "d_y": 2, "options": {}}}}},
        {"maps": {"0_1": {"linear": {"class": "__path__", "sites": 1, "d_x": 2, "d_y": 2, "options": {}}}}},
    ],
    ids=repr,
)
def test_names_in_a_file_are_checked_as_typed_ones_are(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = {"models": MODELS, "component": "residual"}
    maps = {"0_1": {"linear": Linear(1, 3, 3)}}
    save_bank(StoredBank("fit", maps, {"0_1": [(1, 1)]}, data, {}), tmp_path / "bank.safetensors")
    load_bank(tmp_path / "bank.safetensors")
    with pytest.raises(UserError, match="cannot be read as one"):
        load_bank(with_header(tmp_path / "bank.safetensors", **changes))
