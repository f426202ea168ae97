"""`train.py carry` on tiny models: one whose units are permuted, where the truth is known, and one of another kind."""

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.aligners.probing.artefacts.made import draw
from tests.tiny import tiny_folder, tiny_tokenizer
from tests.world import World, read_texts

from aligners.api import Direction, Head, load, read_artefacts, states, write_artefact
from aligners.cli.table import train
from aligners.datamodules.text.labels import places_of
from aligners.maps.linear import Ridge
from aligners.probing.artefacts import carrying
from aligners.probing.artefacts.kinds import Artefact

WIDTH, SITE = 16, 2


@pytest.fixture(scope="module")
def permuted(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.Tensor]:
    """The old model with the units of its residual stream in another order: the same function, other coordinates."""
    folder = tmp_path_factory.mktemp("permuted") / "model"
    shutil.copytree(world.model_x, folder)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
    weights = {}
    for name, value in load_file(folder / "model.safetensors").items():
        inner = any(part in name for part in ("query", "key", "value", "intermediate"))
        value = value[order] if value.shape[0] == WIDTH and not inner and "classifier" not in name else value
        reads = value.ndim == 2 and value.shape[1] == WIDTH and "attention.output" not in name
        weights[name] = (value[:, order] if reads and "classifier" not in name else value).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder), order


def owned(world: World, folder: Path, **more: Any) -> list[Artefact]:
    """A head of mean rows that reads whether a text has a good word, and a direction of tokens."""
    texts, labels = read_texts(world.fit)
    rows = states(world.model_x, texts, SITE, rows="mean", max_length=64)
    y = torch.tensor([float(label) for label in labels]) * 2 - 1
    weight = torch.linalg.lstsq((rows - rows.mean(0)).T @ (rows - rows.mean(0)) + torch.eye(WIDTH), rows.T @ y).solution
    told = {"model": world.model_x, "fingerprint": load(world.model_x).fingerprint, "site": SITE}
    made: list[Artefact] = [
        Head.of(weight, -(rows @ weight).mean(), name="good", rows="mean", classes=["0", "1"], **{**told, **more}),
        Direction({"vector": draw(WIDTH)}, {"name": "some", **told}),
    ]
    for artefact in made:
        write_artefact(artefact, folder / artefact.name)
    return made


def carried(world: World, folder: Path, new: str, *more: str, old: str | None = None) -> Any:
    """Run the command; its report."""
    words = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "64"]
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    models = ["--data.model_x", old or world.model_x, "--data.model_y", new]
    train(["carry", "--artefacts", str(folder), *models, *words, *quiet, "--run", str(folder.parent / "run"), *more])
    return json.loads((folder.parent / "run" / "carrying.json").read_text())


