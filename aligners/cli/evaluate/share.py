"""Write what a finished run has trained to a folder that others can load.

That is weights as safetensors, the models that they belong to with their fingerprints, and a card with what was
measured and what it is not good for. Every option that takes a file of maps takes such a folder, or its name on the
Hub. Paths and options of this machine are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import bare_parser
from aligners.errors import UserError
from aligners.files.shared import is_hub_name
from aligners.files.whole import check_new_folder
from aligners.reports.sharing.pretrained import Shared, shared_from_run


@dataclass
class Options:
    """What is shared.

    Args:
        run: Folder of a finished `train.py fit`, `universe`, `join`, `stitch` or `probe`, one of the folders pairs/X--Y
            of `fit_pairs` or `universe`, or a file of theirs; also a shared folder, or its name on the Hub.
        folder: New folder to write.
        report: Folder of the run whose report makes the card. Default: RUN. A fit has figures of its validation texts
            alone, so name the `evaluate.py inject` that measured it.
        names: Names under which others find the models, in their order. Default: as in RUN; a folder of this machine by
            the end of its path.
        models: Declare it for these models, though it was trained on others. Config and card then say so.
        license: As the Hub names it, such as mit.
        push: Upload it under this name, OWNER/NAME, as well.
        private: Whether an uploaded one is for its owner alone.
    """

    run: Path
    folder: Path
    report: Path | None = None
    names: list[str] | None = None
    models: list[str] | None = None
    license: str | None = None
    push: str | None = None
    private: bool = True


def parser() -> ArgumentParser:
    """The options."""
    return bare_parser(__doc__, "RUN FOLDER [options]", Options)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Write the folder, and upload it.

    Raises:
        ValueError: nothing can be shared, the folder holds files, or the Hub refuses.
    """
    options = parser.parse_args(words)
    check_new_folder(options.folder, "folder")
    if options.push is not None and not is_hub_name(options.push):
        raise UserError(f"Expected `push` to be a name on the Hub, OWNER/NAME, but got {options.push}.")
    shared = shared_from_run(options.run, options.report, names=options.names, license=options.license)
    if options.models is not None:
        shared.use_with(options.models, str(options.run), other_models=True)
    shared.save_pretrained(options.folder)
    print(f"Saved {options.folder}: its card is {options.folder / 'README.md'}")
    if options.push is not None:
        print(f"Uploaded: {_pushed(shared, options)}")


def _pushed(shared: Shared, options: Namespace) -> str:
    try:
        return shared.push_to_hub(options.push, private=options.private)
    except Exception as error:  # the Hub's own, and those of the network
        raise UserError(
            f"{options.folder} is written, but it cannot be uploaded as {options.push}: {error}. `hf auth login` logs "
            f"in; `hf upload {options.push} {options.folder}` uploads the folder."
        ) from error
