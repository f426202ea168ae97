"""Every table and figure of a study: what it says on rows whose effects are known, and why it cannot be made."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.aligners.reports.study import rows as given
from tests.aligners.reports.study.rows import Collected, items
from tests.processes import ROOT

from aligners.reports.study.contents import HeatPanel, LinePanel
from aligners.reports.study.described_tables import NUMBERS
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import CONTENTS, ReportContents, make, usual
from papers.phang2021.phang import two_clusters


@pytest.fixture(scope="module")
def frames() -> Collected:
    return given.collected()


@pytest.fixture(scope="module")
def report(frames: Collected) -> ReportContents:
    return make(Frames(frames))


@pytest.fixture(scope="module")
def made(report: ReportContents) -> dict[str, Any]:
    return {item.name: item for item in (*report.tables, *report.figures)}


def row(table: Any, **where: object) -> Any:
    (found,) = [row for row in table.rows if all(row[key] == value for key, value in where.items())]
    return found


@pytest.mark.slow
def test_everything_is_made_but_what_the_rows_do_not_hold(report: ReportContents, made: dict[str, Any]) -> None:
    attention = {"ren_figure_4", "ren_figure_6_attention", "wu_figure_4", "wu_figure_6"}
    across = {"wu_figure_5", "wu_figure_7", "wu_figure_7_printed", "merchant_figure_2", "merchant_figure_5"}
    brown = {"brown_hans", "brown_figure_7", "brown_table_1"}  # no rows on HANS, no models of several sizes
    assert set(report.missing) == attention | across | brown | {"updates"}
    assert set(made) == set(usual()) - set(report.missing)
    missing = "the study has no errors of maps between attention weights (kind `attention`)"
    assert report.missing["ren_figure_4"] == missing


def test_what_cannot_be_made_says_why(frames: Collected) -> None:
    missing = make(Frames({})).missing
    assert set(missing) == set(usual())
    assert missing["ren_table_3"] == "the study has no rows of kind `recover`"
    not_compared = pd.DataFrame(row for row in given.across_tasks() if row["stage"] is not None)
    not_tuned = frames["probing"][frames["probing"]["stage"] == "pretrained"]
    for name, kind, rows, said in (
        ("wu_figure_5", "similarity", not_compared, "`similarity.across_stages`"),
        ("wu_figure_7", "similarity", frames["similarity"], "`similarity.across_stages`"),
        ("merchant_table_1", "probing", not_tuned, "no model was probed both before and after fine-tuning"),
        ("merchant_figure_5", "similarity", frames["similarity"], "`similarity.across_stages`"),
        ("merchant_figure_2", "similarity", pd.DataFrame(given.rsa(texts=("mnli",))), "`similarity.texts`"),
    ):
        assert said in make(Frames({kind: rows}), [name]).missing[name]


def test_the_page_of_the_docs_lists_every_name() -> None:
    page = (ROOT / "docs" / "study_reports.md").read_text()
    assert set(CONTENTS) <= set(re.findall(r"`(\w+)`", page.split("## Names")[1]))


# ---------------------------------------------------------------------- Ren et al.


def test_alignment_is_the_mean_over_blocks_and_pairs_beside_the_papers_number(
    made: dict[str, Any], frames: Collected
) -> None:
    table, own = made["ren_table_4"], frames["inject"]
    own = own[(own["stage"] == "finetuned") & (own["method"] == "inn") & (own["model_x"] != own["model_y"])]
    mse = own[(own["site_x"] == own["site_y"]) & (own["site_x"] > 0)]["mse"].mean()
    found, linear = (row(table, stage="fine-tuned", method=method) for method in ("inn", "linear"))
    assert (found["mse"].mean, found["mse_fit"].mean) == (pytest.approx(mse), pytest.approx(0.8 * mse))
    assert found["mse_reduced"] is None
    assert linear["mse_reduced"].mean == pytest.approx(0.5 * linear["mse"].mean)
    assert any("what Ren et al. report of it" in note for note in table.notes)
    assert (found["pairs"], found["models"], found["paper_test"].mean) == (28, 8, 0.0523)
    assert row(table, stage="fine-tuned", method="identity")["paper_test"] is None


def test_the_texts_of_a_task_are_counted_beside_the_papers_sizes(made: dict[str, Any]) -> None:
    table = made["ren_table_1"]
    paper = {"paper_train": 67000, "paper_test": 1800}
    assert table.rows == [{"task": "sst2", "fit": 950, "validation": 50, "test": 200, **paper}]
    assert table.notes[-1].startswith("Paper: Ren et al. 2023, Table 1")


def test_the_papers_numbers_stand_beside_the_same_task_only() -> None:
    for task, printed in (("rotten_tomatoes", False), ("SST-2", True)):
        (table,) = items(given.collected([task], given.MODELS[:3]), "ren_table_4").values()
        assert ("paper_test" in [column.key for column in table.columns]) is printed
    assert row(table, stage="pretrained", method="linear")["paper_test"].mean == 0.0896


def test_validation_errors_of_a_fit_are_not_called_held_out(frames: Collected) -> None:
    fit = frames["inject"][frames["inject"]["site_x"].notna()].drop(columns=["score", "overflow"])
    assert items({"fit": fit}, "ren_table_4")["ren_table_4"].notes[0].startswith("Held out: no.")


def test_maps_are_compared_with_the_invertible_one_by_one_family_of_tests(made: dict[str, Any]) -> None:
    table = made["ren_table_4_tests"]
    assert [entry["method"] for entry in table.rows] == ["linear − inn", "mlp − inn"] * 2
    assert all(entry["p"] == 2 / 2**8 and entry["holm"] == pytest.approx(4 * 2 / 2**8) for entry in table.rows)
    assert table.findings[0].startswith("4 of 4 differences between maps are significant at .05: ")


def test_a_papers_own_definition_is_a_column_beside_ours(frames: Collected) -> None:
    printed = {}
    for kind in ("inject", "recover"):
        linear = frames[kind][frames[kind]["method"] == "linear"].assign(method="linear_trained")
        linear["mse"] *= 3
        linear["accuracy_source_pooler"] = 0.375
        printed[kind] = pd.concat([frames[kind].assign(accuracy_source_pooler=0.5), linear], ignore_index=True)
    back = printed["recover"].assign(direction="backward", mse=2 * printed["recover"]["mse"])
    printed["recover"] = pd.concat([printed["recover"].assign(direction="forward"), back], ignore_index=True)
    names = ("ren_table_3", "ren_table_4", "ren_table_5", "ren_table_4_tests")
    made, ours = items(printed, *names), items(frames, *names)
    for name in names[1:3]:
        assert [entry["method"] for entry in made[name].rows] == [entry["method"] for entry in ours[name].rows]
        assert any(note.startswith("As printed: ") for note in made[name].notes)
        assert not any(note.startswith("As printed: ") for note in ours[name].notes)
    assert made["ren_table_4_tests"] == ours["ren_table_4_tests"]
    linear, inn = (row(made["ren_table_4"], stage="fine-tuned", method=method) for method in ("linear", "inn"))
    assert (linear["mse_printed"].mean, inn["mse_printed"]) == (pytest.approx(3 * linear["mse"].mean), None)
    assert row(made["ren_table_5"], stage="fine-tuned", method="linear")["score_printed"].mean == pytest.approx(
        row(made["ren_table_5"], stage="fine-tuned", method="linear")["score"].mean
    )
    for method, accuracy in (("linear", 0.375), ("inn", 0.5)):  # of the trained linear map, where ours is solved
        assert row(made["ren_table_5"], stage="fine-tuned", method=method)["accuracy_printed"].mean == accuracy
    assert any(note.startswith("Accuracy, as printed: ") for note in made["ren_table_5"].notes)
    assert not any(note.startswith("Accuracy, as printed: ") for note in ours["ren_table_5"].notes)
    there, back = (
        row(made["ren_table_3"], strength=2.0, method="linear", direction=way) for way in ("X to f(X)", "f(X) to X")
    )
    assert back["mse"].mean == pytest.approx(2 * there["mse"].mean)
    assert (there["paper"], back["paper"].mean) == (None, 1.0882)  # the paper's is the way back
    assert row(ours["ren_table_3"], strength=2.0, method="linear")["paper"].mean == 1.0882


def test_a_papers_map_that_diverged_has_no_number(frames: Collected) -> None:
    inject = frames["inject"].assign(training=None)
    linear = inject[inject["method"] == "linear"]
    linear = linear.assign(method="linear_trained", training="diverged at step 3, set back to step 2")
    (table,) = items({"inject": pd.concat([inject, linear])}, "ren_table_4").values()
    assert "mse_printed" not in {column.key for column in table.columns}


def not_trained(frames: Collected, chosen: Callable[[pd.DataFrame], pd.Series]) -> Collected:
    """The rows of maps with the INN set back in some."""
    rows = {kind: frames[kind].assign(training=None) for kind in ("inject", "recover")}
    for frame in rows.values():
        frame.loc[(frame["method"] == "inn") & chosen(frame), "training"] = "diverged at step 3, set back to step 2"
    return rows


def test_maps_that_are_not_trained_are_marked_and_in_no_finding_and_no_test(frames: Collected) -> None:
    inn = frames["inject"]["method"] == "inn"
    better = {**frames, "inject": frames["inject"].assign(mse=frames["inject"]["mse"].where(~inn, 0.0))}
    tables = ("ren_table_3", "ren_table_4", "ren_table_5")
    names = (*tables, "ren_table_4_tests", "ren_figure_2")
    made = items(not_trained(better, lambda rows: rows["site_x"] == 2), *names)
    for name in tables:
        assert "inn*" in {entry["method"] for entry in made[name].rows}
        assert any(note.startswith("*: maps that kept their untrained start or diverged") for note in made[name].notes)
        assert made[name].findings
        assert not any("inn" in said for said in made[name].findings)
    assert all("the closest map is mlp" in said for said in made["ren_table_4"].findings)
    tested = {entry["method"] for entry in made["ren_table_4_tests"].rows}
    assert tested == {"mlp − linear"}  # there is no INN to compare with
    titles = [panel.title for panel in made["ren_figure_2"].panels]
    assert titles == [f"sst2, token rows, {name}" for name in ("inn*", "linear", "mlp")]
    assert "of linear" in made["ren_figure_2"].findings[0]


def test_a_pair_that_is_not_trained_is_left_out_of_the_tests_alone(made: dict[str, Any], frames: Collected) -> None:
    one = not_trained(frames, lambda rows: (rows["model_x"] == "a:0") & (rows.get("model_y") == "b:3"))
    tested, whole = (table["ren_table_4_tests"].rows[0] for table in (items(one, "ren_table_4_tests"), made))
    assert tested["method"] == whole["method"] == "linear − inn"
    assert tested["difference"] != whole["difference"]


def test_the_closest_map_is_drawn_and_what_is_not_drawn_is_named(frames: Collected) -> None:
    own = frames["inject"]
    others = [
        own[own["method"] == "inn"].assign(method=name, mse=factor * own["mse"], fvu=factor * own["fvu"])
        for name, factor in (("procrustes", 0.1), ("cca", 3.0))
    ]
    boxes, maps = items({"inject": pd.concat([own, *others])}, "ren_figure_2", "ren_figure_3").values()
    assert [panel.title.split(", ")[-1] for panel in boxes.panels] == ["inn", "linear", "mlp", "procrustes"]
    assert boxes.caption.endswith("not shown: cca.")
    assert any(panel.title.endswith("procrustes") for panel in maps.panels)


def test_injection_is_shown_at_the_last_site_between_ceilings_and_floors(made: dict[str, Any]) -> None:
    native, inn, floor = (
        row(made["ren_table_5"], stage="pretrained", method=name) for name in ("native_y", "inn", "identity")
    )
    assert native["score"].mean == pytest.approx(0.9)
    assert inn["score"].mean < inn["everywhere"].mean  # the error grows with depth
    assert (inn["paper"].mean, floor["role"]) == (74.01, "floor")


def test_a_random_head_stands_beside_the_papers_random_embedding(frames: Collected) -> None:
    floors = [
        frames["inject"][frames["inject"]["method"] == "native_y"].assign(method=name, role="floor", score=0.5)
        for name in ("random_classifier", "random_embedding")
    ]
    (table,) = items({"inject": pd.concat([frames["inject"], *floors])}, "ren_table_5").values()
    head, states = (row(table, stage="fine-tuned", method=floor["method"].iloc[0]) for floor in floors)
    assert (head["paper"].mean, states["paper"]) == (53.97, None)
    assert any("a pretrained model under a head with random weights" in note for note in table.notes)


def test_accuracies_of_papers_stand_beside_accuracies() -> None:
    rows = given.collected(["mrpc"], given.MODELS[:3])
    for kind, name, where in (
        ("inject", "ren_table_5", {"stage": "fine-tuned", "method": "inn"}),
        ("finetune", "wu_table_1", {"variant": "bottom-4"}),
    ):
        frame = rows[kind].assign(score_name="f1", accuracy=0.25)
        headings = {c.key: c.heading for c in items({kind: frame}, name)[name].columns}
        (found,) = (r for r in items({kind: frame}, name)[name].rows if all(r[k] == v for k, v in where.items()))
        assert "accuracy" in headings["accuracy"]
        assert (found["accuracy"].mean if kind == "inject" else found["accuracy"] / 100) == pytest.approx(0.25)
        (same,) = items({kind: frame.assign(score_name="accuracy")}, name).values()
        assert "accuracy" not in {column.key for column in same.columns}
        if name == "ren_table_5":
            assert (headings["paper"], found["paper"].mean) == ("paper: accuracy", 86.34)


def test_every_number_of_a_paper_has_its_metric() -> None:
    metrics = {name: table["metric"] for name, table in NUMBERS.items() if "values" in table}
    assert set(metrics.values()) == {"accuracy", "dimensions", "f1", "mse", "texts"}
    assert metrics["ren_table_5"] == metrics["wu_table_1"] == "accuracy"


def test_a_pair_that_overflowed_is_counted_as_lost(frames: Collected) -> None:
    rows = frames["inject"].copy()
    gone = (rows["method"] == "inn") & (rows["model_x"] == "a:0") & (rows["model_y"] == "b:3")
    rows.loc[gone, ["mse", "score", "mse_fit", "fvu"]] = None
    rows.loc[gone, "overflow"] = True
    made = items({"inject": rows}, "ren_table_4", "ren_table_5")
    for name, column in (("ren_table_4", "mse"), ("ren_table_5", "score")):
        cell = row(made[name], stage="pretrained", method="inn")[column]
        assert (cell.pairs, cell.lost) == (27, 1)


def test_boxes_and_maps_hold_every_pair_at_every_block(made: dict[str, Any]) -> None:
    (tokens,) = [panel for panel in made["ren_figure_2"].panels if panel.title.endswith("inn")]
    assert [series.name for series in tokens.series] == ["pretrained", "fine-tuned"]
    assert list(tokens.across) == ["1", "2", "3"]
    assert all(len(values) == 28 for values in tokens.series[0].values)
    for name, end in (("ren_figure_3", 1.0), ("ren_figure_6", 1.0), ("ren_figure_3_mse", None)):
        assert made[name].panels[0].values.argmin(1).tolist() == list(given.LAYERS)  # brightest on the diagonal
        largest = max(panel.values.max() for panel in made[name].panels)
        assert tuple(made[name].limits) == (end or pytest.approx(largest), 0)
        assert [line["mse" if end is None else "fvu"] for line in made[name].values[: len(given.LAYERS) ** 2]] == (
            pytest.approx(made[name].panels[0].values.ravel().tolist())
        )


def test_a_measure_that_could_not_be_computed_is_a_row_with_its_reason(frames: Collected) -> None:
    pair = {"task": "rte", "stage": "pretrained", "model_x": "a:0", "model_y": "a:1", "measure": "cca"}
    within = {**pair, "model_y": "a:0"}
    missing = [{**pair, "figure": "value", "why": f"{n} rows are too few"} for n in (277, 276)]
    missing += [{**within, "figure": "value", "why": "within"}, {**pair, "figure": "interval", "why": "one batch"}]
    table = items({**frames, "similarity_missing": pd.DataFrame(missing)}, "ren_table_2")["ren_table_2"]
    found = row(table, task="rte", measure="cca")
    assert (found["not_computed"], found["pairs"], found["models"]) == ("277 rows are too few", 2, 2)
    assert "why it is missing" in [column.heading for column in table.columns]
    assert "of several reasons, the first" in table.notes[0]
    whole = items(frames, "ren_table_2")["ren_table_2"]
    assert "why it is missing" not in [column.heading for column in whole.columns]
    assert len(table.rows) == len(whole.rows) + 1


def test_recovery_is_shown_by_strength_and_over_models(made: dict[str, Any]) -> None:
    found = row(made["ren_table_3"], strength=2.0, method="inn")
    assert (found["mse"].mean, found["paper"].mean) == (pytest.approx(0.002), 0.0059)
    assert made["ren_table_3"].findings[0].endswith(" over 8 models; linear 0.0500.")


def test_the_inverse_of_a_map_trained_one_way_is_a_map_of_its_own(frames: Collected) -> None:
    rows = frames["inject"][(frames["inject"]["method"] == "inn") & (frames["inject"]["stage"] == "pretrained")]
    back = rows.rename(columns={"model_x": "model_y", "model_y": "model_x"})
    back = back.assign(fit="inverse of a map trained one way", mse=1e4)
    (table,) = items({"inject": pd.concat([rows.assign(fit="trained"), back])}, "ren_table_4").values()
    assert row(table, method="inn")["mse"].mean < 1
    assert row(table, method="inn, inverted")["mse"].mean == 1e4


def test_attention_weights_have_a_figure_of_their_own_which_names_them_once(frames: Collected) -> None:
    rows = frames["inject"].drop(columns=["overflow", "score"])
    rows = rows.assign(rows="attention weights of pairs of tokens", mse=rows["mse"] / 100)
    made = items({"attention": rows[rows["site_x"] > 0]}, "ren_figure_4", "ren_figure_2")
    assert set(made) == {"ren_figure_4"}
    assert "of attention weights" in made["ren_figure_4"].title
    assert made["ren_figure_4"].notes[0].startswith("Held out: yes")
    assert [panel.title for panel in made["ren_figure_4"].panels] == ["sst2, inn", "sst2, linear", "sst2, mlp"]


def test_a_mean_over_models_of_different_depths_says_so(frames: Collected) -> None:
    rows = frames["similarity_layers"]
    for kept, notes in ((rows, 0), (rows[(rows["model"] != "a:0") | (rows["layer"] < 3)], 1)):
        (figure,) = items({"similarity_layers": kept}, "ren_nuclear_norm").values()
        assert isinstance(figure.panels[0], LinePanel)
        assert len(figure.notes) == notes


# ---------------------------------------------------------------------- Wu et al.


def test_a_block_map_groups_families_and_reads_both_directions(frames: Collected) -> None:
    rows = frames["similarity"].copy()
    rows.loc[(rows["measure"] == "neuronsim") & (rows["direction"] == "backward"), "value"] = 0.01
    (figure,) = items({"similarity": rows.sample(frac=1, random_state=0)}, "wu_figure_1").values()
    panel = figure.panels[0]
    families = [name[0] for name, _ in panel.blocks]
    assert families in (sorted(families), sorted(families, reverse=True))
    assert panel.values.shape == (32, 32)
    assert np.isfinite(panel.values).all()
    x, y = panel.rows.index("a:0 1"), panel.rows.index("b:0 1")
    assert panel.values[x, y] == pytest.approx(0.75)  # a:0 is the first of the pair
    assert panel.values[y, x] == 0.01


def test_localization_is_over_all_other_layers(frames: Collected) -> None:
    rows = frames["similarity"].copy()
    to_layer_0 = rows["layer_y"].where(rows["direction"] == "forward", rows["layer_x"]) == 0
    rows.loc[(rows["measure"] == "neuronsim") & to_layer_0, "value"] += 0.31
    (figure,) = items({"similarity": rows}, "wu_figure_3").values()
    for entry in figure.values:  # 4 layers of 8 models, without the layer itself
        assert entry["localization"] == pytest.approx(0.07 if entry["layer"] == 0 else 0.08)


def drawn_similarities(models: list[dict[str, Any]], **about: object) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """Random similarities of all layers of some models, and by measure the matrix of all layers against all."""
    draw, sides = np.random.default_rng(0), [(model, layer) for model in models for layer in (0, 1, 2)]
    neurons, subspaces, scaled = draw.uniform(size=(3, len(sides), len(sides)))
    matrices = {"neuronsim": neurons, "svcca": subspaces + subspaces.T, "svcca_standardised": scaled + scaled.T}
    rows = []
    for (measure, matrix), (i, x), (j, y) in product(matrices.items(), enumerate(sides), enumerate(sides)):
        if models.index(x[0]) > models.index(y[0]):
            continue
        both = {
            f"{name}_{end}": value
            for end, (model, _) in zip("xy", (x, y), strict=True)
            for name, value in model.items()
        }
        place = {**about, **both, "layer_x": x[1], "layer_y": y[1], "measure": measure, "features": "raw"}
        ways = {"forward": (i, j), "backward": (j, i)} if measure == "neuronsim" else {"both": (i, j)}
        rows += [{**place, "direction": way, "value": matrix[at]} for way, at in ways.items()]
    return pd.DataFrame(rows), matrices


def test_untrained_models_stand_beside_trained_ones_in_figure_2_alone() -> None:
    stages, names = ("random", "pretrained"), ("a", "b")
    models: list[dict[str, Any]] = [
        {"model": name, "stage": stage, "group": None} for stage, name in product(stages, names)
    ]
    rows, matrices = drawn_similarities(models, task="t", stage=None)
    rows["measure"] = rows["measure"].replace({"svcca": "cka"})
    every, trained = (items({"similarity": rows}, name)[name].panels for name in ("wu_figure_2", "wu_figure_1"))
    blocks = [f"{name}, {stage}" for stage, name in product(("untrained", "pretrained"), names)]
    assert [[name for name, _ in panel.blocks] for panel in every] == [blocks]
    assert every[0].values[0, 6] == matrices["svcca"][0, 6]  # the untrained a with the trained one
    assert [[name for name, _ in panel.blocks] for panel in trained] == [["a", "b"]] * 2


def as_in_the_notebooks(similarities: np.ndarray) -> pd.Series:
    """`pd.DataFrame({network: {other: similarity}}).mean(axis=1)`, z-scored: `analysis-14.ipynb` of Wu et al."""
    columns = {a: {b: similarities[a, b] for b in range(len(similarities)) if a != b} for a in range(len(similarities))}
    means = pd.DataFrame(columns).sort_index().mean(axis=1)
    return (means - means.mean()) / means.std()


def test_localization_as_printed_is_that_of_the_released_notebooks() -> None:
    models: list[dict[str, Any]] = [{"model": name, "stage": "pretrained", "group": None} for name in ("a", "b", "c")]
    rows, matrices = drawn_similarities(models, task="t", stage="pretrained")
    ours, printed = items({"similarity": rows}, "wu_figure_3", "wu_figure_3_printed").values()
    without_self = {name: np.where(np.eye(9) == 1, np.nan, matrix) for name, matrix in matrices.items()}
    raw = np.nanmean(without_self["neuronsim"] - without_self["svcca"], 1)
    assert [entry["localization"] for entry in ours.values] == pytest.approx(list(raw))
    notebook = as_in_the_notebooks(matrices["neuronsim"]) - as_in_the_notebooks(matrices["svcca_standardised"])
    assert [entry["localization"] for entry in printed.values] == pytest.approx(list(notebook))
    assert printed.caption.endswith("svsim is that of standardised features, as there.")
    (raw_features,) = items(
        {"similarity": rows[rows["measure"] != "svcca_standardised"]}, "wu_figure_3_printed"
    ).values()
    notebook = as_in_the_notebooks(matrices["neuronsim"]) - as_in_the_notebooks(matrices["svcca"])
    assert [entry["localization"] for entry in raw_features.values] == pytest.approx(list(notebook))


def test_localization_of_fine_tunings_has_a_panel_for_each_model_and_a_line_for_each_task() -> None:
    parts = []
    for name in ("bert", "xlnet"):
        models = [{"model": name, "stage": "pretrained", "tuned": None, "group": None}]
        models += [
            {"model": name, "stage": "finetuned", "tuned": task, "group": None} for task in ("sst2", "mnli", "qqp")
        ]
        rows, matrices = drawn_similarities(models, task="sst2", stage=None)
        parts.append(rows.assign(value=rows["value"] * (1 if name == "bert" else 2)))
    for figure in items({"similarity": pd.concat(parts)}, "wu_figure_7", "wu_figure_7_printed").values():
        assert [panel.title for panel in figure.panels] == ["bert, sst2", "xlnet, sst2"]
        for panel in figure.panels:
            assert [line.name for line in panel.series] == ["base", "sst2", "mnli", "qqp"]
    assert "of all other layers of the model (base) and of its fine-tunings to the layer" in figure.caption
    last = [entry["localization"] for entry in figure.values[:12]]
    notebook = as_in_the_notebooks(matrices["neuronsim"]) - as_in_the_notebooks(matrices["svcca_standardised"])
    assert last == pytest.approx(list(notebook))  # of one model and its fine-tunings alone


@pytest.mark.parametrize(
    ("base", "printed"), [("google-bert/bert-base-cased", 92.43), ("roberta-base", None), ("bert-large-cased", None)]
)
def test_the_papers_accuracy_stands_beside_its_own_models_and_variants_alone(
    made: dict[str, Any], frames: Collected, base: str, printed: float | None
) -> None:
    found = row(made["wu_table_1"], variant="bottom-4")
    assert (found["score"], found["paper"], found["seeds"]) == (pytest.approx(93.5), 92.43, 2)
    rows = frames["finetune"][frames["finetune"]["variant"] == "none"].assign(base=base, model_x=base)
    (table,) = items({"finetune": rows}, "wu_table_1").values()
    assert table.title == "Scores after fine-tuning"  # as no layers were frozen
    assert [(entry["base"], entry["paper"]) for entry in table.rows] == [(base.split("/")[-1], printed)]
    assert "variant" not in {column.key for column in table.columns}


def test_a_model_stands_beside_its_fine_tunings_on_all_tasks() -> None:
    report = make(Frames({"similarity": pd.DataFrame(given.across_tasks())}), ["wu_figure_5", "wu_figure_6"])
    first: Any = report.figures[0].panels[0]
    assert first.title == "bert, texts of mnli"
    assert [name for name, _ in first.blocks] == ["base", "mnli", "sst2"]
    assert first.values[0, given.DEPTH + 1] == pytest.approx(0.9)
    assert first.values[given.DEPTH + 1, 2 * (given.DEPTH + 1)] == pytest.approx(0.8)
    assert set(report.missing) == {"wu_figure_6"}  # no attention was compared


def test_everything_else_is_of_models_tuned_on_the_task_of_the_texts() -> None:
    frames = Frames({"similarity": pd.DataFrame(given.across_tasks())})
    assert len(frames.of("similarity", other_tasks=True)) == 2 * 6 * (given.DEPTH + 1) ** 2
    kept = frames.of("similarity")[["task", "tuned_x", "tuned_y"]].fillna("").drop_duplicates()
    of_own = ((task, *ends) for task in given.TASKS for ends in (("", ""), ("", task), (task, task)))
    assert {*kept.itertuples(index=False, name=None)} == {*of_own}
    (figure,) = make(frames, ["phang_figure_1"]).figures
    shown = product(given.TASKS, ("ORIG–ORIG", "FT–ORIG", "FT–FT"))
    assert [panel.title for panel in figure.panels] == [", ".join(names) for names in shown]


# ---------------------------------------------------------------------- Phang et al.


def test_layers_fall_into_the_clusters_that_they_form(made: dict[str, Any]) -> None:
    found = row(made["phang_clusters"], panel="sst2, FT–FT")
    assert found["clusters"] == "0–1 | 2–3"
    assert found["contrast"] > 0.4
    assert [panel.title for panel in made["phang_figure_1"].panels] == ["sst2, ORIG–ORIG", "sst2, FT–FT"]
    assert two_clusters(np.full((5, 5), np.nan)) == []


def test_fine_tuned_layers_go_up_where_the_original_goes_across(frames: Collected) -> None:
    rows = frames["similarity"]
    own = rows[(rows["model_x"] == "a:0") & (rows["model_y"] == "a:0") & (rows["measure"] == "cka")]
    own = own[own["stage"] == "finetuned"].assign(stage=None, stage_x="pretrained", stage_y="finetuned")
    own = own.assign(value=own["layer_x"] / 10)  # x is the original here
    (panel,) = items({"similarity": own}, "phang_figure_1")["phang_figure_1"].panels
    assert panel.title == "sst2, FT–ORIG"
    assert panel.values[0].tolist() == [layer / 10 for layer in given.LAYERS]


def test_fine_tunings_of_one_model_and_of_two_are_not_mixed(frames: Collected) -> None:
    names = {"a:0": "roberta", "a:1": "roberta#2", "b:0": "electra", "b:1": "electra#2"}
    rows = frames["similarity"]
    rows = rows[rows["model_x"].isin(names) & rows["model_y"].isin(names) & (rows["stage"] == "finetuned")]
    rows = rows.assign(model_x=rows["model_x"].map(names), model_y=rows["model_y"].map(names))
    made = items({"similarity": rows}, "phang_figure_1", "phang_figure_7")
    shown = product(["sst2"], ("roberta", "electra"), ("FT–FT", "FT[1]–FT[2]"))
    assert {panel.title for panel in made["phang_figure_1"].panels} == {", ".join(names) for names in shown}
    (between,) = made["phang_figure_7"].panels
    ends = ("sst2, roberta and electra", "layer, roberta", "layer, electra")
    assert isinstance(between, HeatPanel)
    assert (between.title, between.up, between.across) == ends


def test_surgery_is_the_mean_of_a_models_fine_tunings_with_their_range(made: dict[str, Any]) -> None:
    first, second = made["phang_figure_3"].panels
    assert (first.title, second.title) == ("mnli, bert", "sst2, bert")
    assert [series.name for series in first.series] == ["majority class", "untuned", "tuned"]  # no base model here
    majority, untuned, _ = first.series
    assert [value[0] for value in untuned.values] == pytest.approx([51, 61, 71, 81])
    assert (untuned.low[0], untuned.high[0]) == (pytest.approx(50), pytest.approx(52))
    assert majority.values == [[40.0]] * 4
    (one,) = items({"surgery": pd.DataFrame(given.surgery(["bert"]))}, "phang_figure_3").values()
    assert one.panels[0].series[1].low[0] == pytest.approx(45)  # of a single one, over texts
    skipped = made["phang_figure_4"].panels[0]
    assert skipped.title == "mnli, bert (whole: 81.0)"
    assert skipped.values[0].tolist() == pytest.approx([70, 60, 50])  # by first and last block
    assert np.isnan(skipped.values[1, 0])  # the last block is not before the first


# ---------------------------------------------------------------------- Brown et al.


def test_groups_are_told_apart_by_their_distances(made: dict[str, Any]) -> None:
    table = made["brown_angular_distance"]
    found = {entry["groups"]: entry for entry in table.rows[:3]}
    assert found["a and b"]["distance"].mean > found["a and a"]["distance"].mean
    assert found["a and b"]["p"] == pytest.approx(2 / 70)
    assert "radians further apart than models of one group (p = 0.0286" in table.findings[0]
    lines = made["brown_figure_2_stitching"].panels[0]
    assert {series.name for series in lines.series} == {"same model", "a → a", "a → b", "b → a", "b → b"}


def test_accuracy_lost_has_a_figure_beside_nats(made: dict[str, Any]) -> None:
    nats, lost = (made[f"brown_figure_2_{name}"] for name in ("stitching", "accuracy"))
    means = [{one.name: [v for (v,) in one.values] for one in figure.panels[0].series} for figure in (nats, lost)]
    assert means[1]["a → b"] == pytest.approx([value / 20 for value in means[0]["a → b"]])
    assert means[0]["a → b"][-1] == pytest.approx(0.9)
    assert lost.caption.startswith(
        "Accuracy lost by stitching at each site (the target's own minus that of the stitched"
    )
    assert nats.caption.startswith(
        "Penalty of stitching at each site (loss minus the target's own, in nats), mean over"
    )


def test_groups_that_mean_nothing_are_not_told_apart(frames: Collected) -> None:
    rows = frames["similarity"]
    mixed = rows.assign(**{f"group_{side}": rows[f"model_{side}"].str[-1].isin(["0", "1"]) for side in "xy"})
    mixed = mixed.astype({"group_x": str, "group_y": str})
    (table,) = items({"similarity": mixed}, "brown_angular_distance").values()
    assert "are neither significantly further apart nor closer together than models of one group: " in table.findings[0]


# ---------------------------------------------------------------------- Merchant et al.


def test_models_that_are_not_fine_tuned_have_no_rsa_with_their_fine_tunings(frames: Collected) -> None:
    rows = frames["similarity"]
    alone = {"similarity": rows[rows["stage"] == "pretrained"]}
    assert items(alone, "merchant_figure_2", "merchant_figure_5") == {}


def test_the_mix_stands_beside_the_papers(made: dict[str, Any]) -> None:
    found = made["merchant_table_1"]
    (entry,) = found.rows
    assert entry["base"] == "bert-base-uncased"
    assert entry["before"] == pytest.approx(90)
    assert (entry["after"].mean, entry["after"].sd) == (pytest.approx(88), pytest.approx(2**0.5))
    assert (entry["change"], entry["lexical"], entry["untrained"]) == tuple(map(pytest.approx, (-2, 60, 40)))
    assert (entry["paper_before"], entry["paper_change"]) == (95.5, -0.5)
    assert "Merchant et al. 2020, Table 1" in found.notes[-1]
    assert found.findings == ["Fine-tuning on mnli changes the F1 of edge probes for dependencies by -2.0 points."]


@pytest.mark.parametrize(
    ("other", "before"), [({"model": "roberta-base"}, None), ({"corpus": "grammar"}, None), ({"task": "sst2"}, 95.5)]
)
def test_the_paper_is_beside_its_own_models_corpora_and_fine_tunings_alone(
    other: dict[str, str], before: float | None
) -> None:
    (found,) = items({"probing": pd.DataFrame(given.probing(**other))}, "merchant_table_1").values()
    assert [(row["paper_before"], row["paper_change"]) for row in found.rows] == [(before, None)]
    assert [c.key for c in found.columns if c.key.startswith("paper")] == (["paper_before"] if before else [])
    assert any("Merchant" in note for note in found.notes) is (before is not None)


def test_a_model_probed_once_before_several_fine_tunings_counts_for_each() -> None:
    rows = [row for row in given.probing() if row["stage"] == "pretrained"]
    rows += [row for task in ("mnli", "squad") for row in given.probing(task=task) if row["stage"] == "finetuned"]
    (found,) = items({"probing": pd.DataFrame(rows)}, "merchant_table_1").values()
    assert [(row["task"], row["before"], row["change"]) for row in found.rows] == [
        (task, pytest.approx(90), pytest.approx(-2)) for task in ("mnli", "squad")
    ]
    assert [row["paper_change"] for row in found.rows] == [-0.5, -2.5]


def test_one_task_on_the_sentences_of_two_files_is_two_rows() -> None:
    rows = [*given.probing(), *given.probing(corpus="edges/gum-train.jsonl")]
    (found,) = items({"probing": pd.DataFrame(rows)}, "merchant_table_1").values()
    probed = {row["probed"]: row["paper_before"] for row in found.rows}
    assert probed == {"dependencies, en_ewt": 95.5, "dependencies, gum": None}


def test_description_lengths_stand_beside_f1(made: dict[str, Any]) -> None:
    found = made["merchant_description_lengths"]
    (entry,) = found.rows
    assert (entry["before"], entry["after"].mean, entry["after"].sd) == tuple(map(pytest.approx, (2, 2.2, 0.02**0.5)))
    assert (entry["change"], entry["uniform"], entry["compression_before"]) == tuple(map(pytest.approx, (10, 8, 4)))
    assert (entry["f1_before"], entry["f1_change"]) == (pytest.approx(90), pytest.approx(-2))
    assert found.findings == ["Fine-tuning on mnli changes the codelength of dependencies by +10.0 %."]


def test_rsa_by_layer_in_and_out_of_the_domain() -> None:
    drawn = items({"similarity": pd.DataFrame(given.rsa())}, "merchant_figure_2", "merchant_figure_5")
    outside, both = drawn["merchant_figure_2"], drawn["merchant_figure_5"]
    assert [(panel.title, [line.name for line in panel.series]) for panel in outside.panels] == [
        ("wikipedia", ["fine-tuned on mnli", "fine-tuned on squad"])
    ]
    titles = {panel.title: [line.name for line in panel.series] for panel in both.panels}
    own = "the task's own (in domain)"
    assert titles == {
        "fine-tuned on mnli": [own, "squad", "wikipedia"],
        "fine-tuned on squad": ["mnli", own, "wikipedia"],
    }
    inside, *_ = both.panels[0].series
    assert [value for (value,) in inside.values] == pytest.approx([0.99, 0.89, 0.79, 0.69])
    assert (inside.low[3], inside.high[3]) == (pytest.approx(0.68), pytest.approx(0.7))  # over the two fine-tunings
    assert [value for (value,) in outside.panels[0].series[0].values] == pytest.approx([0.99, 0.94, 0.89, 0.84])
    assert "Mean over 2 fine-tuned models" in outside.caption


def test_every_layer_before_and_after(made: dict[str, Any]) -> None:
    found = made["merchant_layers"].rows
    said = made["merchant_layers"].findings[1]
    assert said.startswith("Fine-tuning on mnli changes the score on depth most at layer")
    assert said.endswith(": -2.0 points.")
    assert [(row["probed"], row["site"]) for row in found] == [*product(("dependencies", "depth"), (0, 1, 2))]
    for key, values in (("before", 2 * [60, 70, 80]), ("change", 6 * [-2]), ("untrained", 6 * [30])):
        assert [row[key] for row in found] == pytest.approx(values)


def test_lines_of_one_model_and_of_several(made: dict[str, Any]) -> None:
    two = pd.DataFrame([*given.probing(), *given.probing("b")])
    one, several = made["merchant_figure_1"], items({"probing": two}, "merchant_figure_1")["merchant_figure_1"]
    assert [panel.title for panel in one.panels] == ["mnli, dependencies", "mnli, depth"]
    first = one.panels[0]
    assert [series.name for series in first.series] == ["untrained", "pretrained", "fine-tuned"]
    assert [list(value) for value in first.series[1].values] == [pytest.approx([value]) for value in (60, 70, 80)]
    assert list(first.series[1].low) == pytest.approx([58, 68, 78])  # over sentences
    assert list(first.series[2].low) == pytest.approx([57, 67, 77])  # over fine-tunings
    assert "Mean over 2 models" in several.caption


def test_probes_of_random_models_are_no_line_of_their_twins(made: dict[str, Any], frames: Collected) -> None:
    rows = frames["probing"]
    random = rows[rows["stage"] == "pretrained"].assign(stage="random", score=0.99)
    (figure,) = items({"probing": pd.concat([rows, random])}, "merchant_figure_1").values()
    assert figure.values == made["merchant_figure_1"].values


def test_names_say_the_rank_where_there_are_several() -> None:
    frame = pd.DataFrame([*given.probing(), *(row | {"rank": 8} for row in given.probing() if row["rank"])])
    (table,) = items({"probing": frame}, "merchant_layers").values()
    assert {row["probed"] for row in table.rows} == {"dependencies", "depth, rank 8", "depth, rank 64"}


# ---------------------------------------------------------------------- updates


def updated(model: str, within: tuple[bool | None, ...], verdicts: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """Rows of one comparison, of an error that grows with the site, and of one carry, whose fidelity falls."""
    about = {"task": "sst2", "model_x": "old", "model_y": model}
    compared = [
        {**about, "site_y": site, "method": method, "fvu": share * (site + 1), "within": known if share == 1 else None}
        for method, share in (("identity", 1), ("rotation", 0.5), ("linear", 0.25)) for site, known in enumerate(within)
    ]  # fmt: skip
    scores = ({"fidelity": 0.99 - n / 100, "stale_fidelity": 0.9 - n / 100} for n in range(len(verdicts)))
    return compared, [{**about, "verdict": verdict, **score} for verdict, score in zip(verdicts, scores, strict=True)]


def test_updates_have_where_they_change_and_what_becomes_of_artefacts() -> None:
    drawn = [
        updated("tuned", (True, False, False), ("carry", "do not use", "carry")),
        updated("rounded", (True, True, True), ("leave as it is",)),
        updated("other", (False, False, False), ("do not use",)),
    ]
    kinds = {kind: [row for pair in drawn for row in pair[k]] for k, kind in enumerate(("compare", "carry"))}
    frames = {kind: pd.DataFrame(rows) for kind, rows in kinds.items()}
    table = given.items(frames, "updates")["updates"]
    tuned = row(table, model_y="tuned")
    assert (tuned["first"], tuned["fvu_identity"], tuned["fvu_linear"]) == (1, 3, 0.75)
    assert (tuned["left"], tuned["to_carry"], tuned["not_used"]) == (0, 2, 1)
    assert (tuned["fidelity"], tuned["worst_fidelity"]) == pytest.approx((0.98, 0.97))
    assert (tuned["stale_fidelity"], tuned["worst_stale_fidelity"]) == pytest.approx((0.89, 0.88))
    assert row(table, model_y="rounded")["first"] is None
    assert list(table.findings) == [
        "Of 3 updates 2 change states by more than rounding: from site 0 on other; from site 1 on tuned.",
        "Of 5 artefacts over all updates 1 can be left as they are, 2 are to be carried over, and 2 should not be "
        "used. Carried, they agree with their old decisions at an AUROC of 0.970 or more; left as they are, the worst "
        "is at 0.880.",
    ]
    assert given.items({"compare": frames["compare"]}, "updates")["updates"].findings == table.findings[:1]
    assert given.items({"carry": frames["carry"]}, "updates")["updates"].findings == table.findings[1:]
