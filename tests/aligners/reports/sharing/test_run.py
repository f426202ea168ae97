"""The command, what it takes out of a run's folder, and the card."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from aligners.cli.table import evaluate
from aligners.reports.finished import finished_run
from aligners.reports.sharing.pretrained import shared_from_run
from tests.world import TEST_TEXTS, World


def test_the_card_says_what_was_measured_and_on_what(run: Path, tmp_path: Path) -> None:
    evaluate(["share", str(run), str(tmp_path / "out"), "--license", "mit"])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict()["license"] == "mit"
    text = card.text
    assert f"On {TEST_TEXTS} held-out texts of `test.csv`, beside `fit.csv`, none of which was fitted on." in text
    assert "| X | `x` |" in text
    rows = json.loads((run / "report.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["method"], row["site_x"]) == ("linear", 1))
    assert f"| {row['fvu']:.3f} [{row['fvu_low']:.3f}, {row['fvu_high']:.3f}] |" in text
    assert "| identity | floor | 1 |" in text
    assert "An interval in brackets is of 95 %." in text
    (finding,) = json.loads((run / "report.json").read_text())["findings"][:1]
    assert finding in text
    for figure in ("fvu", "accuracy"):
        assert f"](figures/{figure}.png)" in text
        assert (tmp_path / "out" / "figures" / f"{figure}.png").stat().st_size > 1000


def test_a_card_without_a_report_says_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(run / "aligners.ckpt", tmp_path / "run")
    evaluate(["share", str(tmp_path / "run"), str(tmp_path / "out")])
    assert "Nothing: no report came with it." in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "report.json").exists()


def test_what_a_card_says_of_its_numbers(run: Path) -> None:
    shared, finished = shared_from_run(run), finished_run(run)
    shared.write_card(finished._replace(kind="fit"))
    assert "Not held out" in shared.card
    rows = [
        {"role": "method", "method": "words", "fvu": 0.3, "fvu_seen": 0.2, "fvu_unseen": 0.5, "training": None},
        {"role": "method", "method": "poor", "fvu": 1.2, "fvu_seen": 1.2, "fvu_unseen": 1.3, "training": None},
    ]
    text = {**finished.report.meta["text"], "left_out": {"texts": 3}}
    meta = {"not_injected": {"backward": "it has no head"}, "text": text}
    shared.write_card(finished._replace(report=replace(finished.report, rows=rows, meta=meta)))
    assert "none of which was fitted on. Another 3 were dropped" in shared.card
    assert "\n- words: partly a vocabulary: on words" in shared.card
    assert "\n- poor: at some site no better than the mean" in shared.card
    assert "\n- Not injected, backward: it has no head.\n" in shared.card
    assert "words: at some site" not in shared.card
    assert "poor: partly" not in shared.card


def test_a_report_on_other_models_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("*.ckpt"))
    content = json.loads((other / "report.json").read_text())
    for model in content["meta"]["models"].values():
        model["fingerprint"] = "0" * 32
    (other / "report.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"`report` to be about the models .* is not about .*x, .*y"):
        shared_from_run(run, other)
    shutil.copy(run / "aligners.ckpt", tmp_path / "another.ckpt")
    (other / "config.yaml").write_text(f"checkpoints: [{tmp_path / 'another.ckpt'}]\n")
    with pytest.raises(ValueError, match=r"`report` to be about .*aligners\.ckpt, but .* measured .*another\.ckpt"):
        shared_from_run(run, other)


def test_names_for_others(run: Path, world: World, tmp_path: Path) -> None:
    evaluate(["share", str(run), str(tmp_path / "out"), "--names", "[me/one, me/two]"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [model["name"] for model in config["models"]] == ["me/one", "me/two"]
    assert (config["data"]["model_x"], config["data"]["text"]["source"]) == ("me/one", "fit.csv")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict()["base_model"] == ["me/one", "me/two"]
    with pytest.raises(ValueError, match="`names` to have one name for each of the 2 models"):
        shared_from_run(run, names=["me/one"])


def test_a_run_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`run` to hold something to share, one of universe\.ckpt, .* holds none"):
        evaluate(["share", str(tmp_path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_command_uploads_and_says_what_went_wrong(
    run: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(["share", str(run), str(tmp_path / "out"), "--push", "me/maps"])
    assert "Uploaded: https://huggingface.co/me/maps" in capsys.readouterr().out
    assert (hub / "me" / "maps" / "private").read_text() == "True"
    with pytest.raises(ValueError, match="`push` to be a name on the Hub"):
        evaluate(["share", str(run), str(tmp_path / "again"), "--push", "maps"])

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("401: log in")

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", refuse)
    with pytest.raises(ValueError, match=r"is written, but it cannot be uploaded as me/maps: 401: log in"):
        evaluate(["share", str(run), str(tmp_path / "again"), "--push", "me/maps"])
    assert (tmp_path / "again" / "README.md").is_file()


def test_a_shared_folder_is_shared_again_for_others(run: Path, world: World, tmp_path: Path) -> None:
    evaluate(["share", str(run), str(tmp_path / "one")])
    evaluate(["share", str(tmp_path / "one"), str(tmp_path / "two"), "--models", f"[{world.model_y}, {world.model_x}]"])
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert [model["name"] for model in config["fitted_on_models"]] == ["x", "y"]
    assert (tmp_path / "two" / "figures" / "fvu.png").is_file()
