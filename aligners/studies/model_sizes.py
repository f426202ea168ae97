"""Sizes of a study's models, read from their configs before any model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aligners.models.architectures import architecture_of
from aligners.models.loading.model_files import read_config
from aligners.models.recipes import EMBEDDED, Recipe, embedded_recipe
from aligners.studies.cells import Cell


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        layers: number of blocks, L.
        width: of the states, d.
        vocabulary: number of tokens.
        head: task of its head: classification, masked or causal; None: no head, or not known.
        known: whether the size was read; otherwise it is a guess.
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
        """Number of weights: 12 d² in a block, whose feed-forward layer is 4 d wide, and d for each token."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width


# Of a model that cannot be reached.
GUESS = Size(layers=12, width=768, vocabulary=30522, known=False)


def size_of(name: str, data: Mapping[str, Any]) -> Size:
    """The size of a model.

    Args:
        name: Hub id, folder, or embedded model.
        data: the study's data options.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    if name.startswith(EMBEDDED):
        return _embedded_size(name)
    trusted = data.get("trust_remote_code", False)
    config = read_config(name, {"revision": None, "trust_remote_code": trusted})
    architecture = architecture_of(config.model_type)
    head = None
    for kind in config.architectures or ():
        head = head or architecture.task(kind, config)
    sizes: Any = config.get_text_config()
    return Size(
        sizes.num_hidden_layers,
        sizes.hidden_size,
        sizes.vocab_size,
        head,
        heads=sizes.num_attention_heads,
    )


def _embedded_size(name: str) -> Size:
    _, recipe = embedded_recipe(name)
    if isinstance(recipe, Recipe):
        head = "classification"
    elif "gpt" in name:
        head = "causal"
    else:
        head = "masked"
    return Size(
        recipe.layers, recipe.width, recipe.vocabulary, head, heads=recipe.heads
    )


def sizes_in(cell: Cell, sizes: Mapping[str, Size]) -> list[Size]:
    """The sizes of a cell's models; a fine-tuned model has a classifier's head.

    Args:
        cell: the cell.
        sizes: of the models by their names in the study file.
    """
    found = []
    for model in cell.models:
        size = sizes[model.name.split("#")[0]]
        if model.stage == "finetuned":
            size = replace(size, head="classification")
        found.append(size)
    return found
