"""The papers' own studies, on tiny models."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import yaml
from tests.aligners.cli.small_study import kinds
from tests.processes import ROOT
from tests.tiny import tiny_folder
from tests.world import World, sentences

import papers  # noqa: F401  (registers their tables)
from aligners.cli.table import study
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make
from aligners.studies.collecting import tables
from aligners.studies.study_folder import StudyFolder

pytestmark = pytest.mark.usefixtures("cells_here")
PAPERS = ROOT / "papers"
MULTIBERTS = ["google/multiberts-seed_0", "google/multiberts-seed_1"]


@pytest.mark.slow
def test_the_papers_study_on_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal of Ren et al.'s own file, with cells of every stage, and fewer models, tasks and sites."""
    config = yaml.safe_load((PAPERS / "ren2023" / "small.yaml").read_text())
    config["models"] |= {"seeds": 2, "groups": {"one": [MULTIBERTS[0]], "two": [MULTIBERTS[1]]}}
    config["tasks"] = {"t": {"text": {"source": "sst2"}}}
    config["pairs"] = {"random": 1}
    config["fit"]["stages"] = config["inject"]["stages"] = ["finetuned"]
    config["recover"]["options"]["model"]["aligners"] = {"linear": "Linear"}
    for kind in ("recover", "attention"):
        config[kind] |= {"tasks": None, "stages": ["pretrained"]}
        config[kind]["options"]["data"]["sites"] = [1]
    config["similarity"] |= {"across_stages": True}
    config["similarity"]["options"]["data"]["layers"] = [1, 3]
    config["similarity"]["options"]["measures"].append("neuronsim")
    config["identity"] = {"stages": ["finetuned"]}
    config["data"]["sites"] = [1]
    config["report"] = ["ren_table_1", "ren_table_2", "ren_table_3", "ren_table_4", "ren_table_5"]
    (tmp_path / "ren.yaml").write_text(yaml.safe_dump(config))
    study(["run", "ren.yaml", "--rehearse"])
    folder = tmp_path / "runs" / "ren_small" / "rehearsal"
    cells = ["attention", "finetune", "finetune", "fit", "identity", "inject", "recover", "recover"]
    assert [kind for kind in kinds(folder) if kind not in ("similarity", "untrained")] == cells
    injected = pd.read_parquet(folder / "tables" / "inject.parquet")
    assert {"linear", "cca", "svcca", "pwcca", "mlp_paper", "inn_paper", "inn", "native_y"} <= set(injected["method"])
    assert set(injected["stage"]) == {"finetuned"}
    assert set(injected["n_texts"]) == {60}
    assert "one" in {*injected["group_x"], *injected["group_y"]}
    compared = pd.read_parquet(folder / "tables" / "similarity.parquet")
    assert {("random", "pretrained"), ("pretrained", "finetuned")} <= set(
        zip(compared["stage_x"], compared["stage_y"], strict=True)
    )
    assert "linear_trained" in set(injected["method"])  # as printed
    assert {"svcca_standardised", "pwcca_standardised"} <= set(compared["measure"])
    recovered = pd.read_parquet(folder / "tables" / "recover.parquet")
    assert set(recovered[recovered["method"] == "linear_trained"]["direction"]) == {"forward", "backward"}
    assert list((folder / "store").iterdir())
    kept = {path.parts[-3] for path in folder.glob("cells/*/run/aligners.safetensors")}
    assert {StudyFolder(folder).described(number)["kind"] for number in kept} == {"attention", "recover"}  # not "fit"
    assert os.environ["WANDB_RUN_GROUP"] == "ren_small-rehearsal"
    assert {path.stem for path in (folder / "report" / "tables").glob("*.md")} == set(config["report"])
    shown = capsys.readouterr().out
    assert "ren_small-rehearsal: " in shown
    assert f"0 of {len(kinds(folder))} cells are done" in shown
    assert shown.splitlines()[-1] == f"Report: {Path('runs', 'ren_small', 'rehearsal', 'report', 'report.html')}"
    for said in ("sst2: the source grammar, as it cannot be read", f"{MULTIBERTS[1]}: a random BERT of width 16"):
        assert said in shown
    assert "At most 60 texts of each split, 60 steps and 3 seeds." in shown
    assert "none of its numbers is a result" in (folder / "report" / "report.html").read_text()
    assert not (tmp_path / "runs" / "ren_small" / "cells").exists()  # nothing is mixed with the study itself
    made = make(Frames(tables(StudyFolder(folder))))
    assert set(made.missing) == {
        *("phang_figure_3", "phang_figure_4", "phang_clusters"),  # fine-tuned models operated on, maps of four layers
        "updates",  # cells of compare or carry
        *("merchant_table_1", "merchant_layers", "merchant_figure_1", "merchant_description_lengths"),  # probes
        *("merchant_figure_2", "merchant_figure_5"),  # rsa
        *(
            "ren_table_4_tests",
            "ren_figure_3",
            "ren_figure_3_mse",
            "ren_figure_6",
            "ren_figure_6_mse",
            "ren_figure_6_attention",
        ),  # three models, pairs of layers
        *("wu_figure_4", "wu_figure_6", "brown_figure_3"),  # other measures
        "brown_table_1",  # models of several sizes
    }, made.missing
    (table,) = [table for table in made.tables if table.name == "ren_table_4"]
    printed = {row["method"] for row in table.rows if row.get("mse_printed")}
    assert printed == {"linear"}
    linear = next(row for row in table.rows if (row["method"], row["rows"]) == ("linear", "mean"))
    assert (linear["pairs"], linear["models"]) == (1, 2)
    assert linear["fvu_fit"].mean < linear["fvu"].mean
    (errors,) = [figure for figure in made.figures if figure.name == "ren_figure_2"]
    assert [len(values) for values in errors.panels[0].series[0].values] == [1]


