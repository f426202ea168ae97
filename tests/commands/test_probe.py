"""`train.py probe` as it is configured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands.table import train
from commands.train.probe import parser
from datamodules.text.sources import TextSource
from tests.shell import ROOT

CONFIGS = sorted((ROOT / "configs" / "probe").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_understood(config: Path) -> None:
    given = parser().parse_args(["--config", str(config), "--data.text.source", "en_ewt-ud-train.conllu"])
    assert given.tasks
    assert all("/" in name for name in given.data.models)


def test_base_and_fine_tuned_models_stand_side_by_side(
    masked: list[str], treebank: TextSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train([
        "probe", "--config", str(ROOT / "configs" / "probe" / "merchant.yaml"), f"--data.models={json.dumps(masked)}",
        f"--data.text.source={treebank.source}", f"--data.text.held_out={treebank.held_out}", "--tasks=[pos,distance]",
        "--data.max_length=64", "--projection=4", "--hidden=4", "--seeds=1", "--training.epochs=1", "--drawn=0",
        "--training.least_steps=5", "--portions=[0.5,1]", "--trainer.logger=false", "--trainer.accelerator=cpu",
        f"--run={tmp_path / 'run'}",
    ])  # fmt: skip
    rows = json.loads((tmp_path / "run" / "probing.json").read_text())["rows"]
    mixed = [row["model"] for row in rows if row["task"] == "pos" and row["source"] == "model" and row["site"] is None]
    assert mixed == masked
    assert (tmp_path / "run" / "probes.safetensors").exists()
    assert "compressed most" in capsys.readouterr().out
