"""A study of probes before and after fine-tuning, as it is configured."""

from pathlib import Path

import pandas as pd
import pytest
import yaml
from tests.processes import ROOT
from tests.world import World

from aligners.cli.table import study


@pytest.mark.slow
@pytest.mark.usefixtures("cells_here")
def test_a_study_of_probes_before_and_after_fine_tuning(world: World, tmp_path: Path) -> None:
    """Every cell run for real: fine-tuned to tell tenses, probed on the same sentences, compared in the report."""
    config = yaml.safe_load((ROOT / "aligners" / "configs" / "study" / "embedded_probes.yaml").read_text())
    config["models"] = {"names": [world.model_x]}
    config["tasks"]["tense"]["text"] |= {"max_texts": 120, "max_held_out": 40}
    config["data"] = {"max_length": 60}
    config["finetune"]["options"]["trainer"] = {"max_epochs": 1}
    config["probe"]["options"] |= {
        "tasks": ["pos", "depth"], "projection": 4, "hidden": 4, "controls": False,
        "training": {"max_epochs": 1, "least_steps": 5},
    }  # fmt: skip
    config["similarity"]["options"]["measures"] = ["rsa"]
    config |= {"report": ["merchant_table_1", "merchant_layers", "merchant_figure_1"]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(config))
    study(["run", "study.yaml", "--imports", str(ROOT / "papers" / "merchant2020" / "merchant.py")])
    folder = tmp_path / "runs" / "embedded_probes"
    found = pd.read_parquet(folder / "tables" / "probing.parquet")
    assert set(zip(found["stage"], found["probed"], strict=True)) == {
        (stage, probed) for stage in ("pretrained", "finetuned") for probed in ("pos", "depth")
    }
    assert set(found["corpus"]) == {"grammar"}
    (row,) = pd.read_csv(folder / "report" / "tables" / "merchant_table_1.csv").to_dict("records")
    assert row["probed"] == "pos"
    layers = pd.read_csv(folder / "report" / "tables" / "merchant_layers.csv")
    assert set(layers["probed"]) == {"pos", "depth"}
    assert (folder / "report" / "figures" / "merchant_figure_1.png").is_file()
