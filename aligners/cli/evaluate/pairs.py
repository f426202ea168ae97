"""The commands for pairs of models: errors of maps, behaviour with mapped states, probes of them, what changed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import save_file

from aligners.cli.run import Run, can_build, command, options_of
from aligners.errors import UserError, check_known
from aligners.files.whole import whole_file
from aligners.fitting.bank import DIRECTIONS, FORWARD, StoredBank, load_bank, refuse_other_bank, save_bank
from aligners.fitting.price import BijectionPrice
from aligners.injection.comparing.comparison import MAPS, Comparison
from aligners.injection.generation.continuing import Continuing, continue_texts
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import CLOSED_FORMS, ClosedForms, between_two_models
from aligners.injection.routes import InjectedTask, paired_routes
from aligners.injection.scoring.pair_intervals import check_groups
from aligners.injection.scoring.tasks import check_labels, match_heads
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.models.loading.models import check_precision
from aligners.probing.across.evaluation import ProbesAcrossMaps
from aligners.probing.reading import check_annotated
from aligners.progress import hidden, track
from aligners.reports.publishing import write_report
from datamodules.model_texts import stitched_texts
from datamodules.module import stream_of
from datamodules.pairings import pair_states
from datamodules.rows.policies import RowKind, policy_of
from datamodules.states import States


def _check(made: Namespace) -> None:
    check_known(CLOSED_FORMS, closed_form=made.closed_form)
    can_build(Continuing)(made)


@command(
    "inject",
    InjectionEvaluation,
    Continuing,
    data=pair_states,
    skip={"stored"},
    defaults={"data.batch_size": 128},
    check=_check,
)
def inject(run: Run, checkpoints: Sequence[Path] = ()) -> None:
    """Measure maps on held-out text: their errors, and what a model does with mapped states in place of its own.

    Errors are those on the rows that the maps were fitted on. The frozen model is a classifier on texts with labels,
    or a language model; to inject into it, both models must read the same tokens. With `--generate 16` language models
    also continue the beginnings of 16 held-out texts: by themselves, and with every map in place at every site.

    Example: `--checkpoints runs/mine/aligners.safetensors --run runs/injected`

    Args:
        run: of the command.
        checkpoints: Files aligners.safetensors or stitching.safetensors of one pair of models. The data options of the
            first are this command's defaults. Without an aligners.safetensors, the closed forms are fitted on the spot.
    """
    if not checkpoints and not run.options.closed_form:
        raise UserError(
            "Expected `checkpoints` or `closed_form` to name at least one map, but got neither: there is nothing to "
            "measure. Leave `closed_form` out for all of them."
        )
    stored = [between_two_models(load_bank(path)) for path in checkpoints]
    if stored:
        run.use_data_of(stored[0].data_config)
    run.start()
    before: list[pl.Callback] = [LambdaCallback(setup=partial(_say_what_is_not_injected, run.options))]
    if all(bank.moments is None for bank in stored):
        stored.append(_fit_closed_forms(run, *before))
        before = []
    after = LambdaCallback(on_test_epoch_end=partial(continue_texts, run.build(Continuing)))
    run.test(run.build(InjectionEvaluation, stored), "injection", *before, after)


def _say_what_is_not_injected(options: Namespace, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
    """Say before anything is read where nothing can be injected, and reject labels that no head predicts."""
    data = stream_of(trainer, States)
    routes = paired_routes(data, both_directions=options.both_directions)
    task = InjectedTask.of(data, routes, masked_share=options.masked_share, seed=0)
    writing = Continuing(**options_of(Continuing, options))
    for route, why in task.not_injected.items():
        writing.check(data.split("test"), route, why)
        if why is not None:
            rank_zero_only(print)(f"Nothing will be injected {DIRECTIONS[route.key]}, only errors are measured: {why}.")


def _fit_closed_forms(run: Run, *callbacks: pl.Callback) -> StoredBank:
    """Fit the closed forms in one pass over the fitting texts, and save those that they determine beside the report."""
    names = run.options.closed_form or ["linear"]
    module = ClosedForms({name: CLOSED_FORMS[name] for name in names}, both_directions=run.options.both_directions)
    once = {"max_epochs": -1, "logger": False, "limit_val_batches": 0, "enable_model_summary": False}
    trainer = run.trainer(*callbacks, **once)
    trainer.fit(module, datamodule=run.made.data)
    bank = replace(module.stored().freeze(), path=run.folder / "aligners.safetensors")
    if trainer.is_global_zero:
        save_bank(bank, bank.path)
        print(f"Saved {bank.path}")
    return bank if run.options.closed_form else replace(bank, maps={})  # floors alone need its moments


@command(
    "stitching",
    StitchingEvaluation,
    data=stitched_texts,
    skip={"stored"},
    defaults={"data.batch_size": 128},
    check=lambda made: made.checkpoint or can_build(StitchingEvaluation)(made),
)
def stitch(run: Run, checkpoint: Path | None = None, groups: dict[str, list[str]] | None = None) -> None:
    """Stitch models on held-out text and measure the penalty.

    With a checkpoint of `train.py stitch`: its layers. Without: identity stitching between any number of models of one
    width, at every block or on the whole grid of site pairs.

    Example: `--checkpoint runs/stitched/stitching.safetensors --run runs/penalties`

    Args:
        run: of the command.
        checkpoint: File stitching.safetensors. Its data options are this command's defaults.
        groups: Name -> models, for example those that generalise and those that do not: means are then taken over the
            routes within and between groups.
    """
    stored = load_bank(checkpoint) if checkpoint else None
    if stored is not None:
        run.use_data_of(stored.data_config)
    check_groups(groups, run.options.data.models)
    evaluation = run.build(StitchingEvaluation, stored)
    run.start()
    run.test(evaluation, "stitching", groups=groups)


@command(
    "probe_across",
    ProbesAcrossMaps,
    data=pair_states,
    skip={"stored", "packed"},
    from_files=[ProbesAcrossMaps],
    defaults={"data.batch_size": 128, "data.text.source": "grammar"},
)
def probe(run: Run, checkpoints: Sequence[Path] = ()) -> None:
    """Train probes on the states of Y, and let them read g(X), for every map g of a checkpoint and at every site.

    What they get right is what the map has kept. Beside it stand Y's own states, probes that are trained on X, and
    floors. It needs annotated sentences and any two models. Where maps are of tokens and Y has a head, the few
    dimensions that a narrow probe reads are also swapped through the map, and Y's answers measured.

    Example: `--checkpoints runs/mine/aligners.safetensors --tasks pos --run runs/across`

    Args:
        run: of the command.
        checkpoints: Files aligners.safetensors of `train.py fit`, of one pair of models. The data options of the first
            are this command's defaults, but for `rows`: maps of tokens are read at the last piece of each word.
    """
    if not checkpoints:
        raise UserError("Expected at least one aligners.safetensors of `train.py fit` in `checkpoints`, but got none.")
    stored = [between_two_models(load_bank(path)) for path in checkpoints]
    run.use_data_of(_of_words(stored[0]))
    check_annotated(run.made.data, run.options.tasks)  # before any model is made or loaded
    run.start()
    evaluation = run.build(ProbesAcrossMaps, stored)
    run.read(evaluation, evaluation.train_probes, "probes_across")


def _of_words(bank: StoredBank) -> dict[str, Any]:
    """The data options of a checkpoint, but that all words are read, where they stand as tokens if tokens were."""
    rows = bank.data_config["rows"]
    options = {name: value for name, value in bank.data_config.items() if name != "packed"}
    return {**options, "rows": rows if policy_of(rows).types == "words" else "words", "held_out_types": 0.0}


@command(
    "comparison",
    data=pair_states,
    skip={"packed", "component", "special_tokens", "held_out_types", "store", "store_dtype", "store_rows"},
)
def compare(
    run: Run, maps: Sequence[str] = MAPS, checkpoints: Sequence[Path] = (), most: int = 500, costs: int = 100,
    seed: int = 0,
) -> None:  # fmt: skip
    """Say what changed from one model (model_x, old) to another (model_y, new) after an update.

    Nothing beyond rounding, only coordinates, or from which block on and on which texts: by their answers, by their
    states at every site, and by their weights, each beside what the old model differs from itself by rounding.

    Example: `--data.model_x embedded-gpt:0 --data.model_y embedded-gpt:1 --run runs/compared`

    Args:
        run: of the command.
        maps: By which states of the old model may agree with those of the new: permutation, rotation, linear. None of
            them (`[]`): states are compared as they are, and few texts do.
        checkpoints: Files aligners.safetensors of `train.py fit` between the two, whose maps are measured, too.
        most: Texts to fit the maps on, and held-out texts to compare on, at most so many of each.
        costs: On how many of them the old model's states are put into the new one, at 8 sites if there are more.
        seed: Of masks, batches, and the resampling of texts.
    """
    check_known(MAPS, maps=maps)
    stored = [between_two_models(load_bank(path)) for path in checkpoints]
    run.start()
    trainer, data = run.trainer(), run.made.data
    check_precision(trainer)
    if trainer.world_size > 1:
        raise UserError(f"One process compares models, but `trainer.devices` makes {trainer.world_size}. Set it to 1.")
    data.prepare_data()
    data.setup("test")
    data.place_models(trainer.strategy.root_device)
    data.leave_out({str(bank.path): bank.fitted for bank in stored if bank.fitted is not None})
    for bank in stored:
        refuse_other_bank(bank, data.describe()["models"], data.component, {FORWARD: data.reader.sites})
        bank.of_each(lambda aligner: aligner.to(trainer.strategy.root_device))
    labelled, cautions = _labelled(data)
    old, new = data.frozen
    found = Comparison(
        old, new, data.split("fit"), data.split("test"), data.texts.test, data.reader.sites, RowKind(data.rows),
        labelled, maps, {name: aligner for bank in stored for name, aligner in bank.maps[FORWARD].items()}, costs, most,
        data.batch_size, seed, lambda batches, what: track(batches, what, disable=hidden(trainer)),
    ).run()  # fmt: skip
    found.meta.update({**data.describe(), "seed": seed, "cautions": cautions})
    if found.vectors:
        with whole_file(run.folder / "directions.safetensors") as unfinished:
            save_file({f"site_{site}": part.contiguous() for site, part in found.vectors.items()}, unfinished)
    write_report(found, "comparison", run.folder, trainer)


def _labelled(data: States) -> tuple[bool, list[str]]:
    """Whether both models are classifiers of the texts' labels; their classes are then matched. And why not, if so."""
    labels = data.split("test").labels
    if labels is None or any(model.task != "classification" or model.regression for model in data.frozen):
        return False, []
    try:
        for model in data.frozen:
            check_labels(model, labels, data.text.source)
        match_heads(data, data.frozen)
    except UserError as error:
        return False, [f"The labels of the texts are not used: {error}"]
    return True, []


@command("bijection", BijectionPrice, data=pair_states, defaults={"data.batch_size": 64, "data.sites": "1"})
def bijection(run: Run) -> None:
    """Measure what being a bijection costs between the states of two models.

    Maps of equal size are trained for equal numbers of steps on the same rows, and measured on held-out text in both
    directions, beside the least error of a map that works in both directions.

    Example: `--data.sites 2 --steps 100 300 --run runs/price`
    """
    price = run.build(BijectionPrice)
    price.check_widths(*run.made.data.frozen_models.widths())
    run.start()
    run.read(price, price.run, "bijection", inference_mode=False)
