"""List the states that `--data.store` has kept in a folder; verify or remove them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from jsonargparse import ArgumentParser

from aligners.cli.options import bare_parser
from aligners.errors import UserError, check_known, check_range
from aligners.files.room import in_words
from aligners.progress import track
from aligners.reports.screen import TitledTable, say, screen
from datamodules.store.keeping import Kept, damages, kept_in, remove, remove_down_to


@dataclass
class Options:
    """What is done.

    Args:
        remove: Names of stores to remove, as they are listed: '[3f2a..., ...]'.
        keep: Remove the least recently used stores until at most this many GB are left; 0 removes all.
    """

    remove: list[str] = field(default_factory=list)
    keep: float | None = None


def parser() -> ArgumentParser:
    """The options."""
    made = bare_parser(__doc__, "--folder FOLDER [options]", Options)
    made.add_argument("--folder", type=Path, required=True, help="The folder that `--data.store` named.")
    made.add_argument("--verify", action="store_true", help="Read everything, and say which files are damaged.")
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Remove what is to go, verify what is left if asked to, and list it."""
    options = parser.parse_args(words)
    check_range(least=0, keep=options.keep)
    _remove_named(options.folder, options.remove)
    if options.keep is not None:
        for kept in remove_down_to(options.folder, options.keep * 1e9):
            print(f"Removed {kept.folder} ({in_words(kept.size)}).")
    stores = kept_in(options.folder)
    _list(options.folder, stores)
    if options.verify:
        _verify(stores)


def _remove_named(folder: Path, names: Sequence[str]) -> None:
    known = {kept.folder.name: kept for kept in kept_in(folder)}
    check_known(known, remove=names)
    for name in names:
        if not remove(known[name]):
            raise UserError(f"{known[name].folder} is being written. Wait until that has ended, and remove it then.")
        print(f"Removed {known[name].folder} ({in_words(known[name].size)}).")


def _list(folder: Path, stores: Sequence[Kept]) -> None:
    console = screen()
    table = TitledTable(f"States in {folder}, the least recently used first")
    for heading in ("name", "model", "texts", "rows", "sites", "stored as", "size", "last used"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "model")
    for kept in stores:
        when = datetime.fromtimestamp(kept.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(kept.folder.name, *_described(kept), in_words(kept.size), when)
    console.print(table)
    say(console, f"{len(stores)} stores, {in_words(sum(kept.size for kept in stores))} in all.")


def _described(kept: Kept) -> list[str]:
    """Model, texts, rows, sites and data type."""
    if kept.folder.is_file():
        return ["moments of a pair", "", "", "", "float64"]
    try:
        manifest = kept.manifest
    except ValueError:
        return ["unreadable manifest, or none yet", "", "", "", ""]
    shards, identity = len(manifest.rows), manifest.identity
    sites = [f"{site}" + ("" if len(there) == shards else "*") for site, there in sorted(manifest.sites.items())]
    component = "" if identity.component == "residual" else f" {identity.component}"
    return [
        str(manifest.about.get("model")),
        str(manifest.bounds[-1]),
        str(sum(manifest.rows)),
        " ".join(sites) + component,
        identity.stored_as,
    ]


def _verify(stores: Sequence[Kept]) -> None:
    """Raise if anything is damaged, and name it."""
    found = [each for kept in track(stores, "Verifying", transient=True) for each in damages(kept)]
    if found:
        raise UserError("\n".join(found))
    print("Everything is as it was written.")
