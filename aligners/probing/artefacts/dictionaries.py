"""Sparse dictionaries in the format of SAELens: the features that they find in states, and how they are carried."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aligners.errors import UserError, check_known, check_range
from aligners.probing.artefacts.kinds import Artefact, Parts, Tensors

# SAELens saves a batch top-k dictionary as jumprelu; its checkpoints, and those of others, keep the name
BATCH_TOPK = ("batchtopk", "matryoshka_batchtopk")
ARCHITECTURES = ("standard", "jumprelu", "topk", *BATCH_TOPK, "gated")
AS_IS = ("none", "expected_average_only_in")  # SAELens folds the second on loading
BY_ROW = ("layer_norm", "constant_norm_rescale")
NORMALISATIONS = (*AS_IS, *BY_ROW)
LAYER_NORM_EPS = 1e-5


class Dictionary(Artefact):
    """A sparse autoencoder in the format of SAELens: features a = σ((x − b_dec) W_enc + b_enc), x̂ = a W_dec + b_dec.

    `cfg` holds its cfg.json. `architecture` says what σ keeps:

    - standard: what is positive;
    - jumprelu: what exceeds a `threshold` (m,) of each feature;
    - topk: the `k` largest of a row;
    - batchtopk, matryoshka_batchtopk: what exceeds the one `threshold` () or `topk_threshold` () that training has
      found for the average of k features a row, so that a row's features do not depend on its batch;
    - gated: what b_gate, in place of b_enc, makes positive, with the size p exp(r_mag) + b_mag, p = (x − b_dec) W_enc.

    Where `apply_b_dec_to_input` is false, b_dec is not subtracted. With `rescale_acts_by_decoder_norm`, features are in
    units of the decoder's rows. `normalize_activations` layer_norm and constant_norm_rescale change each state before
    it is read: no map can be folded into such a dictionary, so that it stays beside it, and `decode` gives changed
    states.
    """

    kind, reads = "dictionary", "W_dec"

    @property
    def cfg(self) -> Mapping[str, Any]:
        """The dictionary's cfg.json."""
        return self.about["cfg"]

    @property
    def architecture(self) -> str:
        """What is kept of a row: see the class."""
        return str(self.cfg.get("architecture", "standard"))

    @property
    def normalisation(self) -> str:
        """What happens to a state before it is read."""
        return str(self.cfg.get("normalize_activations") or "none")

    @property
    def doubts(self) -> list[str]:
        """Cautions about what it reads: SAELens records changes to the model whose states it was trained on."""
        name = "model_from_pretrained_kwargs"
        metadata = self.cfg.get("metadata") or {}
        loading = self.cfg.get(name) or metadata.get(name) or {}
        if not loading.get("center_writing_weights"):
            return []
        return [
            f"Caution: the dictionary {self.name} was trained on states of a model whose writing weights were centred "
            "(`center_writing_weights` of its cfg.json), which have mean zero over the features. The states read "
            "here do not, so its features do not mean what they were trained for."
        ]

    @property
    def plain(self) -> list[Tensor]:
        """W_enc, b_enc (gated: b_gate), W_dec and b_dec in float64, for states neither shifted nor rescaled."""
        encoder = self.tensors["W_enc"].double()
        bias = "b_gate" if self.architecture == "gated" else "b_enc"
        shift = self.tensors[bias].double()
        decoder = self.tensors["W_dec"].double()
        b_dec = self.tensors["b_dec"].double()
        if self.cfg.get("apply_b_dec_to_input", True):
            shift = shift - b_dec @ encoder
        if self.cfg.get("rescale_acts_by_decoder_norm"):
            norm = decoder.norm(dim=1)
            encoder = encoder * norm
            shift = shift * norm
            decoder = decoder / norm[:, None]
        return [encoder, shift, decoder, b_dec]

    @property
    def _threshold(self) -> str | None:
        """The name of the tensor that features have to exceed; None: 0."""
        if self.architecture not in ("jumprelu", *BATCH_TOPK):
            return None
        if "topk_threshold" in self.tensors:
            return "topk_threshold"
        return "threshold"

    def _check(self) -> None:
        check_known(ARCHITECTURES, architecture=self.architecture)
        check_known(NORMALISATIONS, normalize_activations=self.normalisation)
        reshaped = self.cfg.get("reshape_activations", "none")
        if reshaped != "none":
            raise UserError(
                f"Expected `reshape_activations` 'none' in {self.name}, but got {reshaped!r}: only dictionaries of "
                "the residual stream can be read."
            )

        d, m = self.cfg.get("d_in"), self.cfg.get("d_sae")
        shapes: dict[str, tuple[int | None, ...]]
        shapes = {"W_enc": (d, m), "W_dec": (m, d), "b_dec": (d,)}
        biases = ["b_enc"]
        if self.architecture == "gated":
            biases = ["b_gate", "b_mag", "r_mag"]
        for name in biases:
            shapes[name] = (m,)
        threshold = self._threshold
        if threshold is not None:
            one_for_all = self.tensors[threshold].ndim == 0
            shapes[threshold] = () if one_for_all else (m,)
        self.expect(**shapes)
        if self.architecture == "topk":
            check_range(least=1, most=m, k=self.cfg.get("k"))
        if self.architecture == "gated" and self.cfg.get(
            "rescale_acts_by_decoder_norm"
        ):
            raise UserError(
                f"Expected `rescale_acts_by_decoder_norm` false in {self.name}, a gated dictionary, but it is set."
            )

    def _read(self, states: Tensor) -> Tensor:
        encoder, shift = (part.to(states) for part in self.plain[:2])
        before = self._normalised(states) @ encoder + shift
        if self.architecture == "gated":
            return self._sized(before)
        if self.architecture == "topk":
            kept = before.topk(int(self.cfg["k"]), -1)
            none = torch.zeros_like(before)
            return none.scatter(-1, kept.indices, kept.values.relu())
        if self._threshold is None:
            return before.relu()
        least = self.tensors[self._threshold].to(before)
        return before.relu() * (before > least)

    def _normalised(self, states: Tensor) -> Tensor:
        """What SAELens does to states before they are read: nothing, or something to each row."""
        if self.normalisation == "layer_norm":
            centred = states - states.mean(-1, keepdim=True)
            deviation = states.std(-1, keepdim=True)
            return centred / (deviation + LAYER_NORM_EPS)
        if self.normalisation == "constant_norm_rescale":
            norm = states.norm(dim=-1, keepdim=True)
            return states * states.shape[-1] ** 0.5 / norm
        return states

    def _sized(self, before: Tensor) -> Tensor:
        """Return the features of a gated dictionary from what decides whether they are there, both (N, m)."""
        gate, magnitude, factor = (
            self.tensors[name].to(before) for name in ("b_gate", "b_mag", "r_mag")
        )
        product = before - gate
        sizes = product * factor.exp() + magnitude
        return sizes.relu() * (before > 0)

    @torch.no_grad()
    def decode(self, features: Tensor) -> Tensor:
        """Return states from features, (N, m) -> (N, d), of the dictionary's own width."""
        decoder, b_dec = (part.to(features) for part in self.plain[2:])
        return features @ decoder + b_dec

    def _moved(
        self, back: Parts, forward: Callable[[], Parts]
    ) -> tuple[Tensors, Mapping[str, Any]] | None:
        if self.normalisation in BY_ROW:
            return None
        encoder, shift, decoder, b_dec = self.plain
        weight, bias = back
        forward_weight, forward_bias = forward()
        moved = {
            "W_enc": weight @ encoder,
            "W_dec": decoder @ forward_weight,
            "b_dec": b_dec @ forward_weight + forward_bias,
        }
        added = bias @ encoder
        if self.architecture == "gated":
            gate = self.tensors["b_gate"].double()
            added = added + shift - gate
            moved["b_gate"] = gate + added
            factor = self.tensors["r_mag"].double().exp()
            moved["b_mag"] = self.tensors["b_mag"].double() + added * factor
        else:
            moved["b_enc"] = added + shift
        cfg = {**self.cfg, "d_in": len(weight), "apply_b_dec_to_input": False}
        if "rescale_acts_by_decoder_norm" in cfg:
            cfg["rescale_acts_by_decoder_norm"] = False
        return self.tensors | moved, {"cfg": cfg}
