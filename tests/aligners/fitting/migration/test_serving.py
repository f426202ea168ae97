"""A mapped index holds what the map makes of its vectors, in every form."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from aligners.errors import UserError
from aligners.fitting.migration import serving, vector_files
from aligners.fitting.migration.search import Similarity
from aligners.fitting.migration.serving import check_outputs, count, map_index, mapped_parts
from aligners.fitting.migration.vector_maps import MAPS, NETWORKS, Pairs, VectorMap, fit_vectors

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


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_faiss_finds_what_a_whole_sort_finds(fitted: VectorMap, tmp_path: Path, similarity: Similarity) -> None:
    faiss = pytest.importorskip("faiss")
    np.save(tmp_path / "index.npy", ROWS)
    (file,) = map_index(fitted, tmp_path / "index.npy", tmp_path, ["faiss"], similarity=similarity)
    mapped = plain(fitted)
    asked = mapped[:20] + 0.1 * DRAW.normal(size=(20, 5))
    similar = asked @ mapped.T
    if similarity == "cosine":
        similar /= np.linalg.norm(mapped, axis=1)
    _, places = faiss.read_index(str(file)).search(asked.astype(np.float32), 10)
    np.testing.assert_array_equal(places, np.argsort(-similar, 1)[:, :10])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_map_an_index_as_they_map_vectors(name: str, tmp_path: Path) -> None:
    bank = MAPS[name](1, 8, 8)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    network = VectorMap(name, bank, normalised=False)
    np.save(tmp_path / "index.npy", ROWS.astype(np.float16))
    files = map_index(network, tmp_path / "index.npy", tmp_path, ["npy", "parquet", "onnx"])
    expected = network.mapped(ROWS.astype(np.float16))
    np.testing.assert_allclose(np.load(files[0]), expected, atol=1e-6)
    np.testing.assert_allclose(np.stack(pd.read_parquet(files[1])["vector"]), expected, atol=1e-6)
    assert len(files) == 2


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


def test_an_index_of_any_size_is_read_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB that take no place on the disk: the first parts come without the rest."""
    monkeypatch.setattr(serving, "AT_ONCE", 64)
    made = fit_vectors("procrustes", Pairs(ROWS, ROWS), Pairs(ROWS, ROWS), normalised=False)
    rows = 2**31
    path = tmp_path / "index.npy"
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, 8)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 32 * rows)
    assert count(path) == rows
    parts = mapped_parts(made, path, rows)
    for _ in range(3):
        mapped, ids = next(parts)
        assert ids is None
        np.testing.assert_allclose(mapped, np.tile(made.offset.numpy(), (64, 1)))


def test_float16_that_overflowed_is_refused(fitted: VectorMap, tmp_path: Path) -> None:
    with np.errstate(over="ignore"):
        np.save(tmp_path / "index.npy", (1e5 * ROWS).astype(np.float16))
    with pytest.raises(UserError, match="float16 ends at 65,504"):
        map_index(fitted, tmp_path / "index.npy", tmp_path, ["npy"])
    assert not (tmp_path / "mapped.npy").exists()


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.errors.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'aligners\[index\]'"):
        check_outputs(["faiss"])
