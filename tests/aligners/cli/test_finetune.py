import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib import image
from tests.shell import metrics, printed
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World

from aligners.cli.table import train as main
from aligners.cli.train import finetune
from aligners.cli.train.finetune import plan
from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.text.sources import TextSource
from aligners.finetuning.jobs import Job
from aligners.models import load_frozen
from aligners.reports.runs.finetuning_report import finetuning_figure, finetuning_table, summarise


def options(world: World, run: Path, **changes: str) -> list[str]:
    given = {
        "data.models": world.model_x,
        "data.text.source": world.fit,
        "data.text.held_out": world.test,
        "data.max_length": "60",
        "data.batch_size": "32",
        "seeds": "2",
        "variants": "[none, bottom:2, layers:1]",
        "trainer.max_epochs": "1",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.logger": "false",
        "run": str(run),
    }
    return ["finetune", *(word for name, value in (given | changes).items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def done(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finetune") / "run"
    main(options(world, run))
    return run


def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "finetuning.json").read_text())


@pytest.mark.slow
def test_every_seed_and_variant_ends_as_a_model_and_a_row(done: Path, world: World) -> None:
    found = report(done)
    assert found["meta"]["models"][0]["name"] == world.model_x
    folders = [f"{variant}/seed-{seed}" for variant in ("none", "bottom-2", "layers-1") for seed in (0, 1)]
    assert [row["folder"] for row in found["rows"]] == folders
    assert [row["n"] for row in found["summary"]] == [2, 2, 2]
    with (done / "finetuning.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(folders)
    assert image.imread(done / "finetuning.png").std() > 0
    base = load_frozen(world.model_x)
    text = TextSource(world.fit, held_out=world.test)
    data = labelled_texts(world.model_x, text=text, max_length=60)
    batch = data.split("test")[list(range(TEST_TEXTS))]
    for row in found["rows"]:
        tuned = load_frozen(done / row["folder"])
        assert tuned.depth == (1 if row["kind"] == "layers" else 3)
        answers = tuned.logits(batch.inputs[0]).argmax(-1)
        assert row["accuracy"] == pytest.approx(float((answers == batch.labels).double().mean()))
        if row["kind"] == "bottom":
            states = [model.front(batch.inputs[0], [2, 3]) for model in (tuned, base)]
            assert torch.equal(states[0][0], states[1][0])
            assert not torch.equal(states[0][1], states[1][1])


def test_an_interrupted_run_goes_on_with_what_is_missing(
    done: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = tmp_path / "run", report(done)["rows"]
    shutil.copytree(done, run)
    shutil.rmtree(run / "bottom-2" / "seed-1")
    shutil.rmtree(run / "layers-1")
    (run / "layers-1").mkdir()
    trained: list[tuple[str, int]] = []
    real = finetune.train

    def watched(job: Job, data: ModelTexts, *rest: Any) -> dict[str, Any]:
        row = real(job, data, *rest)
        trained.append((job.name, data.order))
        return row

    monkeypatch.setattr(finetune, "train", watched)
    free = {"data.workers": "0", "trainer.devices": "1", "trainer.log_every_n_steps": "3"}
    main(options(world, run, **free))
    assert trained == [("bottom-2/seed-1", 1), ("layers-1/seed-0", 0), ("layers-1/seed-1", 1)]
    for a, b in zip(before, report(run)["rows"], strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}  # also those that were trained again


@pytest.mark.slow
def test_two_ranks_tune_a_model_with_weights_that_nothing_uses_as_one_does(world: World, tmp_path: Path) -> None:
    still = {"dropout": 0.0, "summary_last_dropout": 0.0}  # ranks would drop different things
    base = str(tiny_folder(tmp_path / "xlnet", "xlnet", layers=2, **still))
    changes = {"data.models": base, "seeds": "1", "variants": "[none]", "learning_rate": "1e-2", "epsilon": "1e-2"}
    changes |= {"trainer.logger": "CSVLogger", "trainer.log_every_n_steps": "1"}
    one, two = (tmp_path / name for name in ("one", "two"))
    main(options(world, one, **changes, **{"trainer.logger.save_dir": str(one)}))
    printed(tmp_path, "train", *options(world, two, **changes, **{"trainer.logger.save_dir": str(two)}), ranks=2)
    (expected,), (found,) = (report(run)["rows"] for run in (one, two))
    assert (report(one)["meta"]["ranks"], report(two)["meta"]["ranks"]) == (1, 2)
    for name in set(expected) - {"seconds"}:
        close = pytest.approx(expected[name], rel=1e-4) if isinstance(expected[name], float) else expected[name]
        assert found[name] == close, name
    logged = [metrics(next(run.rglob("metrics.csv")).parent)["none/seed-0/train_loss"] for run in (one, two)]
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)
    assert expected["trained"] < expected["parameters"]
    weights = [load_frozen(run / "none" / "seed-0").model.state_dict() for run in (one, two)]
    before = load_frozen(base).model.state_dict()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert torch.equal(weights[0]["transformer.mask_emb"], before["transformer.mask_emb"])
    assert not torch.equal(weights[0]["transformer.word_embedding.weight"], before["transformer.word_embedding.weight"])


def test_other_options_are_refused_and_nothing_is_touched(done: Path, world: World) -> None:
    before = (done / "finetuning.json").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"learning_rate was 5e-05 and is 0.1.*the same options to go on"):
        main(options(world, done, learning_rate="0.1"))
    assert (done / "finetuning.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(("option", "said"), [
    ("data.models", "but the base model's is"),
    ("data.text.source", r"none/seed-0 is of a run with other data.*the fitting texts were 1"),
])  # fmt: skip
def test_classifiers_of_something_else_are_refused_and_nothing_is_made(
    option: str, said: str, done: Path, world: World, tmp_path: Path
) -> None:
    """As if other weights, or other texts, had been put where those of the run were."""
    run, texts = tmp_path / "run", tmp_path / "texts.csv"
    shutil.copytree(done, run)
    texts.write_text("\n".join([*Path(world.fit).read_text().splitlines()[:-2], "a good new one,1"]))
    then, now = {"data.models": (world.model_x, world.model_y), "data.text.source": (world.fit, str(texts))}[option]
    config = run / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()), width=10_000).replace(then, now))
    before = sorted(run.rglob("*"))
    with pytest.raises(ValueError, match=said):
        main(options(world, run, **{option: now, "trainer.logger": "null"}))
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("content", ["", "data: [1"])
def test_a_file_without_options_is_refused(content: str, world: World, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"the options of a run in .*config.yaml, but got none"):
        main(options(world, tmp_path))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"variants": "[bottom:4]"}, "`bottom` between 0 and L = 3"),
        ({"variants": "[button:2]"}, "`variants` out of none"),
        ({"seeds": "0"}, "`seeds` to be a number above 0"),
        ({"seeds": "[1, 1]"}, "`seeds` to be a number above 0, or different seeds"),
        ({"learning_rate": "-1"}, "`learning_rate` to be above 0"),
    ],
)
def test_a_wrong_option_fails_before_a_folder_is_made(
    wrong: dict[str, str], said: str, world: World, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        main(options(world, tmp_path / "run", **wrong))
    assert list(tmp_path.iterdir()) == []


def test_several_bases_have_a_folder_each(world: World, tmp_path: Path) -> None:
    other = str(tiny_folder(tmp_path / "y", "distilbert", layers=2))
    text = TextSource(world.fit, held_out=world.test)
    data = labelled_texts([world.model_x, other], text=text, max_length=60)
    jobs = plan(data, [0], ["layers:all"])
    assert [(job.place, str(job.folder)) for job in jobs] == [
        *((0, f"x/layers-{count}/seed-0") for count in (1, 2, 3)),
        *((1, f"y/layers-{count}/seed-0") for count in (1, 2)),
    ]
    twice = labelled_texts([world.model_x, world.model_x], text=text, max_length=60)
    with pytest.raises(ValueError, match="of different names, each for a folder"):
        plan(twice, [0], ["none"])
    data.frozen[0].quantised = "bitsandbytes"
    with pytest.raises(ValueError, match=r"are quantised \(bitsandbytes\). Name the model in full precision"):
        plan(data, [0], ["none"])


def row(variant: str, seed: int, accuracy: float) -> dict[str, Any]:
    kind, _, count = variant.partition("-")
    return {
        "variant": variant, "kind": kind, "count": int(count or 0), "seed": seed, "accuracy": accuracy, "loss": 0.5,
        "seconds": 2.0, "trained": 10, "layers": 4, "n_texts": 20, "score": accuracy, "score_name": "accuracy",
    }  # fmt: skip


def test_the_summary_is_over_seeds() -> None:
    rows = [row("none", 0, 0.8), row("none", 1, 0.6), row("bottom-1", 0, 0.5)]
    none, bottom = summarise(rows)
    assert (none["accuracy"], none["accuracy_sd"]) == pytest.approx((0.7, 0.1 * 2**0.5))
    assert bottom["accuracy_sd"] is None
    assert finetuning_table(rows, 0.5).columns[0].cells[2:] == ["majority class"]


def test_many_counts_make_a_curve_and_few_stand_side_by_side() -> None:
    wu = [row(name, seed, 0.5) for name in ("none", "top-2", "bottom-2", "bottom-3") for seed in (0, 1)]
    (beside,) = finetuning_figure(wu, 0.5).axes
    assert [label.get_text() for label in beside.get_xticklabels()] == ["none", "top 2", "bottom 2", "bottom 3"]
    curve = [row(f"bottom-{count}", 0, 0.5) for count in range(5)] + [row("none", 0, 0.75)]
    (figure,) = finetuning_figure(curve, 0.5).axes
    assert list(figure.get_xticks()) == [-1, 0, 1, 2, 3, 4]
    (mean,) = [line for line in figure.lines if len(line.get_xdata()) == 6]
    assert list(mean.get_ydata()) == [75, 50, 50, 50, 50, 50]
    shortened = [row(f"layers-{count}", 0, 0.5) for count in range(1, 4)] + [row("none", 0, 0.75)]
    (figure,) = finetuning_figure(shortened, 0.5).axes
    assert list(figure.get_xticks()) == [1, 2, 3, 4]  # the whole model has four
    assert len(finetuning_figure([*curve, *shortened, row("top-1", 0, 0.5)], 0.5).axes) == 3


def test_a_classifier_is_not_measured_on_its_own_texts(done: Path, world: World) -> None:
    trained = set(labelled_texts(world.model_x, text=TextSource(world.fit, held_out=world.test)).texts.fit["text"])
    other = TextSource(world.fit, test_share=0.5, seed=1)
    drawn = labelled_texts(world.model_x, text=other).texts.test["text"][:]
    for folder in ("none/seed-0", "layers-1/seed-1"):
        texts = labelled_texts(str(done / folder), text=other).texts
        assert texts.test["text"][:] == [text for text in drawn if text not in trained]
        assert 0 < len(texts.test) < len(drawn)
