"""Forward and backward of the plain INN against zuko, FrEIA and its bare matrix products; a bank against a loop.

One network (S = 1): 8 affine couplings on alternating halves, a conditioner of one hidden layer, gradients of all
parameters of a squared error. The peers, built to the same width, depth and activation:
- zuko: `GeneralCouplingTransform` with `MonotonicAffineTransform`, its masks alternating halves;
- FrEIA: `AllInOneBlock`, one coupling a block, its fixed permutation included, and half as many
  `GLOWCouplingBlock`s, two couplings a block.
All of them also return the log-determinant, which ours leaves out unless asked; its gradient is not taken.
"matrix products" is the floor: the very same products, forward and backward, and nothing between them.

The bank: 12 such networks as one bank against a loop over 12 banks of one. Its share of the matrix rate is taken
against the rate of large square products of the same precision, measured in the same run.

The default, trained both ways: a step of its loss against its own matrix products, those of its couplings and of its
triangular pairs (a triangular system counts as the product with its matrix), forward and backward, in both directions.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.maps.inn import INN
from benchmarks.harness import Figures, interleaved, parser, ratio

COUPLINGS = 8


def plain(sites: int, width: int, device: str) -> INN:
    """The paper's form, its hidden layers as wide as the states."""
    network = INN(
        sites,
        width,
        width,
        couplings=COUPLINGS,
        hidden=width,
        depth=1,
        mixing="none",
        start="identity",
        both_ways=False,
    )
    return network.to(device)


def zuko_flow(width: int, device: str) -> nn.Module:
    """Our plain INN in zuko."""
    from zuko.flows.coupling import GeneralCouplingTransform
    from zuko.transforms import MonotonicAffineTransform

    half = torch.arange(width) < width // 2
    return nn.ModuleList(
        GeneralCouplingTransform(
            width,
            mask=half if k % 2 == 0 else ~half,
            univariate=MonotonicAffineTransform,
            shapes=[(), ()],
            hidden_features=[width],
            activation=nn.GELU,
        )
        for k in range(COUPLINGS)
    ).to(device)


def zuko_step(flow: nn.Module, x: Tensor, y: Tensor) -> None:
    """One forward and backward."""
    mapped = x
    for layer in flow.children():
        mapped, _ = layer().call_and_ladj(mapped)
    _backward(flow, mapped, y)


