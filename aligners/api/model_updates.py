"""What changed when a model was updated, and how to keep what was built on its states."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from aligners.api.array_maps import ArrayMap
from aligners.api.model_states import Model, _batches, load, tokenised
from aligners.datamodules.rows.policies import RowKind, policy_of
from aligners.datamodules.rows.sites import parse_sites
from aligners.datamodules.task_targets import task_batch
from aligners.errors import UserError
from aligners.injection.comparing.comparison import MAPS, Compared, Comparison
from aligners.injection.generation import steering
from aligners.injection.scoring.scores import Sums
from aligners.injection.scoring.task_scores import check_labels
from aligners.maps.base import Aligner
from aligners.models.model import FrozenModel
from aligners.probing.artefacts.artefact_files import read_artefacts, write_artefact
from aligners.probing.artefacts.control_vectors import (
    read_control_vector,
    write_control_vector,
)
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.kinds import Artefact, Direction, Head
from aligners.probing.artefacts.tuned_lens import read_tuned_lens, write_tuned_lens

__all__ = [
    "Artefact",
    "Dictionary",
    "Direction",
    "Head",
    "Steered",
    "carry",
    "compare",
    "read_artefacts",
    "read_control_vector",
    "read_tuned_lens",
    "steer",
    "write_artefact",
    "write_control_vector",
    "write_tuned_lens",
]


def compare(
    old: Model,
    new: Model,
    texts: Sequence[str],
    *,
    labels: Sequence[int] | None = None,
    rows: str = "tokens",
    sites: str | Sequence[str | int] = "all",
    maps: Sequence[str] = MAPS,
    costs: int = 0,
    batch_size: int = 32,
    max_length: int = 128,
    seed: int = 0,
) -> Compared:
    """Report what has changed between two models: nothing beyond rounding, only coordinates, or from which block on.

    Maps are fitted on every other text, and everything is measured on the remaining ones.

    Args:
        old: the model as it was; see `load`.
        new: the model as it is.
        texts: texts that both read.
        labels: for classifiers: the class of each text, 0, 1, ... as both heads number them.
        rows: `tokens` for models with one tokenizer; `words` for any.
        sites: `all` for models of equal depth, or sites 3 and pairs "3:5" (OLD's site 3, NEW's site 5).
        maps: out of permutation, rotation and linear; if empty, states are compared unmapped, and few texts suffice.
        costs: number of texts on which OLD's states are put into NEW, to measure what that costs.
        batch_size: texts that are read together.
        max_length: most tokens of a text.
        seed: seed of masks, batches and resampling.

    Returns:
        The `verdict`, the rows of the report with their tables, and the directions in which states differ (`vectors`).

    Raises:
        ValueError: there are no texts, too few for the maps, or none with rows in common; the tokenizers differ where
            rows are tokens, the depths where no sites are named; or the numbers of labels and texts differ.
    """
    models = [load(old), load(new)]
    pairs = _checked_pairs(sites, models)
    of_fit, of_held = _halves(labels, models)

    words = policy_of(rows).types == "words"
    fit, _ = tokenised(models, texts[::2], of_fit, max_length, words=words)
    held, table = tokenised(models, texts[1::2], of_held, max_length, words=words)
    comparison = Comparison(
        models[0],
        models[1],
        fit,
        held,
        table,
        pairs=pairs,
        kind=RowKind(rows),
        labelled=labels is not None,
        maps=maps,
        costs=costs,
        batch_size=batch_size,
        seed=seed,
    )
    return comparison.run()


def _checked_pairs(
    sites: str | Sequence[str | int], models: Sequence[FrozenModel]
) -> list[tuple[int, int]]:
    """Return the site pairs that are named, if both models have them."""
    pairs = parse_sites(sites, models[0].depth, models[1].depth)
    for pair in pairs:
        for model, site in zip(models, pair, strict=True):
            model.check_site(site, "sites")
    return pairs


def _halves(
    labels: Sequence[int] | None, models: Sequence[FrozenModel]
) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """Return the labels of the fitting and of the held-out texts, if all models have such classes."""
    if labels is None:
        return None, None
    for model in models:
        check_labels(model, torch.tensor(labels), "labels")
    return labels[::2], labels[1::2]


def carry(
    artefact: Artefact,
    map: ArrayMap | Aligner,
    forward: ArrayMap | Aligner | None = None,
    **about: Any,
) -> Any:
    """Carry an artefact to another model, whose states it then reads as it read the old model's.

    Args:
        artefact: from `read_artefacts`; or a `Head`, `Direction` or `Dictionary`. `Head.of(clf.coef_, clf.intercept_)`
            takes what scikit-learn has fitted.
        map: g from rows of the new model to rows of the old one, fitted on the same tokens, words or texts, without
            labels.
        forward: a map from the old model's rows to the new one's: a vector to steer by and a dictionary's decoder go
            through it. Default: the (pseudo-)inverse of `map`.
        about: fields that change, including `model` and `site`; `write_artefact` needs the name of the new model.

    Returns:
        An artefact of the same kind. If `map` is not affine, it is kept beside the artefact.

    Raises:
        ValueError: the map is of other widths or several sites, or not fitted.
    """
    there = None
    if forward is not None:
        there = _bank(forward, "forward")
    return artefact.carried(_bank(map, "map"), there, **about)


def _bank(map: ArrayMap | Aligner | Callable[..., Any], name: str) -> Aligner:
    bank = map.bank if isinstance(map, ArrayMap) else map
    if not isinstance(bank, Aligner):
        raise UserError(
            f"Expected `{name}` to be a fitted map of this package, but got a {type(map).__name__}."
        )
    return bank


class Steered(NamedTuple):
    """The effects and costs of steering.

    Attributes:
        curve: a row for each direction and α: `kl`, and the increases of the `loss`, of the log-odds of `words` and of
            a probe's `reading`, all per token and with intervals (`kl_low`, `kl_high`).
        equal: a row for each effect, cost and direction: its `value` there, and its `share` of the first direction's.
            Random directions share a row.
    """

    curve: list[dict[str, Any]]
    equal: list[dict[str, Any]]


def steer(
    model: Model,
    directions: Direction | Mapping[str, Direction],
    texts: Sequence[str],
    *,
    words: tuple[Sequence[str], Sequence[str]] = ((), ()),
    probe: Artefact | None = None,
    alphas: Sequence[float] = steering.ALPHAS,
    equal_kl: Sequence[float] = steering.LEVELS,
    random: int = 3,
    batch_size: int = 16,
    max_length: int = 128,
    seed: int = 0,
) -> Steered:
    """Add directions to the states of a causal language model at every token, and measure its answers.

    Args:
        model: see `load`.
        directions: one, or several by name, with their `site`; the others are compared with the first of a site.
        texts: texts in which every token but the first is predicted.
        words: words that should become more likely, and words that should become less likely.
        probe: an artefact of the model at the site of the directions or later, whose reading should rise.
        alphas: multiples to add, in typical deviations of the states there (median distance from their median).
        equal_kl: costs, in nats of KL per token, at which effects are compared.
        random: number of directions drawn at random for comparison, at each site.
        batch_size: see `states`.
        max_length: likewise.
        seed: seed of the random directions, and of the resampling of texts.

    Raises:
        ValueError: the model is no causal language model, a direction does not fit it, a word is unknown to it, or
            neither words nor a probe are given.
    """
    frozen = load(model)
    if not isinstance(directions, Mapping):
        directions = {directions.name: directions}
    given = _with_roles(directions)
    given += steering.random_directions(given, random, seed)

    steered = steering.Steering(frozen, given, alphas, words, cast(Any, probe))
    parts = _batches([frozen], texts, None, batch_size, max_length)
    batches = [task_batch(part, frozen).to(frozen.device) for part in parts]
    steered.measure_units(batches)
    sums = [steered.sums(batch) for batch in batches]
    table = _joined(sums)
    curve = steering.curve(steered, table, seed)
    return Steered(curve, steering.at_equal_cost(steered, table, equal_kl, seed))


def _joined(parts: Sequence[Sums]) -> Sums:
    """Join the sums over batches, on the CPU."""
    table = {}
    for name in parts[0]:
        table[name] = torch.cat([part[name] for part in parts], -1).cpu()
    return table


def _with_roles(directions: Mapping[str, Direction]) -> list[steering.Direction]:
    """Give directions their roles: the first of a site is native, the others are carried there."""
    given = []
    sites: set[int] = set()
    for name, one in directions.items():
        role = "carried" if one.site in sites else "native"
        vector = one.tensors["vector"]
        given.append(steering.Direction(name, one.site, vector, role))
        sites.add(one.site)
    return given