def nli(path: Path, texts: list[str], label: str, classes: Sequence[str], **columns: Sequence[str]) -> str:
    """Write pairs of sentences with classes, and further columns, that go round."""
    both = {"premise": texts, "hypothesis": texts[::-1]}
    further = {name: [values[n % len(values)] for n in range(len(texts))] for name, values in columns.items()}
    pd.DataFrame(both | {label: [classes[n % len(classes)] for n in range(len(texts))]} | further).to_csv(
        path, sep="\t", index=False
    )
    return str(path)


@pytest.mark.slow
def test_browns_study_on_tiny_models(tmp_path: Path) -> None:
    """Brown et al.'s own file, with other models and texts: heads of three classes on texts of three and of two."""
    config = yaml.safe_load((PAPERS / "brown2023" / "study.yaml").read_text())
    models = [str(tiny_folder(tmp_path / f"m{seed}", seed=seed, n_labels=3)) for seed in range(3)]
    config["models"] |= {
        "names": models,
        "groups": {"generalising": models[:2], "heuristic": models[2:]},
        "seeds": None,
    }
    texts, three = sentences(120), ("entailment", "neutral", "contradiction")
    mnli = nli(tmp_path / "mnli.tsv", texts, "label", three)
    heuristics = {"heuristic": [name for name in ("lexical_overlap", "subsequence", "constituent") for _ in "ab"]}
    hans = nli(tmp_path / "hans.tsv", texts, "label", ("entailment", "non-entailment"), **heuristics)
    hans_tasks = ["hans_lexical_overlap"]  # one will do
    for kind in ("subsequence", "constituent"):
        config["tasks"].pop(f"hans_{kind}")
        config["identity"]["tasks"].remove(f"hans_{kind}")
    for name, task in config["tasks"].items():
        own = (
            {"source": hans, "held_out": hans, "deduplicate": False, "validation_share": 0}
            if "hans" in name
            else {"source": mnli}
        )
        task["text"] |= {"text_columns": ["premise", "hypothesis"], **own}
        task["text"].pop("revision", None)
    config["data"]["max_length"] = 60
    config["data"]["sites"] = [1, 3]
    names = ("figure_2_accuracy", "figure_2_cka", "figure_7", "hans", "angular_distance")
    config |= {"report": [f"brown_{name}" for name in names]}
    (tmp_path / "brown.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    study(["run", "brown.yaml"])
    frames = tables(StudyFolder(tmp_path / "runs" / "brown"))
    made = make(Frames(frames), config["report"])
    by_name = {item.name: item for item in (*made.tables, *made.figures)}
    accuracies = {(row["task"], row["group_y"]): row["accuracy"] for row in by_name["brown_hans"].rows}
    assert {task for task, _ in accuracies} == {"mnli", *hans_tasks}
    stitched = frames["stitching"]
    assert set(stitched[stitched["task"] == hans_tasks[0]]["n_texts"]) == {20}  # those without entailment alone
    assert set(stitched["base_x"]) == {"bert-base-uncased"}
    figure = by_name["brown_figure_7"]
    assert [panel.title for panel in figure.panels] == [
        f"{task}, pretrained, identity" for task in ("mnli", *hans_tasks)
    ]
    native = stitched[(stitched["method"] == "native") & (stitched["task"] == hans_tasks[0])]
    of_group = native[native["group_y"] == "heuristic"].drop_duplicates("model_y")["accuracy"].mean()
    assert accuracies[hans_tasks[0], "heuristic"].mean == pytest.approx(of_group)
    cka = [panel.title for panel in by_name["brown_figure_2_cka"].panels]
    measures = ("minibatch_cka", "mean_minibatch_cka")
    assert cka == [f"{task}, pretrained, {name}" for task in ("mnli", "mnli_before_residual") for name in measures]
    assert {row["definition"] for row in by_name["brown_angular_distance"].rows} == {"cka", "mean_minibatch_cka"}
    said = "All models are fine-tuned from one pretrained model: intervals are over its fine-tunings"
    assert said not in " ".join(by_name["brown_hans"].notes)  # two models in a group have a range


def test_browns_scaling_family_on_tiny_models(tmp_path: Path) -> None:
    """Brown et al.'s own file: causal models of different depth and width on packed text."""
    config = yaml.safe_load((PAPERS / "brown2023" / "scaling.yaml").read_text())
    sizes = {"pythia-1b-deduped": (16, 3), "pythia-2.8b-deduped": (32, 2)}
    config["models"]["names"] = [
        str(tiny_folder(tmp_path / name, "gpt_neox", task="causal", width=width, layers=layers))
        for name, (width, layers) in sizes.items()
    ]
    nli(tmp_path / "pile.tsv", sentences(200), "class", ("a",))
    text = {"source": str(tmp_path / "pile.tsv"), "text_columns": ["premise"]}
    config["tasks"]["pile"]["text"] |= text
    config["similarity"]["options"]["data"] |= {"max_length": 40}
    config["similarity"]["options"]["trainer"]["limit_test_batches"] = 7
    (tmp_path / "brown.yaml").write_text(yaml.safe_dump(config))
    study(["run", "brown.yaml"])
    folder = StudyFolder(tmp_path / "runs" / "brown_scaling")
    frames, rows = tables(folder), pd.read_parquet(folder.path / "tables" / "similarity.parquet")
    assert set(rows["n_rows"]) == {7 * 40}
    assert set(rows["measure"]) == {"minibatch_cka", "mean_minibatch_cka"}
    made = make(Frames(frames), config["report"])
    assert not made.missing
    (table,) = made.tables
    assert [(row["layers"], row["width"], row["paper_head_width"].mean) for row in table.rows] == [
        (3, 16, 256),
        (2, 32, 80),
    ]


@pytest.mark.slow
def test_merchants_study_on_tiny_models(world: World, tmp_path: Path) -> None:
    """Their own file with its three tasks, RSA on the texts of each and on others; other models, texts and probes."""
    from tests.aligners.finetuning.test_tokens import asked, write_questions, write_trees

    config = yaml.safe_load((PAPERS / "merchant2020" / "study.yaml").read_text())
    files = {
        name: tmp_path / name for name in ("fit.conllu", "test.conllu", "train.json", "dev.json", "ner_train.jsonl")
    }
    for name, seeds in (("fit.conllu", range(60)), ("test.conllu", range(90, 100))):
        write_trees(files[name], seeds)
    for name, seeds in (("train.json", range(60)), ("dev.json", range(90, 100))):
        write_questions(files[name], [asked(seed) for seed in seeds])
    trees = {"source": str(files["fit.conllu"]), "held_out": str(files["test.conllu"])}
    config["models"] = {"names": [world.model_x]}
    config["data"] = {"max_length": 60}
    config["tasks"]["mnli"]["text"] = {"source": world.fit, "held_out": world.test}
    config["tasks"]["dep"]["text"] = trees
    config["tasks"]["squad"] = {"text": {"source": str(files["train.json"]), "held_out": str(files["dev.json"])}}
    config["finetune"]["copies"] = 1
    for task in config["finetune"]["tasks"].values():
        task["trainer"] = {"max_epochs": 1}
    config["finetune"]["options"]["trainer"] = {"max_epochs": 1}
    config["similarity"]["texts"]["wikipedia"]["text"] = {"source": str(tmp_path / "other.txt")}
    (tmp_path / "other.txt").write_text("\n".join(f"{n} films without a plot" for n in range(30)))
    line = {"text": "a dull plot", "targets": [{"span1": [n, n + 1], "label": str(n % 2)} for n in range(3)]}
    rows = [json.dumps(line | {"text": f"{n} dull plots"}) for n in range(40)]
    files["ner_train.jsonl"].write_text("\n".join(rows))
    config["probe"]["options"] |= {
        "projection": 4, "hidden": 4, "seeds": 1, "portions": [0.3, 1.0], "controls": True,
        "training": {"max_epochs": 1, "least_steps": 5},
    }  # fmt: skip
    config["probe"]["options"]["data"]["text"] = trees
    config["probe"]["texts"] = {"entities": {"text": {"source": str(files["ner_train.jsonl"])}}}
    config["probe"]["tasks"] = ["mnli"]
    (tmp_path / "merchant.yaml").write_text(yaml.safe_dump(config))
    study(["run", "merchant.yaml"])
    folder = tmp_path / "runs" / "merchant"
    tuned = pd.read_parquet(folder / "tables" / "finetune.parquet").set_index("task")
    assert tuned["score_name"].to_dict() == {"mnli": "accuracy", "dep": "las", "squad": "span_f1"}
    found = folder / "report" / "tables"
    table = pd.read_csv(found / "merchant_table_1.csv")
    assert set(zip(table["task"], table["probed"], strict=True)) == {
        ("mnli", probed) for probed in ("pos", "dependencies", "ner")
    }
    assert table["untrained"].notna().all()
    assert set(pd.read_csv(found / "merchant_description_lengths.csv")["probed"]) == set(table["probed"])
    figures = folder / "report" / "figures"
    assert {"merchant_figure_2.png", "merchant_figure_5.png"} <= {path.name for path in figures.iterdir()}
