"""Where a restored fit goes on: Lightning's counters, one of them private, are put back to the last whole batch.

Lightning 2.6 has no public way to say at which batch a fit begins, and its own counters are off by one after a batch
that was cut off. `tests/datamodules/test_batches.py` fails when a name that is used here is no longer Lightning's.
"""

from typing import Any


def go_on_after_last_batch(fit_loop: Any, batches: int) -> tuple[int, int]:
    """Set the counters of a restored fit loop to what they were at the end of its last whole batch.

    Only the number of processed batches can be relied on. Lightning's counter of batches that began in all epochs
    still includes one that was cut off (Lightning 2.6 corrects the current epoch only), and a validation that is due
    every so many batches would then come one batch too soon.

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
        tracker.ready = tracker.started = epoch + 1
        tracker.processed = tracker.completed = epoch
    _end(loop.batch_progress.total, done)
    _end(loop.batch_progress.current, before + 1)
    loop.batch_progress.is_last_batch = before + 1 == batches
    loop._batches_that_stepped = (
        done - 1
    )  # private: the step at which Lightning's loggers write
    return divmod(done, batches)


def _end(tracker: Any, batches: int) -> None:
    """Say that the last of so many batches was processed, and is yet to be completed."""
    tracker.ready = tracker.started = tracker.processed = batches
    tracker.completed = batches - 1
