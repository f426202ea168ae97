"""What stored states are states of. Its hash names the folder that they are kept in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Self

import torch

from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from datamodules.tokens.tokenised import TokenisedTexts

__all__ = ["DTYPES", "FORMAT", "StateIdentity", "name_of"]

FORMAT = 1  # of the files; a store of another format has another name
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What a config says beside what decides the states.
BESIDE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "architectures")


@dataclass(frozen=True)
class StateIdentity:
    """Everything that decides the states of a model, at all of its sites.

    Attributes:
        weights: the model's fingerprint.
        config: hash of its config, without names.
        inputs: hash of the tokenised texts.
        component: what is read at a site.
        computed_in: data type of the weights, and the precision of products in float32.
        stored_as: data type of the stored values: float32, float16 or bfloat16.
        format: of the files.
    """

    weights: str
    config: str
    inputs: str
    component: Component
    computed_in: str
    stored_as: str
    format: int = FORMAT

    @classmethod
    def of(cls, model: FrozenModel, data: TokenisedTexts, place: int, component: Component, stored_as: str) -> Self:
        """The identity of a model's states on some texts.

        Args:
            model: whose states they are.
            data: the texts.
            place: the model's number among those that the texts are tokenised for.
            component: what is read at a site.
            stored_as: data type of the stored values.
        """
        kept = {name: value for name, value in model.config.to_dict().items() if name not in BESIDE}
        config = blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        computed_in = f"{name_of(model.dtype)}, products {torch.get_float32_matmul_precision()}"
        return cls(model.fingerprint, config, data.digest(place), component, computed_in, stored_as)

    @property
    def name(self) -> str:
        """The name of the store's folder."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=12).hexdigest()


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
