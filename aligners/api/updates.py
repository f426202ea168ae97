"""What becomes of things that live in a model's states when the model is updated."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aligners.api.maps import ArrayMap
from aligners.api.models import Model, _batches, load
from aligners.errors import UserError
from aligners.injection.generation import generating, steering
from aligners.maps.base import Aligner
from aligners.probing.artefacts.files import read_artefacts, write_artefact
from aligners.probing.artefacts.kinds import Artefact, Dictionary, Direction, Head
from datamodules.asking import task_batch

__all__ = [
    "Artefact", "Dictionary", "Direction", "Head", "Steered", "carry", "generate", "read_artefacts", "steer",
    "write_artefact",
]  # fmt: skip


def carry(artefact: Artefact, map: ArrayMap | Aligner, forward: ArrayMap | Aligner | None = None, **about: Any) -> Any:
    """An artefact for another model: it says of the new model's states what it said of the old one's.

    Args:
        artefact: of `read_artefacts`; or a `Head`, `Direction` or `Dictionary`. `Head.of(clf.coef_, clf.intercept_)`
            takes what scikit-learn has fitted.
        map: g from rows of the new model to rows of the old one, fitted on the same tokens, words or texts; no labels.
        forward: a map from the old model's rows to the new one's: a vector to steer by and a dictionary's decoder go
            through it. Default: the (pseudo-)inverse of `map`.
        about: fields that change, `model` and `site` among them; `write_artefact` needs the name of the new model.

    Returns:
        An artefact of the same kind. Where `map` is not affine, it is kept beside what was carried.

    Raises:
        ValueError: the map is of other widths or several sites, or not fitted.
    """
    return artefact.carried(_bank(map, "map"), None if forward is None else _bank(forward, "forward"), **about)


def _bank(map: ArrayMap | Aligner | Callable[..., Any], name: str) -> Aligner:
    bank = map.bank if isinstance(map, ArrayMap) else map
    if not isinstance(bank, Aligner):
        raise UserError(f"Expected `{name}` to be a fitted map of this package, but got a {type(map).__name__}.")
    return bank


class Steered(NamedTuple):
    """What steering does and costs.

    Attributes:
        curve: a row for each direction and α: `kl` and the rise of the `loss`, of the log-odds of `words` and of what
            a probe reads (`reading`), a token, each with its interval (`kl_low`, `kl_high`).
        equal: a row for each effect, cost and direction: its `value` there, and its `share` of the first direction's.
            Directions drawn at random are one row.
    """

    curve: list[dict[str, Any]]
    equal: list[dict[str, Any]]


def steer(
    model: Model, directions: Direction | Mapping[str, Direction], texts: Sequence[str], *,
    words: tuple[Sequence[str], Sequence[str]] | None = None, probe: Artefact | None = None,
    alphas: Sequence[float] = steering.ALPHAS, equal_kl: Sequence[float] = steering.LEVELS, random: int = 3,
    batch_size: int = 16, max_length: int = 128, seed: int = 0,
) -> Steered:  # fmt: skip
    """Add directions to the states of a causal language model at every token, and measure what it answers.

    Args:
        model: see `load`.
        directions: one, or several by name, with their `site`; the others are compared with the first of a site.
        texts: in which every token but the first is predicted.
        words: those that should become more likely, and those that should become less.
        probe: an artefact of the model at the site of the directions or later, whose reading should rise.
        alphas: how much is added, in typical deviations of the states there (median distance from their median).
        equal_kl: costs, in nats of KL a token, at which effects are compared.
        random: directions drawn at random beside them, at each site.
        batch_size: see `states`.
        max_length: likewise.
        seed: of these, and of the resampling of texts.

    Raises:
        ValueError: the model is no causal language model, a direction does not fit it, a word is unknown to it, or
            neither words nor a probe are given.
    """
    frozen, given, native = load(model), list[steering.Direction](), set[int]()
    for name, one in (directions if isinstance(directions, Mapping) else {directions.name: directions}).items():
        site = int(one.about["site"])
        given.append(steering.Direction(name, site, one.tensors["vector"], "carried" if site in native else "native"))
        native.add(site)
    given += steering.random_directions(given, random, seed)
    tokens = words and (steering.first_tokens(frozen, words[0])[0], steering.first_tokens(frozen, words[1])[0])
    reading = None if probe is None else steering.Reading(int(probe.about["site"]), probe.answers)
    steered = steering.Steering(frozen, given, alphas, tokens, reading)
    parts = _batches([frozen], texts, None, batch_size, max_length)
    batches = [task_batch(part, frozen).to(frozen.device) for part in parts]
    steered.measure_units(batches)
    sums = [steered.sums(batch) for batch in batches]
    table = {name: torch.cat([part[name] for part in sums], -1).cpu() for name in sums[0]}
    return Steered(steering.curve(steered, table, seed), steering.at_equal_cost(steered, table, equal_kl, seed))


def generate(
    model: Model, prompts: Sequence[str], *, add: Direction | None = None, alpha: float = 1.0,
    model_x: Model | None = None, map: ArrayMap | Callable[[Tensor], Tensor] | None = None,
    site: int | tuple[int, int] = 0, new_tokens: int = 32, temperature: float = 0.0, seed: int = 0,
) -> list[str]:  # fmt: skip
    """Continue prompts with a causal language model, as it is, steered, or with another model's mapped states in place.

    Args:
        model: see `load`; it needs a cache of keys and values, as `model_x` does.
        prompts: one or more texts.
        add: a direction that is added at its site, at every token.
        alpha: how much of it: it is multiplied by its vector as it is.
        model_x: another model of the same tokens, whose states go in at `site` instead of the model's own.
        map: from its rows (N, d_x) to the model's; see `inject`.
        site: of both models, or (of X, of the model).
        new_tokens: most tokens of a continuation.
        temperature: 0: the most probable token each time; else tokens are drawn.
        seed: of the draws.

    Raises:
        ValueError: a model is of another kind, has no such site, or no room for so many tokens.
    """
    frozen, changing = load(model), cast(Any, None)
    if add is not None:
        changing = generating.Added(int(add.about["site"]), alpha * add.tensors["vector"])
    if model_x is not None and map is not None:
        of_x, of_y = site if isinstance(site, tuple) else (site, site)
        mapped = map.transform if isinstance(map, ArrayMap) else map
        changing = generating.Replaced(of_y, load(model_x), of_x, mapped)
    (batch,) = _batches([frozen], prompts, None, len(prompts), frozen.max_length or 2**20)
    found = generating.generate(
        frozen, batch.inputs_x, changing, new_tokens=new_tokens, temperature=temperature, seed=seed
    )
    rows = zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
    return [cast(Any, frozen.tokenizer).decode(row[:n], skip_special_tokens=True) for row, n in rows]
