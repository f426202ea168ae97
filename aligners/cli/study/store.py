"""`study.py store`: what a folder of stored states holds, whether it is whole, and what can go."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jsonargparse import ArgumentParser

from aligners.files.room import in_words
from aligners.progress import track
from aligners.reports.screen import TitledTable, say, screen
from datamodules.store.keeping import Kept, damages, kept_in, remove, remove_down_to

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The options."""
    made = ArgumentParser(
        description="List the states that `--data.store` has kept in a folder; verify or remove them.",
        usage="%(prog)s --folder FOLDER [options]",
    )
    made.add_argument("--folder", type=Path, required=True, help="The folder that `--data.store` named.")
    made.add_argument("--verify", action="store_true", help="Read everything, and say which files are damaged.")
    made.add_argument(
        "--remove", type=list[str], default=[], help="Names of stores to remove, as they are listed: '[3f2a..., ...]'."
    )
    made.add_argument(
        "--keep", type=float | None, default=None,
        help="Remove the least recently used stores until at most this many GB are left; 0 removes all.",
    )  # fmt: skip
    made.add_argument("--traceback", action="store_true", default=SUPPRESS, help="Show the traceback of every error.")
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Remove what is to go, verify what is left if asked to, and list it."""
    options = parser.parse_args(words)
    if options.keep is not None and options.keep < 0:
        raise ValueError(f"Expected `keep` to be a number of GB of at least 0, but got {options.keep:g}.")
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
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"Expected `remove` to name stores in {folder}, but got {', '.join(unknown)}. It holds "
            f"{', '.join(known) or 'none'}."
        )
    for name in names:
        if not remove(known[name]):
            raise ValueError(f"{known[name].folder} is being written. Wait until that has ended, and remove it then.")
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
        raise ValueError("\n".join(found))
    print("Everything is as it was written.")
