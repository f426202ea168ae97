"""`evaluate.py surgery`: classifiers that are truncated, or that skip spans of layers."""

import warnings

from aligners.cli.command import Run, command, of_trainer
from aligners.datamodules.model_texts import labelled_texts
from aligners.finetuning.classifier_training import EPOCHS, FinetuningRecipe
from aligners.finetuning.truncating import HEADS, SurgeryEvaluation
from aligners.reports.publishing import WriteReport


@command(
    "surgery",
    FinetuningRecipe,
    data=labelled_texts,
    skip={"dtype"},
    defaults={
        **vars(HEADS),
        **of_trainer(
            max_epochs=EPOCHS,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            log_every_n_steps=20,
        ),
    },
)
def surgery(run: Run, seed: int = 0) -> None:
    """Truncate fine-tuned classifiers after every layer and skip every span of layers, on held-out text.

    It measures accuracy with the model's own head (untuned), with a head trained on the states there (tuned), and with
    one trained on the base model's states (tuned_orig, where `data.bases` are named), as Phang et al. 2021, Figures 3
    and 4. Several models, such as seeds, give each model's figures and their mean. Without heads: `--trainer.max_epochs
    0`.

    Example: `--data.models runs/tuned/none/seed-0 --run runs/surgery`

    Args:
        run: of the command.
        seed: Of the resampling of texts for intervals.
    """
    evaluation = SurgeryEvaluation(
        run.build(FinetuningRecipe), run.options.trainer.max_epochs != 0, seed
    )
    run.start()
    trainer, data = run.trainer(WriteReport("surgery", run.folder)), run.made.data
    if evaluation.heads:
        warnings.filterwarnings(
            "ignore", message=".*in eval mode at the start.*"
        )  # the heads have no dropout
        trainer.fit(evaluation, datamodule=data)
    trainer.test(evaluation, datamodule=data, verbose=False)
