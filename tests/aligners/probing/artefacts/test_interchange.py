"""Control vectors of llama.cpp and tuned lenses go in and come out, and say the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.aligners.probing.artefacts.made import WIDTH, about, back_map, draw
from torch import nn

from aligners import maps as banks
from aligners.api import (
    Direction,
    read_artefacts,
    read_control_vector,
    read_tuned_lens,
    write_control_vector,
    write_tuned_lens,
)
from aligners.probing.artefacts.artefact_files import write_carried_control_vector

gguf = pytest.importorskip("gguf")


def _by_repeng(path: Path, directions: dict[int, np.ndarray], architecture: str = "controlvector") -> Path:
    """A file with the calls that repeng makes."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_control_vector_is_a_direction_for_each_block(tmp_path: Path) -> None:
    given = {layer: draw(WIDTH, seed=layer).numpy() for layer in (4, 1, 10)}
    found = read_control_vector(_by_repeng(tmp_path / "happy.gguf", given), model="my-model")
    assert [(one.name, one.site, one.about["model"]) for one in found] == [
        ("happy-2", 2, "my-model"),
        ("happy-5", 5, "my-model"),
        ("happy-11", 11, "my-model"),
    ]
    for one in found:
        assert np.array_equal(one.tensors["vector"].numpy(), given[one.site - 1])


def test_a_carried_control_vector_comes_out_again(tmp_path: Path) -> None:
    given = {layer: draw(WIDTH, seed=layer).numpy() for layer in (1, 4)}
    found = read_control_vector(_by_repeng(tmp_path / "happy.gguf", given), model="my-model")
    carried = [one.carried(back_map("wider"), model="new-model") for one in found]
    write_control_vector(carried, tmp_path / "new.gguf")
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    written = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert set(written) == {"direction.1", "direction.4"}
    for one in carried:
        np.testing.assert_array_equal(written[f"direction.{one.site - 1}"], one.tensors["vector"].float())
        assert len(written[f"direction.{one.site - 1}"]) == WIDTH + 4
    again = read_control_vector(tmp_path / "new.gguf", model="new-model")
    assert [one.about["model_hint"] for one in again] == ["mistral", "mistral"]


def test_a_folder_of_a_control_vector_is_a_folder_of_directions(tmp_path: Path) -> None:
    folder = tmp_path / "happy"
    folder.mkdir()
    given = {layer: draw(WIDTH, seed=layer).numpy() for layer in (1, 4)}
    _by_repeng(folder / "happy.gguf", given)
    (folder / "artefact.json").write_text(json.dumps({"site": 3}))
    with pytest.raises(ValueError, match="to name the `model`"):
        read_artefacts(folder)
    (folder / "artefact.json").write_text(json.dumps({"model": "my-model"}))
    found = read_artefacts(tmp_path)
    assert [(one.site, one.about["model"]) for one in found] == [(2, "my-model"), (5, "my-model")]

    write_carried_control_vector([], tmp_path / "none.gguf")
    write_carried_control_vector([found[0], found[0]], tmp_path / "none.gguf")
    assert not (tmp_path / "none.gguf").exists()
    write_carried_control_vector(found, tmp_path / "again.gguf")
    assert [one.site for one in read_control_vector(tmp_path / "again.gguf", model="my-model")] == [2, 5]


