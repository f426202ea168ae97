"""W&B learns what a run used and left, gets no file unasked, and has one run for an interrupted command."""

import json
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import wandb
from hypothesis import example, given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from tests.processes import Started
from tests.wandb_files import artifacts, records, run_numbers
from tests.world import World

from aligners.cli import run_loggers
from aligners.cli.folders import claim, claim_checkpoints, interrupted_run
from aligners.cli.table import evaluate, train
from aligners.fitting.saved_bank import load_bank
from aligners.reports.tracking import RunArtifact, described, new_number, start_run, unfinished

QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")


def of_the_world(world: World) -> list[str]:
    models = [f"--data.model_x={world.model_x}", f"--data.model_y={world.model_y}", "--data.sites=1"]
    texts = [f"--data.text.source={world.fit}", f"--data.text.held_out={world.test}", "--data.max_length=60"]
    return [*models, *texts, "--data.held_out_types=0", "--data.batch_size=64", *QUIET]


def fit(world: World, run: str, *more: str) -> None:
    train(["fit", *of_the_world(world), "--model.aligners={linear: Linear}", f"--run={run}", *more])
    wandb.finish()


def own_artifacts(run: str) -> list[Any]:
    """Without the tables that W&B itself makes artifacts of."""
    return [each for each in artifacts(Path(run)) if each.type != "run_table"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_maps_and_states_lead_from_run_to_run_and_stay_where_they_are(world: World, tmp_path: Path) -> None:
    fit(world, "fit", "--data.store=store")
    made, kept = {each.name: each for each in own_artifacts("fit")}, load_bank("fit/aligners.safetensors")
    (maps,) = (each for each in made.values() if each.type == "maps")
    assert not maps.use_after_commit
    about = json.loads(maps.metadata)
    assert about["models"] == {model["name"]: model["fingerprint"] for model in kept.data["models"].values()}
    assert (about["command"], about["maps"]["0_1"]) == ("fit", ["linear"])
    stores = {each.name for each in made.values() if each.type == "states"}
    assert stores == {f"states-{path.parent.name}" for path in Path("store").glob("*/manifest.json")}
    assert all(each.use_after_commit for each in made.values() if each.type == "states")

    evaluate(["inject", "--checkpoints+=fit/aligners.safetensors", "--closed_form=[]", "--run=inject", *QUIET])
    wandb.finish()
    (used,) = (each for each in own_artifacts("inject") if each.type == "maps")
    assert used.use_after_commit
    assert (used.name, used.digest) == (maps.name, maps.digest)
    config = {item.key: item.value_json for each in records(Path("inject"), "config") for item in each.update}
    assert json.loads(config["inputs"])[0]["digest"] == maps.digest

    entries = [entry for each in (*made.values(), used) for entry in each.manifest.contents]
    assert {entry.ref.partition(":")[0] for entry in entries} == {"file"}
    assert not any(entry.local_path for entry in entries)  # nothing would be uploaded


def test_a_file_is_uploaded_on_request(world: World) -> None:
    fit(world, "fit", "--upload=true")
    (maps,) = own_artifacts("fit")
    (entry,) = maps.manifest.contents
    assert (entry.path, entry.ref) == ("model.safetensors", "")
    assert entry.local_path
    (Path("shared")).mkdir()
    for copy in ("shared/model.safetensors", "aligners.ckpt"):  # as of `evaluate.py share`, and of the version before
        shutil.copy("fit/aligners.safetensors", copy)
        artifact = described(Path(copy))
        assert artifact is not None
        assert (artifact.name, artifact.artifact().digest) == (maps.name, maps.digest)


def test_without_wandb_nothing_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="W&B does not know.*")
        fit(world, "fit")
    assert Path("fit/aligners.safetensors").is_file()
    assert Path("fit/metrics.csv").is_file()
    assert unfinished(Path("fit")) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_without_wandb_there_is_no_logger_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(run_loggers, "rank", lambda: rank)
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an error
    (logger,) = run_loggers.run_loggers(tmp_path / "run", "fit")
    assert isinstance(logger, CSVLogger)


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
@example(["embedded:1:vocabulary=500", "embedded:1:vocabulary-500"])
@example(["x" * 200 + "a", "x" * 200 + "b"])
@example(["modèle", "mod-le"])
def test_the_name_of_every_artifact_is_legal_and_its_own(folders: list[str]) -> None:
    of_states = [RunArtifact(Path("store", folder, "manifest.json"), "states", {}) for folder in folders]
    of_maps = [
        RunArtifact(Path("aligners.safetensors"), "maps", {"models": {"embedded:0": "", f: ""}}) for f in folders
    ]
    for artifact in (*of_states, *of_maps):
        assert wandb.Artifact(artifact.name, artifact.kind).name == artifact.name
    differ = len({artifact.path for artifact in of_states}) == 2
    assert (len({artifact.name for artifact in of_states}) == 2) == differ


def test_what_is_no_file_of_ours_is_no_artifact(world: World, tmp_path: Path) -> None:
    (tmp_path / "aligners.safetensors").write_text("no maps")
    (tmp_path / "config.yaml").write_text("a: 1")
    for path in (Path(world.model_x), tmp_path / "aligners.safetensors", tmp_path / "config.yaml", tmp_path):
        assert described(path) is None  # the first are a model's own weights


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_same_run_at_wandb(world: World, tmp_path: Path) -> None:
    mlp = "--model.aligners={mlp: {class_path: MLP, init_args: {hidden: [8]}}}"
    words = ["fit", *of_the_world(world), mlp]
    endless = [*words, "--trainer.max_epochs=1000000", "--checkpoint.every_n_minutes=1e-9"]
    killed = Started(tmp_path, "train", *endless, "--run=first")
    killed.wait_until(Path("first/last.ckpt").is_file)
    killed.signal(signal.SIGKILL)
    killed.end()
    train([*endless, "--trainer.max_time=00:00:00:01", "--run=second", "--ckpt_path=first/last.ckpt"])
    wandb.finish()
    (number,) = run_numbers(Path("first"))
    assert run_numbers(Path("second")) == [number]
    assert unfinished(Path("first")) == number
    assert unfinished(Path("second")) is None  # what follows from a run that is complete is another


def test_the_interrupted_run_is_found_where_its_checkpoints_are_kept_elsewhere(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    claim(run, "a: 1")
    claim_checkpoints(kept, run)
    for checkpoint in (kept / "last.ckpt", run / "last.ckpt", run):  # the last with its parts
        assert interrupted_run(str(checkpoint)) == run
    assert interrupted_run(str(run / "aligners.safetensors")) is interrupted_run(None) is None


def test_a_number_that_is_in_use_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the process that began it was killed, and W&B's service was another's and goes on."""
    real = wandb.init

    def init(**options: Any) -> Any:
        if options["id"] is not None:
            raise RuntimeError(f"run ID {options['id']} is in use")
        return real(**options)

    monkeypatch.setattr(wandb, "init", init)
    run = start_run(tmp_path, "name", "fit", number="one")
    assert "the run `one` cannot go on, as it has not ended" in caplog.text
    run.finish()
    assert run_numbers(tmp_path) == [run.id]


def test_the_number_that_a_sweep_gives_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")
    assert new_number(tmp_path, "another") == "of-a-sweep" == unfinished(tmp_path)
