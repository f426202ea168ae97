"""`train.py probe`: what is encoded in the states of models."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from aligners.cli.options import add_data_and_trainer, command_parser, options_of
from aligners.cli.run import instantiate, start
from aligners.probing.evaluation import ProbeExperiment
from aligners.probing.reading import check_annotated
from aligners.probing.storing import PROBES
from aligners.reports.publishing import write_report
from datamodules.layers import LayerActivations

NEW = {"models": ["embedded-sentences:0"], "text.source": "grammar", "rows": "words_mean"}


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "probe",
        "Train probes on the frozen states of every layer: edge probes for labels of words and spans, structural "
        "probes for trees; beside the same probes on an untrained twin, on a control task, and baselines. By default "
        "on sentences of a small grammar, and a model that is trained on them.",
    )
    made.add_class_arguments(ProbeExperiment, None, sub_configs=True)
    skip = {"special_tokens", "attention", "component", "packed"}
    add_data_and_trainer(made, LayerActivations, batch_size=64, skip=skip)
    made.set_defaults({f"data.{name}": value for name, value in NEW.items()})
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Read, train, report, and keep the probes."""
    options = parser.parse_args(words)
    made = instantiate(parser, options)
    check_annotated(made.data, options.tasks)  # before any model is made or loaded
    begun = start("probe", parser, options, made)
    experiment = ProbeExperiment(**options_of(ProbeExperiment, begun.made))
    trainer = begun.trainer()
    trainer.test(experiment, datamodule=begun.made.data, verbose=False)  # reads
    experiment.train_probes()
    write_report(experiment, "probing", begun.folder, trainer)
    experiment.save(begun.folder / PROBES)
