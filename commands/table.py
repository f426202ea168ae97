"""The commands of `train.py`, and which command line each belongs to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

__all__ = ["COMMANDS", "main"]

Arguments = Sequence[str] | None


def _align(args: Arguments) -> None:
    from commands.fit import AlignmentCLI

    AlignmentCLI(None if args is None else list(args))


def _stitch(args: Arguments) -> None:
    from commands.stitch import StitchingCLI

    StitchingCLI(_options(args))


def _finetune(args: Arguments) -> None:
    from commands.finetune import finetune

    finetune(_options(args))


def _options(args: Arguments) -> list[str]:
    """The words after the command."""
    return list(sys.argv[1:] if args is None else args)[1:]


# By first word: what it does, and what runs it; the packages that a command needs are imported only for it.
COMMANDS: dict[str, tuple[str, Callable[[Arguments], None]]] = {
    "fit": ("Fit aligners between the states of two frozen models.", _align),
    "finetune": ("Fine-tune classifiers from any number of seeds, with blocks frozen or left out.", _finetune),
    "stitch": ("Train stitching layers through frozen tails, and report what they cost.", _stitch),
    "validate": ("Show the figures of a checkpoint's aligners on the validation texts.", _align),
}


def main(args: Arguments = None) -> None:
    """Run the command that the first word names.

    Args:
        args: the words after `train.py`; by default those of the process.
    """
    words = list(sys.argv[1:] if args is None else args)
    if words and words[0] in COMMANDS:
        COMMANDS[words[0]][1](args)
        return
    if words and words[0] in ("-h", "--help"):
        print(_usage())
        return
    received = repr(words[0]) if words else "nothing"
    print(f"{_usage()}\n\nExpected the name of a command as first word, received {received}.", file=sys.stderr)
    sys.exit(2)


def _usage() -> str:
    lines = [f"  {name:<10}{said}" for name, (said, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: train.py COMMAND [options]", "", *lines, "", "`train.py COMMAND --help` tells every option."]
    )