def test_a_permuted_model_reads_as_the_old_one_did(
    world: World, permuted: tuple[str, torch.Tensor], tmp_path: Path
) -> None:
    new, order = permuted
    mine = owned(world, tmp_path / "mine", score={"metric": "auroc", "value": 0.9, "n": 500})
    report = carried(world, tmp_path / "mine", new)
    texts = read_texts(world.test)[0]
    for artefact, row in zip(mine, report["rows"], strict=True):
        (again,) = read_artefacts(tmp_path / "run" / "artefacts" / artefact.name)
        assert (again.about["model"], again.about["site"], row["verdict"]) == (new, SITE, "carry")
        before, after = (states(m, texts, SITE, rows=artefact.rows, max_length=64) for m in (world.model_x, new))
        torch.testing.assert_close(after, before[:, order], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again.answers(after), artefact.answers(before), rtol=1e-2, atol=5e-3)
        assert row["fidelity"] > 0.999 > 0.9 > row["stale_fidelity"]
        card = (tmp_path / "run" / "artefacts" / artefact.name / "README.md").read_text()
        assert "Verdict: **carry**" in card
        assert f"reads {new} at site 2" in card
    # where states hardly vary, the map is as its ridge has it: a direction is compared by what it makes of states
    error = again.tensors["vector"] - mine[1].tensors["vector"][order]
    centred = after - after.mean(0)
    assert (centred @ error).norm() < 0.15 * (centred @ again.tensors["vector"]).norm()
    assert report["rows"][0]["predicted"] == pytest.approx(0.9, abs=1e-3)
    assert report["rows"][1]["predicted"] is None
    scores = {row["condition"]: row["auroc"] for row in report["scores"]}
    assert set(scores) == {"native", "stale", "carried", "trained anew", "shuffled map", "random direction"}
    assert scores["carried"] == pytest.approx(scores["native"], abs=0.01)
    assert scores["shuffled map"] != pytest.approx(scores["carried"], abs=1e-3)
    assert {row["artefact"] for row in report["scores"]} == {"good"}  # a token has no label of its own
    assert not {row["map"] for row in report["maps"] if row["chosen"]} & {"identity", "shift"}
    as_they_are = [(row["artefact"], row["fitted_on"]) for row in report["maps"] if row["map"] == "identity"]
    assert as_they_are == [("good", "mean"), ("some", "tokens")]  # once, though other maps of a mean see tokens, too
    assert (tmp_path / "run" / "carrying.png").is_file()


