"""`evaluate.py bijection`: what being a bijection costs."""

from aligners.cli.command import Run, command
from aligners.datamodules.pairings import pair_states
from aligners.fitting.bijection.price import BijectionPrice


@command(
    "bijection",
    BijectionPrice,
    data=pair_states,
    defaults={"data.batch_size": 64, "data.sites": "1"},
)
def bijection(run: Run) -> None:
    """Measure what being a bijection costs between the states of two models.

    Maps of equal size are trained for equal numbers of steps on the same rows, and measured on held-out text in both
    directions, and compared with the smallest possible error of a map that works in both directions.

    Example: `--data.sites 2 --steps 100 300 --run runs/price`
    """
    price = run.build(BijectionPrice)
    price.check_widths(*run.made.data.frozen_models.widths())
    run.start()
    run.read(price, price.run, "bijection", inference_mode=False)
