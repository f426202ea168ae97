"""The default INN trained in TF32 against float32: what it reaches, beside what another seed changes.

450 steps of 512 rows at width 768. States have a known spectrum, types of which a tenth is only held out, and a random
non-linear map between them (`benchmarks/widths.py`). Two seeds are the two sites of a bank: their weights and the order
of their rows differ. TF32 may be worse than float32 by no more than the seeds differ, or by `SLACK` of what float32
has. All figures are taken in float32. Where there is no TF32, float32 is compared with itself.

The head is a random linear one over 4,096 words: the KL divergence of its predictions from mapped states against those
from the true ones stands for the penalty of a language model, of which none is here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.fitting.map_errors import MapErrors
from aligners.maps.inn import INN
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device
from benchmarks.on_gpu.precision import Precision
from benchmarks.widths import synthetic

SEEDS = 2
WORDS = 4_096
SHARPNESS = 3.0  # standard deviation of the head's logits
KL = "KL of a random head, nats"
ERRORS = {
    "fvu": "FVU",
    "fvu_inverse": "FVU of the inverse",
    "fvu_unseen": "FVU on unseen types",
    "round_trip": "round trip",
}
SLACK = 0.02
ROUND_TRIP_SLACK = 1.0  # it is the largest of many rounding errors


class Size(NamedTuple):
    """How large a comparison is.

    Attributes:
        width: d.
        rows: to fit on.
        held_out: rows to judge by.
        types: of rows; a tenth of them is only held out.
        steps: of training.
        a_step: rows a step.
    """

    width: int
    rows: int
    held_out: int
    types: int
    steps: int
    a_step: int


FULL = Size(768, 20_000, 4_000, 2_000, 450, 512)
SMALL = Size(16, 200, 100, 20, 3, 32)


class TypedRows(NamedTuple):
    """Paired rows (SEEDS, n, d) to fit on and held out, and which of the latter are of unseen types, (n,)."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    unseen: Tensor


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    size = FULL
    if small:
        size = SMALL
    coarse: Precision = "float32"
    if device.tf32:
        coarse = "tf32"
    rows = typed_rows(size, device.name)
    exact = trained(rows, size, "float32", device.name)
    faster = trained(rows, size, coarse, device.name)
    for what, values in exact.items():
        compare(figures, what, values, faster[what])


def typed_rows(size: Size, device: str) -> TypedRows:
    """Draw the rows, those of each seed in an order of its own."""
    draw = torch.Generator().manual_seed(0)
    seen = 9 * size.types // 10
    fitted = torch.randint(seen, (size.rows,), generator=draw)
    held_out = torch.randint(size.types, (size.held_out,), generator=draw)
    types = torch.cat([fitted, held_out])
    rows = synthetic(size.width, 0, size.rows, size.held_out, types)
    orders = []
    for _ in range(SEEDS):
        order = torch.randperm(size.rows, generator=draw)
        orders.append(order)
    drawn = torch.stack(orders)
    held_x = rows.held_x.expand(SEEDS, -1, -1)
    held_y = rows.held_y.expand(SEEDS, -1, -1)
    return TypedRows(
        x=rows.x[0, drawn].to(device),
        y=rows.y[0, drawn].to(device),
        held_x=held_x.to(device),
        held_y=held_y.to(device),
        unseen=(held_out >= seen).to(device),
    )


def trained(
    rows: TypedRows, size: Size, products: Precision, device: str
) -> dict[str, Tensor]:
    """Train in this precision, and return what is reached on the held-out rows, (SEEDS,) each."""
    moments = moments_of(rows.x, rows.y)
    torch.manual_seed(0)
    aligner = INN(SEEDS, size.width, size.width).to(device)
    aligner.fit(moments)
    training = Alignment(products=products)
    training.train_on_rows(aligner, rows.x, rows.y, size.steps, size.a_step, seed=0)
    errors = MapErrors(moments.mean_x, moments.mean_y)
    errors.to(device)
    with torch.no_grad():
        errors.update(aligner, rows.held_x, rows.held_y, rows.unseen)
        mapped = aligner(rows.held_x)
        lost = divergence(mapped, rows.held_y)
    found = errors.compute()
    figures = {}
    for name, what in ERRORS.items():
        figures[what] = found[name]
    figures[KL] = lost
    return figures


def divergence(mapped: Tensor, truth: Tensor) -> Tensor:
    """Mean KL divergence in nats of the head's predictions from mapped states, (SEEDS,)."""
    width = truth.shape[-1]
    draw = torch.Generator().manual_seed(0)
    head = torch.randn(width, WORDS, generator=draw)
    head = head.to(truth.device)
    deviation = width**0.5 * truth.std()
    head *= SHARPNESS / deviation
    expected = torch.log_softmax(truth @ head, -1)
    found = torch.log_softmax(mapped @ head, -1)
    lost = expected.exp() * (expected - found)
    of_row = lost.sum(-1)
    return of_row.mean(-1)


def compare(figures: Figures, what: str, exact: Tensor, faster: Tensor) -> None:
    """Add what both precisions reach, mean over the seeds, and how much the seeds differ in float32."""
    value = float(exact.mean())
    reached = float(faster.mean())
    spread = float(exact.max() - exact.min())
    slack = SLACK
    if what == ERRORS["round_trip"]:
        slack = ROUND_TRIP_SLACK
    figures.add(f"{what}, float32", value)
    figures.add(f"{what}, tf32", reached)
    figures.add(f"{what}, two seeds differ by", spread)
    difference = reached - value
    bar = max(spread, slack * value)
    figures.add(f"{what}, difference of tf32 from float32", difference, bar=bar)
