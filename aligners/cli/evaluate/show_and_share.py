"""The commands for finished runs: `evaluate.py show` and `evaluate.py share`."""

from pathlib import Path

from aligners.cli.command import Run, command
from aligners.errors import UserError
from aligners.files.atomic import check_new_folder, let_write
from aligners.files.shared_folder import is_hub_name
from aligners.progress import tell
from aligners.reports.finished_runs import FinishedRun, finished_run, refusing_report
from aligners.reports.page.latent_page import PAGE as LATENTS
from aligners.reports.page.run_page import PAGE, write_page
from aligners.reports.publishing import show as show_report
from aligners.reports.screen import WhenToOpen, open_where_there_is_a_desktop
from aligners.reports.sharing.share_run import shared_from_run


@command(usage="RUN [options]")
def show(_: Run, run: Path, open: WhenToOpen = "auto") -> None:
    """Show the tables and findings of a finished run, and open its report.html.

    If an earlier version made the run, its page is made now. Nothing is recomputed, so a page of latents cannot be made
    again.

    Example: `runs/mine`

    Args:
        run: Folder of the run.
        open: Whether to open the page in a browser: `auto` where there is a desktop, `true`, or `false`.
    """
    finished = finished_run(run)
    page = run / PAGE
    let_write(run)
    with refusing_report(run):
        show_report(finished.report)
        if not page.is_file():
            write_page(finished.report, run)
    opened = open_where_there_is_a_desktop(page, open)
    tell(f"\n{'Opened' if opened else 'Report'}: {page}")
    _tell_of_latents(finished)


def _tell_of_latents(finished: FinishedRun) -> None:
    """Say where the page of latents is, or that only its run can write it, as no other file has what they fire on."""
    if finished.kind != "features":
        return
    latents = finished.folder / LATENTS
    if latents.is_file():
        tell(f"Latents to look through: {latents}")
    elif finished.options.get("contexts"):
        tell(
            f"{latents} is gone. What latents fire on is in no other file: run the command again to write it."
        )


@command(usage="RUN FOLDER [options]")
def share(
    _: Run,
    run: Path,
    folder: Path,
    report: Path | None = None,
    names: list[str] | None = None,
    models: list[str] | None = None,
    license: str | None = None,
    push: str | None = None,
) -> None:
    """Write what a finished run has trained to a folder that others can load.

    The folder has the weights as safetensors, the names and fingerprints of their models, and a card with what was
    measured and the limits of use. Every option that takes a file of maps takes such a folder, or its name on the Hub.
    Paths and options of this machine are left out.

    Example: `runs/mine shared/mine`

    Args:
        run: Folder of a finished `train.py fit`, `universe`, `join`, `stitch` or `probe`, one of the folders pairs/X--Y
            of `fit_pairs` or `universe`, or a file of theirs; also a shared folder, or its name on the Hub.
        folder: New folder to write.
        report: Folder of the run whose report makes the card. Default: RUN. A fit only has figures of its validation
            texts, so name the `evaluate.py inject` run that measured it.
        names: Names under which others find the models, in their order. Default: as in RUN; a folder of this machine by
            the end of its path.
        models: Declare it for these models, though it was trained on others. Config and card then say so.
        license: As the Hub names it, such as mit.
        push: Upload it under this name, OWNER/NAME, as well, for its owner alone; its page on the Hub makes it public.
    """
    check_new_folder(folder, "folder")
    if push is not None and not is_hub_name(push):
        raise UserError(
            f"Expected `push` to be a name on the Hub, OWNER/NAME, but got {push}."
        )
    with refusing_report(report or run):
        shared = shared_from_run(run, report, names=names, license=license)
    if models is not None:
        shared.use_with(models, str(run), other_models=True)
    shared.save_pretrained(folder)
    tell(f"Saved {folder}: its card is {folder / 'README.md'}")
    if push is not None:
        try:
            place = shared.push_to_hub(push, private=True)
        except Exception as error:  # the Hub's own, and those of the network
            raise UserError(
                f"{folder} is written, but it cannot be uploaded as {push}: {error}. `hf auth login` "
                f"logs in; `hf upload {push} {folder}` uploads the folder."
            ) from error
        tell(f"Uploaded: {place}")
