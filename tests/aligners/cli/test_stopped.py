"""Every command that trains or evaluates ends within a step of SIGTERM; each in a process of its own."""

import json
import signal
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.interrupting import strike
from tests.processes import Started
from tests.tiny import tiny_folder
from tests.world import World

from aligners.api import Direction, Head, write_artefact
from aligners.cli.folders import is_free
from aligners.cli.log import RUN_LOG
from aligners.cli.table import COMMANDS, train
from aligners.datamodules.text.sources import TextSource

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
LONG = "--trainer.max_epochs=1000"
STEP, PROBES = "torch.optim:AdamW.step", "torch.optim:Adam.step"
STITCHED = "aligners.injection.stitching.measuring:StitchingEvaluation.test_step"
COMPARED = "aligners.injection.comparing.comparison:Comparison.measure"
# Command -> the step of its loop, and its options. Words in braces are those of `given`.
STOPPED: dict[str, tuple[str, list[str]]] = {
    "train carry": (
        "aligners.probing.artefacts.carrying:Carrying.test_step", ["--artefacts={artefact}", "{pair}", "{text}"],
    ),
    "train fit": (STEP, ["{pair}", "{text}", "--data.sites=1", "--model.aligners={mlp: MLP}", LONG]),
    "train finetune": (STEP, ["{x}", "{text}", LONG]),
    "train fit_attention": (STEP, ["{pair}", "{text}", "--model.aligners={mlp: MLP}", LONG]),
    "train fit_pairs": (STEP, ["{models}", "{text}", "--data.sites=1", "--model.aligners={mlp: MLP}", LONG]),
    "train join": (STEP, ["--universe={universe}", "{fourth}", LONG]),
    "train migrate": (
        "aligners.fitting.migration.migration:Migration._found", ["{vectors}", "--pairs=[100]"],
    ),
    "train probe": (PROBES, ["{x}", "{trees}", "--tasks=[pos]", "--training.least_steps=100000"]),
    "train recover": (STEP, ["--data.model={world.model_x}", "{text}", "--model.aligners={mlp: MLP}", LONG]),
    "train stitch": (STEP, ["{models}", "{text}", "--trainer.max_steps=100000"]),
    "train universe": (STEP, ["{three}", "{text}", "--data.sites=1", LONG]),
    "train validate": (
        "aligners.fitting.alignment:Alignment.validation_step",
        ["{pair}", "{text}", "--data.batch_size=1", "--data.sites=1", "--ckpt_path={fit}"],
    ),
    "evaluate bijection": (STEP, ["{pair}", "{text}", "--steps=[100000]"]),
    "evaluate compare": (COMPARED, ["{pair}", "{text}"]),
    "evaluate features": (
        "aligners.injection.latents.latent_evaluation:LatentEvaluation.test_step",
        ["--checkpoint={sparse}", "--data.batch_size=8"],
    ),
    "evaluate inject": ("aligners.injection.injecting:InjectionEvaluation.test_step", ["{pair}", "{text}"]),
    "evaluate probe": (PROBES, ["--checkpoints=[{fit}]", "{trees}", "--training.least_steps=100000", "--tasks=[pos]"]),
    "evaluate similarity": (
        "aligners.similarity.similarity_evaluation:SimilarityEvaluation.test_step",
        ["{models}", "{text}"],
    ),
    "evaluate steer": (
        "aligners.injection.generation.steering:SteeringEvaluation.test_step",
        ["--data.model={gpt}", "{text}", "--artefacts={direction}", "--words_for=[good]", "--words_against=[bad]"],
    ),
    "evaluate stitch": (STITCHED, ["{models}", "{text}"]),
    "evaluate surgery": (STEP, ["{models}", "{text}", LONG]),
}  # fmt: skip
NO_LOOP = {"train untrained", "evaluate share", "evaluate show"}
OTHERWISE = {f"study {name}" for name in COMMANDS["study"]}  # tests/aligners/cli/test_study_stopped.py


def test_every_command_is_here() -> None:
    every = {f"{script} {name}" for script, names in COMMANDS.items() for name in names}
    assert every == set(STOPPED) | NO_LOOP | OTHERWISE


