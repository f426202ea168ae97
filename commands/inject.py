"""The command line of `evaluate.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace

from aligners.injection.evaluation import InjectionEvaluation
from aligners.injection.methods import CLOSED_FORMS, ClosedForms
from aligners.stitching.storage import load_stitching
from aligners.storage import StoredAlignment, load_alignment
from callbacks.checkpoint import SaveAligners
from commands.run import progress_bar, quiet, start_evaluation
from commands.similarity import compare, similarity_parser
from commands.stitch import evaluate_stitching, stitching_parser
from commands.surgery import operate, surgery_parser
from datamodules.paired import PairedActivations
from datamodules.text.sources import TextSource
from reports.injection.report import Report

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Parse the command line and run what it asks for."""
    quiet()
    parser = ArgumentParser(prog="evaluate.py", description="Compare models on held-out text.")
    commands = parser.add_subcommands(dest="command")
    commands.add_subcommand("inject", _inject_parser(), help="Measure the errors of maps, inject at every site.")
    commands.add_subcommand("similarity", similarity_parser(), help="Measure all layers of models against each other.")
    commands.add_subcommand("stitch", stitching_parser(), help="Stitch models together and measure the penalty.")
    commands.add_subcommand("surgery", surgery_parser(), help="Truncate classifiers, and skip spans of their layers.")
    given = parser.parse_args(args)
    if given.command == "similarity":
        compare(given.similarity, parser.instantiate(given).similarity)
        return
    if given.command == "surgery":
        operate(given.surgery, parser.instantiate(given).surgery)
        return
    if given.command == "stitch":
        trained = load_stitching(given.stitch.checkpoint) if given.stitch.checkpoint else None
        if trained is not None:
            given = _with_data(parser, args, "stitch", trained.data_config)
        evaluate_stitching(given.stitch, parser.instantiate(given).stitch, trained)
        return
    if not given.inject.checkpoints and not given.inject.closed_form:
        raise ValueError(
            "Expected `checkpoints` or `closed_form` to name at least one map, but got neither: there is nothing to "
            "measure. Leave `closed_form` out for all of them."
        )
    stored = [load_alignment(path) for path in given.inject.checkpoints]
    if stored:
        # What the maps were fitted on is what they are evaluated on, unless the command line says otherwise.
        given = _with_data(parser, args, "inject", stored[0].data_config)
    inject(given.inject, parser.instantiate(given).inject, stored)


def _with_data(parser: ArgumentParser, args: Sequence[str] | None, command: str, config: dict[str, Any]) -> Namespace:
    """Parse once more, a checkpoint's data options being the defaults."""
    del config["batch_size"]  # changes nothing but the speed, and training likes smaller ones
    parser.set_defaults({f"{command}.data.{name}": value for name, value in _flat(config).items()})
    return parser.parse_args(args)


def _inject_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Measure maps on held-out text: their errors on the rows that they were fitted on, and what the "
        "frozen model does with mapped states in place of its own, where it has a classification head, the texts have "
        "labels, and both models read the same tokens."
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these options.")
    parser.add_argument(
        "--checkpoints", type=list[Path], default=[],
        help="Files aligners.ckpt of one pair of models. Their data options are this command's defaults. "
        "Without any, only the closed forms are fitted, on the spot.",
    )  # fmt: skip
    parser.add_argument(
        "--closed_form", type=list[str], default=list(CLOSED_FORMS),
        help=f"Closed forms to fit on the spot where the checkpoints lack them: {', '.join(CLOSED_FORMS)}.",
    )  # fmt: skip
    parser.add_argument(
        "--both_directions", type=bool, default=False,
        help="Also inject Y's states into X: through the inverse of bijective aligners.",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="Of the random floors and the resampling of texts.")
    parser.add_argument(
        "--other_text", type=TextSource | None, default=None,
        help="Another source of text, on whose held-out texts errors are measured too: the columns fvu_other. Its "
        "labels are not used; texts that maps were fitted on are left out.",
    )  # fmt: skip
    parser.add_argument(
        "--run",
        type=Path | None,
        default=None,
        help="New folder of the report. Default: runs/inject-<date>-<time>.",
    )
    parser.add_class_arguments(PairedActivations, "data")
    parser.add_class_arguments(pl.Trainer, "trainer", skip={"callbacks"}, instantiate=False)
    parser.set_defaults({"data.batch_size": 128, "trainer.enable_checkpointing": False})
    return parser


def inject(options: Namespace, made: Namespace, stored: list[StoredAlignment]) -> None:
    """Evaluate by injection, through the Trainer.

    Args:
        options: what was asked for, as plain values.
        made: the same, with the data module instantiated.
        stored: the checkpoints.
    """
    given = _inject_parser().dump(options)
    folder, settings = start_evaluation("inject", options.run, vars(options.trainer), given)
    if not stored:
        stored = [_fit_closed_forms(options, made.data, settings, folder)]
    evaluation = InjectionEvaluation(
        stored, options.closed_form, options.both_directions, options.seed, made.other_text
    )
    trainer = pl.Trainer(**settings, callbacks=[*progress_bar(settings["enable_progress_bar"]), Report(folder)])
    trainer.test(evaluation, datamodule=made.data, verbose=False)


def _fit_closed_forms(
    options: Namespace, data: PairedActivations, settings: dict[str, Any], folder: Path
) -> StoredAlignment:
    """One pass over the fitting texts; the closed forms they determine end up in a checkpoint beside the report."""
    factories = {name: CLOSED_FORMS[name] for name in options.closed_form}
    module = ClosedForms(factories, both_directions=options.both_directions)
    once = {
        **settings,
        "max_epochs": -1,
        "logger": False,
        "limit_val_batches": 0,
        "enable_model_summary": False,
    }
    callbacks = [*progress_bar(settings["enable_progress_bar"]), SaveAligners(folder)]
    pl.Trainer(**once, callbacks=callbacks).fit(module, datamodule=data)
    return module.stored(folder / "aligners.ckpt")


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options with dotted names; a map of labels is one value."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        nested = isinstance(value, dict) and name != "labels"
        flat.update(_flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value})
    return flat
