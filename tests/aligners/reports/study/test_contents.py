"""Every table and figure of a study: what it says on rows whose effects are known, and why it cannot be made."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from aligners.reports.study.contents import Figure, HeatPanel, Table
from aligners.reports.study.frames import Frames
from aligners.reports.study.papers.phang import two_clusters
from aligners.reports.study.registry import CONTENTS, ReportContents, make
from aligners.reports.study.statistics import Estimate
from tests.aligners.reports.study.rows import LAYERS, MODELS, collected, similarity
from tests.processes import ROOT


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    return collected()


@pytest.fixture(scope="module")
def made(frames: dict[str, pd.DataFrame]) -> ReportContents:
    return make(Frames(frames))


def table(made: ReportContents, name: str) -> Table:
    return next(item for item in made.tables if item.name == name)


def figure(made: ReportContents, name: str) -> Figure:
    return next(item for item in made.figures if item.name == name)


def row(made: ReportContents, name: str, **where: object) -> dict[str, object]:
    (found,) = [row for row in table(made, name).rows if all(row[key] == value for key, value in where.items())]
    return found


def mean(cell: object) -> float:
    assert isinstance(cell, Estimate)
    return cell.mean


def test_everything_is_made_but_what_the_rows_do_not_hold(made: ReportContents) -> None:
    attention, across = {"ren_figure_4", "wu_figure_4", "wu_figure_6"}, {"wu_figure_5"}
    elsewhere = {"phang_figure_3", "phang_figure_4"}  # tests/aligners/reports/study/test_tuned.py
    probed = {
        "merchant_table_1",
        "merchant_layers",
        "merchant_figure_1",
    }  # tests/aligners/reports/study/test_merchant.py
    assert set(made.missing) == attention | across | elsewhere | probed
    assert {item.name for item in (*made.tables, *made.figures)} == set(CONTENTS) - set(made.missing)
    assert made.missing["ren_figure_4"] == (
        "the study has no errors of maps between attention weights (kind `attention`)"
    )


def test_without_rows_everything_says_why_it_cannot_be_made() -> None:
    made = make(Frames({}))
    assert set(made.missing) == set(CONTENTS)
    assert made.missing["ren_table_3"] == "the study has no rows of kind `recover`"


def test_alignment_is_the_mean_over_blocks_and_pairs_beside_the_papers_number(
    made: ReportContents, frames: dict[str, pd.DataFrame]
) -> None:
    found = row(made, "ren_table_4", stage="fine-tuned", method="inn")
    rows = frames["inject"]
    own = rows[(rows["stage"] == "finetuned") & (rows["method"] == "inn") & (rows["model_x"] != rows["model_y"])]
    own = own[(own["site_x"] == own["site_y"]) & (own["site_x"] > 0)]
    assert mean(found["mse"]) == pytest.approx(own["mse"].mean())
    assert mean(found["mse_fit"]) == pytest.approx(0.8 * own["mse"].mean())
    assert found["mse_reduced"] is None
    linear = row(made, "ren_table_4", stage="fine-tuned", method="linear")
    assert mean(linear["mse_reduced"]) == pytest.approx(0.5 * mean(linear["mse"]))
    assert any("what the paper reports of it" in note for note in table(made, "ren_table_4").notes)
    assert (found["pairs"], found["models"]) == (28, 8)
    assert mean(found["paper_test"]) == 0.0523
    assert row(made, "ren_table_4", stage="fine-tuned", method="identity")["paper_test"] is None


def test_the_papers_numbers_stand_beside_the_same_task_only() -> None:
    other = make(Frames(collected(["rotten_tomatoes"], MODELS[:4])), ["ren_table_4"])
    assert "paper_test" not in [column.key for column in table(other, "ren_table_4").columns]
    assert mean(row(make(Frames(collected(["SST-2"], MODELS[:4])), ["ren_table_4"]), "ren_table_4",
                    stage="pretrained", method="linear")["paper_test"]) == 0.0896  # fmt: skip


def test_validation_errors_of_a_fit_are_not_called_held_out(frames: dict[str, pd.DataFrame]) -> None:
    fit = frames["inject"][frames["inject"]["site_x"].notna()].drop(columns=["score", "overflow"])
    found = make(Frames({"fit": fit}), ["ren_table_4"])
    assert table(found, "ren_table_4").notes[0].startswith("Held out: no.")


def test_maps_are_compared_with_the_invertible_one_by_one_family_of_tests(made: ReportContents) -> None:
    found = table(made, "ren_table_4_tests")
    assert [entry["method"] for entry in found.rows] == ["linear − inn", "mlp − inn"] * 2
    assert all(entry["p"] == 2 / 2**8 and entry["holm"] == pytest.approx(4 * 2 / 2**8) for entry in found.rows)
    assert found.findings[0].startswith("4 of 4 differences between maps are significant at .05: ")


def not_trained(frames: dict[str, pd.DataFrame], chosen: Callable[[pd.DataFrame], pd.Series]) -> Frames:
    """The rows of maps with the INN set back in some."""
    rows = {kind: frames[kind].assign(training=None) for kind in ("inject", "recover")}
    for frame in rows.values():
        frame.loc[(frame["method"] == "inn") & chosen(frame), "training"] = "diverged at step 3, set back to step 2"
    return Frames(rows)


def test_maps_that_are_not_trained_are_marked_and_in_no_finding_and_no_test(frames: dict[str, pd.DataFrame]) -> None:
    inn = frames["inject"]["method"] == "inn"
    better = {**frames, "inject": frames["inject"].assign(mse=frames["inject"]["mse"].where(~inn, 0.0))}
    names = ["ren_table_3", "ren_table_4", "ren_table_4_tests", "ren_table_5", "ren_figure_2"]
    made = make(not_trained(better, lambda rows: rows["site_x"] == 2), names)
    for name in ("ren_table_3", "ren_table_4", "ren_table_5"):
        found = table(made, name)
        assert "inn*" in {entry["method"] for entry in found.rows}
        assert any(note.startswith("*: maps that kept their untrained start or diverged") for note in found.notes)
        assert found.findings
        assert not any("inn" in said for said in found.findings)
    assert all("the closest map is mlp" in said for said in table(made, "ren_table_4").findings)
    tested = {entry["method"] for entry in table(made, "ren_table_4_tests").rows}
    assert tested == {"mlp − linear"}  # there is no INN to compare with
    drawn = figure(made, "ren_figure_2")
    assert [panel.title for panel in drawn.panels] == [
        f"sst2, token rows, {name}" for name in ("inn*", "linear", "mlp")
    ]
    assert "of linear" in drawn.findings[0]


def test_a_pair_that_is_not_trained_is_left_out_of_the_tests_alone(frames: dict[str, pd.DataFrame]) -> None:
    one = not_trained(frames, lambda rows: (rows["model_x"] == "a:0") & (rows.get("model_y") == "b:3"))
    tested, whole = (
        table(make(each, ["ren_table_4_tests"]), "ren_table_4_tests").rows[0] for each in (one, Frames(frames))
    )
    assert tested["method"] == whole["method"] == "linear − inn"
    assert tested["difference"] != whole["difference"]


def test_the_closest_map_is_drawn_and_what_is_not_drawn_is_named(frames: dict[str, pd.DataFrame]) -> None:
    own = frames["inject"]
    others = [
        own[own["method"] == "inn"].assign(method=name, mse=factor * own["mse"], fvu=factor * own["fvu"])
        for name, factor in (("procrustes", 0.1), ("cca", 3.0))
    ]
    made = make(Frames({"inject": pd.concat([own, *others])}), ["ren_figure_2", "ren_figure_3"])
    drawn = figure(made, "ren_figure_2")
    assert [panel.title.split(", ")[-1] for panel in drawn.panels] == ["inn", "linear", "mlp", "procrustes"]
    assert drawn.caption.endswith("not shown: cca.")
    assert any(panel.title.endswith("procrustes") for panel in figure(made, "ren_figure_3").panels)


def test_injection_is_shown_at_the_last_site_between_ceilings_and_floors(made: ReportContents) -> None:
    assert mean(row(made, "ren_table_5", stage="pretrained", method="native_y")["score"]) == pytest.approx(0.9)
    inn = row(made, "ren_table_5", stage="pretrained", method="inn")
    assert mean(inn["score"]) < mean(inn["everywhere"])  # the error grows with depth
    assert mean(inn["paper"]) == 74.01
    assert row(made, "ren_table_5", stage="pretrained", method="identity")["role"] == "floor"


def test_a_pair_that_overflowed_is_counted_as_lost(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["inject"].copy()
    gone = (rows["method"] == "inn") & (rows["model_x"] == "a:0") & (rows["model_y"] == "b:3")
    rows.loc[gone, ["mse", "score", "mse_fit", "fvu"]] = None
    rows.loc[gone, "overflow"] = True
    made = make(Frames({"inject": rows}), ["ren_table_4", "ren_table_5"])
    for name, column in (("ren_table_4", "mse"), ("ren_table_5", "score")):
        cell = row(made, name, stage="pretrained", method="inn")[column]
        assert isinstance(cell, Estimate)
        assert (cell.pairs, cell.lost) == (27, 1)


def test_boxes_hold_every_pair_at_every_block(made: ReportContents) -> None:
    (tokens,) = [panel for panel in figure(made, "ren_figure_2").panels if panel.title.endswith("inn")]
    assert [series.name for series in tokens.series] == ["pretrained", "fine-tuned"]  # type: ignore[union-attr]
    assert list(tokens.across) == ["1", "2", "3", "4"]  # type: ignore[union-attr]
    assert all(len(values) == 28 for values in tokens.series[0].values)  # type: ignore[union-attr]


def test_layer_maps_are_brightest_on_the_diagonal(made: ReportContents) -> None:
    for name in ("ren_figure_3", "ren_figure_6"):
        panel = figure(made, name).panels[0]
        assert isinstance(panel, HeatPanel)
        assert panel.values.shape == (5, 5)
        assert (panel.values.argmin(1) == np.arange(5)).all()


def test_recovery_is_shown_by_strength(made: ReportContents) -> None:
    found = row(made, "ren_table_3", strength=2.0, method="inn")
    assert mean(found["mse"]) == pytest.approx(0.002)
    assert mean(found["paper"]) == 0.0059


def test_a_block_map_groups_families_and_reads_both_directions(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["similarity"].copy()
    back = (rows["measure"] == "neuronsim") & (rows["direction"] == "backward")
    rows.loc[back, "value"] = 0.01
    mixed = rows.sample(frac=1, random_state=0)
    panel = figure(make(Frames({"similarity": mixed}), ["wu_figure_1"]), "wu_figure_1").panels[0]
    assert isinstance(panel, HeatPanel)
    families = [name[0] for name, _ in panel.row_blocks]
    assert families in (sorted(families), sorted(families, reverse=True))
    assert panel.values.shape == (40, 40)
    assert np.isfinite(panel.values).all()
    names = list(panel.rows)
    x, y = names.index("a:0 1"), names.index("b:0 1")
    assert panel.values[x, y] == pytest.approx(0.75)  # a:0 is the first of the pair
    assert panel.values[y, x] == 0.01


def test_localization_is_over_all_other_layers(made: ReportContents) -> None:
    assert all(entry["localization"] == pytest.approx(0) for entry in figure(made, "wu_figure_3").values)


def test_layers_fall_into_the_clusters_that_they_form(made: ReportContents) -> None:
    found = row(made, "phang_clusters", panel="sst2, FT–FT")
    assert found["clusters"] == "0–2 | 3–4"
    assert mean_of(found["contrast"]) > 0.4
    titles = [panel.title for panel in figure(made, "phang_figure_1").panels]
    assert titles == ["sst2, ORIG–ORIG", "sst2, FT–FT"]
    assert two_clusters(np.full((5, 5), np.nan)) == []


def mean_of(cell: object) -> float:
    assert isinstance(cell, float)
    return cell


def test_fine_tuned_layers_go_up_where_the_original_goes_across(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["similarity"]
    own = rows[(rows["model_x"] == "a:0") & (rows["model_y"] == "a:0") & (rows["measure"] == "cka")]
    own = own[own["stage"] == "finetuned"].assign(stage=None, stage_x="pretrained", stage_y="finetuned")
    own = own.assign(value=own["layer_x"] / 10)  # x is the original here
    (panel,) = figure(make(Frames({"similarity": own}), ["phang_figure_1"]), "phang_figure_1").panels
    assert isinstance(panel, HeatPanel)
    assert panel.title == "sst2, FT–ORIG"
    assert panel.values[0].tolist() == [layer / 10 for layer in LAYERS]


def test_untrained_models_are_not_before_fine_tuning(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["similarity"].replace({"stage": {"finetuned": "random"}})
    made = make(Frames({"similarity": rows}), ["wu_figure_7"])
    assert made.missing == {"wu_figure_7": "the study has not both pretrained and fine-tuned models"}


def test_a_mean_over_models_of_different_depths_says_so(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["similarity_layers"]
    for kept, notes in ((rows, 0), (rows[(rows["model"] != "a:0") | (rows["layer"] < 4)], 1)):
        (found,) = make(Frames({"similarity_layers": kept}), ["ren_nuclear_norm"]).figures
        assert len(found.notes) == notes


def test_fine_tunings_of_one_model_and_of_two_are_not_mixed(frames: dict[str, pd.DataFrame]) -> None:
    names = {"a:0": "roberta", "a:1": "roberta#2", "b:0": "electra", "b:1": "electra#2"}
    rows = frames["similarity"]
    rows = rows[rows["model_x"].isin(names) & rows["model_y"].isin(names) & (rows["stage"] == "finetuned")]
    rows = rows.assign(model_x=rows["model_x"].map(names), model_y=rows["model_y"].map(names))
    panels = figure(make(Frames({"similarity": rows}), ["phang_figure_1"]), "phang_figure_1").panels
    assert {panel.title for panel in panels} == {
        f"sst2, {base}, {which}" for base in ("roberta", "electra") for which in ("FT–FT", "FT[1]–FT[2]")
    }
    (between,) = figure(make(Frames({"similarity": rows}), ["phang_figure_7"]), "phang_figure_7").panels
    assert isinstance(between, HeatPanel)
    assert (between.title, between.up, between.across) == (
        "sst2, roberta and electra", "layer, roberta", "layer, electra"
    )  # fmt: skip


def test_the_inverse_of_a_map_trained_one_way_is_a_map_of_its_own(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["inject"][(frames["inject"]["method"] == "inn") & (frames["inject"]["stage"] == "pretrained")]
    back = rows.rename(columns={"model_x": "model_y", "model_y": "model_x"})
    back = back.assign(fit="inverse of a map trained one way", mse=1e4)
    made = make(Frames({"inject": pd.concat([rows.assign(fit="trained"), back])}), ["ren_table_4"])
    assert mean(row(made, "ren_table_4", method="inn")["mse"]) < 1
    assert mean(row(made, "ren_table_4", method="inn, inverted")["mse"]) == 1e4


def test_attention_weights_are_named_once(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["inject"].assign(rows="attention weights of pairs of tokens")
    (found,) = make(Frames({"attention": rows[rows["site_x"] > 0]}), ["ren_figure_4"]).figures
    assert [panel.title for panel in found.panels] == ["sst2, inn", "sst2, linear", "sst2, mlp"]


def test_recovery_is_over_models(made: ReportContents) -> None:
    assert table(made, "ren_table_3").findings[0].endswith(" over 8 models; linear 0.0500.")


def test_groups_are_told_apart_by_their_distances(made: ReportContents) -> None:
    found = {entry["groups"]: entry for entry in table(made, "brown_angular_distance").rows[:3]}
    assert mean(found["a and b"]["distance"]) > mean(found["a and a"]["distance"])
    assert found["a and b"]["p"] == pytest.approx(2 / 70)
    assert (
        "radians further apart than models of one group (p = 0.0286"
        in table(made, "brown_angular_distance").findings[0]
    )
    lines = figure(made, "brown_figure_2_stitching").panels[0]
    assert {series.name for series in lines.series} == {"same model", "a → a", "a → b", "b → a", "b → b"}  # type: ignore[union-attr]


def test_groups_that_mean_nothing_are_not_told_apart(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["similarity"]
    mixed = rows.assign(**{f"group_{side}": rows[f"model_{side}"].str[-1].isin(["0", "1"]) for side in "xy"})
    made = make(Frames({"similarity": mixed.astype({"group_x": str, "group_y": str})}), ["brown_angular_distance"])
    assert "models of different groups are not told apart from models of one group: " in made.tables[0].findings[0]


def test_freezing_has_the_papers_accuracy_of_the_same_variant(made: ReportContents) -> None:
    found = row(made, "wu_table_1", variant="bottom-4")
    assert (found["score"], found["paper"], found["seeds"]) == (pytest.approx(93.5), 92.43, 2)


def test_the_papers_accuracy_stands_beside_its_own_models_alone(frames: dict[str, pd.DataFrame]) -> None:
    for base, printed in (("google-bert/bert-base-cased", 92.43), ("roberta-base", None), ("bert-large-cased", None)):
        rows = frames["finetune"][frames["finetune"]["variant"] == "none"].assign(base=base, model_x=base)
        (found,) = make(Frames({"finetune": rows}), ["wu_table_1"]).tables
        assert found.title == "Scores after fine-tuning"  # as no layers were frozen
        assert [(entry["base"], entry["paper"]) for entry in found.rows] == [(base.split("/")[-1], printed)]
        assert "variant" not in {column.key for column in found.columns}


def test_a_name_that_there_is_not_is_refused_with_one_like_it() -> None:
    with pytest.raises(ValueError, match=r"got ren_tabel_4\. Did you mean .*ren_table_4"):
        make(Frames({}), ["ren_tabel_4"])


def test_the_page_of_the_docs_lists_every_name() -> None:
    page = (ROOT / "docs" / "study_reports.md").read_text()
    named = set(re.findall(r"`(\w+)`", page.split("## Names")[1]))
    assert set(CONTENTS) <= named


def test_the_blocks_of_many_models_are_those_of_their_families() -> None:
    models = [f"{family}:{n}" for family in "ab" for n in range(9)]
    rows = pd.DataFrame(similarity(["sst2"], models))
    rows = rows[(rows["measure"] == "cka") & (rows["stage"] == "pretrained")]
    panel = figure(make(Frames({"similarity": rows}), ["wu_figure_1"]), "wu_figure_1").panels[0]
    assert isinstance(panel, HeatPanel)
    assert list(panel.row_blocks) == [("a", 5), ("b", 5)]
    assert panel.values[0, 0] == pytest.approx(0.9)  # of two models: a model with itself would be 1
    assert panel.values[0, 5] == pytest.approx(0.75)


def test_attention_weights_have_a_figure_of_their_own(frames: dict[str, pd.DataFrame]) -> None:
    rows = frames["inject"][frames["inject"]["method"] == "inn"].drop(columns=["rows", "overflow", "score"])
    made = make(Frames({"attention": rows.assign(mse=rows["mse"] / 100)}), ["ren_figure_4", "ren_figure_2"])
    assert "of attention weights" in figure(made, "ren_figure_4").title
    assert figure(made, "ren_figure_4").notes[0].startswith("Held out: yes")
    assert set(made.missing) == {"ren_figure_2"}
