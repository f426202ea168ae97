"""The sweeps: every parameter is an option of its command, and a trial runs as W&B's agent would start it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.processes import ROOT
from tests.shell import metrics
from tests.world import World
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from aligners.cli.options import flat
from aligners.cli.table import find, train

SWEEPS = sorted((ROOT / "aligners" / "configs" / "sweeps").glob("*.yaml"))


def ends_of(parameter: dict[str, Any]) -> list[Any]:
    """The first and the last value that a parameter can take."""
    if "value" in parameter:
        return [parameter["value"]] * 2
    values = parameter.get("values") or [parameter["min"], parameter["max"]]
    return [values[0], values[-1]]


def words_of(sweep: dict[str, Any], end: int) -> list[str]:
    """The command line of a trial, after the program."""
    chosen = {name: {"value": ends_of(parameter)[end]} for name, parameter in sweep["parameters"].items()}
    filled = create_sweep_command_args({"args": chosen})
    filled |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    chunks = create_sweep_command(list(sweep["command"]))
    words = [word for chunk in chunks for word in (filled[chunk[2:-1]] if chunk.startswith("${") else [chunk])]
    assert words[:3] == ["/usr/bin/env", "python", "train.py"]
    return words[3:]


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_value_of_a_parameter_is_understood(path: Path, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load(path.read_text())
    command, *words = words_of(sweep, end)
    parser = find("train", command).parser()
    given = flat(yaml.safe_load(parser.dump(parser.parse_args(words))))
    for name, parameter in sweep["parameters"].items():
        assert given[name.replace("optimizer.", "optimizer.init_args.")] == ends_of(parameter)[end]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_trial_logs_what_the_sweep_compares(
    path: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load(path.read_text())
    command, *words = words_of(sweep, 0)
    models = [f"--data.model_x={world.model_x}", f"--data.model_y={world.model_y}", "--data.held_out_types=0"]
    if command == "stitch":
        models = [f"--data.models={json.dumps([world.model_x, world.model_y])}"]
    texts = [f"--data.text.source={world.fit}", f"--data.text.held_out={world.test}", "--data.max_length=60"]
    short = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.check_val_every_n_epoch=null"]
    short = short if command == "stitch" else ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    csv = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]
    train([command, *words, *models, *texts, *short, *quiet, *csv, f"--run={tmp_path / 'run'}"])
    (logged,) = tmp_path.rglob("metrics.csv")
    assert sweep["metric"]["name"] in metrics(logged.parent)
