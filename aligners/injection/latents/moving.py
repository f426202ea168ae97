"""What part of the change between two models comes with latents that are moved from Y's states to X's."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.injection.comparing.read_answers import divergences
from aligners.injection.latents.choosing import Chosen
from aligners.injection.latents.read_models import ModelPair, ReadBatch, X, Y
from aligners.injection.scoring.scores import per_text_sums
from aligners.similarity.latents.dictionary import Firing

STEPS = (1, 2, 5, 10, 20, 50, 100)  # latents that are moved together


class Move(NamedTuple):
    """What is moved in X's states at one site.

    Attributes:
        what: "one" latent, the "first" or as many "random" ones, "all" latents, the "reconstruction", which has the
            biases too, or the whole "state".
        size: number of latents.
        latents: (size,) their numbers; None: not only some.
    """

    what: str
    size: int
    latents: Tensor | None = None


def moves_of(chosen: Chosen, latents: int) -> list[Move]:
    """List what is moved at one site, given the chosen latents and how many there are."""
    moves = []
    for latent in chosen.every.split(1):
        moves.append(Move("one", 1, latent))
    for count in steps_to(len(chosen.first)):
        moves.append(Move("first", count, chosen.first[:count]))
    for count in steps_to(len(chosen.random)):
        moves.append(Move("random", count, chosen.random[:count]))
    for what in ("all", "reconstruction", "state"):
        moves.append(Move(what, latents))
    return moves


def steps_to(count: int) -> list[int]:
    """The numbers of latents that are moved together, up to a number and with it."""
    below = [step for step in STEPS if step < count]
    if count:
        below.append(count)
    return below


def moved_divergences(
    pair: ModelPair, read: ReadBatch, place: int, moves: list[Move]
) -> Iterator[Tensor]:
    """Yield KL(Y ‖ X) in nats, summed over each text of a batch, for each move at a site: (B,) float64.

    A latent moves X's state by f_j (d_y,j − d_x,j), the state in place moves it to Y's.
    """
    of_y = read.answers[Y]
    before = read.divergences()
    for move in moves:
        added, texts = _added(pair, read, place, move)
        kl = before.clone()
        if len(texts):
            units, logits = pair.moved(read, X, place, added, texts)
            kl[units] = divergences(of_y[units], logits)
        yield per_text_sums(kl, read.task.targets)


def _added(
    pair: ModelPair, read: ReadBatch, place: int, move: Move
) -> tuple[Tensor, Tensor]:
    """Return what a move adds to X's rows (N, d), and the numbers of the texts in which it adds something."""
    vectors = read.vectors[X][place]
    every = read.rows.owner.unique()
    if move.what == "state":
        of_y = read.vectors[Y][place]
        return of_y.double() - vectors, every

    entries = read.entries[place]
    if move.latents is not None:
        entries = only(entries, move.latents)
    added = entries.rebuilt(pair.apart(place), len(vectors))
    if move.what == "reconstruction":
        dictionary = pair.dictionary
        biases = dictionary.bias_y[place] - dictionary.bias_x[place]
        return added + biases, every
    return added, read.texts_of(entries)


def only(entries: Firing, latents: Tensor) -> Firing:
    """Return the entries of some latents."""
    kept = torch.isin(entries.latent, latents)
    return Firing(entries.row[kept], entries.latent[kept], entries.value[kept])
