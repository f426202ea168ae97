"""Tables and figures of what the commands really write: no column is guessed."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from aligners.cli.table import evaluate
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import ReportContents, make
from tests.tiny import tiny_folder
from tests.world import World


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, world: World) -> ReportContents:
    """Of three models: `inject` of a pair, `similarity` and `stitch` of all, with columns as `collect` adds them."""
    folder = tmp_path_factory.mktemp("cells")
    models = [str(tiny_folder(folder / name, seed=seed)) for seed, name in enumerate(("one", "two", "three"))]
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    texts = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "60", *quiet]
    found: dict[str, list[dict[str, Any]]] = {"inject": [], "similarity": [], "similarity_layers": [], "stitching": []}
    pair = [
        "--data.model_x",
        models[0],
        "--data.model_y",
        models[1],
        "--data.sites",
        "blocks",
        "--fitting_errors",
        "true",
    ]
    more = ["--closed_form", "[linear, procrustes]", "--data.held_out_types", "0", "--run", str(folder / "inject")]
    evaluate(["inject", *pair, *more, *texts])
    for x, y in combinations(models, 2):  # the others as if they were the first
        found["inject"] += [row | {"model_x": x, "model_y": y} for row in rows(folder / "inject" / "report.json")]
    every = ["--data.models", json.dumps(models), *texts]
    evaluate(["similarity", *every, "--measures", "[cka, svcca, neuronsim]", "--run", str(folder / "similarity")])
    evaluate(["stitch", *every, "--data.sites", "blocks", "--run", str(folder / "stitch")])
    found["similarity"] = rows(folder / "similarity" / "similarity.json")
    found["similarity_layers"] = rows(folder / "similarity" / "similarity.json", "layers")
    found["stitching"] = rows(folder / "stitch" / "stitching.json")
    frames = {kind: pd.DataFrame(own).assign(kind=kind, task="sst2", stage="finetuned") for kind, own in found.items()}
    return make(Frames(frames))


def rows(path: Path, name: str = "rows") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())[name]
    return found


def test_what_the_commands_write_is_enough_for_the_papers(made: ReportContents) -> None:
    assert set(made.missing) == {
        *("ren_table_3", "wu_table_1", "phang_figure_3", "phang_figure_4"),  # other kinds of cells
        *("merchant_table_1", "merchant_layers", "merchant_figure_1"),
        *("ren_figure_3", "ren_figure_4", "ren_figure_6"),  # pairs of layers, attention
        *("wu_figure_5", "wu_figure_6"),  # models tuned on several tasks
        *("wu_figure_2", "wu_figure_4", "wu_figure_7", "brown_figure_3"),  # controls, measures, stages
    }, made.missing
    assert made.missing["wu_figure_2"] == "the rows of kind `similarity` have no `untrained`"


def test_models_have_their_short_names_and_errors_of_both_kinds_of_texts(made: ReportContents) -> None:
    (table,) = [table for table in made.tables if table.name == "ren_table_4"]
    linear = next(row for row in table.rows if row["method"] == "linear")
    assert (linear["pairs"], linear["models"], linear["rows"]) == (3, 3, "tokens")
    assert linear["fvu_fit"].mean < linear["fvu"].mean  # type: ignore[union-attr]
    (figure,) = [figure for figure in made.figures if figure.name == "ren_figure_2"]
    assert figure.panels[0].series[0].points[0] == ["one and two", "one and three", "three and two"]  # type: ignore[union-attr]
