"""What runs have trained, shared: folders, the Hub, the command, and the card."""

import json
import math
import shutil
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World

import aligners
from aligners import SharedMaps, SharedProbes, SharedUniverse
from aligners.cli.table import evaluate
from aligners.errors import UserError
from aligners.files.shared_folder import sha256
from aligners.fitting.saved_bank import load_bank
from aligners.models.loading.load_models import load_frozen
from aligners.probing.probe_bank import Bank, ModelLayer, Variant
from aligners.probing.probes import EdgeProbes
from aligners.probing.storing import load_banks, save_banks
from aligners.reports.finished_runs import finished_run
from aligners.reports.names import four_digits
from aligners.reports.sharing.public_names import renamed
from aligners.reports.sharing.share_run import shared_from_run


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two closed forms, fitted and measured."""
    folder = tmp_path_factory.mktemp("sharing") / "run"
    given = {
        "data.model_x": world.model_x, "data.model_y": world.model_y, "data.text.source": world.fit,
        "data.text.held_out": world.test, "data.max_length": "60", "data.sites": "1,3", "trainer.accelerator": "cpu",
        "trainer.logger": "false", "closed_form": "[linear,permutation]", "run": str(folder),
    }  # fmt: skip
    evaluate(["inject", *(word for name, value in given.items() for word in (f"--{name}", value))])
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the Hub: what is uploaded lies in a folder of its name, and can be fetched from there."""
    place = tmp_path / "hub"

    class Api:
        def __init__(self, token: str | None = None) -> None:
            self.token = token

        def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> SimpleNamespace:
            (place / repo_id).mkdir(parents=True, exist_ok=exist_ok)
            (place / repo_id / "private").write_text(str(private))
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> str:
            shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)
            return f"https://huggingface.co/{repo_id}/commit/1"

    def download(repo_id: str, **options: Any) -> str:
        if not (place / repo_id).is_dir():
            raise FileNotFoundError(f"404: no repository {repo_id}\nwith more lines")
        return str(place / repo_id)

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return place


@pytest.fixture(scope="module")
def shared(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "maps"
    shared_from_run(run).save_pretrained(folder)
    return folder


def test_maps_come_back_as_they_were(run: Path, shared: Path, world: World) -> None:
    before, found = load_bank(run / "aligners.safetensors"), SharedMaps.from_pretrained(shared, models=world[:2])
    x = torch.randn(2, 5, before.maps["0_1"]["linear"].d_x)
    for name, aligner in before.maps["0_1"].items():
        assert torch.equal(found.bank.maps["0_1"][name](x), aligner(x))
    assert found.bank.pairs == before.pairs
    assert found.bank.fitted is not None
    assert before.fitted is not None
    assert (found.bank.fitted.keys == before.fitted.keys).all()


def test_nothing_of_this_machine_is_in_a_shared_folder(shared: Path, run: Path, world: World, tmp_path: Path) -> None:
    texts = {path: path.read_bytes() for path in shared.rglob("*") if path.is_file()}
    assert {path.relative_to(shared).as_posix() for path in texts} >= {"model.safetensors", "config.json", "README.md"}
    here = str(Path(world.model_x).parent).encode()
    assert [path.name for path, content in texts.items() if here in content] == []
    assert renamed({"x": [str(shared), "no/such"]}, {}) == {"x": ["maps", "no/such"]}
    given = shared_from_run(run)
    assert isinstance(given, SharedMaps)
    given.bank.data_config.update(trust_remote_code=True, cache="/elsewhere")  # as somebody else could write them
    given.save_pretrained(tmp_path / "evil")
    found = load_bank(tmp_path / "evil")
    assert (found.data_config["trust_remote_code"], found.data_config["cache"]) == (False, None)


def test_other_models_are_refused_unless_it_is_declared_for_them(
    shared: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = str(tiny_folder(tmp_path / "other", seed=7))
    with pytest.raises(ValueError, match=r"belongs to, x \(fingerprint .*but got .*other .*other_models=True"):
        SharedMaps.from_pretrained(shared, models=[other, world.model_y])
    with pytest.raises(ValueError, match="Name them in this order"):
        SharedMaps.from_pretrained(shared, models=[world.model_y, world.model_x])
    loaded = [load_frozen(other, tokenizer=False), load_frozen(world.model_y, tokenizer=False)]
    declared = SharedMaps.from_pretrained(shared, models=loaded, other_models=True)
    declared.save_pretrained(tmp_path / "declared")
    assert "but trained on x (fingerprint" in caplog.text
    assert "Declared for " in (tmp_path / "declared" / "README.md").read_text()
    again = SharedMaps.from_pretrained(tmp_path / "declared", models=[other, world.model_y])
    assert [model["name"] for model in again.fitted_on_models] == ["x", "y"]
    assert again.bank.data["models"]["x"]["fingerprint"] == loaded[0].fingerprint


def refused(place: Path | str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_bank(place)


def test_a_damaged_folder_is_refused_and_nothing_in_it_is_unpickled(shared: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shared, tmp_path / "copy")
    weights, config = copy / "model.safetensors", copy / "config.json"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused(copy, r"is damaged: it is not the file that config\.json describes")
    with pytest.raises(ValueError, match="is damaged"):
        SharedMaps.from_pretrained(copy)
    torch.save({"alignment": {}}, weights)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sha256": sha256(weights)}))
    refused(copy, "it cannot be read as one: Error while deserializing header")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"format": 2}))
    refused(copy, "its format, 2, is later than 1. Update aligners")
    shutil.copy(shared / "config.json", config)
    weights.unlink()
    refused(copy, r"it has no model\.safetensors")
    config.write_text("{")
    refused(copy, r"its config\.json cannot be read")


