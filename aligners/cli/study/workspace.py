"""`study.py workspace`: a view of all runs at W&B."""

from aligners.cli.command import Run, command
from aligners.errors import UserError
from aligners.progress import tell
from aligners.reports.tracking import CURVES, PROJECT, logged_in
from aligners.reports.tracking import workspace as view_of


@command(usage="ENTITY [options]")
def workspace(_: Run, entity: str, project: str = PROJECT) -> None:
    """Save a view of all runs of a W&B project: errors of maps, stitching penalties, figures, tables.

    They are grouped by study and kind of job. It needs a network and `wandb login`, and sends nothing but the view.

    Example: `my-team`

    Args:
        entity: User or team at W&B.
        project: In which the runs are.
    """
    view = view_of(entity, project)
    if not logged_in():
        raise UserError(
            "Expected a login at W&B, but there is no key. Run `wandb login`, or set WANDB_API_KEY."
        )
    view.save()
    tell(
        f"Saved the view {view.name!r} with {', '.join(CURVES)}, figures and tables: {view.url}"
    )
