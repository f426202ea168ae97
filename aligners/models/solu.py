"""The SoLU activation (Elhage et al. 2022, Softmax Linear Units, Transformer Circuits Thread)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN


def solu(x: Tensor) -> Tensor:
    """LayerNorm(x · softmax(x)) over the last axis, without gain and bias; x (..., d), the result likewise.

    The paper puts a LayerNorm after the activation, because x · softmax(x) alone is small and costs performance. Where
    an affine map follows, as in the MLP of GPT-2, it absorbs a gain γ and a bias β exactly (W(γ·z + β) + b =
    (Wγ)z + (Wβ + b)), so that nothing is lost by leaving them out.
    """
    return nn.functional.layer_norm(x * torch.softmax(x, -1), x.shape[-1:])


class SoLU(nn.Module):
    """`solu` as a module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """LayerNorm(x · softmax(x)), (..., d) to (..., d)."""
        return solu(x)


def register_solu() -> None:
    """Register the activation with `transformers` as "solu", so that configs can name it."""
    ACT2FN["solu"] = SoLU
