from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.maps.linear import Linear, Procrustes
from aligners.storage import KEY, build_aligner, describe_aligner, load_alignment, refuse_other_models
from similarity.functional.moments import moments_of
from tests.runs import related_rows

MODELS = {which: {"name": f"model-{which}", "revision": None, "fingerprint": which * 32} for which in "xy"}


def checkpoint() -> dict[str, Any]:
    """As `Alignment` writes it, with two names of which one begins like the other."""
    x, y = related_rows(2, 100, 5, 5)
    maps = {"linear": Linear(2, 5, 5), "linear_2": Procrustes(2, 5, 5)}
    state = {}
    for name, aligner in maps.items():
        aligner.fit(moments_of(x, y))
        state |= {f"forward_maps.{name}.{key}": value for key, value in aligner.state_dict().items()}
    described = {name: describe_aligner(aligner) for name, aligner in maps.items()}
    return {
        "state_dict": state,
        KEY: {
            "aligners": {"forward": described, "backward": {}},
            "moments": moments_of(x, y)._asdict(),
            "data": {"models": MODELS, "sites": [[1, 1], [2, 3]]},
            "data_config": {"rows": "tokens"},
        },
    }


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    content = checkpoint()
    torch.save(content, tmp_path / "aligners.ckpt")
    stored = load_alignment(tmp_path / "aligners.ckpt")
    assert stored.site_pairs == [(1, 1), (2, 3)]
    assert stored.data_config == {"rows": "tokens", "held_out_types": 0.0}  # of before there was the option
    assert stored.seen is None
    assert list(stored.maps["forward"]) == ["linear", "linear_2"]
    assert isinstance(stored.maps["forward"]["linear_2"], Procrustes)
    x, y = related_rows(2, 100, 5, 5)
    expected = Linear(2, 5, 5)
    expected.fit(moments_of(x, y))
    assert torch.equal(stored.maps["forward"]["linear"](x.float()), expected(x.float()))
    torch.testing.assert_close(stored.moments.xy, moments_of(x, y).xy)


def test_a_model_is_another_when_its_weights_are() -> None:
    moved = {**MODELS, "x": {**MODELS["x"], "name": "a/folder/that/moved"}}
    refuse_other_models(MODELS, moved, "a.ckpt")
    changed = {**MODELS, "y": {"name": "other", "revision": None, "fingerprint": "z" * 32}}
    said = (
        r"a\.ckpt was .*: Y was model-y \(fingerprint yyyyyyyyyyyy\) and is other \(fingerprint zzzzzzzzzzzz\)\. Name"
    )
    with pytest.raises(ValueError, match=said):
        refuse_other_models(MODELS, changed, "a.ckpt")
    swapped = {"x": MODELS["y"], "y": MODELS["x"]}
    with pytest.raises(ValueError, match=r": X was .*; Y was "):
        refuse_other_models(MODELS, swapped, "a.ckpt")
    with pytest.raises(ValueError, match=r"model 1 was model-y .* and is nothing"):
        refuse_other_models(list(MODELS.values()), [MODELS["x"]], "a.ckpt")


class Code:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_file_that_brings_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "evil.ckpt", tmp_path / "trace"
    torch.save({**checkpoint(), "more": Code(trace)}, path)
    with pytest.raises(ValueError, match=r"evil\.ckpt.*`train\.py fit`"):
        load_alignment(path)
    path.write_bytes(pickle.dumps(Code(trace), protocol=2))
    with pytest.raises(ValueError, match=r"evil\.ckpt"):
        load_alignment(path)
    assert not trace.exists()


def test_a_file_that_is_missing_damaged_or_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "aligners.ckpt"
    with pytest.raises(ValueError, match="no such file"):
        load_alignment(path)
    torch.save(checkpoint(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        load_alignment(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ValueError, match=r"written by `train\.py fit`"):
        load_alignment(path)


def test_an_aligner_that_nobody_defined_is_named() -> None:
    description = {**describe_aligner(Linear(1, 5, 5)), "class": "Teleporter"}
    with pytest.raises(ValueError, match=r"'Teleporter'.*Linear.*Import the module"):
        build_aligner(description)


def test_building_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_aligner({"class": "MLP", "sites": 1, "d_x": 3, "d_y": 3, "options": {}})
    assert torch.equal(torch.rand(3), expected)
