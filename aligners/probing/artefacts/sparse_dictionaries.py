"""A sparse autoencoder that was trained here, as a dictionary in the format of SAELens."""

from typing import Any

import torch

from aligners.errors import UserError, check_range
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.probing.artefacts.dictionaries import Dictionary


@torch.no_grad()
def dictionary_of(
    aligner: SparseAligner, place: int, *, model: str, site: int, **about: Any
) -> Dictionary:
    """Return one place of a sparse autoencoder as a dictionary, which `write_artefact` writes for SAELens.

    Means and scales are folded into the weights. Batch top-k becomes jumprelu: what exceeds the threshold by its size
    exceeds the threshold over the size of the latent's decoder.

    Args:
        aligner: trained with `of="x"`.
        place: of the bank, from 0.
        model: name of the model whose states it reads.
        site: that it reads: 0 is the embedding output, l the output of block l.
        about: further fields of artefact.json: name, rows, and so on.

    Raises:
        ValueError: it is a crosscoder, for which SAELens has no format; or there is no such place.
    """
    if aligner.of != "x":
        raise UserError(
            "Expected a `SparseAligner` of x alone, but got one of both models, for which SAELens has no format. Train "
            "it with `of: x`."
        )
    check_range(least=0, below=aligner.sites, place=place)
    crosscoder = aligner.crosscoder
    scale = aligner.scaling.scale_x[place].double()
    mean = aligner.scaling.mean_x[place, 0].double()
    encoder = crosscoder.encoder(0)[place].double() / scale
    decoder = crosscoder.decoder(0)[place].double() * scale
    bias = crosscoder.bias[place, 0].double() - mean @ encoder
    shift = mean + crosscoder.shifts[0][place, 0].double() * scale[0]
    tensors = {"W_enc": encoder, "W_dec": decoder, "b_enc": bias, "b_dec": shift}
    architecture = "standard"
    if crosscoder.selection == "batch_topk":
        architecture = "jumprelu"
        least = crosscoder.threshold[place, 0].double()
        tensors["threshold"] = least / crosscoder.norms()[place, 0].double()

    block = max(site - 1, 0)
    hook = "hook_resid_post" if site else "hook_resid_pre"
    cfg = {
        "architecture": architecture,
        "d_in": aligner.d_x,
        "d_sae": crosscoder.latents,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"model_name": model, "hook_name": f"blocks.{block}.{hook}"},
    }
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    told = {"name": "sparse", "rows": "tokens", **about, "model": model, "site": site}
    return Dictionary(plain, {**told, "cfg": cfg})
