"""What a file of somebody else's may name: no path of it is imported, let alone called, by any command."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.shell import options
from tests.test_adding_things import example
from tests.world import World

from aligners.cli.table import evaluate, study, train
from aligners.cli.trusted import BASES, check_typed
from aligners.errors import UserError
from aligners.maps.base import Aligner
from aligners.studies.study_folder import PLAN, STUDY

CALL = {"class_path": "os.system", "init_args": {"command": "touch touched"}}
EVIL = {"class_path": "evil.Thing"}
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
NESTED: dict[str, Any] = {"class_path": LAMBDA, "init_args": {"on_fit_start": "os.system"}}
INSIDE: dict[str, Any] = {"class_path": LAMBDA, "init_args": {"on_fit_start": "aligners.files.atomic.remove"}}
BASE: dict[str, Any] = {"class_path": "INN", "init_args": {"start": EVIL}}
HOSTILE = [
    ("fit", {"model": {"aligners": {"linear": CALL}}}),
    ("fit", {"model": {"aligners": {"linear": EVIL}}}),
    ("fit", {"model": {"aligners": {"linear": "evil.Thing"}}}),
    ("fit", {"model": {"aligners": {"linear": {"class_path": "aligners.cli.table.os.system"}}}}),
    ("fit", {"model": {"aligners": {"linear": {"class_path": "aligners.files.atomic.remove"}}}}),
    ("fit", {"model": {"aligners": {"inn": BASE}}}),
    ("fit", {"model": {"optimizer": "os.system"}}),
    ("fit", {"model": {"optimizer": EVIL}}),
    ("fit_pairs", {"model": {"optimizer": CALL}}),
    ("fit_attention", {"model": {"aligners": {"linear": CALL}}}),
    ("recover", {"model": {"aligners": {"linear": EVIL}}}),
    ("universe", {"model": {"network": CALL}}),
    ("universe", {"model": {"network": "evil.Thing"}}),
    ("stitch", {"model": {"layers": {"affine": CALL}}}),
    ("validate", {"model": {"optimizer": EVIL}}),
    ("fit", {"trainer": {"callbacks": [EVIL]}}),
    ("fit", {"trainer": {"callbacks": [NESTED]}}),
    ("fit", {"trainer": {"callbacks": [INSIDE]}}),
    ("finetune", {"trainer": {"logger": CALL}}),
    ("probe", {"trainer": {"plugins": [EVIL]}}),
    ("carry", {"trainer": {"strategy": EVIL}}),
    ("join", {"trainer": {"profiler": EVIL}}),
    ("similarity", {"trainer": {"callbacks": EVIL}}),
    ("inject", {"trainer": {"logger": [EVIL]}}),
    ("compare", {"trainer": {"callbacks": [CALL]}}),
    ("fit", {"imports": ["evil.py"]}),
    ("inject", {"imports": ["evil"]}),
    ("fit", {"data": {"trust_remote_code": True}}),
    ("similarity", {"data": {"trust_remote_code": True}}),
]
EVALUATIONS = ("similarity", "inject", "compare")
# Lightning says itself of some texts that they name no part of it.
REFUSED = r"Nothing of it was run|on the command line alone|another value of|invalid|can only be one of|to be identity"


@pytest.fixture(autouse=True)
def _traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose import is seen, as is a command that is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("evil.py").write_text("import pathlib\npathlib.Path('imported').touch()\nclass Thing: ...\n")
    yield
    assert not Path("touched").exists()
    assert not Path("imported").exists()
    assert "evil" not in sys.modules


def run(command: str, words: list[str]) -> None:
    """Run a command of one of the two scripts."""
    script: Callable[..., object] = evaluate if command in EVALUATIONS else train
    script([command, *words, "--run", "run"])


@pytest.mark.parametrize(("command", "content"), HOSTILE)
def test_a_config_runs_no_code(command: str, content: dict[str, Any]) -> None:
    Path("f.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(Exception, match=REFUSED) as error:
        run(command, ["--config", "f.yaml"])
    assert isinstance(error.value, ValueError) or type(error.value).__name__ == "MisconfigurationException"
    assert not Path("run").exists()


TYPED = [
    ["--model.aligners.linear", "evil.Thing"],
    ["--model.aligners.linear.class_path", "evil.Thing"],
    ["--model.optimizer", "os.system"],
    ["--model.optimizer.class_path=os.system"],
    ["--model", "part.yaml"],
    ["--trainer.callbacks+", "evil.Thing"],
    ["--trainer.callbacks.help", "evil.Thing"],
    ["--trainer", "trainer.yaml"],
    ["--data", "{trust_remote_code: null}", "--data", "data.yaml"],
]


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_no_words_and_no_part_of_a_config_run_code(words: list[str]) -> None:
    Path("part.yaml").write_text(yaml.safe_dump({"aligners": {"linear": CALL}}))
    Path("trainer.yaml").write_text(yaml.safe_dump({"callbacks": [EVIL]}))
    Path("data.yaml").write_text(yaml.safe_dump({"trust_remote_code": True}))
    with pytest.raises(UserError):
        run("fit", words)


OF_A_STUDY: list[dict[str, Any]] = [
    {"fit": {"options": {"model": {"aligners": {"linear": CALL}}}}},
    {"fit": {"options": {"model": {"optimizer": EVIL}}}},
    {"fit": {"options": {"trainer": {"callbacks": [EVIL]}}}},
    {"stitch": {"options": {"model": {"layers": {"affine": EVIL}}}}},
    {"fit": {"options": {"imports": ["evil.py"]}}},
    {"fit": {"options": {"data": {"trust_remote_code": True}}}},
    {"data": {"trust_remote_code": True}},
    {"imports": ["evil.py"]},
    {"executor": "slurm", "executor_options": {"cluster": "local", "local_setup": ["touch touched"]}},
]


@pytest.mark.parametrize("content", OF_A_STUDY, ids=json.dumps)
@pytest.mark.parametrize("plan", ["true", "false"])
def test_a_study_file_runs_no_code(world: World, content: dict[str, Any], plan: str) -> None:
    Path("f.yaml").write_text(yaml.safe_dump(study_of(world) | content))
    with pytest.raises(UserError, match=REFUSED):
        study(["run", "f.yaml", "--plan", plan])
    assert not Path("runs").exists()


@pytest.mark.parametrize("content", OF_A_STUDY[:7], ids=json.dumps)
def test_somebodys_study_folder_runs_no_code(world: World, content: dict[str, Any]) -> None:
    Path("folder").mkdir()
    Path("folder", PLAN).write_text("{}")
    whole = {"finetune": None, **study_of(world), **content}
    Path("folder", STUDY).write_text(yaml.safe_dump(whole))
    with pytest.raises(UserError, match=REFUSED):
        study(["retry", "folder"])


def study_of(world: World) -> dict[str, Any]:
    """A small study."""
    return {
        "name": "small",
        "models": {"names": [world.model_x, world.model_y]},
        "tasks": {"t": {"text": {"source": world.fit, "held_out": world.test}}},
        "data": {"max_length": 60},
        "fit": {"options": {"model": {"aligners": {"linear": "Linear"}}}},
    }


def written(content: dict[str, Any]) -> str:
    """The path of a study file."""
    Path("study.yaml").write_text(yaml.safe_dump(content))
    return "study.yaml"


def test_every_map_and_part_that_comes_along_may_be_named(world: World) -> None:
    maps: dict[str, Any] = {"linear": "Linear", "own": "aligners.Procrustes"}
    for name in ("Ridge", "INN"):
        maps[name.lower()] = {"class_path": f"{Aligner.registry[name].__module__}.{name}"}
    content = {
        "model": {"aligners": maps, "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}},
        "trainer": {
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:00:10:00"}}
            ],
            "profiler": "simple",
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
        },
    }
    Path("f.yaml").write_text(yaml.safe_dump(content))
    from aligners.cli.train.fit import fit

    made = fit.parser().instantiate(fit.parser().parse_args(["--config", "f.yaml", *pair(world)]))
    assert set(made.model.factories) == {"linear", "ridge", "inn", "own"}
    assert type(made.trainer.callbacks[0]).__name__ == "Timer"


def pair(world: World) -> list[str]:
    """The two models."""
    return options(data__model_x=world.model_x, data__model_y=world.model_y)


def test_bases_are_classes_of_this_package_of_torch_and_of_lightning() -> None:
    assert {base.__module__.split(".")[0] for base in BASES} == {"aligners", "torch", "lightning"}


@pytest.mark.slow
def test_cells_of_a_study_take_the_maps_of_a_file_that_its_command_line_names(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_map", None)
    del sys.modules["my_map"]
    Path("my_map.py").write_text(example("# a map"))
    content = study_of(world) | {
        "fit": {"options": {"model": {"aligners": {"scale": "Scale"}}, "data": {"sites": [1]}}}
    }
    file = written(content)
    with pytest.raises(UserError, match="Scale"):
        study(["run", file, "--plan", "true"])
    study(["run", file, "--imports", "my_map.py", "--folder", "done"])
    assert list(Path("done").glob("cells/*/run/aligners.safetensors"))


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["--data.trust_remote_code=true"], True),
        (["--data.trust_remote_code", "true"], True),
        (["--data", "{trust_remote_code: true}"], True),
        (["--data={trust_remote_code: true}"], True),
        (["--data.trust_remote_code=false"], False),
        (["--data", "{trust_remote_code: null}"], False),
        (["--data", "trust.yaml"], False),
        (["--config", "{data: {trust_remote_code: true}}"], False),
        (["trust_remote_code"], False),
    ],
)
def test_what_counts_as_typed(words: list[str], typed: bool) -> None:
    with nullcontext() if typed else pytest.raises(UserError, match="on the command line alone"):
        check_typed({"data.trust_remote_code": True, "data.rows": "words"}, words)


def test_one_typed_option_of_an_executor_does_not_let_a_file_add_others() -> None:
    words = ["--executor_options.timeout_min=5"]
    check_typed({"executor_options.timeout_min": 5}, words)
    check_typed({"executor_options.timeout_min": 5}, ["--executor_options", "{timeout_min: 5}"])
    with pytest.raises(UserError, match=r"`executor_options.local_setup` on the command line alone"):
        check_typed({"executor_options.timeout_min": 5, "executor_options.local_setup": ["touch touched"]}, words)
