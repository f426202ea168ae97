"""What watches a run: the best state of each site, checkpoints on interruption, figures, tables, reports."""

from contextlib import suppress

with suppress(ImportError):
    # Every W&B run imports it. Before Lightning it takes a tenth of the time: it looks through all that is loaded.
    import wandb.sdk.launch.inputs.internal  # noqa: F401
