"""The table of commands of `train.py`, `evaluate.py` and `study.py`, which `aligners` shares, and how one is run."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from aligners import __version__
from aligners.cli.endings import early_endings
from aligners.cli.known.option_cache import keep, kept
from aligners.cli.log import watch_streams
from aligners.cli.words import as_parsed, help_of
from aligners.errors import did_you_mean
from aligners.files.yaml_tables import table_beside

if TYPE_CHECKING:
    from aligners.cli.command import Command

# Script -> command -> the module below `aligners.cli` and the function in it, and a line of help. A module is imported
# only when a command of it is used.
COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "train": {
        "carry": (
            "train.carry:carry",
            "Carry heads, directions, probes and dictionaries to another model, by maps without labels.",
        ),
        "fit": (
            "train.fit:fit",
            "Fit aligners between the states of two frozen models.",
        ),
        "finetune": (
            "train.finetune:finetune",
            "Fine-tune classifiers from any number of seeds, with blocks frozen or left out.",
        ),
        "fit_attention": (
            "train.fit:fit_attention",
            "Fit aligners between the attention weights of two models.",
        ),
        "fit_pairs": (
            "train.fit:fit_pairs",
            "Fit aligners of many pairs of models at once, in one bank.",
        ),
        "join": (
            "train.fit_universe:join",
            "Fit one more model to a shared space that many have.",
        ),
        "migrate": (
            "train.migrate:migrate",
            "Map an index of old vectors to a new embedding model, and say what a search then finds.",
        ),
        "probe": (
            "train.train_probes:probe",
            "Train probes on the states of models: what is encoded, layer by layer.",
        ),
        "recover": (
            "train.fit:recover",
            "Fit maps to random bijections of a model's states, and measure how well each is found.",
        ),
        "stitch": (
            "train.train_stitching:stitch",
            "Train stitching layers through frozen tails, and report what they cost.",
        ),
        "universe": (
            "train.fit_universe:universe",
            "Fit one shared space for many models, with a bijection from each.",
        ),
        "untrained": ("train.untrained:untrained", "Save a model's untrained twin."),
        "validate": (
            "train.fit:validate",
            "Show the figures of a checkpoint's aligners on the validation texts.",
        ),
    },
    "evaluate": {
        "bijection": (
            "evaluate.bijection:bijection",
            "Measure what being a bijection costs, by steps and size.",
        ),
        "compare": (
            "evaluate.compare:compare",
            "Say what changed between two models, where, and on what.",
        ),
        "features": (
            "evaluate.features:features",
            "Say what two models share, feature by feature of a sparse dictionary.",
        ),
        "inject": (
            "evaluate.inject:inject",
            "Measure the errors of maps, and inject mapped states at every site.",
        ),
        "probe": (
            "evaluate.evaluate_probes:probe",
            "Let probes of one model read the mapped states of another.",
        ),
        "share": (
            "evaluate.show_and_share:share",
            "Write what a run has trained to a folder for others, with a card; upload it.",
        ),
        "show": (
            "evaluate.show_and_share:show",
            "Show a finished run's tables and findings, and open its report.",
        ),
        "similarity": (
            "evaluate.similarity:similarity",
            "Measure all layers of models against each other.",
        ),
        "steer": (
            "evaluate.steer:steer",
            "Steer a language model: what directions do, and what they cost.",
        ),
        "stitch": (
            "evaluate.evaluate_stitching:stitch",
            "Stitch models together and measure the penalty.",
        ),
        "surgery": (
            "evaluate.surgery:surgery",
            "Truncate classifiers, and skip spans of their layers.",
        ),
    },
    "study": {
        "run": ("study.run_cells:run", "Run what is missing of a study, and report."),
        "status": ("study.study_results:status", "Show how far a study is."),
        "retry": (
            "study.run_cells:retry",
            "Run the failed cells of a study once more.",
        ),
        "collect": (
            "study.study_results:collect",
            "Write the results of a study into tables.",
        ),
        "report": (
            "study.study_results:report",
            "Make the tables and figures of a study.",
        ),
        "store": (
            "study.store:store",
            "List, verify and remove the states that a store keeps.",
        ),
    },
}


def run_script(
    script: str,
    args: Sequence[str] | None = None,
    program: str | None = None,
    skip: int = 1,
    modules: Sequence[str] = (),
) -> None:
    """Run the command that the first word names.

    Args:
        script: its name, without `.py`.
        args: the words after it; errors are raised. By default those of the process, which then ends with a message and
            an exit status if the user can fix the error.
        program: what the user typed before the words. Default: the script's file.
        skip: number of words of the process that `program` stands for.
        modules: modules that are imported before a command runs, such as those that register tables of studies.
    """
    program = program or f"{script}.py"
    if args is not None:
        _run(script, list(args), program, modules)
        return
    with early_endings(traceback="--traceback" in sys.argv):
        _run(script, sys.argv[skip:], program, modules)


train, evaluate, study = (partial(run_script, script) for script in COMMANDS)


def main() -> None:
    """`aligners`: run the command that the first two words name, such as `aligners train fit`."""
    script = sys.argv[1] if len(sys.argv) > 1 else ""
    if script in COMMANDS:
        run_script(script, program=f"aligners {script}", skip=2)
        return
    if script == "--version":
        print(_versions())
    else:
        print("\n\n".join(_usage(f"aligners {name}", name) for name in COMMANDS))
    sys.exit(0 if script in ("-h", "--help", "--version") else 2)


def find(script: str, name: str) -> Command:
    """Import a command."""
    module, _, function = COMMANDS[script][name][0].partition(":")
    return getattr(import_module(f"aligners.cli.{module}"), function)


@cache
def known_options(script: str, name: str) -> dict[str, Any]:
    """Return what a command's parser says, from the cache or by making the parser, which takes all imports.

    Returns: see `aligners.cli.known.describe_options.describe`.
    """
    command = f"{script} {name}"
    about = kept(command)
    if about is None:
        if _is_first_rank():
            _say(f"Reading the options of `{command}` (once after each change) ...")
        import_first(wandb=False)
        from aligners.cli.known.describe_options import describe

        about = describe(find(script, name), script, name)
        keep(command, about)
    return about


def _run(script: str, words: list[str], program: str, modules: Sequence[str]) -> None:
    # Batches differ in shape, and oneDNN caches compiled code for the last 1,024 shapes, which takes ever more memory.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    _let_segments_grow()
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(_usage(program, script))
    elif name == "--version":
        print(_versions())
    elif name in COMMANDS[script]:
        _run_command(script, name, f"{program} {name}", words[1:], modules)
    else:
        received = repr(name) if name else "nothing"
        like = did_you_mean([name], COMMANDS[script])
        error = (
            f"Expected the name of a command as first word, but got {received}.{like}"
        )
        print(f"{_usage(program, script)}\n\n{error}", file=sys.stderr)
        sys.exit(2)


def _let_segments_grow() -> None:
    """Let torch's segments of GPU memory grow, unless the user has set how it takes memory.

    Otherwise each shape of batch may leave gaps that no other fits in.
    """
    settings = "PYTORCH_ALLOC_CONF"
    of_devices = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    set_by_user = os.environ.keys() & {settings, *of_devices}
    if sys.platform != "linux" or set_by_user:
        return
    major, minor, _ = version("torch").split(".", 2)
    if (int(major), int(minor)) < (2, 9):
        settings = "PYTORCH_CUDA_ALLOC_CONF"
    os.environ[settings] = "expandable_segments:True"


def _run_command(
    script: str, name: str, program: str, words: list[str], modules: Sequence[str]
) -> None:
    about = known_options(script, name)
    asked = not {"-h", "--help"}.isdisjoint(words)
    if asked and "all" not in words:
        print(help_of(program, about))
        return
    if (script, name) == ("study", "run") and words and not words[0].startswith("-"):
        words = ["--config", *words]
    words = ["--help"] if asked else as_parsed(about, words)
    watch_streams()
    if not asked:
        _say_that_it_begins(about)
    import_first(wandb=script == "study" or _begins_at_wandb(about, words))
    from aligners.cli.command import run_command

    for module in modules:
        import_module(module)
    run_command(find(script, name), program, words)


def _begins_at_wandb(about: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Whether a command, with these words as they are parsed, may begin a run at W&B."""
    logs = "trainer.logger" in about["options"]
    return logs and "--trainer.logger=false" not in [word.lower() for word in words]


