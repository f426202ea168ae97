"""States of known features as recorded states, and a dictionary that knows them, as a checkpoint: no training."""

from pathlib import Path

import numpy as np
import torch

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.saved_bank import FORWARD, StoredBank
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.algebra.moments import moments_of
from aligners.similarity.latents.planted import Plan, Planted, plant

PLAN = Plan(d_x=224, d_y=256, shared=60, scaled=10, own_x=20, own_y=20, texts=800, rows=10, active=5.0, noise=0.02)
SHRUNK = 5  # shared features whose decoder of X is 0 in the dictionary


def recorded(folder: Path, plan: Plan = PLAN, seed: int = 0, batch_size: int = 16) -> PairedActivations:
    """The planted rows, in texts of unequal length, half of them held out; written if they are not there."""
    if not (folder / "x.npy").exists():
        planted = plant(plan, seed)
        lengths = np.random.default_rng(seed).integers(4, 17, plan.texts)
        group = np.resize(np.repeat(np.arange(plan.texts), lengths), planted.x.shape[1])
        group = np.sort(group)
        np.save(folder / "group.npy", group)
        for name, states in (("x", planted.x), ("y", planted.y)):
            np.save(folder / f"{name}.npy", states[0].float().numpy())
    names = [f"states:{folder}/{name}.npy:group=group.npy" for name in "xy"]
    text = TextSource(test_share=0.5, validation_share=0.1)
    return pair_states(*names, text=text, batch_size=batch_size, far_rows="keep")


def knowing(planted: Planted, shrunk: int = SHRUNK) -> SparseAligner:
    """A dictionary of the true features, which reads their strengths by pseudo-inverses, and shrinks some."""
    decoders = [decoder[0].float() for decoder in planted.dictionary.decoders]
    aligner = SparseAligner(1, planted.x.shape[2], planted.y.shape[2], latents=len(planted.kind), active=5)
    aligner.fit(moments_of(planted.x.float(), planted.y.float()))
    scaling, crosscoder = aligner.scaling, aligner.crosscoder
    sides = ((scaling.mean_x, scaling.scale_x), (scaling.mean_y, scaling.scale_y))
    has = torch.stack([(decoder.norm(dim=1) > 0).float() for decoder in decoders])
    weights = has / has.sum(0)
    bias = torch.zeros(len(planted.kind))
    with torch.no_grad():
        for side, (decoder, (mean, scale)) in enumerate(zip(decoders, sides, strict=True)):
            reading = torch.linalg.pinv(decoder) * weights[side]
            crosscoder.encoders[side].copy_(reading * scale[0])
            bias += mean[0, 0] @ reading
            crosscoder.shifts[side].copy_(-mean / scale)
            crosscoder.decoders[side].copy_(decoder / scale[0])
        crosscoder.decoders[0][0, :shrunk] = 0
        crosscoder.bias.copy_(bias)
        crosscoder.threshold.copy_(0.2 * crosscoder.norms().median())
    return aligner.requires_grad_(False).eval()


def stored(data: PairedActivations, aligner: SparseAligner, path: Path) -> StoredBank:
    """A checkpoint as a fit on these data would leave it."""
    data.setup("test")
    maps = {FORWARD: {"sparse": aligner}}
    pairs = {FORWARD: list(data.reader.sites)}
    return StoredBank("fit", maps, pairs, data.describe(), data.config(), path=path)
