"""Every kind of map gives the same vectors in every form in which it is written."""

import runpy
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.special import erf

from aligners.errors import UserError
from aligners.fitting.migration.map_files import load_map, not_in_numpy, save_map
from aligners.fitting.migration.vector_maps import MAPS, NETWORKS, Pairs, VectorMap, fit_vectors

DRAW = np.random.default_rng(0)
WIDTH = 8
ROWS = DRAW.normal(1, 2, (301, WIDTH)).astype(np.float32)
AFFINE = [name for name in MAPS if name not in NETWORKS]


def fitted(name: str, d_y: int = WIDTH, *, normalised: bool = False) -> VectorMap:
    """Fit a map; weights of networks are then moved, as by training."""
    y = ROWS @ DRAW.normal(size=(WIDTH, d_y)) + DRAW.normal(size=d_y)
    pairs = Pairs(ROWS, y.astype(np.float32))
    if name not in NETWORKS:
        return fit_vectors(name, pairs.at(slice(200)), pairs.at(slice(200, None)), normalised=normalised)
    bank = MAPS[name](1, WIDTH, d_y)
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        bank.scaling.mean_x += 0.5
        bank.scaling.scale_y *= 3
    return VectorMap(name, bank, normalised=normalised)


def plain(made: VectorMap, folder: Path) -> np.ndarray:
    """Map `ROWS` by the tensors of the file in float64: NumPy for affine maps and MLPs, the bank itself for INNs."""
    held = {name: tensor.astype(float) for name, tensor in load_file(folder / "map.safetensors").items()}
    if made.name == "mlp":
        mapped = plain_mlp(held)
    elif made.name == "inn":
        assert made.bank is not None
        mapped = made.bank.double()(torch.from_numpy(ROWS[None]).double())[0].numpy()
        made.bank.float()
    else:
        mapped = ROWS @ held["weight"] + held["offset"]
    if made.normalised:
        mapped = mapped / np.linalg.norm(mapped, axis=1, keepdims=True)
    return mapped


def plain_mlp(held: dict[str, np.ndarray]) -> np.ndarray:
    bank = {name.removeprefix("bank."): tensor[0] for name, tensor in held.items()}
    x = (ROWS - bank["scaling.mean_x"]) / bank["scaling.scale_x"]
    hidden = x
    for layer in range(4):
        if layer:
            hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        hidden = hidden @ bank[f"layers.{layer}.weight"] + bank[f"layers.{layer}.bias"]
    return (hidden + x @ bank["skip"]) * bank["scaling.scale_y"] + bank["scaling.mean_y"]


def agree(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("normalised", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("name", MAPS)
def test_what_is_loaded_maps_as_what_was_saved(name: str, normalised: bool, tmp_path: Path) -> None:
    made = fitted(name, normalised=normalised)
    save_map(made, tmp_path, "queries")
    expected = plain(made, tmp_path)
    agree(made.mapped(ROWS), expected)
    for place in (tmp_path, str(tmp_path / "map.safetensors")):
        loaded = load_map(place)
        assert (loaded.name, loaded.normalised) == (name, normalised)
        np.testing.assert_array_equal(loaded.mapped(ROWS), made.mapped(ROWS))
    # a network is a module that others can trace
    traced = torch.export.export(loaded, (torch.from_numpy(ROWS),)).module()
    agree(traced(torch.from_numpy(ROWS)).detach().numpy(), expected)


@pytest.mark.parametrize("d_y", [5, 8, 11])
@pytest.mark.parametrize("name", AFFINE)
def test_affine_maps_are_functions_of_numpy(name: str, d_y: int, tmp_path: Path) -> None:
    made = fitted(name, d_y, normalised=d_y == 5)
    save_map(made, tmp_path, "queries")
    migrate = runpy.run_path(str(tmp_path / "migrate_map.py"))["migrate"]
    expected = plain(made, tmp_path)
    agree(migrate(ROWS), expected)
    agree(migrate(ROWS[3]), expected[3])
    agree(migrate(ROWS.astype(np.float16)), made.mapped(ROWS.astype(np.float16)))
    assert migrate(ROWS.astype(np.float64)).dtype == np.float32
    np.testing.assert_array_equal(load_map(tmp_path).mapped(ROWS), made.mapped(ROWS))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_no_function_of_numpy_and_that_is_said(name: str, tmp_path: Path) -> None:
    save_map(fitted(name), tmp_path, "queries")
    assert [path.name for path in tmp_path.iterdir()] == ["map.safetensors"]
    (said,) = not_in_numpy({"queries": name, "documents": "ridge"}, onnx=False)
    assert f"The map of queries ({name}) has no migrate_map.py" in said
    assert "`--outputs onnx`" in said
    assert "Serve it by map.onnx" in not_in_numpy({"queries": name}, onnx=True)[0]
    assert not_in_numpy(dict.fromkeys(("queries", "documents"), "procrustes"), onnx=False) == []


# the graph of an INN takes half a minute to make
KINDS = [pytest.param(name, marks=[pytest.mark.slow] if name == "inn" else []) for name in ("ridge", "mlp", "inn")]


@pytest.mark.parametrize("name", KINDS)
def test_onnx_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    made = fitted(name, normalised=True)
    save_map(made, tmp_path, "queries", onnx=True)
    expected = plain(made, tmp_path)
    run = reference.ReferenceEvaluator(str(tmp_path / "map.onnx"))
    for rows in (ROWS, ROWS[:1]):
        (found,) = run.run(None, {"vectors": rows})
        agree(found, expected[: len(rows)])


def test_what_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        load_map(tmp_path)
    save_map(fitted("ridge"), tmp_path, "queries")
    path = tmp_path / "map.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        load_map(tmp_path)
    path.write_text("no map at all")
    with pytest.raises(UserError, match=r"to be a map of `train\.py migrate`"):
        load_map(tmp_path)