def _say_that_it_begins(about: Mapping[str, Any]) -> None:
    """Announce what takes the next seconds, unless an earlier command of this process has imported it already."""
    if "lightning" not in sys.modules and _is_first_rank():
        reads = "data.batch_size" in about["options"]
        _say("Loading models ..." if reads else "Loading ...")


def _is_first_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _versions() -> str:
    """Return the versions of this package and of those on which its numbers depend, without importing them."""
    others = [
        f"{package} {version(package)}"
        for package in ("torch", "lightning", "transformers")
    ]
    return ", ".join([f"aligners {__version__}", *others])


def _usage(program: str, script: str) -> str:
    lines = [f"usage: {program} COMMAND [options]", ""]
    for name, (_, summary) in COMMANDS[script].items():
        lines.append(f"  {name:<14}{summary}")
    last = (
        f"`{program} COMMAND --help` shows an example and the options that people use."
    )
    return "\n".join([*lines, "", last])


def import_first(*, wandb: bool = True) -> None:
    """Import what every command needs, in the order that takes least time.

    Args:
        wandb: whether the command begins a run at W&B, if WANDB_MODE lets it.
    """
    from aligners.cli.imports import import_packages

    import_packages(with_wandb=wandb and os.environ.get("WANDB_MODE") != "disabled")
    quiet()


def quiet() -> None:
    """Silence messages of other packages that nobody here can act on, as silenced.yaml lists them."""
    silenced = table_beside(__file__, "silenced.yaml")
    for name, value in silenced["environment"].items():
        os.environ.setdefault(name, value)
    for message in silenced["warnings"]:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
