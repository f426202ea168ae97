"""The tutorials run, at a small size, print what they talk about, draw their figures, and leave no file behind.

They run in one process, so that models that several of them use are made once; each finds them by itself. Their
notebooks, which the site shows, have the same code.
"""

import base64
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from tests.tutorials.scripts import TUTORIALS, cells, notebook, outputs

SMALL = "layers=2,width=32,steps=40,batch=2"
LONGER = "layers=2,width=32,steps=100,batch=2"


def aligned(values: dict[str, Any]) -> bool:
    floor, fvu, penalty = "identity", values["fvu"], values["penalty"]
    return fvu[floor] > 1 and all(
        fvu[name] < fvu[floor] and penalty[name] < penalty[floor] for name in fvu if name != floor
    )


def controlled(values: dict[str, Any]) -> bool:
    few, many, trained = values["biased"][0], values["biased"][-1], values["values"]
    return (
        few > many > values["unbiased"][-1]
        and values["outliers"][-1][0] > 0.9 > 0.1 > values["outliers"][-1][1]
        and all(abs(value) < 0.05 for value in trained["rows shuffled"])
    )


def looked_up(values: dict[str, Any]) -> bool:
    seen, unseen = values["errors"]["lookup table"]
    return seen < 0.5 < 0.9 < unseen


def stitched(values: dict[str, Any]) -> bool:
    penalty = {key: [row["penalty"] for row in rows] for key, rows in values["routes"].items()}
    own, across = "GELU → GELU", ("GELU → SoLU", "SoLU → GELU")
    return penalty[own, "identity"] == [0, 0] and all(
        b < a / 2 for r in across for a, b in zip(penalty[r, "identity"], penalty[r, "affine"], strict=True)
    )


def many(values: dict[str, Any]) -> bool:
    return all(fvu.shape == (3, 2) and bool((fvu > 0).all()) for fvu in values["results"].values())


def carried(values: dict[str, Any]) -> bool:
    scores, rows = values["scores"], values["steered"].curve
    return scores["carried"] > scores["stale"] and {"native", "carried"} < {row["method"] for row in rows}


class Size(NamedTuple):
    """The parameters of a small run, and what holds at any size."""

    parameters: dict[str, Any]
    holds: Callable[[dict[str, Any]], bool]


def pair(size: str) -> dict[str, str]:
    return {"name_x": f"embedded-gpt:0:{size}", "name_y": f"embedded-gpt:1:{size}"}


SIZES = {
    "align_two_models": Size({**pair(SMALL), "texts_to_fit": 400, "texts_to_test": 60, "steps": 40}, aligned),
    "is_cka_enough": Size(
        {**pair(SMALL), "texts_to_read": 100, "width": 64, "counts": [16, 64, 512], "many": 1000}, controlled
    ),
    "bijection_or_lookup_table": Size(
        {**pair(LONGER), "texts_to_fit": 500, "texts_to_test": 200, "steps": 20}, looked_up
    ),
    "stitch_gelu_into_solu": Size(
        {
            "gelu": f"embedded-gpt:0:{SMALL}",
            "solu": f"embedded-gpt:1:activation=solu,{SMALL}",
            "texts_held_out": 60,
            "tokens_each": 64,
            "start_batches": 4,
            "steps": 8,
        },
        stitched,
    ),
    "my_model_was_updated": Size(
        {
            "name_old": f"embedded-gpt:0:{LONGER}",
            "name_new": f"embedded-gpt:1:{LONGER}",
            "texts_with_labels": 300,
            "texts_without": 300,
            "texts_to_test": 200,
            "texts_to_steer": 10,
            "cost": 1e-6,
        },
        carried,
    ),
    "many_seeds_at_once": Size(
        {"names": [f"embedded-gpt:{seed}:{SMALL}" for seed in range(3)], "texts_to_fit": 300, "texts_to_test": 100},
        many,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_tutorial(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    values: dict[str, Any] = {}
    with mpl.rc_context({"backend": "agg"}), warnings.catch_warnings():
        for cell in cells(name):
            if cell.kind == "code":
                exec(compile(cell.source, name, "exec"), values)
            if "parameters" in cell.tags:
                assert set(SIZES[name].parameters) <= set(values)
                values |= SIZES[name].parameters
    (figure,) = shown
    figure.canvas.draw()
    assert all(axis.has_data() for axis in figure.axes)
    plt.close("all")
    assert SIZES[name].holds(values)
    assert len(capsys.readouterr().out.splitlines()) > 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TUTORIALS)
def test_the_outputs_that_the_site_shows_are_those_of_the_script(name: str) -> None:
    """`make tutorials` makes them anew."""
    in_notebook = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook(name)["cells"]]
    assert in_notebook == [(cell.kind, cell.source) for cell in cells(name)]
    pictures = [output["data"]["image/png"] for output in outputs(name) if "data" in output]
    assert len(pictures) == 1
    assert len(base64.b64decode(pictures[0])) <= 100_000
    assert {output["output_type"] for output in outputs(name)} == {"stream", "display_data"}
    assert {output["name"] for output in outputs(name) if "name" in output} == {"stdout"}


def test_every_tutorial_is_run() -> None:
    assert (
        sorted(SIZES) == TUTORIALS == sorted(path.stem for path in Path(__file__).parents[2].glob("tutorials/*.ipynb"))
    )
