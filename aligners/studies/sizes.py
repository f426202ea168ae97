"""The sizes of models, known before any is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligners.models.architectures import architecture_of
from aligners.models.embedded.recipes import EMBEDDED, Recipe, embedded_recipe
from aligners.models.loading.files import read_config
from aligners.studies.spec import Assumed


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        layers: number of blocks, L.
        width: of the states, d.
        vocabulary: tokens that it knows.
        head: what its head answers: classification, masked, causal; None: it has none, or nothing is known.
        known: whether this was read, and not assumed.
        heads: attention heads of each block; None: not known.
    """

    layers: int
    width: int
    vocabulary: int
    head: str | None = None
    known: bool = True
    heads: int | None = None

    @property
    def weights(self) -> int:
        """Number of weights: 12 d² in a block, whose feed-forward layer is 4 d wide, and d for each known token."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width

    def reading(self, tokens: float) -> float:
        """FLOP of a forward pass over so many tokens."""
        return 2.0 * self.layers * 12 * self.width**2 * tokens

    @classmethod
    def assumed(cls, assumed: Assumed) -> Size:
        """The size that a study file gives models which cannot be reached."""
        return cls(assumed.layers, assumed.width, assumed.vocabulary, known=False)


def size_of(name: str, data: Mapping[str, Any]) -> Size:
    """The size of a model.

    Args:
        name: Hub id, folder, or embedded model.
        data: the study's data options.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    if name.startswith(EMBEDDED):
        _, recipe = embedded_recipe(name, Recipe(**data.get("recipe", {})))
        made = "classification" if isinstance(recipe, Recipe) else "causal" if "gpt" in name else "masked"
        return Size(recipe.layers, recipe.width, recipe.vocabulary, made, heads=recipe.heads)
    config = read_config(name, {"revision": None, "trust_remote_code": data.get("trust_remote_code", False)})
    architecture = architecture_of(config.model_type)
    tasks = (architecture.task(kind) for kind in config.architectures or ())
    sizes: Any = config.get_text_config()
    head = next((task for task in tasks if task is not None), None)
    return Size(sizes.num_hidden_layers, sizes.hidden_size, sizes.vocab_size, head, heads=sizes.num_attention_heads)
