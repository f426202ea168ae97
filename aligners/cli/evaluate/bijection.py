"""`evaluate.py bijection`: what being a bijection costs."""

from __future__ import annotations

from aligners.cli.run import Run, command
from aligners.fitting.price import BijectionPrice, RowsInMemory
from aligners.reports.publishing import write_report
from datamodules.pairings import pair_states


@command("bijection", BijectionPrice, data=pair_states, defaults={"data.batch_size": 64, "data.sites": "1"})
def bijection(run: Run) -> None:
    """Measure what being a bijection costs between the states of two models.

    Maps of equal size are trained for equal numbers of steps on the same rows, and measured on held-out text in both
    directions, beside the least error that a map can have if it is to be good both ways.
    """
    price = run.build(BijectionPrice)
    price.check_widths(*run.made.data.frozen_models.widths())
    run.start()
    trainer, reading = run.trainer(inference_mode=False), RowsInMemory(price.most_rows, price.other_text)
    trainer.test(reading, datamodule=run.made.data, verbose=False)
    price.run(run.made.data, reading.rows, shown=trainer.progress_bar_callback is not None)
    write_report(price, "bijection", run.folder, trainer)
