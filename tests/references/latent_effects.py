"""What latents do in two GPT-2, one text at a time and without padding, with hooks of torch and sums of NumPy."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

Array = NDArray[np.float64]
Codes = Callable[[Array, Array], Array]  # of rows of one site


class Pair(NamedTuple):
    """Two language models in float64, the decoders and biases of a dictionary at one site, and its codes."""

    x: Any
    y: Any
    site: int
    decoder_x: Array
    decoder_y: Array
    bias_x: Array
    bias_y: Array
    codes: Codes


class Text(NamedTuple):
    """Tokens (T,), states (T, d), codes (T, m) and log-probabilities (T - 1, V) of one text."""

    ids: torch.Tensor
    x: Array
    y: Array
    codes: Array
    own_x: Array
    own_y: Array


@contextmanager
def hooked(model: Any, site: int, hook: Callable) -> Any:
    """The input of the block after a site goes through a hook."""
    handle = model.transformer.h[site].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def state_of(model: Any, ids: torch.Tensor, site: int) -> Array:
    found = []
    with hooked(model, site, lambda block, args: found.append(args[0][0])):
        model(ids[None])
    return found[0].numpy()


def log_probabilities(model: Any, ids: torch.Tensor, site: int, added: Array) -> Array:
    """Of every next token, with something added to the states (T, d) at a site."""
    with hooked(model, site, lambda block, args: (args[0] + torch.from_numpy(added), *args[1:])):
        logits = model(ids[None]).logits[0, :-1]
    return log_softmax(logits.numpy(), -1)


@torch.no_grad()
def read(pair: Pair, ids: torch.Tensor) -> Text:
    x, y = (state_of(model, ids, pair.site) for model in (pair.x, pair.y))
    own = [log_probabilities(model, ids, pair.site, 0 * state) for model, state in ((pair.x, x), (pair.y, y))]
    return Text(ids, x, y, pair.codes(x, y), *own)


def divergence(own: Array, other: Array) -> float:
    """Σ KL(own ‖ other) over all positions."""
    return float((np.exp(own) * (own - other)).sum())


@torch.no_grad()
def left(pair: Pair, text: Text, added: Array) -> float:
    """The divergence where something is added to X's states."""
    return divergence(text.own_y, log_probabilities(pair.x, text.ids, pair.site, added))


def recovered(pair: Pair, texts: list[Text], added: Callable[[Text], Array]) -> float:
    """The share of the divergence that is gone."""
    before = sum(divergence(text.own_y, text.own_x) for text in texts)
    after = sum(left(pair, text, added(text)) for text in texts)
    return (before - after) / before


def carried_by(pair: Pair, latents: list[int]) -> Callable[[Text], Array]:
    """What latents add to Y's states more than to X's."""
    difference = pair.decoder_y - pair.decoder_x
    return lambda text: sum(text.codes[:, j : j + 1] * difference[j] for j in latents)


def carried_of_texts(pair: Pair, texts: list[Text], latent: int, step: float = 1e-4) -> Array:
    """Nats of each text that a latent carries to first order, by central differences half-way to where all moved X."""
    added = carried_by(pair, [latent])
    every = carried_by(pair, list(range(len(pair.decoder_x))))
    fallen = []
    for text in texts:
        half, little = every(text) / 2, step * added(text)
        fallen.append(left(pair, text, half - little) - left(pair, text, half + little))
    return np.array(fallen) / (2 * step)


def resampled_ratio(above: Array, below: Array, drawn: NDArray[np.int64]) -> tuple[float, float, float]:
    """A ratio of sums over texts, and the ends of its 95 % interval over draws of texts (R, n)."""
    ratios = [above[texts].sum() / below[texts].sum() for texts in drawn if below[texts].sum()]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return above.sum() / below.sum(), float(low), float(high)


@torch.no_grad()
def correlation(pair: Pair, texts: list[Text], latent: int, direction_y: Array) -> tuple[float, float, float]:
    """Of the shifts where a latent is taken out, and the mean divergences for each row on which it fires."""
    shifts_x, shifts_y, kl_x, kl_y, rows = [], [], 0.0, 0.0, 0
    for text in texts:
        code = text.codes[:, latent : latent + 1]
        x = log_probabilities(pair.x, text.ids, pair.site, -code * pair.decoder_x[latent])
        y = log_probabilities(pair.y, text.ids, pair.site, -code * direction_y)
        for shifts, own, moved in ((shifts_x, text.own_x, x), (shifts_y, text.own_y, y)):
            shift = moved - own
            shifts.append(shift - shift.mean(1, keepdims=True))
        kl_x += divergence(text.own_x, x)
        kl_y += divergence(text.own_y, y)
        rows += int((code > 0).sum())
    a, b = np.concatenate(shifts_x).ravel(), np.concatenate(shifts_y).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b))), kl_x / rows, kl_y / rows
