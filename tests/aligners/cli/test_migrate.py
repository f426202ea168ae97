"""`train.py migrate` as users type it, on models and on vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.aligners.models.test_sentence_pipeline import pipeline
from tests.kinds import WORDS

from aligners.cli.table import evaluate, train
from aligners.errors import UserError
from aligners.fitting.migration import vector_maps
from aligners.fitting.migration.map_files import load_map


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = []
    for place in range(700):
        words = draw.choice(list(WORDS), draw.integers(3, 12))
        lines.append(json.dumps({"_id": f"t{place}", "text": " ".join(words), "domain": "ab"[place % 2]}))
    path.write_text("\n".join(lines))
    return path


def test_models_are_embedded_once_and_an_index_is_mapped(tmp_path: Path, texts: Path) -> None:
    old = pipeline(tmp_path / "old", normalised=True)
    new = pipeline(tmp_path / "new", "cls", architecture="mpnet")
    index = np.random.default_rng(1).normal(size=(50, 9)).astype(np.float32)
    np.save(tmp_path / "index.npy", index)
    run = tmp_path / "run"
    words = [
        "--old",
        f"{old}:width=9",
        "--new",
        str(new),
        "--texts",
        str(texts),
        "--index",
        str(tmp_path / "index.npy"),
    ]
    train(["migrate", *words, "--pairs", "200", "--held_out_domains", "b", "--price_per_hour", "3", "--run", str(run)])
    content = json.loads((run / "migration.json").read_text())
    meta = content["meta"]
    assert meta["old"]["width"] == 9
    assert meta["new"]["width"] == 16
    assert meta["index_size"] == 50
    assert meta["price"] == pytest.approx(3 * meta["hours"])
    assert meta["hours"] == pytest.approx(50 / meta["new"]["texts_a_second"] / 3600)
    assert content["findings"][0].startswith("Switching by a map is")
    assert {row["domain"] for row in content["rows"]} == {"all", "a", "b"}
    mapped = np.load(run / "mapped.npy")
    held = np.load(run / "maps" / "documents" / "map.npz")
    np.testing.assert_allclose(mapped, index @ held["weight"] + held["offset"], atol=1e-5)
    assert (run / "maps" / "queries" / "migrate_map.py").is_file()

    again = tmp_path / "again"
    sides = ["--old", str(run / "vectors" / "old"), "--new", str(run / "vectors" / "new")]
    train(["migrate", *sides, "--texts", str(texts), "--pairs", "200", "--held_out_domains", "b", "--run", str(again)])
    rows = json.loads((again / "migration.json").read_text())["rows"]
    assert rows == content["rows"]
    evaluate(["show", str(again), "--open", "false"])


def test_a_network_is_served_and_the_report_says_by_what(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_maps, "STEPS", 10)
    draw = np.random.default_rng(0)
    old = draw.normal(size=(700, 6)).astype(np.float32)
    np.save(tmp_path / "old.npy", old)
    np.save(tmp_path / "new.npy", np.tanh(old @ draw.normal(size=(6, 5))).astype(np.float32))
    sides = [
        "--old",
        str(tmp_path / "old.npy"),
        "--new",
        str(tmp_path / "new.npy"),
        "--index",
        str(tmp_path / "old.npy"),
    ]
    run = tmp_path / "run"
    train(["migrate", *sides, "--texts", str(texts), "--pairs", "200", "--maps", "mlp", "--run", str(run)])
    said = " ".join(json.loads((run / "migration.json").read_text())["findings"])
    for route in ("queries", "documents"):
        assert f"The map of {route} (mlp) has no migrate_map.py" in said
        assert [path.name for path in (run / "maps" / route).iterdir()] == ["map.safetensors"]
    loaded = load_map(run / "maps" / "documents")
    np.testing.assert_allclose(np.load(run / "mapped.npy"), loaded.mapped(old), atol=1e-6)


def test_what_is_missing_is_asked_for_before_anything_is_read(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(UserError, match="Expected `old`, but got none"):
        train(["migrate", "--new", "x", "--texts", str(texts)])
    with pytest.raises(UserError, match="`outputs`"):
        train(["migrate", "--old", "x", "--new", "y", "--texts", str(texts), "--outputs", "csv"])
