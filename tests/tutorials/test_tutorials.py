"""The tutorials run, at a small size, print what they talk about, draw their figures, and leave no file behind.

They run in one process, so that models that several of them use are made once; each finds them by itself.
"""

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from tests.processes import ROOT


def aligned(found: dict[str, Any]) -> bool:
    floor, scores, penalties = "identity", found["scores"], found["penalties"]
    return (
        scores[floor] < 0
        and all(scores[name] > scores[floor] for name in scores if name != floor)
        and all(penalties[name] < penalties[floor] for name in scores if name != floor)
    )


def controlled(found: dict[str, Any]) -> bool:
    few, many, values = found["biased"][0], found["biased"][-1], found["found"]
    return (
        few > many > found["unbiased"][-1]
        and found["outliers"][-1][0] > 0.9 > 0.1 > found["outliers"][-1][1]
        and all(abs(value) < 0.05 for value in values["rows shuffled"])
    )


def looked_up(found: dict[str, Any]) -> bool:
    seen, unseen = found["left"]["lookup table"]
    return seen < 0.5 < 0.9 < unseen


def stitched(found: dict[str, Any]) -> bool:
    penalty = {key: [row["penalty"] for row in rows] for key, rows in found["routes"].items()}
    own, across = "GELU → GELU", ("GELU → SoLU", "SoLU → GELU")
    return penalty[own, "identity"] == [0, 0] and all(
        b < a / 2 for r in across for a, b in zip(penalty[r, "identity"], penalty[r, "affine"], strict=True)
    )


def many(found: dict[str, Any]) -> bool:
    return all(fvu.shape == (3, 2) and bool((fvu > 0).all()) for fvu in found["found"].values())


# What the words of a tutorial take for granted at any size.
SAID: dict[str, Callable[[dict[str, Any]], bool]] = {
    "align_two_models": aligned,
    "is_cka_enough": controlled,
    "bijection_or_lookup_table": looked_up,
    "stitch_gelu_into_solu": stitched,
    "many_seeds_at_once": many,
}


@pytest.mark.parametrize("name", SAID)
def test_a_tutorial(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    monkeypatch.setenv("ALIGNERS_TUTORIAL_SIZE", "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    with mpl.rc_context({"backend": "agg"}), warnings.catch_warnings():
        found = runpy.run_path(str(ROOT / "tutorials" / f"{name}.py"))
    (figure,) = shown
    figure.canvas.draw()
    assert all(axis.has_data() for axis in figure.axes)
    plt.close("all")
    assert SAID[name](found)
    assert len(capsys.readouterr().out.splitlines()) > 2
    assert list(tmp_path.iterdir()) == []


def test_every_tutorial_is_run() -> None:
    assert {path.stem for path in (ROOT / "tutorials").glob("*.py")} == set(SAID)
