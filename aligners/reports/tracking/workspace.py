"""A view of all runs of a project at W&B, as code: curves of fits and stitching, figures and tables side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section, Workspace

__all__ = ["workspace"]

NAME = "aligners"
STEP = "trainer/global_step"
# Section -> title of a panel and the metrics in it: every map at every site.
CURVES = {
    "Maps: errors on validation texts": {
        "FVU": "^validation/[^/]+/[^/]+/fvu$",
        "FVU of the inverse": "^validation/[^/]+/[^/]+/fvu_inverse$",
        "FVU on unseen types": "^validation/[^/]+/[^/]+/fvu_unseen$",
        "round trip": "^validation/[^/]+/[^/]+/round_trip$",
    },
    "Stitching: penalty on validation texts, nats": {"penalty": "^validation/[^/]+/[^/]+/[^/]+/penalty$"},
    "Training": {"loss": "^step/.+/loss$"},
}
TABLES = ("report", "summary", "stitching", "similarity", "probing")  # as `aligners.reports.publishing` logs them
FIGURES = ("fvu", "penalty", "accuracy", "similarity", "stitching", "probing")


def workspace(entity: str, project: str = NAME) -> Workspace:
    """Describe the view. Nothing is sent before its `save()`.

    Args:
        entity: user or team at W&B.
        project: that the runs are in.

    Raises:
        ValueError: wandb-workspaces is not installed.
    """
    try:
        from wandb_workspaces import expr, workspaces
        from wandb_workspaces.reports import v2 as panels
    except ImportError as error:
        raise ValueError(
            "A view at W&B is described by the package wandb-workspaces, which is not installed. Run: "
            "pip install '.[workspace]'"
        ) from error
    curves = [
        workspaces.Section(name=section, panels=[_curves(*panel) for panel in own.items()], is_open=True)
        for section, own in CURVES.items()
    ]
    shown = [panels.MediaBrowser(title=name, media_keys=[name], num_columns=2) for name in FIGURES]
    tables = [panels.WeavePanelSummaryTable(table_name=name) for name in TABLES]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            *curves,
            workspaces.Section(name="Figures", panels=shown, is_open=True),
            workspaces.Section(name="Tables", panels=tables),
            _differences(),
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP, max_runs=20),
        runset_settings=workspaces.RunsetSettings(groupby=[expr.Metric("Group"), expr.Metric("JobType")]),
    )


def _curves(title: str, metrics: str) -> LinePlot:
    """All metrics that a regular expression finds, by step."""
    from wandb_workspaces.reports.v2 import LinePlot

    return LinePlot(title=title, x=STEP, metric_regex=metrics, log_y=True, max_runs_to_show=20)


def _differences() -> Section:
    """The options by which runs differ."""
    from wandb_workspaces.reports.v2 import RunComparer
    from wandb_workspaces.workspaces import Section

    return Section(name="What differs between runs", panels=[RunComparer(diff_only="split")])
