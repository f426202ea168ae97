"""Where a resumed fit goes on: after its last whole step, wherever in Lightning's loops it was interrupted."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["go_on_after_last_batch", "limited"]


def go_on_after_last_batch(fit_loop: Any, batches: int) -> tuple[int, int]:
    """Set the counters of a restored fit loop to what they were at the end of its last whole batch.

    How many batches were processed says it all. Lightning's other counters do not: a batch that was cut off stays
    among those that began, of all epochs together (Lightning 2.6 takes it back in the current epoch only), and a
    validation that is due every so many batches then comes one too soon.

    Args:
        fit_loop: of the Trainer, after it was restored and before it runs.
        batches: in an epoch.

    Returns:
        The epoch in which the next batch is, from 0, and how many batches of it have been.
    """
    loop = fit_loop.epoch_loop
    done = loop.batch_progress.total.processed
    loop.val_loop.batch_progress.reset()
    if done == 0:
        fit_loop.epoch_progress.reset()
        loop.batch_progress.reset()
        fit_loop.restarting = False
        return 0, 0
    epoch, before = divmod(done - 1, batches)
    for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        vars(tracker).update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
    for tracker, ended in ((loop.batch_progress.total, done - 1), (loop.batch_progress.current, before)):
        vars(tracker).update(ready=ended + 1, started=ended + 1, processed=ended + 1, completed=ended)
    loop.batch_progress.is_last_batch = before + 1 == batches
    loop._batches_that_stepped = done - 1
    return divmod(done, batches)


def limited(batches: int, trainer: Any, stage: Literal["train", "test"]) -> int:
    """Number of batches that a Trainer reads of `batches`, under its `limit_train_batches` or `limit_test_batches`.

    Raises:
        ValueError: the limit leaves none.
    """
    name = f"limit_{stage}_batches"
    limit = getattr(trainer, name)
    count = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    if not count:
        raise ValueError(f"Expected `trainer.{name}` to leave at least one of {batches} batches, but got {limit}.")
    return count
