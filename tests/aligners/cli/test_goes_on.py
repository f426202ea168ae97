"""`--ckpt_path` of what no run can go on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligners.cli.table import train


@pytest.mark.parametrize("command", ["fit", "stitch"])
def test_a_file_of_another_kind_is_refused_before_anything_is_made(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"x": torch.ones(3)}, "stitching" if command == "fit" else "alignment": {}}, "other.ckpt")
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    for name, said in (("other", "another kind of run"), ("text", "cannot be read as one"), ("none", "no such file")):
        with pytest.raises(ValueError, match=rf"a last.ckpt of `train.py {command}`, but .*{said}"):
            train([command, "--ckpt_path", f"{name}.ckpt"])
    assert not (tmp_path / "runs").exists()


def test_a_folder_for_checkpoints_is_tried_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`checkpoint.folder` to be a folder that can be written to"):
        train(["stitch", "--checkpoint.folder", "file/below", "--trainer.logger", "false"])
