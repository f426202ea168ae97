from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor

from aligners.maps.linear import Procrustes
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.probing.artefacts.artefact_files import read_artefacts, write_artefact
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.sparse_dictionaries import dictionary_of, start_from


@pytest.mark.parametrize(("selection", "architecture"), [("batch_topk", "jumprelu"), ("l1", "standard")])
def test_a_sparse_autoencoder_goes_to_a_folder_of_saelens_and_back(
    tmp_path: Path, selection: str, architecture: str
) -> None:
    x, y = related_rows(2, 200, 8, 8)
    x = 30 * x + 4
    torch.manual_seed(0)
    aligner = fitted(SparseAligner(2, 8, 8, of="x", latents=40, active=4, selection=selection), x, y)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in aligner.parameters():
            weight += 0.1 * torch.randn_like(weight)
    for place, site in ((0, 0), (1, 3)):
        write_artefact(dictionary_of(aligner, place, model="gpt2", site=site), tmp_path / str(site))
        assert {"cfg.json", "sae_weights.safetensors"} <= {path.name for path in (tmp_path / str(site)).iterdir()}
        (tmp_path / str(site) / "artefact.json").unlink()  # what SAELens itself reads tells all
        (again,) = read_artefacts(tmp_path / str(site))
        assert isinstance(again, Dictionary)
        assert (again.architecture, again.about["model"], again.site) == (architecture, "gpt2", site)
        codes = aligner.codes(x)[place].float()
        assert 0 < (codes > 0).double().mean() < 1
        features = again.answers(x[place].float())
        torch.testing.assert_close(features, codes, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            again.decode(features),
            aligner.decode(codes[None].double().expand(2, -1, -1))[0][place].float(),
            rtol=1e-4,
            atol=1e-3,
        )


def test_a_crosscoder_or_a_place_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="of x alone, but got one of both"):
        dictionary_of(SparseAligner(1, 8, 8, latents=40), 0, model="gpt2", site=1)
    with pytest.raises(ValueError, match=r"`place`.*below 1, but got 1"):
        dictionary_of(SparseAligner(1, 8, 8, latents=40, of="x"), 1, model="gpt2", site=1)


def trained(sites: int, width: int, x: Tensor, **options: Any) -> SparseAligner:
    """An autoencoder of x with weights unlike those that it began with."""
    torch.manual_seed(0)
    aligner = fitted(SparseAligner(sites, width, width, of="x", latents=40, active=4, **options), x, x)
    with torch.no_grad():
        for weight in aligner.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return aligner


@pytest.mark.parametrize("selection", ["batch_topk", "l1"])
def test_an_autoencoder_begins_as_a_dictionary_at_its_place_alone(selection: str) -> None:
    x, y = related_rows(2, 400, 8, 8)
    x, y = 30 * x + 4, 5 * y - 70
    dictionary = dictionary_of(trained(2, 8, x, selection=selection), 1, model="gpt2", site=1)

    there = trained(2, 8, y, selection=selection)
    before = {name: value.clone() for name, value in there.state_dict().items()}
    there.crosscoder.since += 10**6
    start_from(there, 1, dictionary, y[1])
    codes = there.codes(y)
    features = y[1] @ dictionary.tensors["W_enc"].double() + dictionary.tensors["b_enc"].double()
    kept = codes[1] > 0
    torch.testing.assert_close(codes[1], features.relu() * kept, rtol=1e-4, atol=1e-4)
    again = codes[1] @ dictionary.tensors["W_dec"].double() + dictionary.tensors["b_dec"].double()
    torch.testing.assert_close(there.decode(codes)[0][1], again, rtol=1e-4, atol=1e-3)
    if selection == "batch_topk":
        assert abs(kept.sum(1).double().mean() - 4) < 0.05
    assert there.crosscoder.dead().sum(1).tolist() == [40, 0]
    for name, value in there.state_dict().items():
        if name != "crosscoder.since" and len(value) == 2:
            torch.testing.assert_close(value[0], before[name][0], rtol=0, atol=0)


def test_a_dictionary_that_was_carried_by_a_rotation_explains_as_much_as_it_did() -> None:
    x, _ = related_rows(1, 400, 8, 8)
    turned = x @ torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q + 3
    there = trained(1, 8, x)
    dictionary = dictionary_of(there, 0, model="gpt2", site=1)
    back, forward = fitted(Procrustes(1, 8, 8), turned, x), fitted(Procrustes(1, 8, 8), x, turned)
    carried = dictionary.carried(back, forward, model="other", site=1)
    here = fitted(SparseAligner(1, 8, 8, of="x", latents=40, active=4), turned, turned)
    start_from(here, 0, carried, turned[0])
    start_from(there, 0, dictionary, x[0])
    error = here.reconstruction_errors(turned, turned)
    torch.testing.assert_close(error, there.reconstruction_errors(x, x), rtol=1e-3, atol=1e-4)


def test_a_dictionary_of_other_sizes_or_another_kind_is_refused() -> None:
    x, _ = related_rows(1, 100, 8, 8)
    dictionary = dictionary_of(trained(1, 8, x), 0, model="gpt2", site=1)
    for d, latents in ((8, 41), (9, 40)):
        with pytest.raises(ValueError, match=rf"width {d} with {latents} features.*has width 8 and 40"):
            start_from(SparseAligner(1, d, d, of="x", latents=latents), 0, dictionary, x[0])
    cfg = {**dictionary.about["cfg"], "normalize_activations": "layer_norm"}
    changed = Dictionary(dictionary.tensors, {**dictionary.about, "cfg": cfg})
    with pytest.raises(ValueError, match="reads states as they are"):
        start_from(SparseAligner(1, 8, 8, of="x", latents=40), 0, changed, x[0])
    with pytest.raises(ValueError, match="of x alone"):
        start_from(SparseAligner(1, 8, 8, latents=40), 0, dictionary, x[0])