def test_what_is_no_control_vector_is_said(tmp_path: Path) -> None:
    vector = draw(WIDTH).numpy()
    (tmp_path / "text.gguf").write_text("not a file of this kind at all")
    with pytest.raises(ValueError, match="cannot be read"):
        read_control_vector(tmp_path / "text.gguf", model="m")
    with pytest.raises(ValueError, match=r"`general\.architecture` is 'llama'"):
        read_control_vector(_by_repeng(tmp_path / "model.gguf", {1: vector}, "llama"), model="m")
    with pytest.raises(ValueError, match="holds no direction"):
        read_control_vector(_by_repeng(tmp_path / "none.gguf", {}), model="m")
    with pytest.raises(ValueError, match="of one axis"):
        read_control_vector(_by_repeng(tmp_path / "matrix.gguf", {1: vector.reshape(2, -1)}), model="m")
    with pytest.raises(ValueError, match="finite"):
        read_control_vector(_by_repeng(tmp_path / "nan.gguf", {1: vector * np.nan}), model="m")

    one = Direction({"vector": draw(WIDTH)}, about("direction"))
    at_embeddings = Direction({"vector": draw(WIDTH)}, about("direction", site=0))
    other = Direction({"vector": draw(3)}, about("direction", site=1))
    path = tmp_path / "new.gguf"
    for wrong, words in (([one, one], "one at each site"), ([at_embeddings], "site 0"), ([one, other], "one width")):
        with pytest.raises(ValueError, match=words):
            write_control_vector(wrong, path, "llama")
    with pytest.raises(ValueError, match="got none"):
        write_control_vector([], path, "llama")
    with pytest.raises(ValueError, match="model_hint"):
        write_control_vector([one], path)
    assert not path.exists()


def _lens(folder: Path, depth: int = 3, **changes: object) -> nn.ModuleList:
    """A lens as the package tuned-lens saves it: h + layer(h)."""
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
    folder.mkdir()
    torch.save(layers.state_dict(), folder / "params.pt")
    told = {"base_model_name_or_path": "gpt2", "d_model": WIDTH, "num_hidden_layers": depth, "bias": True}
    (folder / "config.json").write_text(json.dumps({**told, **changes}))
    return layers


def test_a_tuned_lens_is_a_map_for_each_site(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = _lens(tmp_path / "lens")
    lens = read_tuned_lens(tmp_path / "lens")
    states = draw(7, WIDTH) + 3
    assert (lens.model, list(lens.maps)) == ("gpt2", [0, 1, 2])
    for site, layer in enumerate(layers):
        torch.testing.assert_close(lens.maps[site](states[None])[0], states + layer(states))


def test_affine_maps_become_a_tuned_lens(tmp_path: Path) -> None:
    fitted = {}
    for site in range(2):
        bank = banks.Linear(1, WIDTH, WIDTH)
        bank.weight.copy_(draw(1, WIDTH, WIDTH, seed=site))
        bank.mean_x.copy_(draw(1, 1, WIDTH, seed=5))
        bank.mean_y.copy_(draw(1, 1, WIDTH, seed=6))
        fitted[site] = bank
    write_tuned_lens(fitted, tmp_path / "lens", model="gpt2")
    tensors = torch.load(tmp_path / "lens" / "params.pt", weights_only=True)
    states = draw(7, WIDTH)
    for site, bank in fitted.items():
        layer = nn.Linear(WIDTH, WIDTH)
        layer.load_state_dict({"weight": tensors[f"{site}.weight"], "bias": tensors[f"{site}.bias"]})
        torch.testing.assert_close(states + layer(states), bank(states[None])[0], rtol=1e-5, atol=1e-5)
    again = read_tuned_lens(tmp_path / "lens")
    torch.testing.assert_close(again.maps[1](states[None]), fitted[1](states[None]), rtol=1e-5, atol=1e-5)


def test_what_is_no_tuned_lens_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_tuned_lens(tmp_path)
    _lens(tmp_path / "other", lens_type="mlp")
    with pytest.raises(ValueError, match="`lens_type`"):
        read_tuned_lens(tmp_path / "other")
    _lens(tmp_path / "short", num_hidden_layers=4)
    with pytest.raises(ValueError, match="cannot be read"):
        read_tuned_lens(tmp_path / "short")
    with pytest.raises(ValueError, match="affine"):
        write_tuned_lens({0: banks.INN(1, WIDTH, WIDTH)}, tmp_path / "new", model="gpt2")
    with pytest.raises(ValueError, match="affine"):
        write_tuned_lens({0: banks.Linear(1, WIDTH, 3)}, tmp_path / "new", model="gpt2")
    with pytest.raises(ValueError, match="sites 0, 1"):
        write_tuned_lens({1: banks.Linear(1, WIDTH, WIDTH)}, tmp_path / "new", model="gpt2")
    assert not (tmp_path / "new").exists()