def sub_layer_dictionary(folder: Path, hook: str, model: str) -> None:
    """A dictionary of SAELens, random."""
    features = 20
    shapes = {"W_enc": (WIDTH, features), "W_dec": (features, WIDTH), "b_dec": (WIDTH,), "b_enc": (features,)}
    folder.mkdir(parents=True)
    tensors = {name: draw(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, folder / "sae_weights.safetensors")
    told = {"model_name": model, "hook_name": hook}
    cfg = {"architecture": "standard", "d_in": WIDTH, "d_sae": features, "metadata": told}
    (folder / "cfg.json").write_text(json.dumps(cfg))


@pytest.mark.parametrize(("hook", "component"), [("hook_mlp_out", "mlp"), ("attn.hook_out", "attention")])
def test_a_dictionary_of_a_sub_layer_reads_the_new_models(
    hook: str, component: Any, world: World, permuted: tuple[str, torch.Tensor], tmp_path: Path
) -> None:
    sub_layer_dictionary(tmp_path / "mine" / "sae", f"blocks.1.{hook}", world.model_x)
    report = carried(world, tmp_path / "mine", permuted[0])
    assert report["meta"]["component"] == component
    (before,), (after,) = (read_artefacts(tmp_path / place) for place in ("mine", "run/artefacts"))
    assert (after.site, after.about["component"]) == (2, component)
    assert after.cfg["metadata"]["hook_name"] == f"blocks.1.{hook}"
    old, new = load(world.model_x), load(permuted[0])
    inputs = old.tokenizer(read_texts(world.test)[0], padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].bool()
    reads = [model.front(inputs, [2], component)[0][mask] for model in (old, new)]
    expected = before.answers(reads[0])
    assert torch.corrcoef(torch.stack([after.answers(reads[1]).flatten(), expected.flatten()]))[0, 1] > 0.99
    stream = new.front(inputs, [2])[0][mask]
    assert torch.corrcoef(torch.stack([after.answers(stream).flatten(), expected.flatten()]))[0, 1] < 0.9


def test_artefacts_of_several_components_are_refused(world: World, tmp_path: Path) -> None:
    for hook in ("hook_mlp_out", "hook_resid_post"):
        sub_layer_dictionary(tmp_path / "mine" / hook, f"blocks.1.{hook}", world.model_x)
    with pytest.raises(ValueError, match=r"one component of the blocks, but .* reads mlp and .* reads residual"):
        carried(world, tmp_path / "mine", world.model_y)


def test_another_depth_width_and_tokenizer(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites of the new model are tried; a token's direction is carried on words."""
    new = str(tiny_folder(tmp_path / "gpt2", "gpt2", layers=2, width=24))
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None  # without special tokens
    tokenizer.save_pretrained(new)
    monkeypatch.setattr(carrying, "forward_map", lambda *_: Ridge(1, WIDTH, 24))  # to nothing
    owned(world, tmp_path / "mine")
    report = carried(world, tmp_path / "mine", new, "--maps", "[identity, ridge, procrustes]", "--labelled", "false")
    assert [row["stale_fidelity"] for row in report["rows"]] == [None, None]
    assert {row["site_y"] for row in report["maps"]} == {1, 2}
    assert [row["rows"] for row in report["rows"]] == ["mean", "words"]
    assert {row["map"] for row in report["maps"]} == {"ridge", "procrustes"}
    assert report["scores"] == []
    good, some = (read_artefacts(tmp_path / "run" / "artefacts" / name)[0] for name in ("good", "some"))
    assert (good.width, some.width) == (24, 24)
    assert not some.tensors["vector"].any()  # it is pushed forward, by a map of its own
    assert some.tensors["reading"].any()


def test_the_same_model_is_left_as_it_is(world: World, tmp_path: Path) -> None:
    score = {"metric": "auroc", "value": 0.9, "n": 500}
    owned(world, tmp_path / "mine", fingerprint=None, model="elsewhere", score=score)
    report = carried(world, tmp_path / "mine", world.model_x, "--data.sites", "2:2,2:3")
    assert {row["verdict"] for row in report["rows"]} == {"leave as it is"}
    assert {row["site_y"] for row in report["rows"]} == {2}
    assert "good says that it reads elsewhere" in " ".join(report["findings"])


def test_a_head_that_is_trained_anew_is_that_of_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows, labels = draw(300, WIDTH) * torch.linspace(0.5, 3, WIDTH) + 2, (draw(300, seed=4) > 0.3).long()
    rows[:, 0] += 2 * labels
    head = carrying.trained_anew(rows, labels, 2)
    scaled, logits = (rows - rows.mean(0)) / rows.std(0), head.answers(rows).diff(dim=1)[:, 0]
    fits = (
        linear_model.LogisticRegression(C=1 / (penalty * 300), tol=1e-10, max_iter=1000)
        for penalty in carrying.PENALTIES
    )
    expected = [
        torch.from_numpy(fit.fit(scaled.numpy(), labels.numpy()).decision_function(scaled.numpy())) for fit in fits
    ]
    assert min(float((logits - other).abs().max()) for other in expected) < 1e-2


WRONG: dict[str, tuple[dict[str, Any], Sequence[str], str]] = {
    "fingerprint": ({"fingerprint": "0" * 20}, (), r"that good reads, but it was .*x \(fingerprint 0{12}\)"),
    "site": ({"site": 7}, (), "between 0 and 3"),
    "maps": ({}, ("--maps", "[lineal]"), "Expected `maps` out of"),
    "no_site": ({}, ("--data.sites", "1:1"), "site 2"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_carried(wrong: str, world: World, tmp_path: Path) -> None:
    more, words, said = WRONG[wrong]
    owned(world, tmp_path / "mine", **more)
    with pytest.raises(ValueError, match=said):
        carried(world, tmp_path / "mine", world.model_y, *words)


def test_an_artefact_of_another_width(world: World, tmp_path: Path) -> None:
    write_artefact(Head.of(draw(1, 8), draw(1), model=world.model_x, site=1), tmp_path / "mine" / "other")
    with pytest.raises(ValueError, match="Expected artefacts of width 16"):
        carried(world, tmp_path / "mine", world.model_y)


def lengths(world: World, folder: Path) -> tuple[World, Artefact]:
    """The world with the length of each text beside its label, and a head that reads it."""
    files = {}
    for name in ("fit", "test"):
        texts, labels = read_texts(getattr(world, name))
        files[name] = str(folder / f"{name}.csv")
        with Path(files[name]).open("w", newline="") as file:
            rows = [[text, label, LENGTH[len(text.split()) > 7]] for text, label in zip(texts, labels, strict=True)]
            csv.writer(file).writerows([["text", "label", "size"], *rows])
    texts = read_texts(world.fit)[0]
    rows = states(world.model_x, texts, SITE, rows="mean", max_length=64)
    y = torch.tensor([2.0 * (len(text.split()) > 7) - 1 for text in texts])
    centred = rows - rows.mean(0)
    weight = torch.linalg.lstsq(centred.T @ centred + 0.01 * torch.eye(WIDTH), rows.T @ y).solution
    told = {"name": "size", "model": world.model_x, "site": SITE, "rows": "mean", "classes": LENGTH}
    return world._replace(**files), Head.of(weight, -(rows @ weight).mean(), **told)


LENGTH = ["short", "long"]


@pytest.mark.parametrize("column", ["size", None, "nowhere"])
def test_an_artefact_is_scored_against_labels_of_its_own_alone(
    column: str | None, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head for the length of a text beside one for good words: by the texts' one column of labels it was scored."""
    long, head = lengths(world, tmp_path)
    owned(world, tmp_path / "mine")
    write_artefact(replace(head, about={**head.about, "label_column": column}), tmp_path / "mine" / "size")
    columns = ["--data.text.text_columns", "[text]"]
    report = carried(long, tmp_path / "mine", long.model_y, "--maps", "[identity, ridge]", *columns)
    rows, scores = ({row["artefact"]: row for row in report[name]} for name in ("rows", "scores"))
    assert "good" in scores
    said = "".join(report["meta"]["data_cautions"])  # with which the report begins
    assert report["findings"][0].startswith(said)
    if column == "size":
        assert set(scores) == {"good", "size"}
        texts = read_texts(world.test)[0]
        answers = head.answers(states(world.model_x, texts, SITE, rows="mean", max_length=64))[:, 0]
        truth = torch.tensor([len(text.split()) > 7 for text in texts])
        ranks = torch.cat([answers[truth], answers[~truth]])
        right = (ranks[: int(truth.sum()), None] > ranks[None, int(truth.sum()) :]).double().mean()
        native = next(row for row in report["scores"] if (row["artefact"], row["condition"]) == ("size", "native"))
        assert native["auroc"] == pytest.approx(float(right), abs=1e-3)
        assert rows["size"]["own_score"] == pytest.approx(native["auroc"])  # with which its forecast begins
        assert rows["size"]["own_score_of"] == carrying.HELD_OUT
        assert rows["size"]["predicted"] is not None
        assert "Caution" not in said
    else:
        assert set(scores) == {"good"}
        assert rows["size"]["predicted"] is None  # what is no score is no forecast
        assert rows["size"]["fidelity"] is not None
        assert said.startswith("Caution: some artefacts are not known to read the labels of the texts of")
        reason = "its classes are short, long, those of the texts 0, 1" if column is None else "name nowhere"
        assert "size: " in said
        assert reason in said
        assert said in caplog.text
        card = (tmp_path / "run" / "artefacts" / "size" / "README.md").read_text()
        assert "labels of" not in card
        assert "Forecast" not in card


@pytest.mark.parametrize(
    ("classes", "names", "places"),
    [
        (["negative", "positive"], ["Positive", "negative"], [1, 0]),
        (["0", "1"], ["0", "1"], [0, 1]),
        (["short", "long"], ["0", "1"], None),
        (["0", "1"], ["short", "long"], None),
        (["short", "long"], ["negative", "positive"], None),
        (["a", "b", "c"], ["a", "b"], None),
    ],
)
def test_classes_are_the_same_by_their_names_alone(
    classes: list[str], names: list[str], places: list[int] | None
) -> None:
    assert places_of(classes, names) == places
