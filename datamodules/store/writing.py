"""Writes the shards of a store that are missing, all sites in one pass of the model.

What is written does not depend on who writes it, or on how often the writing was stopped: a shard's texts form the same
batches every time. Whoever has a shard's lock writes it; ranks and other processes meanwhile take the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from filelock import Timeout
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from aligners.errors import UserError
from aligners.files.whole import whole_file
from datamodules.rows.policies import select_rows
from datamodules.rows.reading import read_rows
from datamodules.store.shards import ShardWriter
from datamodules.store.states import StoredStates, shard_path

MOST_TOKENS = 8192  # of a batch, padding included
MOST_BYTES = 2**28  # of the states of a batch at all sites, in float32


def write_missing(
    states: StoredStates, sites: Sequence[int], progress: Callable[[int], None] = lambda rows: None
) -> None:
    """Write the shards that are missing at some sites; when this returns, all of them are there.

    Args:
        states: of a model and its texts.
        sites: ascending.
        progress: told the number of rows that were written, at all sites, or that others have written.

    Raises:
        ValueError: a state is not finite, or too large for the stored data type.
        OSError: something cannot be written.
    """
    waiting = []
    for shard in states.missing(sites):
        try:
            with states.lock(f"{shard:05d}").acquire(timeout=0):
                _write(states, shard, sites, progress)
        except Timeout:
            waiting.append(shard)
    if waiting:
        rank_zero_only(print)(f"Others are writing {len(waiting)} shards of {states.model.name}: waiting.", flush=True)
    for shard in waiting:
        with states.lock(f"{shard:05d}"):
            _write(states, shard, sites, progress)
    states.reload()


def _write(states: StoredStates, shard: int, sites: Sequence[int], progress: Callable[[int], None]) -> None:
    """Write one shard at those sites where it is still missing. Its lock is held."""
    states.reload()
    missing, texts = states.manifest.lacking(states.folder, sites, shard), states.texts(shard)
    if not missing:
        progress(states.manifest.rows[shard])
        return
    with ExitStack() as files:
        writers = [files.enter_context(_writer(states, site, shard)) for site in missing]
        for chosen in _batches(states, texts):
            rows = _read(states, chosen, missing)
            _put(writers, rows, chosen - texts.start, states.lengths[chosen])
            progress(rows.shape[1])
        checksums = dict(zip(missing, [writer.finish() for writer in writers], strict=True))
    states.record(shard, checksums)


@contextmanager
def _writer(states: StoredStates, site: int, shard: int) -> Iterator[ShardWriter]:
    path: Path = shard_path(states.folder, site, shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = states.lengths[slice(*states.manifest.bounds[shard : shard + 2])]
    about = {"store": states.identity.name, "site": str(site), "shard": str(shard)}
    with whole_file(path) as unfinished:
        writer = ShardWriter(unfinished, lengths, states.manifest.width, states.identity.stored_as, about)
        try:
            yield writer
        finally:
            writer.close()


def _batches(states: StoredStates, texts: range) -> Iterator[np.ndarray]:
    """The row numbers of the texts in each batch of a shard: the longest first, equal ones together."""
    token = 4 * states.model.width * (states.model.depth + 1)
    most = max(min(MOST_TOKENS, MOST_BYTES // token), 1)
    order = texts.start + np.argsort(-states.lengths[texts.start : texts.stop], kind="stable")
    while len(order):
        count = max(most // int(states.lengths[order[0]]), 1)
        yield order[:count]
        order = order[count:]


def _read(states: StoredStates, chosen: np.ndarray, sites: Sequence[int]) -> Tensor:
    """The rows of some texts, (S, P, d), as they are stored, on the CPU."""
    batch, device = states.data[chosen.tolist()], states.model.device
    inputs = batch.inputs[states.place]
    rows = select_rows(inputs["attention_mask"], batch.special[states.place], "tokens").to(device)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    found = read_rows(states.model, inputs, sites, rows, states.identity.component).to(states.dtype)
    finite = found.sum((1, 2), dtype=torch.float32).isfinite().tolist()
    if not all(finite):
        bad = ", ".join(str(site) for site, fine in zip(sites, finite, strict=True) if not fine)
        raise UserError(
            f"Expected finite states to store, but those of {states.model.name} hold NaN or infinity as "
            f"{states.identity.stored_as} at site {bad}, in texts {chosen.min()} to {chosen.max()}. Look at these "
            "texts, or use float32 as `dtype` and `store_dtype`."
        )
    return found.cpu()


def _put(writers: Sequence[ShardWriter], rows: Tensor, texts: np.ndarray, lengths: np.ndarray) -> None:
    ends = np.cumsum(lengths)
    for writer, at_site in zip(writers, rows.view(torch.uint8).numpy(), strict=True):
        for text, start, end in zip(texts.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True):
            writer.write(text, at_site[start:end])