@pytest.fixture(scope="module")
def given(world: World, treebank: TextSource, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Options by their names above."""
    folder = tmp_path_factory.mktemp("given")
    third, fourth = (str(tiny_folder(folder / str(seed), seed=seed)) for seed in (2, 3))
    common = ["--data.max_length=64", "--data.batch_size=12"]
    models = ["--data.models", json.dumps([world.model_x, world.model_y])]
    text = [f"--data.text.source={world.fit}", f"--data.text.held_out={world.test}", *common]
    pair = [f"--data.model_x={world.model_x}", f"--data.model_y={world.model_y}"]
    quick = [*text, "--data.sites=1", *QUIET, "--trainer.max_epochs=1"]
    train(["fit", *pair, *quick, "--model.aligners={linear: Linear}", f"--run={folder / 'fit'}"])
    swapped = [f"--data.text.source={world.test}", f"--data.text.held_out={world.fit}", *quick[2:]]
    dictionary = "{sparse: {class_path: SparseAligner, init_args: {latents: 100, active: 4}}}"
    train(["fit", *pair, *swapped, f"--model.aligners={dictionary}", f"--run={folder / 'sparse'}"])
    three = ["--data.models", json.dumps([world.model_x, world.model_y, third])]
    train(["universe", *three, *quick, f"--run={folder / 'universe'}"])
    gpt = tiny_folder(folder / "gpt", "gpt2", task="causal")
    write_artefact(Direction({"vector": torch.ones(16)}, {"model": str(gpt), "site": 1}), folder / "direction")
    write_artefact(Head.of(torch.ones(16), torch.ones(1), model=world.model_x, site=1, rows="mean"), folder / "head")
    vectors = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    np.save(folder / "vectors.npy", vectors)
    (folder / "texts.txt").write_text("\n".join(f"text {number}" for number in range(len(vectors))))
    return {
        "vectors": [
            f"--old={folder / 'vectors.npy'}", f"--new={folder / 'vectors.npy'}", f"--texts={folder / 'texts.txt'}",
        ],
        "gpt": [str(gpt)], "direction": [str(folder / "direction")], "artefact": [str(folder / "head")],
        "text": text, "pair": pair, "models": models, "x": ["--data.models", json.dumps([world.model_x])],
        "three": three, "fourth": ["--data.models", json.dumps([fourth])],
        "trees": [f"--data.text.source={treebank.source}", f"--data.text.held_out={treebank.held_out}", *common],
        "fit": [str(folder / "fit" / "aligners.safetensors")],
        "sparse": [str(folder / "sparse" / "aligners.safetensors")],
        "universe": [str(folder / "universe" / "universe.safetensors")],
        "world.model_x": [world.model_x],
    }  # fmt: skip


def struck_in_third(step: str) -> AbstractContextManager[None]:
    """Within it, this process gets SIGTERM in its third step and may not begin a fifth."""
    module, owner, method = step.replace(":", ".").rsplit(".", 2)
    return strike(getattr(import_module(module), owner), method, 3, signal.SIGTERM, most=4)


@pytest.mark.slow
@pytest.mark.parametrize("command", STOPPED)
def test_sigterm_ends_it_within_a_step(command: str, given: dict[str, list[str]], tmp_path: Path) -> None:
    step, words = STOPPED[command]
    script, name = command.split()
    filled = [w for word in words for w in (given.get(word[1:-1]) or [_filled(word, given)])]
    quiet = [] if command == "train migrate" else QUIET  # it has no Trainer
    given_words = [name, *filled, *quiet, f"--run={tmp_path / 'run'}"]
    struck = Started(tmp_path, script, *given_words, around=partial(struck_in_third, step))
    status, said = struck.end(), struck.said()
    assert status == 143, f"{status}: {said}"
    assert "Stopped by SIGTERM.\n" in said
    assert "Traceback" not in said
    by_path = command != "train finetune" and (tmp_path / "run" / "last.ckpt").exists()
    assert ("--ckpt_path" in said) == by_path
    resumed = by_path or command in ("train finetune", "evaluate similarity")
    assert said.endswith((tmp_path / "run" / RUN_LOG).read_text().splitlines()[-1] + "\n")
    used = not is_free(tmp_path / "run")  # by a command that begins anew: no other may begin there
    further = ["There is nothing to resume.", "To begin again, run\n", "To resume, run\n"]
    assert [line for line in further if line in said] == [further[2 if resumed else int(used)]]
    assert (f"{tmp_path / 'run-2'}" in said) == ("--ckpt_path" in said or (used and not resumed))


def _filled(word: str, given: dict[str, list[str]]) -> str:
    for name, (first, *_) in given.items():
        word = word.replace(f"{{{name}}}", first)
    return word
