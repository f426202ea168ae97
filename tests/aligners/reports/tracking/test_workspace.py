"""The view of all runs at W&B: what is built, as nothing can be saved here."""

import json
import re
import sys
from typing import Any

import pytest

from aligners.cli.study import workspace as command
from aligners.cli.table import study
from aligners.reports.tracking import CURVES, workspace

LOGGED = {
    "FVU": ("validation/inn/2-2/fvu", "validation/linear_backward/1-3/fvu"),
    "FVU of the inverse": ("validation/inn/2-2/fvu_inverse",),
    "FVU on unseen types": ("validation/inn/2-2/fvu_unseen",),
    "round trip": ("validation/inn/2-2/round_trip",),
    "penalty": ("validation/0_1/affine_norm/2-2/penalty",),
    "loss": ("step/inn/2-2/loss", "step/0_1/affine_norm/2-2/loss"),
}


def test_every_metric_is_in_the_panel_of_its_name() -> None:
    panels = {title: metrics for own in CURVES.values() for title, metrics in own.items()}
    assert set(panels) == set(LOGGED)
    for title, names in LOGGED.items():
        for name in names:
            assert [other for other, metrics in panels.items() if re.search(metrics, name)] == [title]


def test_the_view_is_what_wandb_takes() -> None:
    pytest.importorskip("wandb_workspaces")
    made: Any = workspace("me", "mine")
    assert (made.entity, made.project) == ("me", "mine")
    sent = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]["section"]
    sections = {each["name"]: each["panels"] for each in sent["panelBankConfig"]["sections"]}
    asked = [panel["config"]["metricRegex"] for name in CURVES for panel in sections[name]]
    assert asked == [metrics for own in CURVES.values() for metrics in own.values()]
    assert {panel["config"]["xAxis"] for name in CURVES for panel in sections[name]} == {"trainer/global_step"}
    assert [key["name"] for key in sent["runSets"][0]["grouping"]] == ["group", "jobType"]


def test_without_the_package_or_a_key_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "view_of", lambda *_: None)
    monkeypatch.setattr(command, "logged_in", lambda: False)
    with pytest.raises(ValueError, match="Run `wandb login`"):
        study(["workspace", "me"])
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ValueError, match=r"\.\[workspace\]"):
        workspace("me")
