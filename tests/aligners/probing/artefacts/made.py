"""Artefacts of every kind with random tensors, and models whose states are a known map of another's."""

from typing import Any

import torch
from torch import Tensor

from aligners.fitting.saved_bank import describe_aligner
from aligners.maps import INN, Linear
from aligners.maps.linear import Ridge
from aligners.probing.artefacts.carrying_maps import PairedRows
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.kinds import Artefact, Direction, Head, Probe, Stitching
from aligners.probing.probe_bank import Bank, ModelLayer, Variant
from aligners.probing.probes import DepthProbes, DistanceProbes, EdgeProbes

WIDTH, FEATURES = 12, 20


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def about(kind: str, **more: Any) -> dict[str, Any]:
    """What artefact.json says."""
    return {"name": f"my-{kind}", "model": "old-model", "site": 2, **more}


def _probe(cls: type[Any], rank: int | None = None, **options: Any) -> Probe:
    bank = Bank(cls([Variant("model", 2, rank=rank)], WIDTH, **options), [ModelLayer("model", 2)])
    with torch.no_grad():
        for number, value in enumerate(bank.state_dict().values()):
            value.copy_(draw(*value.shape, seed=number).abs() + 0.1)
    described = {"class": cls.__name__, "rank": rank, "options": bank.probes.options()}
    return Probe(dict(bank.state_dict()), about(cls.__name__, probe=described, rows="words_mean"))


def _stitching(bank: Any) -> Stitching:
    for number, value in enumerate(bank.state_dict().values()):
        if value.is_floating_point() and not value.isnan().any():
            value.copy_(draw(*value.shape, seed=number))
    told = about(f"stitching-{type(bank).__name__}", into="other", into_site=1, map=describe_aligner(bank))
    return Stitching(dict(bank.state_dict()), told)


def dictionary(architecture: str, **cfg: Any) -> Dictionary:
    """A random one."""
    shapes: dict[str, tuple[int, ...]] = {"W_enc": (WIDTH, FEATURES), "W_dec": (FEATURES, WIDTH), "b_dec": (WIDTH,)}
    biases = ("b_gate", "b_mag", "r_mag") if architecture == "gated" else ("b_enc",)
    shapes |= dict.fromkeys(biases, (FEATURES,))
    more: dict[str, Any] = {}
    if architecture == "jumprelu":
        shapes["threshold"] = (FEATURES,)
    if architecture == "batchtopk":
        shapes["topk_threshold"] = ()
    if architecture == "topk":
        more = {"k": 4}
    tensors = {name: draw(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}
    metadata = {"model_name": "old-model", "hook_name": "blocks.1.hook_resid_post"}
    told = {"architecture": architecture, "d_in": WIDTH, "d_sae": FEATURES, "metadata": metadata, **more, **cfg}
    return Dictionary(tensors, about(f"dictionary-{architecture}-{len(cfg)}", cfg=told))


def head(logits: int = 1, width: int = WIDTH, seed: int = 0, **more: Any) -> Head:
    """A linear one."""
    return Head.of(draw(logits, width, seed=seed), draw(logits, seed=seed + 1), **about("head", **more))


ARTEFACTS: dict[str, Artefact] = {
    "direction": Direction({"vector": draw(WIDTH)}, about("direction")),
    "head": head(3, classes=["a", "b", "c"]),
    "network": Head(
        {"weight_0": draw(7, WIDTH), "bias_0": draw(7), "weight_1": draw(2, 7), "bias_1": draw(2)},
        about("network", activation="gelu", rows="mean"),
    ),
    "edge": _probe(EdgeProbes, labels=3, projection=6, hidden=5),
    "edges": _probe(EdgeProbes, labels=3, spans=2, projection=6, hidden=5),
    "depth": _probe(DepthProbes, rank=3),
    "distance": _probe(DistanceProbes, rank=4),
    "stitching": _stitching(Linear(1, WIDTH, 5)),
    "dictionary": dictionary("standard"),
    "jumprelu": dictionary("jumprelu", apply_b_dec_to_input=False),
    "topk": dictionary("topk", rescale_acts_by_decoder_norm=True),
    "batchtopk": dictionary("batchtopk", k=4.5, rescale_acts_by_decoder_norm=True),
    "gated": dictionary("gated"),
    "gated_unshifted": dictionary("gated", apply_b_dec_to_input=False),
}
THROUGH: dict[str, Artefact] = {"network": _stitching(INN(1, WIDTH, WIDTH, couplings=2))}  # nothing can be folded into

ROTATION = torch.linalg.qr(draw(WIDTH, WIDTH).double())[0]
UPDATES: dict[str, Tensor] = {  # new = old @ W + 1
    "rotated": ROTATION,
    "permuted": torch.eye(WIDTH, dtype=torch.float64)[
        torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    ],
    "scaled": torch.diag(torch.linspace(0.2, 5, WIDTH, dtype=torch.float64)),
    "wider": torch.linalg.qr(draw(WIDTH + 4, WIDTH).double())[0].T * 3,
}


def back_map(update: str) -> Ridge:
    """The exact map from new states to old ones."""
    weight = UPDATES[update]
    bank = Ridge(1, weight.shape[1], WIDTH).double()
    bank.weight.copy_(torch.linalg.pinv(weight))
    bank.mean_x.fill_(1)
    return bank


def paired(update: str, n: int = 200, *, texts: int | None = None, seed: int = 3, noise: float = 0.0) -> PairedRows:
    """Rows of both."""
    old = draw(n, WIDTH, seed=seed) + draw(WIDTH, seed=9)
    new = old.double() @ UPDATES[update] + 1
    new = new + noise * draw(*new.shape, seed=seed + 1)
    return PairedRows(old, new.float(), torch.arange(n) * (texts or n) // n)
