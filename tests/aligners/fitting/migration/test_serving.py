"""What a migration leaves gives the same vectors in every form."""

import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from aligners.errors import UserError
from aligners.fitting.migration import serving, vector_files
from aligners.fitting.migration.serving import check_outputs, map_index, save_map
from aligners.fitting.migration.vector_maps import Pairs, VectorMap, fit_vectors

DRAW = np.random.default_rng(0)
ROWS = DRAW.normal(size=(301, 8)).astype(np.float32)


@pytest.fixture(params=[True, False], ids=["normalised", "raw"])
def fitted(request: pytest.FixtureRequest) -> VectorMap:
    y = ROWS @ DRAW.normal(size=(8, 5)) + DRAW.normal(size=5)
    pairs = Pairs(ROWS, y.astype(np.float32))
    return fit_vectors("ridge", pairs.at(slice(200)), pairs.at(slice(200, None)), normalised=request.param)


def plain(fitted: VectorMap) -> np.ndarray:
    mapped = ROWS.astype(float) @ fitted.weight.double().numpy() + fitted.offset.double().numpy()
    if fitted.normalised:
        mapped /= np.linalg.norm(mapped, axis=1, keepdims=True)
    return mapped


def test_numpy_function_safetensors_and_onnx_give_the_same_vectors(fitted: VectorMap, tmp_path: Path) -> None:
    expected = plain(fitted)
    save_map(fitted, tmp_path, "queries", onnx=True)
    np.testing.assert_allclose(fitted.mapped(ROWS), expected, atol=1e-6 * np.abs(expected).max())
    migrate = runpy.run_path(str(tmp_path / "migrate_map.py"))["migrate"]
    np.testing.assert_allclose(migrate(ROWS), expected, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(migrate(ROWS[3]), expected[3], atol=1e-6 * np.abs(expected).max())
    tensors = load_file(tmp_path / "map.safetensors")
    np.testing.assert_array_equal(tensors["weight"], fitted.weight.numpy())
    reference = pytest.importorskip("onnx.reference")
    run = reference.ReferenceEvaluator(str(tmp_path / "map.onnx"))
    for rows in (ROWS, ROWS[:1]):
        (found,) = run.run(None, {"vectors": rows})
        np.testing.assert_allclose(found, expected[: len(rows)], atol=2e-6 * np.abs(expected).max())


def test_an_index_is_mapped_a_part_at_a_time(
    fitted: VectorMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (serving, vector_files):
        monkeypatch.setattr(module, "AT_ONCE", 64)
    np.save(tmp_path / "index.npy", ROWS)
    names = [f"d{place}" for place in range(len(ROWS))]
    pd.DataFrame({"id": names, "v": [row.tolist() for row in ROWS]}).to_parquet(tmp_path / "index.parquet")
    expected = plain(fitted)
    for ending in ("npy", "parquet"):
        folder = tmp_path / ending
        files = map_index(fitted, tmp_path / f"index.{ending}", folder, ["npy", "parquet"])
        assert [file.name for file in files] == ["mapped.npy", "mapped.parquet"]
        np.testing.assert_allclose(np.load(files[0]), expected, atol=1e-5)
        table = pd.read_parquet(files[1])
        np.testing.assert_allclose(np.stack(table["vector"]), expected, atol=1e-5)
        assert ("id" in table) == (ending == "parquet")
    assert list(table["id"]) == names


def test_faiss_finds_what_the_cosine_finds(fitted: VectorMap, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    np.save(tmp_path / "index.npy", ROWS)
    (file,) = map_index(fitted, tmp_path / "index.npy", tmp_path, ["faiss"])
    mapped = plain(fitted)
    unit = (mapped / np.linalg.norm(mapped, axis=1, keepdims=True)).astype(np.float32)
    _, places = faiss.read_index(str(file)).search(unit, 1)
    assert (places[:, 0] == np.arange(len(ROWS))).all()


def test_a_file_is_whole_or_not_there(fitted: VectorMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "AT_ONCE", 64)
    bad = ROWS.copy()
    bad[250, 1] = np.nan
    np.save(tmp_path / "index.npy", bad)
    (tmp_path / "mapped.npy").write_bytes(b"before")
    with pytest.raises(UserError, match="to be finite"):
        map_index(fitted, tmp_path / "index.npy", tmp_path, ["npy"])
    assert (tmp_path / "mapped.npy").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.npy", "mapped.npy"]
    np.save(tmp_path / "index.npy", ROWS[:, :3])
    with pytest.raises(UserError, match="vectors of width 8"):
        map_index(fitted, tmp_path / "index.npy", tmp_path, ["parquet"])
    with pytest.raises(UserError, match="`outputs`"):
        check_outputs(["csv"])


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.errors.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'aligners\[index\]'"):
        check_outputs(["faiss"])