def test_a_folder_of_something_else_is_refused(run: Path, world: World, shared: Path, tmp_path: Path) -> None:
    refused(world.model_x, r"its config\.json describes something else")
    refused(run, r"it is that of a run\. Name its file .*aligners\.safetensors")
    refused(tmp_path, r"it has no config\.json")
    refused("runs/aligners.ckpt", r"checkpoint at runs/aligners\.ckpt, but there is no such file")  # no name on the Hub
    with pytest.raises(ValueError, match=r"to hold universe, but it holds maps\. Load it with SharedMaps"):
        SharedUniverse.from_pretrained(shared)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="`folder` to be a new or empty folder"):
        shared_from_run(run).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_is_uploaded_is_fetched_by_its_name(
    run: Path, hub: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    evaluate(["share", str(run), str(tmp_path / "out"), "--push", "me/maps"])
    assert "Uploaded: https://huggingface.co/me/maps/commit/1\n" in capsys.readouterr().out
    assert (hub / "me" / "maps" / "private").read_text() == "True"
    found = SharedMaps.from_pretrained("me/maps", models=world[:2])
    assert load_bank("me/maps").pairs == load_bank("me/maps@main").pairs == found.bank.pairs
    card = hub / "me" / "maps" / "README.md"
    assert ModelCard.load(card).data.library_name == "aligners"
    assert '"me/maps"' in card.read_text()
    refused("me/none", r"the Hub does not give it: 404: no repository me/none$")
    with pytest.raises(ValueError, match="`push` to be a name on the Hub"):
        evaluate(["share", str(run), str(tmp_path / "again"), "--push", "maps"])

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("401: log in")

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", refuse)
    with pytest.raises(ValueError, match=r"is written, but it cannot be uploaded as me/maps: 401: log in"):
        evaluate(["share", str(run), str(tmp_path / "again"), "--push", "me/maps"])
    assert (tmp_path / "again" / "README.md").is_file()


def test_probes_are_shared_with_their_models(world: World, tmp_path: Path) -> None:
    variants = [Variant("model", 0), Variant("model", 1)]
    bank = Bank(EdgeProbes(variants, 4, labels=3, spans=1, several=False, projection=2, hidden=2),
                [ModelLayer("model", 0), ModelLayer("model", 1)])  # fmt: skip
    model = load_frozen(world.model_x, tokenizer=False).identity()
    banks = {f"pos, seed 0, {world.model_x}": (bank, {"model": world.model_x, "task": "pos"})}
    given = SharedProbes(banks, [model], {})
    given.rename({world.model_x: "x"})
    given.save_pretrained(tmp_path / "probes")
    found = SharedProbes.from_pretrained(tmp_path / "probes", models=[world.model_x])
    ((name, (again, about)),) = found.banks.items()
    assert (name, about["model"], about["task"]) == ("pos, seed 0, x", "x", "pos")
    for key, value in bank.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    assert list(load_banks(tmp_path / "probes")) == [name]
    with pytest.raises(ValueError, match=r"to be those that .* belongs to, x"):
        SharedProbes.from_pretrained(tmp_path / "probes", models=[world.model_y])
    save_banks(tmp_path / "run" / "probes.safetensors", {name: (bank, {})})
    with pytest.raises(ValueError, match="is that of a run"):
        load_banks(tmp_path / "run")


def test_the_card_says_what_was_measured_and_on_what(run: Path, tmp_path: Path) -> None:
    evaluate(["share", str(run), str(tmp_path / "out"), "--license", "mit"])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict()["license"] == "mit"
    text = card.text
    assert (
        f"On {TEST_TEXTS} held-out texts of `test.csv`, beside `fit.csv`, none of which was used for fitting." in text
    )
    assert "| X | `x` |" in text
    (row,) = (row for row in finished_run(run).report.rows if (row["method"], row["site_x"]) == ("linear", 1))
    fvu, low, high = (four_digits(row[f"fvu{end}"]) for end in ("", "_low", "_high"))
    assert f"| {fvu} [{low}, {high}] |" in text
    assert "| identity | floor | 1 |" in text
    assert "Brackets hold 95 % intervals." in text
    assert finished_run(run).report.sentences[0] in text
    for figure in ("fvu", "accuracy"):
        assert f"](figures/{figure}.png)" in text
        assert (tmp_path / "out" / "figures" / f"{figure}.png").stat().st_size > 1000


def test_a_card_says_how_to_install_the_package(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(["share", str(run), str(tmp_path / "unknown")])
    assert f"version {aligners.__version__} wrote this folder. In a clone of it, `pip install .`" in (
        tmp_path / "unknown" / "README.md"
    ).read_text().replace("\n", " ")
    about = Message()
    about["Version"], about["Project-URL"] = "9.8.7", "Repository, https://example.org/aligners"
    monkeypatch.setattr("aligners.reports.sharing.card.metadata", lambda _: about)
    evaluate(["share", str(run), str(tmp_path / "known")])
    card = (tmp_path / "known" / "README.md").read_text()
    assert "version 9.8.7" in card
    assert 'pip install "aligners @ git+https://example.org/aligners"' in card


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
    assert "none of which was used for fitting. Another 3 were dropped" in shared.card
    assert "\n- words: partly memorised words: on words" in shared.card
    assert "\n- poor: at some site no better than the mean" in shared.card
    assert "\n- Not injected, backward: it has no head.\n" in shared.card
    assert "words: at some site" not in shared.card
    assert "poor: partly" not in shared.card
    shared.write_card(finished._replace(report=replace(finished.report, rows=rows * 50)))
    assert "20 further rows are in `report.json`." in shared.card


def test_a_report_on_other_models_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("*.ckpt"))
    content = json.loads((other / "report.json").read_text())
    for model in content["meta"]["models"].values():
        model["fingerprint"] = "0" * 32
    (other / "report.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"`report` to be about the models .* is not about .*x, .*y"):
        shared_from_run(run, other)
    shutil.copy(run / "aligners.safetensors", tmp_path / "another.safetensors")
    (other / "config.yaml").write_text(f"checkpoints: [{tmp_path / 'another.safetensors'}]\n")
    with pytest.raises(ValueError, match=r"`report` about .*/aligners\..*, but .* measured .*/another\."):
        shared_from_run(run, other)


def test_an_edited_report_is_refused_and_no_number_that_json_lacks_is_shared(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("*.ckpt"))
    content = json.loads((other / "report.json").read_text())
    content["rows"][0]["loss"] = math.nan
    (other / "report.json").write_text(json.dumps(content))
    evaluate(["share", str(other), str(tmp_path / "nan")])
    assert "NaN" not in (tmp_path / "nan" / "report.json").read_text()
    content["rows"][0] |= {"loss": "much", "fvu": [], "model_x": None}
    (other / "report.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="It was edited, or another version wrote it"):
        evaluate(["share", str(other), str(tmp_path / "edited")])
    assert not (tmp_path / "edited").exists()


def test_names_for_others(run: Path, tmp_path: Path) -> None:
    evaluate(["share", str(run), str(tmp_path / "out"), "--names", "[me/one, me/two]"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [model["name"] for model in config["models"]] == ["me/one", "me/two"]
    assert (config["data"]["model_x"], config["data"]["text"]["source"]) == ("me/one", "fit.csv")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict()["base_model"] == ["me/one", "me/two"]
    with pytest.raises(ValueError, match="`names` to have one name for each of the 2 models"):
        shared_from_run(run, names=["me/one"])


def test_a_card_without_a_report_says_so_and_a_run_that_keeps_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`run` to hold something to share, one of universe\..*, .* holds none"):
        evaluate(["share", str(tmp_path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    shutil.copy(run / "aligners.safetensors", tmp_path / "aligners.ckpt")  # as the version before called it
    given = shared_from_run(tmp_path)
    assert "Nothing: no report came with it." in given.card
    assert given.files == {}


def test_a_shared_folder_is_shared_again_for_others(shared: Path, world: World, tmp_path: Path) -> None:
    evaluate(["share", str(shared), str(tmp_path / "two"), "--models", f"[{world.model_y}, {world.model_x}]"])
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert [model["name"] for model in config["fitted_on_models"]] == ["x", "y"]
    assert (tmp_path / "two" / "figures" / "fvu.png").is_file()


@pytest.mark.parametrize(
    "name", ["README.md", "report.json", "figures/penalty.png", "config.json", "model.safetensors"]
)
def test_links_out_of_a_shared_folder_are_not_followed(shared: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(shared, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    secret = tmp_path / "secret"
    secret.write_text("mine alone")
    (folder / name).symlink_to(secret)
    with pytest.raises(UserError, match=f"{name} leads to {secret}"):
        evaluate(["share", str(folder), str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()


def test_links_of_a_run_are_not_published(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(run, folder)
    image = next(folder.glob("*.png"))
    image.unlink()
    image.symlink_to(next(run.glob("*.png")))
    with pytest.raises(UserError, match="leads to"):
        evaluate(["share", str(folder), str(tmp_path / "again")])
    with pytest.raises(UserError, match="leads to"):
        finished_run(folder).figures  # noqa: B018


def test_files_of_the_hubs_cache_are_links_within_it(shared: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "c0"
    shutil.copytree(shared, snapshot)
    (repository / "blobs").mkdir()
    for path in [path for path in snapshot.rglob("*") if path.is_file()]:
        blob = repository / "blobs" / sha256(path)
        path.rename(blob)
        path.symlink_to(blob)
    assert SharedMaps.from_pretrained(snapshot).card == (shared / "README.md").read_text()
