"""Rows of one model met by rows of other texts at the same places: the null of every reading of a latent."""

import torch
from torch import Tensor

from aligners.datamodules.rows.token_pairs import row_keys

GROUP = 8  # texts that change places with one another
_SEED = 0x1A7E27  # of the order of texts


def drawn_order(texts: Tensor) -> Tensor:
    """Put texts (T,) into an order that their numbers alone decide, so that no two neighbours belong together."""
    places = torch.zeros_like(texts)
    keys = row_keys(_SEED, texts, places)
    order = keys.argsort(stable=True)
    return texts[order]


def groups_of(place: Tensor) -> list[Tensor]:
    """Divide rows by the groups of texts that change places with one another: row numbers of each group.

    Args:
        place: (N,) places of the rows' texts in a batch, ascending. The first `GROUP` texts are the first group, and so
            on; what would be left is in the last one.
    """
    if not len(place):
        return []
    texts = int(place[-1]) + 1
    groups = max(texts // GROUP, 1)
    group = place // GROUP
    group = group.clamp(max=groups - 1)
    _, counts = group.unique_consecutive(return_counts=True)
    sizes = counts.tolist()
    rows = torch.arange(len(place), device=place.device)
    parts = rows.split(sizes)
    return list(parts)


def other_rows(text: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each row of a group of texts with the row at its place in the next text, those of the last with the first.

    All texts are cut to the rows of the shortest. Rows of one text stay together and at their places, so that what
    depends on the place alone is in the null as it is in the pairs; and no text meets itself, which
    `aligners.similarity.text_orders.permuted_rows` lets happen as often as chance has it.

    Args:
        text: (N,) number of the text of each row; rows of a text are neighbours. The texts should be of nearly equal
            length.

    Returns:
        Numbers of the rows whose codes count and of those that they meet, each (M,), M <= N; none of one text alone.
    """
    _, lengths = text.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    shortest = 0
    if len(lengths) > 1:
        shortest = int(lengths.amin())
    place = torch.arange(shortest, device=text.device)
    next_starts = starts.roll(-1)
    rows = starts[:, None] + place
    partners = next_starts[:, None] + place
    return rows.flatten(), partners.flatten()
