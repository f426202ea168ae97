from pathlib import Path

import pytest
import torch
from tests.rows import fitted
from tests.runs import related_rows

from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.probing.artefacts.artefact_files import read_artefacts, write_artefact
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.sparse_dictionaries import dictionary_of


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
