"""Variants of fine-tuning: the blocks that are frozen or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.models.truncation import Kept, check_count, freeze, shortened

NONE = "none"
ALL = "all"


@dataclass(frozen=True)
class Variant:
    """One way to fine-tune.

    Attributes:
        kind: none: everything trains; bottom or top: `count` blocks are frozen, and with bottom also the embeddings;
            layers: only the bottom `count` blocks are kept.
        count: the number of blocks; 0 for none.
    """

    kind: Kept | Literal["none"] = "none"
    count: int = 0

    @property
    def name(self) -> str:
        """`none`, `bottom-4`, `layers-3`: also the name of a folder."""
        return NONE if self.kind == NONE else f"{self.kind}-{self.count}"

    def check(self, model: PreTrainedModel) -> None:
        """Raise what `apply` would raise, before anything is changed.

        Raises:
            ValueError: the model has fewer blocks, or they are shared.
        """
        if self.kind != NONE:
            check_count(model, cast(Kept, self.kind), self.count)

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model to train: `model` itself with blocks frozen, or a smaller copy.

        Raises:
            ValueError: as in `check`, or the config of this family cannot describe a model with fewer blocks.
        """
        if self.kind == "layers":
            return shortened(model, self.count)
        if self.kind != NONE:
            freeze(model, **{self.kind: self.count})
        return model


def parse_variants(written: Sequence[str], depth: int) -> list[Variant]:
    """Parse variants, each of which is returned once, in the order in which they are written.

    Args:
        written: `none`, `bottom:4`, `top:4`, `layers:3`; or `bottom:all` for none and 0..L (Merchant et al., Figure 3),
            `top:all` for none and 1..L, `layers:all` for 1..L, of which L is the whole model (Figure 4).
        depth: L.

    Raises:
        ValueError: nothing is written, or something else.
    """
    found = [variant for entry in written for variant in _parse(entry, depth)]
    if not found:
        raise UserError("Expected at least one of `variants`, but got none. Write `none` to fine-tune everything.")
    return list(dict.fromkeys(found))


def _parse(entry: str, depth: int) -> list[Variant]:
    kind, colon, count = entry.strip().partition(":")
    if kind == NONE and not colon:
        return [Variant()]
    if kind in get_args(Kept):
        known = cast(Kept, kind)
        if count == ALL:
            first = 0 if kind == "bottom" else 1
            every = [Variant(known, number) for number in range(first, depth + 1)]
            return every if kind == "layers" else [Variant(), *every]
        if count.isdigit():
            return [Variant(known, int(count))]
    raise UserError(
        f"Expected `variants` out of none, bottom:4, top:4, layers:3 with any number, or bottom:all, top:all, "
        f"layers:all, but got {entry!r}."
    )
