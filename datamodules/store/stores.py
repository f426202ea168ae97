"""The stores of a data module: opened on first use; missing states of all sites are written in one pass.

The files do not depend on which process writes them, or on how often it was stopped: a shard's texts form the same
batches every time. The process that has a shard's lock writes it; other processes and ranks take the next one.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from filelock import Timeout
from lightning.pytorch.utilities import rank_zero_only
from rich.progress import Progress
from torch import Tensor

from aligners.datamodules.batches import StoredRows
from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.rows.policies import RowKind, policy_of, select_rows
from aligners.datamodules.rows.read_rows import read_rows
from aligners.datamodules.store.read_ahead import StatesAtSites
from aligners.datamodules.store.shards import ShardWriter
from aligners.datamodules.store.stored_states import (
    DTYPES,
    USED,
    StoredStates,
    name_of,
    shard_path,
)
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError, check_known
from aligners.files.atomic import check_folder, let_write, whole_file
from aligners.files.resources import free_disk, in_words
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from aligners.progress import hidden

KeptRows = Literal["tokens", "texts"]
MOST_TOKENS = 8192  # tokens of a batch, padding included
MOST_BYTES = 2**28  # bytes of a batch's states at all sites, in float32


def write_missing(
    states: StoredStates,
    sites: Sequence[int],
    progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write the shards that are missing at some sites; when this returns, all of them are there.

    Args:
        states: stored states of a model on its texts.
        sites: sites, ascending.
        progress: called with the number of rows, at all sites, that this or another process has written.

    Raises:
        ValueError: a state is not finite, or too large for the stored data type.
        OSError: a file cannot be written.
    """
    waiting = []
    for shard in states.missing(sites):
        try:
            with states.lock(f"{shard:05d}").acquire(timeout=0):
                _write(states, shard, sites, progress)
        except Timeout:
            waiting.append(shard)
    if waiting:
        said = f"Waiting for other processes to write {len(waiting)} shards of {states.model.name}."
        rank_zero_only(print)(said, flush=True)
    for shard in waiting:
        with states.lock(f"{shard:05d}"):
            _write(states, shard, sites, progress)
    states.reload()


def _write(
    states: StoredStates,
    shard: int,
    sites: Sequence[int],
    progress: Callable[[int], None],
) -> None:
    """Write one shard at those sites where it is still missing, while holding its lock."""
    states.reload()
    missing = states.lacking(sites, shard)
    texts = states.texts(shard)
    if not missing:
        progress(states.manifest.rows[shard])
        return
    with ExitStack() as files:
        writers = []
        for site in missing:
            writer = files.enter_context(_writer(states, site, shard))
            writers.append(writer)
        for chosen in _batches(states, texts):
            rows = _read(states, chosen, missing).view(torch.uint8)
            counts = states.lengths[chosen].tolist()
            for writer, at_site in zip(writers, rows, strict=True):
                writer.write_texts(chosen - texts.start, at_site.split(counts))
            progress(rows.shape[1])
        checksums = [writer.finish() for writer in writers]
    states.record(shard, dict(zip(missing, checksums, strict=True)))


