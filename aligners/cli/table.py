"""The commands of `train.py`, `evaluate.py` and `study.py`, one line each, which `aligners` runs as well."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from aligners.cli.endings import early_endings

CONFIGS = Path(__file__).parents[1] / "configs"  # the YAML files that the package brings

# Script -> command -> its line of help. The command is the module `SCRIPT/COMMAND.py` here with two functions,
# `parser()` and `run(parser, words)`, which is imported only when the command is used.
COMMANDS: dict[str, dict[str, str]] = {
    "train": {
        "fit": "Fit aligners between the states of two frozen models.",
        "finetune": "Fine-tune classifiers from any number of seeds, with blocks frozen or left out.",
        "fit_attention": "Fit aligners between the attention weights of two models.",
        "fit_pairs": "Fit aligners of many pairs of models at once, in one bank.",
        "join": "Fit one more model to a shared space that many have.",
        "probe": "Train probes on the states of models: what is encoded, layer by layer.",
        "recover": "Fit maps to random bijections of a model's states, and measure how well each is found.",
        "stitch": "Train stitching layers through frozen tails, and report what they cost.",
        "universe": "Fit one shared space for many models, with a bijection from each.",
        "untrained": "Save a model's untrained twin.",
        "validate": "Show the figures of a checkpoint's aligners on the validation texts.",
    },
    "evaluate": {
        "bijection": "Measure what being a bijection costs, by steps and size.",
        "inject": "Measure the errors of maps, and inject mapped states at every site.",
        "probe": "Let probes of one model read the mapped states of another.",
        "share": "Write what a run has trained to a folder for others, with a card; upload it.",
        "show": "Show a finished run's tables and findings, and open its report.",
        "similarity": "Measure all layers of models against each other.",
        "stitch": "Stitch models together and measure the penalty.",
        "surgery": "Truncate classifiers, and skip spans of their layers.",
    },
    "study": {
        "run": "Run what is missing of a study, and report.",
        "status": "Show how far a study is.",
        "retry": "Run the failed cells of a study once more.",
        "collect": "Write the results of a study into tables.",
        "report": "Make the tables and figures of a study.",
        "store": "List, verify and remove the states that a store keeps.",
        "workspace": "Save a view of all runs at W&B.",
    },
}


def train(args: Sequence[str] | None = None) -> None:
    """`train.py`: run the command that the first word names.

    Args:
        args: the words after `train.py`; errors are raised. By default those of the process, which then ends with a
            message and an exit status where the user can mend the error.
    """
    _main("train", args)


def evaluate(args: Sequence[str] | None = None) -> None:
    """`evaluate.py`: run the command that the first word names.

    Args:
        args: see `train`.
    """
    _main("evaluate", args)


def study(args: Sequence[str] | None = None) -> None:
    """`study.py`: run the command that the first word names.

    Args:
        args: see `train`.
    """
    _main("study", args)


def main() -> None:
    """`aligners`: run the command that the first two words name, such as `aligners train fit`."""
    script = sys.argv[1] if len(sys.argv) > 1 else None
    if script in COMMANDS:
        _main(script, None, program=f"aligners {script}", skip=2)
    else:
        print(*(_usage(f"aligners {name}", name) for name in COMMANDS), sep="\n\n")
        sys.exit(0 if script in ("-h", "--help") else 2)


def _main(script: str, args: Sequence[str] | None, program: str | None = None, skip: int = 1) -> None:
    program = program or f"{script}.py"
    if args is not None:
        return _run(script, list(args), program)
    with early_endings(traceback="--traceback" in sys.argv):
        _run(script, sys.argv[skip:], program)


def _run(script: str, words: list[str], program: str) -> None:
    # Batches differ in shape, and oneDNN keeps what it has compiled for each of the last 1,024: memory without end.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    name = words[0] if words else None
    if name in ("-h", "--help"):
        print(_usage(program, script))
    elif name not in COMMANDS[script]:
        received = "nothing" if name is None else repr(name)
        usage = _usage(program, script)
        print(f"{usage}\n\nExpected the name of a command as first word, but got {received}.", file=sys.stderr)
        sys.exit(2)
    else:
        _import_wandb_first()
        from aligners.cli.folders import release_unused
        from aligners.cli.lineage import end_runs, forget_runs
        from aligners.cli.run import quiet

        quiet()
        module = import_module(f"aligners.cli.{script}.{name}")
        parser = module.parser()
        parser.prog = f"{program} {name}"
        try:
            module.run(parser, _with_config_files(script, name, words[1:]))
            end_runs()
        except BaseException:
            release_unused()
            raise
        finally:
            forget_runs()


def _with_config_files(script: str, command: str, words: list[str]) -> list[str]:
    """Put the files of configs that the package brings in the place of their names: `--config demo`, `run embedded`."""
    folder = CONFIGS / (command if (CONFIGS / command).is_dir() else script)

    def file_of(name: str) -> str:
        brought = folder / f"{name}.yaml"
        return str(brought) if brought.is_file() and not Path(name).exists() else name

    found = [
        file_of(word) if before in ("-c", "--config") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    found = [f"--config={file_of(word[9:])}" if word.startswith("--config=") else word for word in found]
    return [file_of(found[0]), *found[1:]] if (script, command) == ("study", "run") and found else found


def _usage(program: str, script: str) -> str:
    lines = [f"  {name:<14}{said}" for name, said in COMMANDS[script].items()]
    usage = [f"usage: {program} COMMAND [options]", "", *lines, ""]
    return "\n".join([*usage, f"`{program} COMMAND --help` explains every option."])


def _import_wandb_first() -> None:
    """Import what every W&B run needs: it inspects all loaded modules, and is ten times faster before Lightning is."""
    with suppress(ImportError):
        import wandb.sdk.launch.inputs.internal  # noqa: F401
