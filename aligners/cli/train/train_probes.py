"""`train.py probe`: what is encoded in the states of models."""

from aligners.cli.command import Run, can_build, command
from aligners.datamodules.layers import LayerActivations
from aligners.probing.probing_evaluation import ProbeExperiment
from aligners.probing.storing import PROBES
from aligners.probing.word_states import check_annotated


@command(
    "probe",
    ProbeExperiment,
    data=LayerActivations,
    skip={"special_tokens", "attention", "component", "packed", "far_rows"},
    defaults={
        "data.models": ["embedded-sentences:0"],
        "data.text.source": "grammar",
        "data.rows": "words_mean",
        "data.batch_size": 64,
    },
    from_files=[ProbeExperiment],
    check=can_build(ProbeExperiment),
)
def probe(run: Run) -> None:
    """Train probes on the frozen states of every layer: what is encoded, and where.

    Edge probes read labels of words and spans, structural probes read trees. They are compared with the same probes on
    an untrained twin, with a control task, and with baselines. By default they read sentences of a small grammar, and a
    model that is trained on them.

    Example: `--data.models embedded-sentences:0 --tasks pos --run runs/probes`
    """
    check_annotated(
        run.made.data, run.options.tasks
    )  # before any model is made or loaded
    run.start()
    experiment = run.build(ProbeExperiment)
    run.read(experiment, experiment.train_probes, "probing")
    experiment.save(run.folder / PROBES)