def freia_flow(width: int, device: str, block: str) -> nn.Module:
    """Our plain INN in FrEIA, of `AllInOneBlock`s or `GLOWCouplingBlock`s."""
    from FrEIA import framework, modules

    def conditioner(d_in: int, d_out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(d_in, width), nn.GELU(), nn.Linear(width, d_out))

    flow = framework.SequenceINN(width)
    for _ in range(COUPLINGS if block == "AllInOneBlock" else COUPLINGS // 2):
        flow.append(getattr(modules, block), subnet_constructor=conditioner)
    return flow.to(device)


def freia_step(flow: nn.Module, x: Tensor, y: Tensor) -> None:
    """One forward and backward."""
    mapped, _ = flow(x)
    _backward(flow, mapped, y)


def inn_step(aligner: INN, x: Tensor, y: Tensor) -> None:
    """One forward and backward."""
    _backward(aligner, aligner(x), y)


def _backward(network: nn.Module, mapped: Tensor, y: Tensor) -> None:
    network.zero_grad()
    (mapped - y).square().mean().backward()


def matrix_products(
    sites: int, rows: int, width: int, device: str
) -> Callable[[], None]:
    """The products of the plain INN's forward and backward, each into memory that is already there."""

    def bank(*shape: int) -> Tensor:
        return torch.randn(sites, *shape, device=device)

    half = width // 2
    x, for_x, hidden, out = (
        bank(rows, half),
        bank(rows, half),
        bank(rows, width),
        bank(rows, width),
    )
    weights = [(bank(half, width), bank(width, width)) for _ in range(COUPLINGS)]
    gradients = [(torch.empty_like(a), torch.empty_like(b)) for a, b in weights]

    def run() -> None:
        for first, last in weights:
            torch.bmm(x, first, out=hidden)
            torch.bmm(hidden, last, out=out)
        for k, ((first, last), (for_first, for_last)) in enumerate(
            zip(weights, gradients, strict=True)
        ):
            torch.bmm(hidden.mT, out, out=for_last)
            torch.bmm(out, last.mT, out=hidden)
            torch.bmm(x.mT, hidden, out=for_first)
            if (
                k < COUPLINGS - 1
            ):  # nobody asks for the gradient of the states themselves
                torch.bmm(hidden, first.mT, out=for_x)

    return run


def flops(sites: int, rows: int, width: int) -> float:
    """Multiplications and additions of `matrix_products`."""
    half = width // 2
    per_coupling = 3 * (half * width + width * width)
    return 2.0 * sites * rows * (COUPLINGS * per_coupling - half * width)


def one_network(
    figures: Figures, rows: int, width: int, rounds: int, device: str
) -> None:
    """Ours against the peers and the floor."""
    x, y = torch.randn(2, 1, rows, width, device=device)
    aligner = plain(1, width, device)
    steps: dict[str, Callable[[], object]] = {
        "INN": lambda: inn_step(aligner, x, y),
        "matrix products": matrix_products(1, rows, width, device),
    }
    if find_spec("zuko"):
        zuko = zuko_flow(width, device)
        steps["zuko"] = lambda: zuko_step(zuko, x[0], y[0])
    else:
        print("zuko is not installed: left out")
    if find_spec("FrEIA"):
        one, two = (
            freia_flow(width, device, block)
            for block in ("AllInOneBlock", "GLOWCouplingBlock")
        )
        steps["FrEIA AllInOneBlock"] = lambda: freia_step(one, x[0], y[0])
        steps["FrEIA GLOWCouplingBlock"] = lambda: freia_step(two, x[0], y[0])
    else:
        print("FrEIA is not installed: left out")
    seconds = interleaved(steps, rounds=rounds, device=device)
    figures.add_times(seconds)
    for name in steps:
        if name != "INN":
            figures.add(
                f"INN / {name}",
                ratio(seconds, "INN", name),
                bar=1.3 if name == "matrix products" else 1.0,
            )


def bank_against_loop(
    figures: Figures, sites: int, rows: int, width: int, rounds: int, device: str
) -> None:
    """A bank against a loop over its members, and against its own products."""
    x, y = torch.randn(2, sites, rows, width, device=device)
    bank, members = (
        plain(sites, width, device),
        [plain(1, width, device) for _ in range(sites)],
    )

    def loop() -> None:
        for i, member in enumerate(members):
            inn_step(member, x[i : i + 1], y[i : i + 1])

    side = 8192 if torch.device(device).type == "cuda" else 1024
    a, b, product = torch.randn(3, side, side, device=device)
    names = [
        f"bank of {sites}",
        f"loop over {sites}",
        "the bank's matrix products",
        "large product",
    ]
    runs: list[Callable[[], object]] = [
        lambda: inn_step(bank, x, y),
        loop,
        matrix_products(sites, rows, width, device),
        lambda: torch.mm(a, b, out=product),
    ]
    seconds = interleaved(
        dict(zip(names, runs, strict=True)), rounds=rounds, device=device
    )
    figures.add_times(seconds)
    on_gpu = torch.device(device).type == "cuda"
    figures.add(
        f"loop / bank of {sites}",
        ratio(seconds, names[1], names[0]),
        bar=8.0 if on_gpu else 1.5,
        sense=">=",
    )
    figures.add("bank / its matrix products", ratio(seconds, names[0], names[2]))
    work = flops(sites, rows, width) / (2.0 * side**3)
    figures.add(
        "bank, share of the matrix rate", work * ratio(seconds, names[3], names[0])
    )


def products_of(aligner: INN, rows: int, device: str) -> Callable[[], None]:
    """The matrix products of a step both ways: of each layer one forward and two backward, with fresh memory.

    Rotations and the fixed matrix are left out.
    """
    weights = [
        weight.detach()
        for weight in aligner.parameters()
        if weight.ndim == 3 and weight.shape[1] > 1
    ]
    weights += [
        weight
        for weight in weights
        if weight.shape[1] == weight.shape[2] == aligner.d_x
    ]  # pairs have two
    inputs = {
        width: torch.randn(aligner.sites, rows, width, device=device)
        for w in weights
        for width in w.shape[1:]
    }

    def run() -> None:
        for _ in range(2):  # directions
            for weight in weights:
                x, gradient = (inputs[width] for width in weight.shape[1:])
                torch.bmm(x, weight)
                torch.bmm(gradient, weight.mT)
                torch.bmm(x.mT, gradient)

    return run


def step_of(aligner: INN, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A training step without the optimiser: the loss and its gradients."""

    def run() -> None:
        aligner.zero_grad()
        aligner.loss(x, y).sum().backward()

    return run


def both_ways(
    figures: Figures, rows: int, width: int, rounds: int, device: str
) -> None:
    """A step of the default network against its own products."""
    x, y = torch.randn(2, 1, rows, width, device=device)
    aligner = INN(1, width, width).to(device)
    steps = {
        "default INN, a step both ways": step_of(aligner, x, y),
        "its matrix products": products_of(aligner, rows, device),
    }
    seconds = interleaved(dict(steps), rounds=rounds, device=device)
    figures.add_times(seconds)
    figures.add(
        "default INN, a step / its matrix products", ratio(seconds, *steps), bar=1.5
    )


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--rows", type=int, default=512)
    arguments.add_argument("--bank", type=int, default=12)
    arguments.add_argument(
        "--bank_width", type=int, help="256 on CPU, 768 on GPU where not given"
    )
    arguments.add_argument("--bank_rows", type=int, default=64)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    figures = Figures(options.device)
    one_network(figures, options.rows, options.width, options.rounds, options.device)
    bank_width = options.bank_width or (
        768 if torch.device(options.device).type == "cuda" else 256
    )
    bank_against_loop(
        figures,
        options.bank,
        options.bank_rows,
        bank_width,
        options.rounds,
        options.device,
    )
    both_ways(figures, options.rows, options.width, options.rounds, options.device)
    figures.write(options.json)


if __name__ == "__main__":
    main()
