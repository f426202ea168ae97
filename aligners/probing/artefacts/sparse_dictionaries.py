"""Sparse autoencoders that are trained here, to and from dictionaries in the format of SAELens."""

from typing import Any

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.maps.sparse.selection import least_kept
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.probing.artefacts.dictionaries import BY_ROW, Dictionary


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
    _check_place(aligner, place)
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


@torch.no_grad()
def start_from(
    aligner: SparseAligner, place: int, dictionary: Dictionary, x: Tensor
) -> None:
    """Let one place of a sparse autoencoder begin as a dictionary: one that was carried over, or was trained elsewhere.

    Training goes on from it; no latent counts as dead at first. Chen et al. 2025 (arXiv 2506.06609) save a part of the
    training with a dictionary that was carried from a smaller model.

    Args:
        aligner: with `of="x"`, already fitted to the moments of the states.
        place: of the bank, from 0.
        dictionary: of states as wide as these, with as many features as the aligner has latents.
        x: rows of the states, (N, d_x), on which the threshold of batch top-k is measured.

    Raises:
        ValueError: the dictionary has other sizes, is gated or reads states that it has changed; or it is a crosscoder;
            or there is no such place.
    """
    _check_place(aligner, place)
    _check_fits(aligner, dictionary)
    crosscoder = aligner.crosscoder
    scale = aligner.scaling.scale_x[place].double()
    mean = aligner.scaling.mean_x[place, 0].double()
    encoder, shift, decoder, b_dec = dictionary.plain
    crosscoder.encoders[0][place] = encoder * scale
    crosscoder.bias[place, 0] = shift + mean @ encoder
    crosscoder.decoders[0][place] = decoder / scale
    crosscoder.shifts[0][place, 0] = (b_dec - mean) / scale[0]
    crosscoder.since[place] = 0
    if crosscoder.selection == "batch_topk":
        positive = (x.double() @ encoder + shift).relu()
        sizes = positive * crosscoder.norms()[place]
        crosscoder.threshold[place] = least_kept(sizes[None], crosscoder.active)[0]


def _check_place(aligner: SparseAligner, place: int) -> None:
    """Check that a place of the bank is a sparse autoencoder."""
    if aligner.of != "x":
        raise UserError(
            "Expected a `SparseAligner` of x alone, but got one of both models, for which SAELens has no format. Train "
            "it with `of: x`."
        )
    check_range(least=0, below=aligner.sites, place=place)


def _check_fits(aligner: SparseAligner, dictionary: Dictionary) -> None:
    """Check that an aligner can be this dictionary."""
    sizes = tuple(dictionary.tensors["W_enc"].shape)
    wanted = (aligner.d_x, aligner.latents)
    if sizes != wanted:
        raise UserError(
            f"Expected a dictionary of width {wanted[0]} with {wanted[1]} features, as the `SparseAligner` has, but "
            f"{dictionary.name} has width {sizes[0]} and {sizes[1]} features. Set `latents`, or carry it to this model."
        )
    changed = dictionary.normalisation in BY_ROW
    if dictionary.architecture == "gated" or changed or dictionary.through:
        raise UserError(
            f"Expected a dictionary with one encoder that reads states as they are, but {dictionary.name} is gated, "
            "normalises each state, or has a map beside it. Take one of another kind."
        )
