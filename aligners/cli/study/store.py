"""`study.py store`: the states that `--data.store` has kept in a folder."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from aligners.cli.command import Run, command
from aligners.datamodules.store.keeping import (
    StoreEntry,
    damages,
    kept_in,
    remove_down_to,
)
from aligners.datamodules.store.keeping import remove as remove_store
from aligners.errors import UserError, check_known, check_range
from aligners.files.resources import in_words
from aligners.progress import tell, track
from aligners.reports.screen import SiteTable, say, screen


@command(
    usage="--folder FOLDER [options]",
    flags={"verify": "Read everything, and list the files that are damaged."},
)
def store(
    run: Run, *, folder: Path, remove: Sequence[str] = (), keep: float | None = None
) -> None:
    """List the states that `--data.store` has kept in a folder; verify or remove them.

    Example: `--folder states --verify`

    Args:
        run: of the command.
        folder: The folder that `--data.store` named.
        remove: Names of stores to remove, as they are listed: '[3f2a..., ...]'.
        keep: Remove the least recently used stores until at most this many GB are left; 0 removes all.
    """
    check_range(least=0, keep=keep)
    _remove_named(folder, remove)
    if keep is not None:
        for entry in remove_down_to(folder, keep * 1e9):
            tell(f"Removed {entry.folder} ({in_words(entry.size)}).")
    stores = kept_in(folder)
    _list(folder, stores)
    if run.options.get("verify"):
        faults = [
            fault for entry in track(stores, "Verifying") for fault in damages(entry)
        ]
        if faults:
            raise UserError("\n".join(faults))
        tell("Everything is as it was written.")


def _remove_named(folder: Path, names: Sequence[str]) -> None:
    known = {entry.folder.name: entry for entry in kept_in(folder)}
    check_known(known, remove=names)
    for name in names:
        if not remove_store(known[name]):
            raise UserError(
                f"{known[name].folder} is being written. Wait until that has ended, and remove it then."
            )
        tell(f"Removed {known[name].folder} ({in_words(known[name].size)}).")


def _list(folder: Path, stores: Sequence[StoreEntry]) -> None:
    console = screen()
    columns = ["model", "texts", "rows", "sites", "stored as", "size", "last used"]
    table = SiteTable(
        f"States in {folder}, the least recently used first", ["name"], columns, {}
    )
    for entry in stores:
        when = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(entry.folder.name, *_described(entry), in_words(entry.size), when)
    console.print(table)
    say(
        console,
        f"{len(stores)} stores, {in_words(sum(entry.size for entry in stores))} in all.",
    )


def _described(kept: StoreEntry) -> list[str]:
    """Return model, texts, rows, sites and data type."""
    if kept.folder.is_file():
        return ["moments of a pair", "", "", "", "float64"]
    try:
        manifest = kept.manifest
    except ValueError:
        return ["unreadable manifest, or none yet", "", "", "", ""]
    shards, identity = len(manifest.rows), manifest.identity
    sites = [
        f"{site}" + ("" if len(there) == shards else "*")
        for site, there in sorted(manifest.sites.items())
    ]
    component = "" if identity.component == "residual" else f" {identity.component}"
    return [
        str(manifest.about.get("model")),
        str(manifest.bounds[-1]),
        " ".join(filter(None, [str(sum(manifest.rows)), identity.rows])),
        " ".join(sites) + component,
        identity.kept_as,
    ]