@contextmanager
def _writer(states: StoredStates, site: int, shard: int) -> Iterator[ShardWriter]:
    path: Path = shard_path(states.folder, site, shard)
    lengths = states.lengths[states.texts(shard)]
    width = states.manifest.width
    kept_as = states.identity.kept_as
    about = {"store": states.identity.name, "site": str(site), "shard": str(shard)}
    try:
        with whole_file(path) as unfinished, unfinished.open("wb") as file:
            yield ShardWriter(file, lengths, width, kept_as, about)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _batches(states: StoredStates, texts: range) -> Iterator[np.ndarray]:
    """Return the row numbers of the texts in each batch of a shard: longest texts first, equal lengths together."""
    token = 4 * states.model.width * (states.model.depth + 1)
    most = max(min(MOST_TOKENS, MOST_BYTES // token), 1)
    lengths = states.tokens[texts.start : texts.stop]
    order = texts.start + np.argsort(-lengths, kind="stable")
    while len(order):
        count = max(most // int(states.tokens[order[0]]), 1)
        yield order[:count]
        order = order[count:]


def _read(states: StoredStates, chosen: np.ndarray, sites: Sequence[int]) -> Tensor:
    """Read the rows of some texts on the CPU, (S, P, d), in the stored type; if pooled, as from stored tokens."""
    model = states.model
    batch = states.data[chosen.tolist()]
    special = batch.special[states.place]
    mask = batch.inputs[states.place]["attention_mask"]
    rows = select_rows(mask, special, "tokens").to(model.device)
    inputs = batch.to(model.device).inputs[states.place]
    values = read_rows(model, inputs, sites, rows, states.identity.component)
    values = values.to(DTYPES[states.identity.stored_as])
    _check_finite(states, values, sites, chosen)
    kind = states.kind
    if kind is None:
        return values.cpu()
    policy = policy_of(kind.policy)
    pooled = policy.choose(batch, states.place, kind.special_tokens)
    stored = StoredRows(tuple(sites), list(values))
    values = read_rows(model, inputs, sites, pooled.to(model.device), stored=stored)
    return values.cpu()


def _check_finite(
    states: StoredStates, values: Tensor, sites: Sequence[int], texts: np.ndarray
) -> None:
    """Raise unless states (S, P, d) are finite at all sites."""
    finite = values.sum((1, 2), dtype=torch.float32).isfinite()
    bad = [str(sites[place]) for place in (~finite).nonzero()[:, 0].tolist()]
    if bad:
        raise UserError(
            f"Expected finite states to store, but those of {states.model.name} hold NaN or infinity as "
            f"{states.identity.stored_as} at site {', '.join(bad)}, in texts {texts.min()} to {texts.max()}. Look at "
            "these texts, or use float32 as `dtype` and `store_dtype`."
        )


def check_store(folder: Path | None, dtype: str | None, rows: str) -> None:
    """Raise unless the options of a store fit together."""
    check_known(DTYPES, store_dtype=dtype)
    check_known(get_args(KeptRows), store_rows=rows)
    if dtype is not None and folder is None:
        raise UserError(
            f"`store_dtype` {dtype!r} says how states are stored, but there is no `store`. Name its folder, or leave "
            "`store_dtype` out."
        )


class Reader(Protocol):
    """The properties of a data module that decide which states it reads; see `TextModule`."""

    frozen_models: FrozenModels
    component: Component
    trainer: Any

    @property
    def kinds_read(self) -> Sequence[RowKind]:
        """Kinds of rows that are read."""


class Stores:
    """The stored states of a data module.

    Args:
        folder: folder that holds a folder for each store.
        dtype: data type of the stored states; None: that of the models.
        rows: which rows are written: every token, or one per text where nothing more is read.
    """

    def __init__(
        self, folder: Path, dtype: str | None, rows: KeptRows = "tokens"
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.rows = rows
        self._known: dict[tuple[Any, ...], StoredStates] = {}
        self._read: dict[StoredStates, None] = {}

    @property
    def opened(self) -> list[Path]:
        """The folder of each store that was read."""
        return [states.folder for states in self._read]

    def complete(
        self,
        reader: Reader,
        splits: Sequence[TokenisedTexts],
        sites: Sequence[Sequence[int]],
    ) -> list[list[StatesAtSites]]:
        """Write the states that are missing, after announcing their size; all ranks take part.

        Args:
            reader: the data module whose models are read, with its component and kinds of rows. A model that has to run
                is moved to its device for that time. A progress bar is shown if its Trainer has one.
            splits: splits to read, tokenised for these models.
            sites: sites at which each model is read.

        Returns:
            For each split, the states of each model and the sites that are read. A model is missing, and has to run, if
            `rows` is "texts", more than one row per text is needed, and no store of its tokens is complete.

        Raises:
            ValueError: there is too little disk space, a store is damaged or not ours, or states are not finite.
            OSError: a file cannot be written.
        """
        let_write(self.folder)  # for moments, even if no states are missing
        by_split = [self._open(reader, data, sites) for data in splits]
        every: list[StatesAtSites] = []
        for stored in by_split:
            every += stored
        self._write_missing(reader, every)
        for states, _ in every:
            self._read[states] = None
            if os.access(states.folder, os.W_OK):
                (states.folder / USED).touch()
        known = reader.frozen_models.known
        if known is not None and os.access(self.folder, os.W_OK):
            known.save()
        return by_split

    def _write_missing(self, reader: Reader, every: Sequence[StatesAtSites]) -> None:
        """Announce what is missing, and write it under a progress bar."""
        missing = {states: states.missing(sites) for states, sites in every}
        if not any(missing.values()):
            return
        check_folder(self.folder, "store")
        self._announce(missing)
        rows = 0
        for states, shards in missing.items():
            rows += sum(states.manifest.rows[shard] for shard in shards)
        trainer = reader.trainer
        device = None
        if trainer is not None:
            device = trainer.strategy.root_device
        with Progress(transient=True, disable=hidden(trainer)) as bar:
            task = bar.add_task("Writing states", total=rows)
            for states, sites in every:
                with reader.frozen_models.running(states.model, device):
                    write_missing(states, sites, lambda count: bar.advance(task, count))

    def _open(
        self, reader: Reader, data: TokenisedTexts, sites: Sequence[Sequence[int]]
    ) -> list[StatesAtSites]:
        """Return the states of each model that is read, and the sites."""
        wanted: dict[FrozenModel, set[int]] = {}
        for model, of_model in zip(reader.frozen_models.loaded, sites, strict=True):
            wanted.setdefault(model, set()).update(of_model)
        stored = []
        for model, chosen in wanted.items():
            if not chosen:
                continue
            states = self._choose(reader, model, data, sorted(chosen))
            if states is not None:
                stored.append((states, tuple(sorted(chosen))))
        return stored

    def _choose(
        self,
        reader: Reader,
        model: FrozenModel,
        data: TokenisedTexts,
        sites: Sequence[int],
    ) -> StoredStates | None:
        """Return the states to read: those already stored, or those to write; None: the model runs."""
        kinds = reader.kinds_read
        tokens = self._states(reader, model, data, None)
        pooled = None
        if kinds[0].types is not None:
            return tokens
        if len(kinds) == 1:
            pooled = self._states(reader, model, data, kinds[0])
        for states in (pooled, tokens):
            if states is not None and not states.missing(sites):
                return states
        return tokens if self.rows == "tokens" else pooled

    def _states(
        self,
        reader: Reader,
        model: FrozenModel,
        data: TokenisedTexts,
        kind: RowKind | None,
    ) -> StoredStates:
        """Return the states of a model on some texts, made once."""
        place = reader.frozen_models.loaded.index(model)
        component = reader.component
        key = (model, data.digest(place), component, kind)
        if key not in self._known:
            stored_as = self.dtype or name_of(model.dtype)
            self._known[key] = StoredStates(
                self.folder, model, data, place, component, stored_as, kind
            )
        return self._known[key]

    def _announce(
        self, missing: Mapping[StoredStates, Mapping[int, Sequence[int]]]
    ) -> None:
        """Say how much will be written.

        Args:
            missing: states -> number of each missing shard -> the sites that lack it.

        Raises:
            ValueError: the disk has too little space.
        """
        total = 0
        names: dict[str, None] = {}
        for states, shards in missing.items():
            for shard, sites in shards.items():
                total += states.size(shard) * len(sites)
                names[states.model.name] = None
        what = ", ".join(names)
        free = free_disk(self.folder)
        if total > free:
            raise UserError(
                f"Expected room for {in_words(total)} of states of {what} in `store` {self.folder}, but its disk has "
                f"{in_words(free)} free. Free some space, read fewer sites or texts, store "
                "bfloat16 (`store_dtype`), or leave `store` out."
            )
        said = f"Writing {in_words(total)} of states of {what} to {self.folder}, whose disk has {in_words(free)} free."
        rank_zero_only(print)(said, flush=True)
