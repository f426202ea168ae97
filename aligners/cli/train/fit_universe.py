"""The commands that fit models to one shared space: k models at once, or one more."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aligners.callbacks.checkpoint import save_maps
from aligners.cli.command import Run, with_named_revisions
from aligners.cli.train.fit import check_resumed, fits
from aligners.datamodules.pairings import universe_states
from aligners.datamodules.rows.sites import DEEPEST, NORM, sites_of_each
from aligners.errors import UserError
from aligners.fitting.saved_bank import StoredBank, load_bank
from aligners.fitting.universe.universe import (
    NETWORK,
    load_universe,
    sites_of,
    universes_of,
)
from aligners.fitting.universe.universe_alignment import Joining, UniverseAlignment
from aligners.fitting.universe.universe_evaluation import (
    UniverseEvaluation,
    between_members,
)


@fits("universe", data=universe_states, module=UniverseAlignment)
def universe(run: Run, against: Sequence[Path] = ()) -> None:
    """Fit k models, of any widths, to one shared space: a bijection u_i for each model.

    The map from model i into model j is u_i followed by the inverse of u_j, for all pairs from k maps. With models of
    different widths, or with `--model.shared`, only the first coordinates are shared; the rest is completed by its
    average. Every map is measured on held-out text, and universe.safetensors and pairs/X--Y/aligners.safetensors are
    written, which `evaluate.py inject` takes.

    Example: `--data.models embedded:0 embedded:1 embedded:2 --run runs/universe`

    Args:
        run: of the command.
        against: Files aligners.safetensors of `fit` or `fit_pairs` between its models, to measure beside it.
    """
    check_resumed(run)
    beside = [load_bank(path) for path in against]
    _check_members(run, beside)
    model = run.made.model
    widths = run.made.data.frozen_models.widths()
    model.network(len(widths), widths)
    run.start()
    run.fit(run.training())
    stored = replace(model.stored().freeze(), path=run.folder / UniverseAlignment.final)
    run.test(UniverseEvaluation(stored, beside), "universe")


@fits("join", data=universe_states, module=Joining)
def join(run: Run, universe: Path | None = None, against: Sequence[Path] = ()) -> None:
    """Fit one more model, `--data.models '[NEW]'`, to the shared space of a universe that stays as it is.

    One fit gives the maps from and to all members, whose states on the same texts are read. The universe of all models
    is written. `--data.sites` names the newcomer's layers, one for each of the members'; by default, they are the same.

    Example: `--universe runs/universe/universe.safetensors --data.models embedded:3 --run runs/joined`

    Args:
        run: of the command.
        universe: The file universe.safetensors to join.
        against: As in `train.py universe`: maps of pairs to measure beside.
    """
    if universe is None:
        raise UserError(
            "Expected `universe` to name a file universe.safetensors, but got nothing."
        )
    check_resumed(run)
    stored, beside = load_universe(universe), [load_bank(path) for path in against]
    run.use_data_of(
        {"far_rows": "keep", **stored.data_config, "models": []}
    )  # earlier versions kept far rows
    _add_members(run, stored)
    _check_members(run, beside)
    model, data = run.made.model, run.made.data
    model.members = universes_of(stored)[NETWORK]
    model.refuse_narrow(data.frozen_models.widths())
    run.start()
    data.prepare_data()
    model.refuse_other_members(stored, data)
    trainer = run.training()
    run.fit(trainer)
    evaluation = UniverseEvaluation(
        replace(model.joined(stored), path=run.folder / UniverseAlignment.final), beside
    )
    run.test(evaluation, "universe")
    if trainer.is_global_zero:
        save_maps(evaluation.stored, data, evaluation.stored.path)


def _check_members(run: Run, against: Sequence[StoredBank]) -> None:
    """Raise before anything is trained unless maps of pairs can be measured beside the models.

    Raises:
        ValueError: as `between_members`.
    """
    data = run.made.data
    if against:
        data.prepare_data()
        described = data.describe()
        between_members(against, described["models"], described["sites"])


def _add_members(run: Run, stored: StoredBank) -> None:
    """Put the members of a universe before the newcomer.

    Raises:
        ValueError: not exactly one model is named, it is in the universe already, or it lacks a site for one of the
            members'.
    """
    members = with_named_revisions(stored.data_config)["models"]
    data = run.options.data
    if len(data.models) != 1:
        raise UserError(
            f"Expected `data.models` to name the one model that joins, but got {data.models}."
        )
    if data.models[0] in members:
        raise UserError(
            f"Expected a model that is not in {stored.path}, but {data.models[0]} is in it already."
        )
    data.models = [*members, *data.models]
    data.sites = _sites_of_all(data.sites, stored)


def _sites_of_all(wanted: str, stored: StoredBank) -> str:
    """Return the members' sites with those of the newcomer, in the form of `data.sites`.

    Raises:
        ValueError: the newcomer does not have one site for each of the members'.
    """
    of_members = _members_words(stored)
    words: list[str | None] = []
    if wanted == stored.data_config["sites"]:  # as those of the members, by default
        words = list(map(_shared, of_members))
    elif wanted not in ("all", "blocks"):  # its depth is not known yet
        words = [_word(site) for (site,) in sites_of_each(wanted, [DEEPEST])]
    if len(words) != len(of_members) or None in words:
        raise UserError(
            f"Expected `data.sites` to name the newcomer's site for each of the members' {sites_of(stored)}, but got "
            f"{wanted}. {_choices(of_members, stored)}."
        )
    together = []
    for of, new in zip(of_members, words, strict=True):
        together.append(":".join(map(str, (*of, new))))
    return ",".join(together)


def _members_words(stored: StoredBank) -> list[list[str]]:
    """Return, for each place of a universe, the site of every member: a number, or `norm` where the user wrote it."""
    wanted = stored.data_config["sites"]
    numbers = sites_of(stored)
    entries: Sequence[str | int] = wanted
    if isinstance(wanted, str):
        entries = wanted.replace(",", " ").split()
    words = []
    for place, sites in enumerate(numbers):
        of_place = list(map(str, sites))
        if len(entries) == len(numbers):  # not `all` or `blocks`
            written = str(entries[place]).split(":")
            if NORM in written:
                of_place = written * (len(sites) // len(written))
        words.append(of_place)
    return words


def _shared(words: Sequence[str]) -> str | None:
    """Return the site that all members share; None: they share none."""
    return words[0] if len(set(words)) == 1 else None


def _choices(of_members: Sequence[Sequence[str]], stored: StoredBank) -> str:
    """Say what to write in order to read a newcomer at the sites of each member."""
    names = stored.data_config["models"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, own in zip(names, zip(*of_members, strict=True), strict=True):
        alike.setdefault(own, []).append(name)
    choices = []
    for own, members in alike.items():
        sites = ",".join(own)
        choices.append(f"`--data.sites {sites}` for those of {' and '.join(members)}")
    return f"Write {'; '.join(choices)}; or others, in this order"


def _word(site: int) -> str:
    """Write a site of a model of the depth `DEEPEST`."""
    return NORM if site == DEEPEST + 1 else str(site)
